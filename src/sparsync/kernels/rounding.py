"""Rounding that makes no infinities, and what it drops: for codecs, sums in 16 bits, and gradients."""

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync.kernels.operations import all_finite


def rounded(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """Return `x` in `dtype`, rounded to nearest; finite numbers beyond its largest become that. NaN and Inf stay."""
    largest = torch.finfo(dtype).max
    if not x.numel() or largest >= torch.finfo(x.dtype).max:
        return x.to(dtype)
    low, high = torch.aminmax(x)
    if not x.is_cuda and bool((low >= -largest) & (high <= largest)):
        return x.to(dtype)
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)


def lacking(
    x: Float[Tensor, " n"], received: Float[Tensor, " n"], times: int | Float[Tensor, " n"] = 1
) -> Float[Tensor, " n"]:
    """Return `x` - `times` * `received` in the type of `x`, even if the product is beyond its largest number."""
    received = received.to(x.dtype)
    if isinstance(times, int) and times == 1:
        return x - received
    error = x - times * received
    if not x.is_cuda and all_finite(error):
        return error
    wide = (x.double() - times * received.double()).to(x.dtype)
    return torch.where(error.isfinite(), error, wide) if x.is_cuda else wide


def add_rounded_(x: Float[Tensor, " n"], addend: Float[Tensor, " n"], dropped: Float[Tensor, " n"] | None) -> None:
    """Add `addend` to `x`, and the rounding of the sum to `dropped`, if that is given and wider."""
    if dropped is None or dropped.dtype == x.dtype:
        x.add_(addend)
        return
    total = x.to(dropped.dtype) + addend.to(dropped.dtype)
    x.copy_(rounded(total, x.dtype))
    dropped.add_(total - x.to(dropped.dtype))
