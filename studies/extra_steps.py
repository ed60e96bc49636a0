"""Trains with many methods beside dense trainings of several lengths, and writes what `sparsync advise` takes extra steps from.

    .venv/bin/python -m studies extra_steps train --out build/extra      # an hour or two; a stopped one goes on where it was
    .venv/bin/python -m studies extra_steps write --out build/extra      # lab/src/sparsync_lab/advise/extra_steps.toml and docs/advise.md

A method's factor: its steps over those of the dense training, with its own schedule, that ends at the same quality; between two
lengths the logarithms are interpolated. 1 where it ends at or below dense's at equal length. Each method has the job's own rate. The
deviations are those of the first 50 steps' gradients, of the same job and seed.
"""

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsync_lab import workloads
from sparsync_lab.advise import extra_steps
from sparsync_lab.advise.command import adaptive
from sparsync_lab.advise.extra_steps import Training
from sparsync_lab.advise.replay import deviations
from sparsync_lab.frontier import runs
from sparsync_lab.predict.advice import Extra
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.traffic.record import record
from sparsync_lab.traffic.stream import from_record
from studies import parts

DATA = parts.ROOT / "lab" / "src" / "sparsync_lab" / "advise" / "extra_steps.toml"
PAGE, PART = "docs/advise.md", "extra steps"
RANKS, RECORDED, SEED = 4, 50, 0
COMMON = (
    "two_shot:density=1.0:values=int4,two_shot:density=1.0:values=sign,two_shot:density=0.05:values=int4,two_shot:density=0.01:values=int4,"
    "topk:density=0.01:values=int8,topk:density=0.001,oktopk:density=0.01:values=int8,micro:density=0.01:values=int8,"
    "exdyna:density=0.01:values=int8,skip_reduce:skip=1,skip_reduce:skip=2,powersgd,local_steps(every=4)/two_shot:density=1.0:values=int4,"
    "local_steps(every=8)/dense"
)
ADAM = (
    "steps/two_shot:density=1.0:values=sign,steps/two_shot:density=0.03:values=sign:density_down=0.12,"
    "steps(keep=0.35:measure_every=16)/two_shot:density=0.012:values=sign"
)
LONG = (
    "two_shot:density=1.0:values=int4,two_shot:density=0.05:values=int4,topk:density=0.01:values=int8,oktopk:density=0.01:values=int8,"
    "skip_reduce:skip=1,powersgd,local_steps(every=4)/two_shot:density=1.0:values=int4,"
    "steps/two_shot:density=0.03:values=sign:density_down=0.12"
)

LONG_SGD = (
    "two_shot:density=0.02:values=int4,topk:density=0.01:values=int8,topk:density=0.002,oktopk:density=0.01:values=int8,skip_reduce:skip=1,"
    "powersgd,local_steps(every=4)/two_shot:density=1.0:values=int4"
)


@dataclass(frozen=True)
class StudiedJob:
    """A job, the length of its trainings, the shorter dense ones beside them, and whether the curve is fitted to it."""

    name: str
    steps: int
    shorter: tuple[int, ...]
    methods: str
    fitted: bool
    options: tuple[str, ...] = ()  # KEY=VALUE

    @property
    def title(self) -> str:
        return " ".join((self.name, *self.options))


JOBS = (
    StudiedJob("shakespeare-small", 300, (40, 75, 110, 150, 200, 250), COMMON, True),
    StudiedJob("gpt-tiny", 800, (100, 150, 200, 300, 400, 550), f"{COMMON},{ADAM}", True),
    StudiedJob("gpt", 300, (60, 100, 150, 200), LONG, False),
    StudiedJob(
        "gpt", 400, (60, 100, 150, 200, 300), LONG, False, ("width=96", "layers=3", "context=48", "batch_size=32")
    ),
    StudiedJob("shakespeare", 400, (75, 110, 150, 200, 300), LONG_SGD, False, ("vocabulary=1000", "width=128")),
)


def main(argv: Sequence[str]) -> None:
    parser = parts.options("extra_steps", __doc__, writes=False)
    parser.add_argument("what", choices=("train", "write"))
    parser.add_argument("--out", type=Path, required=True, help="folder of finished trainings")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for job in JOBS if options.what == "train" else ():
        _frontier(job, "dense", (*job.shorter, job.steps), options.out)
        _frontier(job, f"dense,{job.methods}", (job.steps,), options.out)
    if options.what == "write":
        finished = runs.read(options.out)
        found = {job: trainings(job, finished) for job in JOBS}
        DATA.write_text(as_toml([each for job, own in found.items() if job.fitted for each in own]))
        extra_steps.trainings.cache_clear()
        extra_steps.curve.cache_clear()
        parts.put(PAGE, PART, page(found))


