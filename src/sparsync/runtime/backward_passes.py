"""How backward passes and steps follow each other in a loop: a pass whose gradients were thrown away is told from accumulation."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class BackwardPasses:
    """Counts the backward passes since the last step whose gradients were thrown away: where the next pass finds none, or zeros.

    Gradients that are kept accumulate. `gradients` returns what the parameters have.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._task = -1  # of autograd, the last one
        self.stepped()

    def stepped(self) -> None:
        """Begin again: a step was taken, or has failed."""
        self._came, self.thrown_away = False, 0

    def note(self) -> None:
        """Note that a gradient comes, before it is accumulated."""
        # HACK: torch has no public function for this. Price: it may change with torch; tests skip steps and accumulate.
        task = torch._C._current_graph_task_id()
        if task in (self._task, -1):
            return
        self._task = task
        if self._came and not any_kept(self._gradients()):
            self.thrown_away += 1
        self._came = True


def any_kept(gradients: Iterable[Tensor | None]) -> bool:
    """Return whether any gradient is there and not zero. A host sync for each that is zero, and for the first that is not."""
    return any(bool(each.count_nonzero()) for each in gradients if each is not None)
