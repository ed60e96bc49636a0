"""The command-line options of `sparsync`, each defined once. Nothing here imports torch."""

import argparse
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from sparsync.recipes import rows

# Takes minutes on gpt-tiny.
FRONTIER = (
    "dense,bf16,topk,exact_micro,exact_exdyna,exact_oktopk,topk:density=0.05:values=int4,exact_micro:density=0.05:values=int4,"
    "exact_oktopk:density=0.05:values=int4"
)

# The methods whose buckets a probe measures: the recipes and published schemes that `sparsync advise` predicts.
PROBED = ",".join(
    (
        "dense,bf16,topk:density=0.01:values=int8,exact_oktopk:density=0.01:values=int8,two_shot:density=0.05:values=int4,two_shot:density=1.0:values=int4",
        *(each.text.partition("/")[2] for each in rows("steps", 4)),
    )
)

_METHODS = (
    "names of `sparsync schemes`, package.module:Class or path/to/file.py:Class, with settings; in front of one steps(keep=0.5)/ or "
    "local_steps(every=4)/, as attach(..., exchange=Steps(keep=0.5)) or LocalSteps(every=4); default or bits=0.8, as attach takes them "
    "with the job's optimizer"
)
Changes = dict[str, Any]  # Any: what argparse takes
Number = TypeVar("Number", int, float)


def positive(text: str) -> float:
    """Parse a finite number above 0. Raises ArgumentTypeError otherwise."""
    return _number(text, "a finite number above 0", math.ulp(0.0))


def _number(text: str, wanted: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        raise ArgumentTypeError(f"takes {wanted}, got {text!r}")
    return value


def count(text: str) -> int:
    """Parse a whole number above 0. Raises ArgumentTypeError otherwise."""
    if not (text.isdecimal() and int(text)):
        raise ArgumentTypeError(f"takes a whole number above 0, got {text!r}")
    return int(text)


def _several(text: str, read: Callable[[str], Number]) -> tuple[Number, ...]:
    """Parse distinct numbers separated by commas."""
    found = tuple(read(number) for number in text.split(","))
    if len(set(found)) < len(found):
        raise ArgumentTypeError(f"takes each number once, got {text!r}")
    return found


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"takes whole numbers, with commas between several, such as 0,1,2, got {text!r}")
    return int(text)


def _job(text: str) -> tuple[str, str, dict[str, str]]:
    """Parse "NAME" or "NAME(KEY=VALUE:KEY=VALUE)" into the text, the workload and its options."""
    match = re.fullmatch(r"([^()]+)(?:\((.*)\))?", text)
    options = [each.partition("=") for each in (match[2] or "").split(":") if each] if match else []
    if match is None or not all(key and equals for key, equals, _ in options):
        raise ArgumentTypeError(f"takes a workload, such as sympy or sympy(width=64:layers=6), got {text!r}")
    return text, match[1], {key: value for key, _, value in options}


