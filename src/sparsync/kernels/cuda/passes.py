"""Passes over a whole vector that add to it, and flag non-finite elements."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Sparse
from sparsync.kernels.cuda.launch import (
    FLOAT32,
    GRADIENT,
    PASS,
    POSITIONS,
    lanes,
    loaded,
    magnitude,
    programs,
    store,
    takes,
)


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> Any:
    bad = added(residual, grad, out)
    return bad if bad is NotImplemented else none(bad)


def none(bad: Tensor) -> Tensor:
    """Invert the flag `bad` [1] to a tensor []."""
    return (bad == 0)[0]


@takes(POSITIONS, GRADIENT)
def finite_each(parts: Sequence[Sparse], times: int) -> Any:
    values = torch.cat([part.value for part in parts]).float() * times
    bad = torch.zeros(1, dtype=torch.int32, device=values.device)
    if values.numel():
        _add_kernel[programs(values.numel())](values, values, values, bad, values.numel(), ADD=False, **PASS)
    return none(bad)


@takes(FLOAT32, GRADIENT, FLOAT32)
def added(residual: Tensor, grad: Tensor, out: Tensor) -> Any:
    """Write residual + grad to `out` [n], and return a flag [1] on the device: non-zero if any element is non-finite."""
    n = residual.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
    if n:
        _add_kernel[programs(n)](residual, grad, out, bad, n, ADD=True, **PASS)
    return bad


@takes(GRADIENT)
def all_finite(x: Tensor) -> bool:
    """Return whether `x` [n], of 16 or 32 bits, is finite everywhere. One host sync; torch's operations would read `x` three times."""
    n = x.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    if n:
        _add_kernel[programs(n)](x, x, x, bad, n, ADD=False, **PASS)
    return not int(bad)  # a host sync: the messages depend on it


@triton.jit
def _add_kernel(x, grad, out, bad, n, ADD: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = lanes(BLOCK)
    left = tl.minimum(n - first, BLOCK).to(tl.int32)
    acc = loaded(x + first, lane, left, BLOCK).to(tl.float32)
    if ADD:
        acc += loaded(grad + first, lane, left, BLOCK).to(tl.float32)
        store(out + first, lane, acc, left, BLOCK)
    if tl.max(magnitude(acc)) >= 0x7F800000:
        tl.atomic_max(bad, 1, sem="relaxed")
