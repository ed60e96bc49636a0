"""How backward passes and steps follow each other in a loop: a pass whose gradients were thrown away is told from accumulation."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_ROW = 3  # steps one after the other with such a pass before each: the loop uses these gradients, as where each loss has a pass
_MOST = 16  # such passes without a step: other optimizers step


def current_pass() -> int:
    """Return the number of the backward pass that runs in this thread, or -1."""
    # HACK: torch has no public function for this. Price: it may change with torch; tests skip steps and accumulate.
    return torch._C._current_graph_task_id()


class BackwardPasses:
    """Counts the backward passes since the last step whose gradients were thrown away: where the next pass finds none, or zeros.

    Gradients that are kept accumulate, also zeros, where `begins` was told so of the pass. `gradients` returns what the parameters have.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._task = -1  # of autograd, the last one
        self._came, self.thrown_away = False, 0
        self._nonzero: Tensor | None = None  # whether the first gradient of the pass was; None: not known
        self._row: int | None = None  # steps with such a pass before them, up to the last step; None: no step was seen

    @property
    def skips(self) -> bool:
        """Whether such a pass is a step that the loop has skipped, and not what it does always."""
        return self._row is not None and self._row < _ROW and self.thrown_away <= _MOST

    def stepped(self) -> None:
        """Begin again: a step was taken, or has failed."""
        self._row = (self._row or 0) + 1 if self.thrown_away else 0
        self._came, self.thrown_away = False, 0

    def came(self, kept: bool = True) -> None:
        """Note that there are gradients that may be thrown away; not `kept`: nothing is to be done about it."""
        self._came = kept

    def begins(self, gradient: Tensor | None = None) -> bool:
        """Note that `gradient` is about to be accumulated; return whether a pass begins, and those of the last one were thrown away."""
        task = current_pass()
        if task in (self._task, -1):
            return False
        self._task = task
        thrown_away = self.gone()
        self._nonzero = None if gradient is None else _values(gradient).any()  # no host sync here
        return thrown_away

    def gone(self) -> bool:
        """Return whether the gradients of the last pass were thrown away since the last call. Not inside a pass."""
        thrown_away = self._came and not self._kept()
        self.thrown_away += thrown_away
        self._came = self._came and not thrown_away
        return thrown_away

    def _kept(self) -> bool:
        """Return whether any gradient is there and not zero, or as it came. A host sync for each zero, and for the first other one."""
        gradients = [_values(each) for each in self._gradients() if each is not None]
        if gradients and self._nonzero is not None and not bool(self._nonzero):
            return True  # as of a batch without any loss
        return any(bool(each.any()) for each in gradients)


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient
