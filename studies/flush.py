"""What `handle.flush()` at the end of a training does to the model: a table of docs/adamw_steps.md.

    .venv/bin/python -m studies flush                  # 20 minutes of one core

Each training is evaluated twice at its end: the common weights as they are, and after what was unsent has been sent.
"""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsync import Comm, Report
from sparsync_lab import workloads
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.base import Workload
from sparsync_lab.workloads.one_process import train_locally
from studies import parts

PAGE, PART = "docs/adamw_steps.md", "flush"
METHODS = (
    "steps(keep=0.35:measure_every=16)/two_shot:density=0.012:values=sign,"
    "steps/two_shot:density=0.03:values=sign:density_down=0.12,"
    "steps/two_shot:density=1.0:values=sign"
)
RANKS, DENSITY = 4, 0.01  # the density of a scheme that names none


def main(argv: Sequence[str] | None = None) -> None:
    parser = parts.options("flush", __doc__)
    parser.add_argument("--workload", default="gpt-tiny", help="the job (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="times the job's learning rate (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="of a training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method (default: %(default)s)")
    parser.add_argument("--methods", default=METHODS, help="as `sparsync frontier --schemes` takes them")
    options = parser.parse_args(argv)
    job = workloads.get(options.workload).at_rate(options.rate)
    rows = []
    for choice in parse_schemes(options.methods, DENSITY):
        pairs = [_qualities(job, choice, seed, options.steps) for seed in range(options.seeds)]
        changes = [100 * (after / before - 1) for before, after in pairs]
        means = [f"{statistics.fmean(each):.3f}" for each in zip(*pairs, strict=True)]
        rows.append([f"`{choice.label}`", *means, ", ".join(f"{each:+.2f}" for each in changes)])
        print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    heads = ("method", f"{job.metric} without `flush`", "after it", "change in %, by seed")
    where = f"{options.workload} at {options.rate:g} times its rate, {RANKS} ranks, {options.steps} steps (`python -m studies flush`):"
    parts.put(PAGE, PART, f"{where}\n\n{parts.table(heads, rows)}", options.print)


def _qualities(job: Workload, choice: SchemeChoice, seed: int, steps: int) -> tuple[float, float]:
    """Return the quality of the common weights at the end of one training, before and after `flush`."""
    before: list[float] = []

    def make(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Any:  # Any: as `make_local`
        return _Evaluated(
            choice.make_local(model, optimizer, comm=comm), job, model, before if comm.rank == 0 else None
        )

    trained = train_locally(job, make, seed, steps, RANKS, {steps}, exchange_last=True)
    return before[0], trained.quality[-1][1]


class _Evaluated:
    """The handle of one rank, whose `flush` first appends the quality of the common weights to `before`; None: on other ranks."""

    def __init__(
        self, handle: Any, job: Workload, model: nn.Module, before: list[float] | None
    ) -> None:  # Any: as `make_local`
        self._handle, self._job, self._model, self._before = handle, job, model, before

    def __getattr__(self, name: str) -> Any:  # Any: of the handle
        return getattr(self._handle, name)

    def flush(self) -> list[Report]:
        if self._before is not None:
            with self._handle.averaged():
                self._before.append(self._job.quality_and_error(self._model)[0])
        return self._handle.flush()
