"""What tests of the kernels mean by the same result."""

import torch
from torch import Tensor

from sparsync.core import Sparse


def bits(x: Tensor) -> Tensor:
    """What is compared: the bits, but all NaN alike, because which one an addition makes is the processor's affair."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32) if x.dtype == torch.float32 else x


def same(got: Sparse, expected: Sparse) -> None:
    assert got.index.dtype == expected.index.dtype
    assert torch.equal(got.index, expected.index)
    assert torch.equal(bits(got.value), bits(expected.value))
    assert got.length == expected.length
