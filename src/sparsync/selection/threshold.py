"""Selection by a threshold inside one span, as MiCRO and ExDyna do it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync import kernels
from sparsync.core import Span


def select_above(acc: Float[Tensor, " n"], threshold: float, span: Span, step: int) -> Int[Tensor, " k"]:
    """The positions in `span` where |acc| >= threshold, ascending, int64; where there are none, one position that moves with `step`.

    Only an empty span gives none. NaN is above no threshold; find it otherwise.
    """
    index = kernels.select_ge(
        span.of(acc), threshold
    ).index.long()  # a host sync: how many are above depends on the data
    if index.numel() == 0 and len(span):
        index = torch.tensor([step % len(span)], device=acc.device)
    return index + span.start
