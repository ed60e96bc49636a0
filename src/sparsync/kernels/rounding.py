"""Rounding without overflow to infinity, and its errors, for codecs, 16-bit sums and gradients."""

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync.kernels.operations import all_finite


def rounded(x: Float[Tensor, " n"], dtype: torch.dtype) -> Float[Tensor, " n"]:
    """Round `x` to the nearest number in `dtype`; finite numbers beyond its largest become its largest. Keeps NaN and Inf."""
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
    """Compute `x` - `times` * `received` in the type of `x`, even if the product overflows it."""
    received = received.to(x.dtype)
    if isinstance(times, int) and times == 1:
        return x - received
    error = x - times * received
    if not x.is_cuda and all_finite(error):
        return error
    wide = (x.double() - times * received.double()).to(x.dtype)
    return torch.where(error.isfinite(), error, wide) if x.is_cuda else wide


def add_rounded_(x: Float[Tensor, " n"], addend: Float[Tensor, " n"], dropped: Float[Tensor, " n"] | None) -> None:
    """Add `addend` to `x`, and the rounding error to `dropped`, if given and of a wider type."""
    if dropped is None or dropped.dtype == x.dtype:
        x.add_(addend)
        return
    total = x.to(dropped.dtype) + addend.to(dropped.dtype)
    x.copy_(rounded(total, x.dtype))
    dropped.add_(total - x.to(dropped.dtype))