def trainings(job: StudiedJob, finished: Mapping[runs.Key, runs.Finished]) -> list[Training]:
    """Return each method of `job` with its factor and its deviation."""
    workload = workloads.get(job.name, **dict(option.split("=") for option in job.options))
    workload.prepare()
    choices = parse_schemes(job.methods, 0.01)
    described = runs.described(workload.describe())
    own = {key: each for key, each in finished.items() if key.job == described and key.seed == SEED and key.rate == 1}
    methods = {runs.described(choice.described()): choice.label for choice in (*choices, *parse_schemes("dense", 0.01))}
    ends: dict[str, dict[int, float]] = {}
    for key, each in own.items():
        if key.method in methods and key.ranks == RANKS:
            ends.setdefault(methods[key.method], {})[key.steps] = each.end
    stream = from_record(record(workload, SEED, RANKS, RECORDED, precision="float32"))
    adapts = adaptive(workload)
    found = []
    for choice, each in zip(choices, deviations(workload, SEED, stream, choices, job.steps), strict=True):
        value = factor(ends["dense"], job.steps, ends[choice.label][job.steps], workload.better == "lower")
        progress, scatter = float(f"{each.progress:.4g}"), float(f"{each.scatter:.4g}")
        found.append(Training(job.title, choice.label, adapts, progress, scatter, float(f"{value:.4g}")))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def factor(dense: Mapping[int, float], steps: int, end: float, lower: bool) -> float:
    """Return `steps` over those of dense's training that ends at `end`; at most over the shortest of dense's.

    `dense` has the quality at the end of trainings by their number of steps. If longer trainings are no better, the shortest counts.
    """
    sign = 1.0 if lower else -1.0
    known = sorted((length, sign * quality) for length, quality in dense.items() if length <= steps)
    if sign * end <= known[-1][1]:
        return 1.0
    for (short, worse), (long, better) in zip(known[-2::-1], known[:0:-1], strict=True):
        if better < sign * end <= worse:
            share = (worse - sign * end) / (worse - better)
            return steps / math.exp(math.log(short) + share * (math.log(long) - math.log(short)))
    return steps / known[0][0]


def as_toml(found: Sequence[Training]) -> str:
    lines = [
        "# Made by `python -m studies extra_steps`: trainings that were done to their end, which the curve of extra steps is fitted to.",
        "",
    ]
    for each in found:
        lines += [
            "[[training]]",
            f'job = "{each.job}"',
            f'method = "{each.method}"',
            f"adaptive = {str(each.adaptive).lower()}",
            f"progress = {each.progress!r}",
            f"scatter = {each.scatter!r}",
            f"factor = {each.factor!r}",
            "",
        ]
    return "\n".join(lines)


def page(found: Mapping[StudiedJob, Sequence[Training]]) -> str:
    """Return the curves, the measured factor of every training with that of its curve in brackets, and the errors by job."""
    lines = []
    for adapts in (False, True):
        fitted = [each for job, own in found.items() if job.fitted for each in own if each.adaptive == adapts]
        curve = extra_steps.curve(adapts)
        kind = "Adam and others that divide by second moments" if adapts else "SGD"
        jobs = ", ".join(dict.fromkeys(each.job for each in fitted))
        lines += [f"{kind}: a = {curve.a:.3g}, b = {curve.b:.3g}, fitted to {len(fitted)} trainings of {jobs}.", ""]
    methods = dict.fromkeys(each.method for own in found.values() for each in own)
    cells = {
        (job, each.method): f"{each.factor:.2f} ({_extra(each).factor:.2f})"
        for job, own in found.items()
        for each in own
    }
    rows = ([f"`{method}`", *(cells.get((job, method), "") for job in found)] for method in methods)
    lines += [parts.table(["method", *(_heading(job) for job in found)], rows), ""]
    for job, own in found.items():
        off = sorted(abs(_extra(each).factor / each.factor - 1) for each in own)
        lines.append(
            f"- {_heading(job)}: median error {100 * off[len(off) // 2]:.0f} %, "
            f"{sum(each <= 0.1 for each in off)} of {len(off)} within 10 %, the worst {100 * off[-1]:.0f} %."
        )
    return "\n".join(lines)


def _heading(job: StudiedJob) -> str:
    return job.title if job.fitted else f"{job.title} (not fitted)"


def _extra(training: Training) -> Extra:
    from sparsync_lab.advise.replay import Deviation

    return extra_steps.curve(training.adaptive).extra(Deviation(training.progress, training.scatter))


def _frontier(job: StudiedJob, methods: str, steps: Sequence[int], out: Path) -> None:
    lengths = ",".join(map(str, steps))
    options = [word for option in job.options for word in ("--option", option)]
    what = (
        *options,
        "--workload",
        job.name,
        "--schemes",
        methods,
        "--steps",
        lengths,
        "--rates",
        "1",
        "--out",
        str(out),
    )
    subprocess.run([sys.executable, "-m", "sparsync_lab.cli", "frontier", *what, "--ranks", str(RANKS)], check=True)
