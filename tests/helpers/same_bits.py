"""Compare results of kernels bit by bit."""

import torch
from torch import Tensor

from sparsync.core import Sparse


def bits(x: Tensor) -> Tensor:
    """Return the bits of `x` with a single NaN, because processors differ in which NaN an addition makes."""
    words = {torch.float32: torch.int32, torch.float64: torch.int64}.get(x.dtype)
    return x if words is None else torch.where(x.isnan(), torch.nan, x).view(words)


def same(got: Sparse, expected: Sparse) -> None:
    """Assert that two sparse vectors are equal."""
    assert got.index.dtype == expected.index.dtype
    assert torch.equal(got.index, expected.index)
    assert torch.equal(bits(got.value), bits(expected.value))
    assert got.length == expected.length
