"""What SkipReduce holds back with `feedback=True`, which is ours."""

import torch
from torch import Tensor

from sparsync.core import SpanSet, exact_divisor
from sparsync.feedback import Accumulator
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded


class LeftOut:
    """What this rank holds back of one step, [n] in the order of the chunks: what sums left out, and what rounding dropped."""

    def __init__(self, acc: Accumulator, grad: Tensor, order: SpanSet, P: int) -> None:
        """Make `grad` [n] what this rank sends: acc, or, where its type is narrower, acc / P rounded, divided by P no more later."""
        narrow = grad.dtype != acc.values.dtype
        self.shares = (
            P if narrow else 1
        )  # in 16 bits, shares of the mean, whose sums overflow no sooner than the mean does
        if narrow:
            grad.copy_(rounded(acc.values / exact_divisor(acc.values, P), grad.dtype))
        own = order.take(acc.values)
        self.omitted = torch.zeros_like(own)  # filled by the all-reduce
        self._dropped = lacking(own, order.take(grad), self.shares) if narrow else None
        self._finite = None if acc.finite else own.isfinite()
        self._residual, self._order = acc.residual, order

    def keep(self) -> None:
        """Make it the residual, unless a contribution that was left out, or a sum of some, is not finite."""
        held = self.omitted if self._dropped is None else lacking(self._dropped, -self.omitted, self.shares)
        if self._finite is not None or not kernels.all_finite(held):  # seldom, and it takes more memory
            usable = held.isfinite() if self._finite is None else held.isfinite() & self._finite
            held = torch.where(usable, held, self._order.take(self._residual))
        self._order.put_(self._residual, held)
