"""The options of the commands of `sparsync`. Nothing here imports torch."""

import argparse
import math
from argparse import ArgumentTypeError
from pathlib import Path

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

SCHEMES_HELP = "names of `sparsync schemes`, package.module:Class or path/to/file.py:Class, with settings"
RECIPES_HELP = "; default or bits=0.8, as attach takes them with the job's optimizer"
METHODS_HELP = (
    SCHEMES_HELP
    + "; in front of one steps(keep=0.5)/ or local_steps(every=4)/, as attach(..., exchange=Steps(keep=0.5)) or LocalSteps(every=4)"
    + RECIPES_HELP
)


def add_workload_options(parser: argparse.ArgumentParser, default: str | None) -> None:
    add = parser.add_argument
    forms = "a name of `sparsync workloads`, package.module:Class or path/to/file.py:Class"
    add("--workload", default=default, help=f"the training job: {forms} (default: {default or 'none'})")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the workload, e.g. width=128")
    add("--data", default=None, metavar="FOLDER", help="the workload's data, instead of where it is usually found")


def add_group_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=None, help="data-parallel ranks (default: 4; under torchrun: its processes)")
    link = "rate of each rank's link, such as 100mbit, 1Gbps or none (default: 100mbit; not under torchrun)"
    add("--link", default=None, help=link)
    _add_directions(parser)
    gpu = "under torchrun: gloo or nccl (default: nccl if every rank has its own GPU)"
    add("--backend", choices=("gloo", "nccl"), default=None, help=gpu)


def _add_directions(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--up", default=None, metavar="RATE", help="rate at which a rank sends, or none (default: --link)")
    add("--down", default=None, metavar="RATE", help="rate at which a rank receives, or none (default: --link)")
    add_delay_options(parser)


def add_delay_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--delay", default=None, metavar="TIME", help="one-way delay between any two ranks, such as 25ms (default: 0)")
    most = "by how much it is longer or shorter at most, such as 5ms; packets keep their order (default: 0)"
    add("--jitter", default=None, metavar="TIME", help=most)


def add_fault_options(parser: argparse.ArgumentParser, about: str) -> None:
    add = parser.add_argument
    fault = "kill:2@30s, leave:1@60s, freeze:3@20s+8s, partition:0@70s+10s, join@45s or store@10s+3s; again for more; "
    add("--fault", action="append", default=[], metavar="KIND:RANK@TIME+TIME", help=fault + about)
    add("--chaos", type=int, default=None, metavar="SEED", help="draw faults, one in about 20 s; a rank is always left")
    add("--faults-until", default=None, metavar="TIME", help="no fault begins after this, such as 300s (default: none)")


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default="shakespeare")
    add_group_options(parser)
    add("--schemes", default="dense,bf16,topk,skip_reduce", metavar="A,B:KEY=VALUE", help=METHODS_HELP)
    add("--density", type=float, default=0.01, help="share of elements that sparse schemes send (default: 0.01)")
    add("--skip", type=_count_or_share, default=None, help="for skipping schemes: ranks left out, or their share")
    add("--target", type=_finite, default=None, help="quality to reach; its time is reported")
    add("--steps", type=int, default=300, help="training steps of each scheme (default: 300)")
    add("--eval-every", type=int, default=10, metavar="STEPS", help="steps between evaluations (default: 10)")
    add(
        "--seed",
        "--seeds",
        dest="seeds",
        type=_integers,
        default=(0,),
        help="one or more, separated by commas (default: 0)",
    )
    same = "size of all buckets in MB, DDP's bucket_cap_mb (default: 25; in DDP's default the first has 1)"
    add("--bucket-mb", type=positive, default=25.0, help=same)
    add(
        "--timeout",
        type=positive,
        default=120.0,
        metavar="S",
        help="timeout of an operation between ranks (default: 120)",
    )
    add("--out", type=Path, default=Path("results"), help="folder for results and report (default: results)")
    add_within(parser)
    add_csv(parser)


def add_within(parser: argparse.ArgumentParser) -> None:
    near = "how far behind dense's quality the report's choice may be (default: 2)"
    parser.add_argument("--within", type=_not_negative, default=2.0, metavar="PERCENT", help=near)


def add_csv(parser: argparse.ArgumentParser) -> None:
    each = "also write a row of numbers per training there, as sparsync_lab.read_results returns them"
    parser.add_argument("--csv", type=Path, default=None, metavar="FILE", help=each)


def add_demo_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("demo"), help="folder for results and reports (default: demo)")
    add("--steps", type=int, default=None, help="training steps of each scheme, for a quick trial")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="folder", help="the folder a comparison wrote")
    add_within(parser)
    add_csv(parser)


