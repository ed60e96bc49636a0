"""Elements in rows: one launch copies them together, for the kernels that rank whole vectors, or divides them in place."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Rows
from sparsync.kernels.cuda.exact_top_k import top_k
from sparsync.kernels.cuda.launch import FLOAT32, PASS, POSITIONS, lanes, programs, takes
from sparsync.kernels.cuda.passes import accumulate
from sparsync.kernels.reference import of_rows

# Any: what the signature in `operations` says, or NotImplemented for what Triton does not take.


def top_k_of_rows(x: Tensor, rows: Rows, k: int, bound: float | None = None) -> Any:
    found = _of_rows(x, rows.starts, rows.row, rows.length)
    # Not declined: what called this may have written already.
    return top_k(of_rows(x, rows) if found is NotImplemented else found, k, bound)


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> Any:
    finite = accumulate(residual, grad, out)
    if finite is NotImplemented:
        return NotImplemented
    return [top_k_of_rows(out, *each) for each in zip(regions, counts, bounds, strict=True)], finite


def divide_rows_(x: Tensor, rows: Rows, divisor: int) -> Any:
    return _divide_rows(x, rows.starts, rows.row, rows.length, divisor)


@takes(FLOAT32, POSITIONS)
def _of_rows(x: Tensor, starts: Tensor, row: int, length: int) -> Tensor:
    """Return the elements of `x` [n] in rows, copied. A host sync. Raises IndexError for rows outside of `x`."""
    out = x.new_empty(length)
    _check(x, starts, row, length)
    if length:
        _rows_kernel[programs(length)](x, starts, out, row, length, 1.0, DIVIDED=False, **PASS)
    return out


@takes(FLOAT32, POSITIONS)
def _divide_rows(x: Tensor, starts: Tensor, row: int, length: int, divisor: int) -> None:
    """Divide the elements of `x` [n] in rows. A host sync. Raises IndexError, before anything is written, for rows outside of `x`."""
    _check(x, starts, row, length)
    if length:
        _rows_kernel[programs(length)](x, starts, x, row, length, float(divisor), DIVIDED=True, **PASS)


def _check(x: Tensor, starts: Tensor, row: int, length: int) -> None:
    """Raise IndexError where an element in rows lies outside of `x`; the last row may be shorter."""
    if not length:
        return
    count = -(-length // row)
    used = starts[:count].long()
    lengths = torch.full_like(used, row)
    lengths[-1] = length - (count - 1) * row
    low, high = torch.stack([used.min(), (used + lengths).max()]).tolist()  # a host sync
    if used.numel() < count or low < 0 or high > x.numel():
        raise IndexError(f"rows must lie in [0, {x.numel()}) for {x.numel()} elements, got some outside")


@triton.jit(do_not_specialize=["divisor"])
def _rows_kernel(x, starts, out, row, length, divisor, DIVIDED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + lanes(BLOCK)
    inside = place < length
    number = place // row
    at = tl.load(starts + number, mask=inside, other=0).to(tl.int64) + place - number * row
    value = tl.load(x + at, mask=inside, other=0.0)
    if DIVIDED:  # a branch: only one of the two is compiled
        tl.store(x + at, tl.div_rn(value, tl.full((BLOCK,), 0.0, tl.float32) + divisor), mask=inside)
    else:
        tl.store(out + place, value, mask=inside)