_finite = partial(_number, wanted="a finite number", least=-math.inf)
_FILE: Changes = {"type": Path, "metavar": "FILE"}
_SCHEMES: Changes = {"metavar": "A,B:KEY=VALUE", "help": _METHODS}
_COUNTS: Changes = {"type": partial(_several, read=count)}
# Arguments of `add_argument` for each option; commands may override some.
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
    "--ranks": {"type": count, "help": "data-parallel ranks, 4 unless given; under torchrun its processes"},
    "--link": {
        "help": "rate of each rank's link, such as 100mbit, 1Gbps or none, 100mbit unless given; not under torchrun"
    },
    "--up": {"metavar": "RATE", "help": "rate at which a rank sends, where it is not --link"},
    "--down": {"metavar": "RATE", "help": "rate at which a rank receives, where it is not --link"},
    "--delay": {"metavar": "TIME", "help": "one-way delay between any two ranks, such as 25ms"},
    "--jitter": {
        "metavar": "TIME",
        "help": "by how much the delay is longer or shorter at most, such as 5ms; packets keep their order",
    },
    "--fault": {
        "action": "append",
        "default": [],
        "metavar": "KIND:RANK@TIME+TIME",
        "help": "kill:2@30s, leave:1@60s, freeze:3@20s+8s, partition:0@70s+10s, join@45s or store@10s+3s, for a command that trains with "
        "sparsync_elastic; again for more",
    },
    "--schemes": _SCHEMES,
    "--scheme": {"metavar": "A:KEY=VALUE", "help": _METHODS},
    "--density": {"type": float, "default": 0.01, "help": "share of elements that sparse schemes send"},
    "--target": {"type": _finite, "help": "quality to reach; its time is reported"},
    "--steps": {"type": count, "default": 300, "help": "training steps of each scheme"},
    "--eval-every": {"type": count, "default": 10, "metavar": "STEPS", "help": "steps between evaluations"},
    "--seed": {"type": _seed, "default": 0, "help": "of the weights and batches, or of the drawn gradients"},
    "--seeds": {
        "flags": ("--seed", "--seeds"),
        "dest": "seeds",
        "default": "0",
        "type": partial(_several, read=_seed),
        "help": "one or more, separated by commas",
    },
    "--bucket-mb": {
        "type": positive,
        "help": "size of all buckets in MB; in DDP's default the first has 1 and the others 25",
    },
    "--timeout": {"type": positive, "default": 120.0, "metavar": "S", "help": "timeout of an operation between ranks"},
    "--out": {"type": Path, "help": "what is written: the folder of results, or the file"},
    "--grace": {
        "type": partial(_number, wanted="a finite number of 0 or more", least=0.0),
        "default": 5.0,
        "metavar": "S",
        "help": "time for the others to end after a rank has failed",
    },
    "command": {
        "nargs": argparse.REMAINDER,
        "metavar": "-- COMMAND",
        "help": "what every rank runs, as with torchrun; or the script that doctor runs on one rank up to its first optimizer step",
    },
    "--seconds": {
        "type": partial(_number, wanted="a finite number of 1 or more", least=1.0),
        "default": 45.0,
        "help": "approximate time for exchanges and kernels; in less than 1 only bursts are measured",
    },
    "--probe": {"required": True, "help": "the file that `sparsync probe` wrote"} | _FILE,
    "--rates": {
        "type": partial(_several, read=positive),
        "default": "0.5,1,2",
        "help": "factors of the job's rate; if the lowest or the highest is best, more are tried",
    },
    "--rates-seed": {"type": _seed, "metavar": "SEED", "help": "try the rates with this seed only"},
    "--beside": {
        "action": "append",
        "type": _job,
        "default": [],
        "metavar": "JOB(KEY=VALUE)",
        "help": "train the methods on this job, too, for a column of the table; again for more",
    },
    "--jobs": {"type": count, "default": 1, "metavar": "N", "help": "trainings at a time, each on one core"},
    "--device": {
        "choices": ("cpu", "cpu-bfloat16", "cuda"),
        "default": "cpu",
        "help": "where all ranks of a training are; cpu-bfloat16 and cuda: in bfloat16 autocast",
    },
    "--page": {"type": Path, "metavar": "FILE.md", "help": "a page in which one part is rewritten"},
    "--part": {"metavar": "NAME", "help": "the part of the page, the name of the workload unless given"},
    "--elements": {"type": count, "help": "of the drawn gradient, 100000 unless given"},
    "--preset": {
        "metavar": "NAME|FILE.toml",
        "help": "a name of --list, or a file like those in sparsync_lab/simulate/presets",
    },
    "--list": {"action": "store_true", "help": "list the presets"},
    "--gbit": {
        "type": positive,
        "metavar": "RATE",
        "help": "Gbit/s of a link between nodes, instead of the preset's own",
    },
    "--new": {"type": Path, "metavar": "FILE.py", "help": "write a job that runs; replace its model, data and loss"},
    "folder": {"type": Path, "help": "the folder a comparison wrote"},
    "name": {"nargs": "?", "help": "show its settings: NAME, package.module:Class or path/to/file.py:Class"},
}
_JOB, _LINKS = "--workload --option --data", "--link --up --down --delay --jitter"
# The options of each command and its overrides.
_OF: dict[str, tuple[str, dict[str, Changes]]] = {
    "compare": (
        f"{_JOB} --ranks {_LINKS} --schemes --density --target --steps --eval-every --seeds --bucket-mb --timeout --out",
        {
            "--workload": {"default": "shakespeare"},
            "--schemes": {"default": "dense,bf16,topk,skip_reduce"},
            "--bucket-mb": {"default": 25.0},
            "--out": {"default": Path("results")},
        },
    ),
    "launch": (
        f"--ranks {_LINKS} --scheme --grace --fault command",
        {"--ranks": {"default": 4}, "--link": {"default": "100mbit"}},
    ),
    "probe": (
        f"{_JOB} --ranks {_LINKS} --schemes --bucket-mb --seconds --timeout --out",
        {"--schemes": {"default": PROBED}, "--out": {"default": Path("probe.toml")}},
    ),
    "advise": (f"{_JOB} --probe --schemes --density", {}),
    "demo": ("--out --steps", {"--out": {"default": Path("demo")}, "--steps": {"default": None}}),
    "frontier": (
        f"{_JOB} --schemes --density --ranks --steps --seeds --rates --rates-seed --beside --jobs --device --page --part --out",
        {
            "--workload": {"default": "gpt-tiny"},
            "--schemes": {
                "default": FRONTIER,
                "help": f"{_METHODS}; adamw: dense with beta2 >= 0.999; laprop: with LaProp",
            },
            "--ranks": {"default": "4", "help": "one or more numbers, separated by commas"} | _COUNTS,
            "--steps": {"default": "300", "help": "of a training; one or more, separated by commas"} | _COUNTS,
            "--out": {"default": Path("frontier")},
        },
    ),
    "doctor": ("--scheme command", {}),
    "report": ("folder", {}),
    "simulate": ("--preset --list --ranks --gbit", {"--ranks": {"help": "instead of the preset's own"}}),
    "traffic": (
        f"{_JOB} --schemes --ranks --elements --density --steps --seed",
        {
            "--workload": {
                "help": "take the gradients of this job, as it trains with the dense mean; drawn ones unless given"
            },
            "--schemes": {
                "flags": ("--scheme", "--schemes"),
                "dest": "schemes",
                "default": "exact_micro,exact_exdyna,exact_oktopk,topk",
            },
            "--ranks": {"default": 4, "help": "ranks, all in this process"},
        },
    ),
    "schemes": ("name", {}),
    "workloads": ("--new", {}),
}


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of a command; the help shows the default."""
    names, changes = _OF[command]
    for name in names.split():
        about = _SAID[name] | changes.get(name, {})
        flags = about.pop("flags", (name,))
        told = "" if about.get("default") in (None, []) else " (default: %(default)s)"
        parser.add_argument(*flags, **about | {"help": about["help"] + told})
