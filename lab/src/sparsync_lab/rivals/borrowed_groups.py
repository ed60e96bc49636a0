"""Optimizers in the place of a job's own, with its groups, so that the job's schedule sets their rates."""

from typing import Any

from torch.optim import Optimizer


class BorrowedGroups(Optimizer):
    """The part of such an optimizer that keeps the groups when a state is loaded: torch's `load_state_dict` makes new ones."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the groups that are there."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups
