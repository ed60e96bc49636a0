"""Combine Muon for matrices and AdamW for the rest into the single optimizer of a job."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class Several(Optimizer):
    """Steps several optimizers in sequence. It has the groups of all, so that one schedule sets their rates."""

    def __init__(self, *optimizers: Optimizer) -> None:
        self.members = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no loss to return
        for each in self.members:
            each.step(closure)
