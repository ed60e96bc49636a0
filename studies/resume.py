"""What a training loses that is resumed from the optimizer's state alone: a table of docs/adamw_steps.md.

    .venv/bin/python -m studies resume                 # 6 minutes of one core

Half way each rank closes its handle, and goes on with a new one and one of the states in WAYS.
"""

import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sparsync import Comm, Report
from sparsync_lab import workloads
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workloads.one_process import train_locally
from studies import parts

PAGE, PART = "docs/adamw_steps.md", "resume"
JOB, RATE, METHOD, RANKS, STEPS, SEEDS = "gpt-tiny", 2.0, "steps(keep=0)/two_shot:density=1.0:values=int3", 4, 300, 2
WAYS = {
    "none": "not interrupted",
    "handle": "the checkpoint of the handle",
    "own": "each rank's own `optimizer.state_dict()`",
    "first": "that of rank 0, on all ranks",
    "new": "nothing but the weights",
}


def main(argv: Sequence[str] | None = None) -> None:
    options = parts.options("resume", __doc__).parse_args(argv)
    job, rows = workloads.get(JOB).at_rate(RATE), []
    (choice,) = parse_schemes(METHOD, 0.01)
    for way, words in WAYS.items():
        found = list[float]()
        for seed in range(SEEDS):
            states: list[Any] = [None] * RANKS  # Any: of optimizers

            def make(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Any:  # Any: as `make_local`
                return _Resumed(lambda: choice.make_local(model, optimizer, comm=comm), optimizer, comm, way, states)  # noqa: B023

            found.append(train_locally(job, make, seed, STEPS, RANKS, {STEPS}).quality[-1][1])
        rows.append([words, ", ".join(f"{each:.3f}" for each in found), f"{statistics.fmean(found):.3f}"])
        print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    where = f"{JOB} at {RATE:g} times its rate, {RANKS} ranks, `{METHOD}`, {STEPS} steps, with new handles after half of them"
    table = parts.table(("resumed from", f"{job.metric}, by seed", "mean"), rows)
    parts.put(PAGE, PART, f"{where} (`python -m studies resume`):\n\n{table}", options.print)


class _Resumed:
    """The handle of one rank, in whose place another one comes after half of the steps."""

    def __init__(self, make: Callable[[], Any], optimizer: Optimizer, comm: Comm, way: str, states: list[Any]) -> None:
        self._make, self._optimizer, self._comm, self._way, self._states = make, optimizer, comm, way, states
        self._handle, self._taken = make(), 0

    def __getattr__(self, name: str) -> Any:  # Any: of the handle
        return getattr(self._handle, name)

    def step(self) -> list[Report]:
        reports, self._taken = self._handle.step(), self._taken + 1
        if self._taken == STEPS // 2 and self._way != "none":
            before, rank = self._handle.state_dict(), self._comm.rank
            self._states[rank] = copy.deepcopy(self._optimizer.state_dict())
            self._comm.all_gather(torch.zeros(1))  # all have theirs
            self._handle.close()
            self._optimizer.load_state_dict(self._states[0 if self._way == "first" else rank])
            if self._way == "new":
                self._optimizer.state.clear()
            self._handle = self._make()
            if self._way == "handle":
                self._handle.load_state_dict(before)
        return reports
