"""What a training loses that is resumed from the optimizer's state alone: a table of docs/adamw_steps.md.

    .venv/bin/python -m studies resume                 # 8 minutes of one core

Half way each rank closes its handle, and goes on with a new one and one of the states in WAYS.
"""

import copy
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from sparsync import Comm, Report
from sparsync_lab import workloads
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.workloads.one_process import train_locally
from studies import parts

PAGE, PART = "docs/adamw_steps.md", "resume"
METHOD, RANKS = "steps(keep=0)/two_shot:density=1.0:values=int3", 4
WAYS = {
    "none": "not interrupted",
    "handle": "from the checkpoint of the handle",
    "own": "from each rank's own `optimizer.state_dict()`",
    "first": "all from that of rank 0",
    "new": "with new moments",
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = parts.options("resume", __doc__)
    parser.add_argument("--workload", default="gpt-tiny", help="the job (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="times the job's learning rate (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="of a training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="trainings in each way (default: %(default)s)")
    options = parser.parse_args(argv)
    job = workloads.get(options.workload).at_rate(options.rate)
    (choice,) = parse_schemes(METHOD, 0.01)
    rows = []
    for way, words in WAYS.items():
        found = list[float]()
        for seed in range(options.seeds):
            states: list[Any] = [None] * RANKS  # Any: of optimizers

            def make(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Any:  # Any: as `make_local`
                return _Resumed(choice, model, optimizer, comm, way, options.steps // 2, states)  # noqa: B023

            found.append(train_locally(job, make, seed, options.steps, RANKS, {options.steps}).quality[-1][1])
        rows.append([words, ", ".join(f"{each:.3f}" for each in found), f"{statistics.fmean(found):.3f}"])
        print(parts.line(rows[-1]), file=sys.stderr, flush=True)
    where = f"{options.workload} at {options.rate:g} times its rate, {RANKS} ranks, `{METHOD}`, {options.steps} steps, resumed at half of"
    table = parts.table(("resumed", f"{job.metric}, by seed", "mean"), rows)
    parts.put(PAGE, PART, f"{where} them (`python -m studies resume`):\n\n{table}", options.print)


class _Resumed:
    """The handle of one rank, in whose place another one comes after step `at`."""

    def __init__(
        self,
        choice: SchemeChoice,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Comm,
        way: str,
        at: int,
        states: list[Any],
    ) -> None:  # Any: of optimizers
        self._made = lambda: choice.make_local(model, optimizer, comm=comm)
        self._optimizer, self._comm, self._way, self._at, self._states = optimizer, comm, way, at, states
        self._handle, self._taken = self._made(), 0

    def __getattr__(self, name: str) -> Any:  # Any: of the handle
        return getattr(self._handle, name)

    def step(self) -> list[Report]:
        reports, self._taken = self._handle.step(), self._taken + 1
        if self._taken == self._at and self._way != "none":
            before = self._handle.state_dict()
            self._states[self._comm.rank] = copy.deepcopy(self._optimizer.state_dict())
            self._comm.all_gather(torch.zeros(1))  # all have theirs
            self._handle.close()
            self._optimizer.load_state_dict(self._states[0 if self._way == "first" else self._comm.rank])
            if self._way == "new":
                self._optimizer.state.clear()
            self._handle = self._made()
            if self._way == "handle":
                self._handle.load_state_dict(before)
        return reports