def add_schemes_options(parser: argparse.ArgumentParser) -> None:
    what = "show its settings: NAME, package.module:Class or path/to/file.py:Class"
    parser.add_argument("name", nargs="?", help=what)


def add_workloads_options(parser: argparse.ArgumentParser) -> None:
    what = "write a job that runs; replace its model, data and loss"
    parser.add_argument("--new", type=Path, default=None, metavar="FILE.py", help=what)


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default=None)
    add(
        "--scheme",
        default=None,
        metavar="A:KEY=VALUE",
        help=f"for the script or the job (default: the recipe that attach takes): {METHODS_HELP}",
    )
    add(
        "--timeout", type=positive, default=120.0, metavar="S", help="timeout of the script's first step (default: 120)"
    )
    script = "your script and its arguments: it runs on one rank up to its first optimizer step"
    add("script", nargs=argparse.REMAINDER, metavar="-- SCRIPT", help=script)


def add_launch_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="processes, each with its own link and address (default: 4)")
    add("--link", default="100mbit", help="rate of each rank's link, each way, or none (default: 100mbit)")
    _add_directions(parser)
    add(
        "--scheme",
        default=None,
        metavar="A:KEY=VALUE",
        help=f"for scripts that call sparsync.attach(model, optimizer=optimizer): {METHODS_HELP}",
    )
    add(
        "--nodes", action="store_true", help="each rank is a machine to the script: LOCAL_RANK is 0, LOCAL_WORLD_SIZE 1"
    )
    add(
        "--grace",
        type=float,
        default=5.0,
        metavar="S",
        help="time for the others to end after a rank has failed (default: 5)",
    )
    add_fault_options(parser, "the command is to train with sparsync.elastic")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what every rank runs, as with torchrun")


def add_probe_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default=None)
    add_group_options(parser)
    add(
        "--schemes",
        default=PROBED,
        metavar="A,B:KEY=VALUE",
        help=f"methods whose buckets are measured, for `sparsync advise`; their default density is 0.01 (default: {PROBED})",
    )
    layout = "size of all of the job's DDP buckets in MB (default: DDP's, a first one of 1 and then 25; compare has 25 for all)"
    add("--bucket-mb", type=positive, default=None, help=layout)
    add("--seconds", type=positive, default=45.0, help="approximate time for exchanges and kernels (default: 45)")
    add(
        "--timeout",
        type=positive,
        default=120.0,
        metavar="S",
        help="timeout of an operation between ranks (default: 120)",
    )
    add("--out", type=Path, default=Path("probe.toml"), metavar="FILE", help="the file to write (default: probe.toml)")


def add_advise_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default=None)
    add("--probe", type=Path, required=True, metavar="FILE.toml", help="the file that `sparsync probe` wrote")
    add(
        "--gradients",
        type=Path,
        default=None,
        metavar="FILE",
        help="the job's gradients from `sparsync gradients`, to estimate extra steps",
    )
    add("--seed", type=int, default=None, help="with --gradients: seed of the recorded training (default: 0)")
    add(
        "--steps",
        type=_count,
        default=None,
        help="with --gradients: all steps of the recorded training, for its schedule (default: 300)",
    )
    advised = "those that `sparsync probe` measures, local steps, and AdamW steps for a job with AdamW"
    add("--schemes", default=None, metavar="A,B:KEY=VALUE", help=f"{METHODS_HELP} (default: {advised})")
    add("--density", type=float, default=0.01, help="share of elements that sparse schemes send (default: 0.01)")
    add("--skip", type=_count_or_share, default=None, help="for skipping schemes: ranks left out, or their share")
    add(
        "--parameters",
        type=int,
        default=None,
        metavar="N",
        help="parameters of the model, if the probe has no [backward]",
    )
    add("--forward-ms", type=_not_negative, default=None, metavar="MS", help="its forward pass")
    add("--backward-ms", type=_not_negative, default=None, metavar="MS", help="its backward pass")
    add("--optimizer-ms", type=_not_negative, default=None, metavar="MS", help="its optimizer (default: 0)")
    size = "size of its buckets in MB, except the first, which has 1 as in DDP's default (default: 25)"
    add("--bucket-mb", type=positive, default=None, help=size)
    add(
        "--json", default=None, metavar="FILE", help="write the answer as JSON; -: on standard output, and nothing else"
    )


