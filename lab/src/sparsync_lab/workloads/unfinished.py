"""The state of a training that is not finished, in one file: a training that was stopped continues from it with the same bits."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync_lab.workloads.job_errors import JobError

EVERY_S = 600.0

State = dict[str, Any]  # Any: nested dicts and lists of tensors, numbers and texts, as weights_only loads them


class StateFileError(JobError):
    """The file with the state of a training cannot be read, used or written. It ends a study: the method has not failed."""


class Unfinished:
    """Keeps the state of a training in `file`, after each `every` steps; None: about every ten minutes.

    The ranks of a LocalWorld share one, of which one runs at a time.
    """

    def __init__(self, file: Path, every: int | None = None) -> None:
        self.file, self.every = file, every
        self._decided, self._due = 0, set[int]()  # up to which step it is decided what is due; the steps that are
        self._written_s = time.monotonic()
        self._parts: dict[int, dict[int, State]] = {}  # by step and rank, until all ranks have been there

    def read(self) -> tuple[int, list[State]]:
        """Return after how many steps the training was stopped, and the state of each rank; 0 and none where there is no file.

        Raises StateFileError where the file cannot be read.
        """
        try:
            if not self.file.is_file():
                return 0, []
            state = torch.load(self.file, weights_only=True)
            return state["step"], state["ranks"]
        except Exception as error:  # torch raises many kinds
            raise StateFileError(
                f"{self.file} cannot be read as the state of a training ({error!r}); make it readable, or delete it to begin that training "
                "again"
            ) from error

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Turn what is raised while a state that was read is loaded into a StateFileError."""
        try:
            yield
        except Exception as error:
            raise StateFileError(
                f"{self.file} does not fit its training ({error!r}); delete it to begin that training again"
            ) from error

    def due(self, step: int) -> bool:
        """Return whether the state after `step` steps is to be kept: the same for all ranks, whenever each of them asks."""
        if step > self._decided:
            self._decided, now = step, time.monotonic()
            due = step % self.every == 0 if self.every else now - self._written_s >= EVERY_S
            if due:
                self._due.add(step)
                self._written_s = now
        return step in self._due

    def keep(self, step: int, state: State, rank: int = 0, ranks: int = 1) -> None:
        """Keep the state of one rank after `step` steps. The last of the ranks writes those of all, in place of earlier ones.

        Tensors must not change afterwards. Raises StateFileError where the file cannot be written.
        """
        parts = self._parts.setdefault(step, {})
        parts[rank] = state
        if len(parts) < ranks:
            return
        del self._parts[step]
        partial = self.file.with_suffix(".partial")
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as out:
                torch.save({"step": step, "ranks": [parts[each] for each in range(ranks)]}, out)
                out.flush()
                os.fsync(out.fileno())
            partial.replace(self.file)
        except (OSError, RuntimeError) as error:  # torch raises the latter on a full disk
            raise StateFileError(
                f"cannot write the state of a training to {self.file}: {error}; make room there, or choose another folder with --out"
            ) from error

    def remove(self) -> None:
        """Remove what was kept."""
        self.file.unlink(missing_ok=True)
        self.file.with_suffix(".partial").unlink(missing_ok=True)


def state_of(optimizer: Optimizer, schedule: LRScheduler, model: nn.Module | None = None) -> State:
    """Return a copy of the state of these, with all tensors of `model` where it is given."""
    tensors = [] if model is None else [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    return {
        "optimizer": deepcopy(optimizer.state_dict()),
        "schedule": deepcopy(schedule.state_dict()),
        "tensors": tensors,
    }


def restore(state: State, optimizer: Optimizer, schedule: LRScheduler, model: nn.Module | None = None) -> None:
    """Bring these back into the state that `state_of` returned."""
    load_in_place(optimizer, state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    if model is not None:
        for each, saved in zip((*model.parameters(), *model.buffers()), state["tensors"], strict=True):
            each.detach().copy_(saved)


def load_in_place(optimizer: Optimizer, state: State) -> None:
    """Load the state of an optimizer into its groups, which others may share, where torch's `load_state_dict` makes new ones."""
    groups = optimizer.param_groups
    optimizer.load_state_dict(state)
    for group, loaded in zip(groups, optimizer.param_groups, strict=True):
        group.update(loaded)
    optimizer.param_groups = groups
