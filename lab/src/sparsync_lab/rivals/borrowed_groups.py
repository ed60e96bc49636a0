"""Base of optimizers that replace a job's optimizer and share its groups, so that the job's schedule sets their rates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BorrowedGroups(Optimizer):
    """An optimizer with the groups of `job`, which it replaces. A parameter without a gradient does not move."""

    def __init__(self, job: Optimizer) -> None:
        super().__init__(job.param_groups, {})
        self._job = job

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the existing groups: torch's method makes new ones."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no loss to return
        # HACK: a schedule warns unless its optimizer has stepped, which it reads from this private attribute.
        vars(self._job)["_opt_called"] = True
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_(parameter, parameter.grad, group, number)

    def update_(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        """Update one parameter of group `number`."""
        raise NotImplementedError
