"""The options of the commands of `sparsync`, each said once. Nothing here imports torch."""

import argparse
import math
from argparse import ArgumentTypeError
from functools import partial
from pathlib import Path
from typing import Any

from sparsync.recipes import recipe

# Minutes on gpt-tiny.
FRONTIER = (
    "dense,bf16,topk,micro,exdyna,oktopk,topk:density=0.05:values=int4,micro:density=0.05:values=int4,"
    "oktopk:density=0.05:values=int4"
)

# What `sparsync advise` compares, beside local steps, and AdamW steps for a job that AdamW trains.
ADVISED = (
    "dense,bf16,two_shot:density=1.0:values=int4,two_shot:density=0.05:values=int4,topk:density=0.01:values=int8,"
    "skip_reduce:skip=1,micro:density=0.01:values=int8,exdyna:density=0.01:values=int8,oktopk:density=0.01:values=int8"
)
ADVISED_LOCAL = "local_steps(every=4)/two_shot:density=1.0:values=int4,local_steps(every=8)/dense"
ADVISED_ADAMW = recipe("steps", 4, 0.8).text

# Whose buckets a probe measures: what these reduce with.
PROBED = f"{ADVISED},{ADVISED_ADAMW.partition('/')[2]}"

_METHODS = (
    "names of `sparsync schemes`, package.module:Class or path/to/file.py:Class, with settings; in front of one steps(keep=0.5)/ or "
    "local_steps(every=4)/, as attach(..., exchange=Steps(keep=0.5)) or LocalSteps(every=4); default or bits=0.8, as attach takes them "
    "with the job's optimizer"
)
Changes = dict[str, Any]  # Any: what argparse takes


def positive(text: str) -> float:
    """Return a finite number above 0. Raises ArgumentTypeError for another text."""
    return _number(text, "a finite number above 0", math.ulp(0.0))


def _number(text: str, wanted: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        raise ArgumentTypeError(f"takes {wanted}, got {text!r}")
    return value


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"takes a whole number above 0, got {text!r}")
    return int(text)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"takes whole numbers with commas between them, such as 0,1,2, got {text!r}") from None


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(positive(number) for number in text.split(","))


