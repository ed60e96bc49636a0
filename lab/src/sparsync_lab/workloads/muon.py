"""Muon for matrices and AdamW for the rest, as one optimizer, which is what a job has."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from sparsync_lab.workloads.unfinished import load_in_place


class Several(Optimizer):
    """Steps several optimizers, one after the other. It has the groups of all, so that one schedule sets their rates."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.members = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each, beside the groups of all."""
        return {**super().state_dict(), "members": [each.state_dict() for each in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each, whose groups stay the ones here."""
        for each, state in zip(self.members, state_dict["members"], strict=True):
            load_in_place(each, state)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no loss to return
        """Take the step of each."""
        for each in self.members:
            each.step(closure)
