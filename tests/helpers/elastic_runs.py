"""Elastic runs for tests, in which a rank that is stopped for seconds, or that a loaded machine leaves waiting, does not count as lost."""

import contextlib
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparsync_elastic as elastic
from sparsync_elastic import members

PATIENT_S = 60.0  # longer than any rank stands still; one that ends is noticed at once all the same


def patient_run(port: int, timeout_s: float = PATIENT_S, wait_s: float = 4 * PATIENT_S, **given: Any) -> elastic.Run:
    """Begin a run in a process started for this call."""
    members.ANSWER_S = timeout_s
    return elastic.Run(f"127.0.0.1:{port}", timeout_s=timeout_s, wait_s=wait_s, **given)


class LastStep:
    """The number of steps of a run: `more` than were done when a rank was first seen that was not there in the first epoch.

    Each rank learns of it at the same step; `joins`: this rank is the one.
    """

    def __init__(self, run: elastic.Run, joins: bool, more: int = 20) -> None:
        self._first, self._more, self._last = frozenset[str](), more, None if not joins else -1
        run.on_change = self._changed

    def _changed(self, run: elastic.Run) -> None:
        self._first = self._first or frozenset(run.epoch.members)
        if self._last == -1 or (self._last is None and not self._first.issuperset(run.epoch.members)):
            self._last = run.step + self._more

    @property
    def is_known(self) -> bool:
        """Whether the other rank is there."""
        return self._last is not None

    def __gt__(self, step: int) -> bool:
        return self._last is None or step < self._last


def digest_of(model: nn.Module, handle: Any) -> str:
    shown = handle.averaged() if hasattr(handle, "averaged") else contextlib.nullcontext()
    with shown:
        content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(content).hexdigest()


def network() -> nn.Module:
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    return nn.Sequential(nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 5))