_finite = partial(_number, wanted="a finite number", least=-math.inf)
_not_negative = partial(_number, wanted="a finite number of 0 or more", least=0.0)
_FILE: Changes = {"type": Path, "metavar": "FILE"}
_SCHEMES: Changes = {"metavar": "A,B:KEY=VALUE", "help": _METHODS}
_COUNTS: Changes = {"type": _integers}
# What argparse takes for each option; a command may say some of it in another way.
_SAID: dict[str, Changes] = {
    "--workload": {
        "help": "the training job: a name of `sparsync workloads`, package.module:Class or path/to/file.py:Class"
    },
    "--option": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "an option of the workload, e.g. width=128",
    },
    "--data": {"metavar": "FOLDER", "help": "the workload's data, instead of where it is usually found"},
    "--ranks": {"type": int, "help": "data-parallel ranks, 4 unless given; under torchrun its processes"},
    "--link": {
        "help": "rate of each rank's link, such as 100mbit, 1Gbps or none, 100mbit unless given; not under torchrun"
    },
    "--up": {"metavar": "RATE", "help": "rate at which a rank sends, or none, where it is not --link"},
    "--down": {"metavar": "RATE", "help": "rate at which a rank receives, or none, where it is not --link"},
    "--delay": {"metavar": "TIME", "help": "one-way delay between any two ranks, such as 25ms"},
    "--jitter": {
        "metavar": "TIME",
        "help": "by how much the delay is longer or shorter at most, such as 5ms; packets keep their order",
    },
    "--backend": {"choices": ("gloo", "nccl"), "help": "under torchrun; nccl if every rank has its own GPU"},
    "--fault": {
        "action": "append",
        "default": [],
        "metavar": "KIND:RANK@TIME+TIME",
        "help": "kill:2@30s, leave:1@60s, freeze:3@20s+8s, partition:0@70s+10s, join@45s or store@10s+3s, for a command that trains with "
        "sparsync_elastic; again for more",
    },
    "--chaos": {"type": int, "metavar": "SEED", "help": "draw faults, one in about 20 s; a rank is always left"},
    "--faults-until": {"metavar": "TIME", "help": "no fault begins after this, such as 300s"},
    "--schemes": _SCHEMES,
    "--scheme": {"metavar": "A:KEY=VALUE", "help": _METHODS},
    "--density": {"type": float, "default": 0.01, "help": "share of elements that sparse schemes send"},
    "--target": {"type": _finite, "help": "quality to reach; its time is reported"},
    "--steps": {"type": int, "default": 300, "help": "training steps of each scheme"},
    "--eval-every": {"type": int, "default": 10, "metavar": "STEPS", "help": "steps between evaluations"},
    "--seed": {"type": int, "default": 0, "help": "of the training, or of the drawn gradients"},
    "--seeds": {
        "flags": ("--seed", "--seeds"),
        "dest": "seeds",
        "default": "0",
        "help": "one or more, separated by commas",
    }
    | _COUNTS,
    "--bucket-mb": {
        "type": positive,
        "help": "size of all buckets in MB; in DDP's default the first has 1 and the others 25",
    },
    "--timeout": {"type": positive, "default": 120.0, "metavar": "S", "help": "timeout of an operation between ranks"},
    "--out": {"type": Path, "help": "what is written: the folder of results, or the file"},
    "--within": {
        "type": _not_negative,
        "default": 2.0,
        "metavar": "PERCENT",
        "help": "how far behind dense's quality the report's choice may be",
    },
    "--csv": {"help": "also write a row of numbers per training there, as sparsync_lab.read_results returns them"}
    | _FILE,
    "--json": {"metavar": "FILE", "help": "write the figures there; -: on standard output, and nothing else"},
    "--nodes": {
        "action": "store_true",
        "help": "each rank is a machine to the script: LOCAL_RANK is 0, LOCAL_WORLD_SIZE 1",
    },
    "--grace": {
        "type": float,
        "default": 5.0,
        "metavar": "S",
        "help": "time for the others to end after a rank has failed",
    },
    "command": {
        "nargs": argparse.REMAINDER,
        "metavar": "-- COMMAND",
        "help": "what every rank runs, as with torchrun; or the script that doctor runs on one rank up to its first optimizer step",
    },
    "--seconds": {"type": positive, "default": 45.0, "help": "approximate time for exchanges and kernels"},
    "--probe": {"required": True, "help": "the file that `sparsync probe` wrote"} | _FILE,
    "--gradients": {"help": "gradients that `sparsync gradients` recorded of the job"} | _FILE,
    "--rates": {
        "type": _numbers,
        "default": "0.5,1,2",
        "help": "factors of the job's rate; if the lowest or the highest is best, more are tried",
    },
    "--rates-seed": {"type": int, "metavar": "SEED", "help": "try the rates with this seed only"},
    "--jobs": {"type": int, "default": 1, "metavar": "N", "help": "trainings at a time, each on one core"},
    "--device": {
        "choices": ("cpu", "cuda"),
        "default": "cpu",
        "help": "where all ranks of a training are; cuda: in bfloat16 autocast",
    },
    "--checkpoint-every": {
        "type": int,
        "metavar": "STEPS",
        "help": "steps after which the state of a training is kept, for one that is stopped; about every ten minutes unless given",
    },
    "--page": {"type": Path, "metavar": "FILE.md", "help": "a page in which one part is rewritten"},
    "--part": {"metavar": "NAME", "help": "the part of the page, the name of the workload unless given"},
    "--elements": {"type": int, "help": "of the gradient, 100000 unless recorded"},
    "--jump": {"type": int, "metavar": "STEP", "help": "from this step on, drawn gradients are 10 times as large"},
    "--every": {"type": int, "default": 1, "metavar": "STEPS", "help": "steps between two lines or records"},
    "--plot": {"type": Path, "metavar": "FILE.png", "help": "draw a picture"},
    "--preset": {
        "metavar": "NAME|FILE.toml",
        "help": "a name of --list, or a file like those in sparsync_lab/simulate/presets",
    },
    "--list": {"action": "store_true", "help": "list the presets"},
    "--gbit": {"type": float, "metavar": "RATE", "help": "Gbit/s of a link between nodes, instead of the preset's own"},
    "--new": {"type": Path, "metavar": "FILE.py", "help": "write a job that runs; replace its model, data and loss"},
    "folder": {"type": Path, "help": "the folder a comparison wrote"},
    "name": {"nargs": "?", "help": "show its settings: NAME, package.module:Class or path/to/file.py:Class"},
}
_JOB, _LINKS, _FAULTS = (
    "--workload --option --data",
    "--link --up --down --delay --jitter",
    "--fault --chaos --faults-until",
)
# The options of each command, and what it says in another way.
_OF: dict[str, tuple[str, dict[str, Changes]]] = {
    "compare": (
        f"{_JOB} --ranks {_LINKS} --backend --schemes --density --target --steps --eval-every --seeds --bucket-mb --timeout --out "
        "--within --csv",
        {
            "--workload": {"default": "shakespeare"},
            "--schemes": {"default": "dense,bf16,topk,skip_reduce"},
            "--bucket-mb": {"default": 25.0},
            "--out": {"default": Path("results")},
        },
    ),
    "launch": (
        f"--ranks {_LINKS} --scheme --nodes --grace {_FAULTS} command",
        {"--ranks": {"default": 4}, "--link": {"default": "100mbit"}},
    ),
    "probe": (
        f"{_JOB} --ranks {_LINKS} --backend --schemes --bucket-mb --seconds --timeout --out",
        {"--schemes": {"default": PROBED}, "--out": {"default": Path("probe.toml")}},
    ),
    "advise": (f"{_JOB} --probe --gradients --seed --steps --schemes --density --json", {}),
    "demo": ("--out --steps", {"--out": {"default": Path("demo")}, "--steps": {"default": None}}),
    "frontier": (
        f"{_JOB} --schemes --density --ranks --steps --seeds --rates --rates-seed --jobs --device --checkpoint-every --page --part "
        "--out --csv",
        {
            "--workload": {"default": "gpt-tiny"},
            "--schemes": {
                "default": FRONTIER,
                "help": f"{_METHODS}; laprop: dense with LaProp in place of AdamW; oracle: the limit of every selection",
            },
            "--ranks": {"default": "4", "help": "one or more numbers, separated by commas"} | _COUNTS,
            "--steps": {"default": "300", "help": "of a training; one or more, separated by commas"} | _COUNTS,
            "--out": {"default": Path("frontier")},
        },
    ),
    "doctor": (f"{_JOB} --scheme --timeout command", {}),
    "report": ("folder --within --csv", {}),
    "simulate": (
        "--preset --list --ranks --gbit --json",
        {"--ranks": {"help": "instead of the preset's own"}},
    ),
    "traffic": (
        "--schemes --ranks --elements --density --steps --seed --jump --gradients --every --json --plot",
        {
            "--schemes": {"flags": ("--scheme", "--schemes"), "dest": "schemes", "default": "micro,exdyna,oktopk,topk"},
            "--ranks": {"help": "ranks, all in this process, 4 unless recorded"},
            "--steps": {"default": None, "help": "steps, 300 unless recorded"},
        },
    ),
    "gradients": (
        f"{_JOB} --ranks --steps --every --seed --out",
        {
            "--workload": {"default": "shakespeare-small"},
            "--ranks": {"default": 4, "help": "equal shares of each batch"},
            "--steps": {"default": 50, "help": "training steps, with the dense mean"},
            "--out": {"required": True},
        },
    ),
    "schemes": ("name", {}),
    "workloads": ("--new", {}),
}


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command."""
    names, changes = _OF[command]
    add_named(parser, names, changes)


def add_named(parser: argparse.ArgumentParser, names: str, changes: dict[str, Changes] | None = None) -> None:
    """Add these options, separated by spaces, with what is said in another way; a default is told behind the help."""
    for name in names.split():
        about = _SAID[name] | (changes or {}).get(name, {})
        flags = about.pop("flags", (name,))
        told = "" if about.get("default") in (None, []) else " (default: %(default)s)"
        parser.add_argument(*flags, **about | {"help": about["help"] + told})