def add_frontier_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default="gpt-tiny")
    further = "laprop: dense with LaProp in place of AdamW; oracle: the limit of every selection, which sends nothing"
    methods = f"{METHODS_HELP}; {further} (default: {FRONTIER})"
    add("--schemes", default=FRONTIER, metavar="A,B:KEY=VALUE", help=methods)
    add("--density", type=float, default=0.01, help="share of elements that sparse schemes send (default: 0.01)")
    add("--skip", type=_count_or_share, default=None, help="for skipping schemes: ranks left out, or their share")
    add("--ranks", type=_integers, default=(4,), help="one or more numbers, separated by commas (default: 4)")
    add(
        "--steps", type=_integers, default=(300,), help="of a training; one or more, separated by commas (default: 300)"
    )
    add(
        "--seed",
        "--seeds",
        dest="seeds",
        type=_integers,
        default=(0,),
        help="one or more, separated by commas (default: 0)",
    )
    add(
        "--rates",
        type=_numbers,
        default=(0.5, 1.0, 2.0),
        help="factors of the job's rate; if the lowest or the highest is best, more are tried (default: 0.5,1,2)",
    )
    add("--rates-seed", type=int, default=None, metavar="SEED", help="try the rates with this seed only")
    add("--follow-rate", action="store_true", help="residuals follow the learning rate")
    add("--jobs", type=int, default=1, metavar="N", help="trainings at a time, each on one core (default: 1)")
    on_gpu = "where all ranks of a training are; cuda: in bfloat16 autocast (default: cpu)"
    add("--device", choices=("cpu", "cuda"), default="cpu", help=on_gpu)
    kept = (
        "steps after which the state of a training is kept, for one that is stopped (default: about every ten minutes)"
    )
    add("--checkpoint-every", type=int, default=None, metavar="STEPS", help=kept)
    add("--ours", default=None, metavar="A,B", help="names of schemes that are marked as ours, not as published")
    add("--page", type=Path, default=None, metavar="FILE.md", help="a page in which one part is rewritten")
    add("--part", default=None, metavar="NAME", help="the part of the page (default: the name of the workload)")
    add(
        "--out",
        type=Path,
        default=Path("frontier"),
        help="folder of finished trainings and results (default: frontier)",
    )
    add_csv(parser)


def add_traffic_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--scheme",
        "--schemes",
        dest="schemes",
        default="micro,exdyna,oktopk,topk",
        metavar="A,B:KEY=VALUE",
        help=SCHEMES_HELP,
    )
    add("--ranks", type=int, default=None, help="ranks, all in this process (default: 4, or as recorded)")
    add("--elements", type=int, default=None, help="of the gradient (default: 100000, or as recorded)")
    add("--density", type=float, default=0.01, help="share of elements that sparse schemes send (default: 0.01)")
    add("--skip", type=_count_or_share, default=None, help="for skipping schemes: ranks left out, or their share")
    add("--steps", type=int, default=None, help="steps (default: 300, or all that were recorded)")
    add("--seed", type=int, default=0, help="of the drawn gradients (default: 0)")
    add(
        "--jump",
        type=int,
        default=None,
        metavar="STEP",
        help="from this step on, drawn gradients are 10 times as large",
    )
    add("--gradients", type=Path, default=None, metavar="FILE", help="use gradients that `sparsync gradients` recorded")
    add("--every", type=int, default=1, metavar="STEPS", help="steps between two lines (default: 1)")
    add("--json", default=None, metavar="FILE", help="write JSON lines there; -: on standard output, and nothing else")
    add("--plot", type=Path, default=None, metavar="FILE.png", help="draw a picture")


def add_gradients_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_workload_options(parser, default="shakespeare-small")
    add("--ranks", type=int, default=4, help="equal shares of each batch (default: 4)")
    add("--steps", type=int, default=50, help="training steps, with the dense mean (default: 50)")
    add("--every", type=int, default=1, metavar="STEPS", help="steps between two records (default: 1)")
    add("--precision", default="bfloat16", help="of the file: bfloat16 or float32 (default: bfloat16)")
    add("--seed", type=int, default=0, help="of the training (default: 0)")
    add("--out", type=Path, required=True, metavar="FILE", help="the file to write")


def _count_or_share(text: str) -> int | float:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise ArgumentTypeError(
            f"takes a number of ranks, such as 1, or a share of them, such as 0.5, got {text!r}"
        ) from None


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


def _finite(text: str) -> float:
    return _number(text, "a finite number", -math.inf)


def _not_negative(text: str) -> float:
    return _number(text, "a finite number of 0 or more", 0.0)


def positive(text: str) -> float:
    return _number(text, "a finite number above 0", math.ulp(0.0))


def _number(text: str, wanted: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        raise ArgumentTypeError(f"takes {wanted}, got {text!r}")
    return value
