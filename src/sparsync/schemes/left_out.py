"""The residual of SkipReduce with `feedback=True`, which is an addition to the paper."""

import torch
from torch import Tensor

from sparsync.core import SpanSet, exact_divisor
from sparsync.feedback import Accumulator
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded


class LeftOut:
    """The part of one step that this rank holds back, [n] in the order of the chunks: omitted contributions and rounding errors."""

    def __init__(self, acc: Accumulator, grad: Tensor, order: SpanSet, P: int) -> None:
        """Write to `grad` [n] what this rank sends: acc, or if its type is narrower, acc / P rounded, so that no division follows."""
        narrow = grad.dtype != acc.values.dtype
        self.shares = P if narrow else 1  # sums of shares of the mean overflow no sooner than the mean does
        if narrow:
            grad.copy_(rounded(acc.values / exact_divisor(acc.values, P), grad.dtype))
        mine = order.take(acc.values)
        self.omitted = torch.zeros_like(mine)  # filled by the all-reduce
        self._dropped = lacking(mine, order.take(grad), self.shares) if narrow else None
        self._finite = None if acc.finite else mine.isfinite()
        self._residual, self._order = acc.residual, order

    def keep(self) -> None:
        """Write it to the residual, except where an omitted contribution, or a sum of them, is non-finite."""
        held = self.omitted if self._dropped is None else lacking(self._dropped, -self.omitted, self.shares)
        if self._finite is not None or not kernels.all_finite(held):  # seldom, and it takes more memory
            usable = held.isfinite() if self._finite is None else held.isfinite() & self._finite
            held = torch.where(usable, held, self._order.take(self._residual))
        self._order.put_(self._residual, held)
