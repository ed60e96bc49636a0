"""Elements in rows: whether they lie in a vector, and one launch that divides them in place."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsync.core import Rows
from sparsync.kernels.cuda.launch import FLOAT32, PASS, POSITIONS, lanes, programs, takes

# Any: None, or NotImplemented for what Triton does not take.

_checked: MutableMapping[Tensor, set[tuple[int, int, int]]] = WeakTensorKeyDictionary()


def divide_rows_(x: Tensor, rows: Rows, divisor: int) -> Any:
    return _divide_rows(x, rows.starts, rows, divisor)


@takes(FLOAT32, POSITIONS)
def _divide_rows(x: Tensor, starts: Tensor, rows: Rows, divisor: int) -> None:
    """Divide the elements of `x` [n] in rows. Raises as `check` does, before anything is written."""
    check(x, [rows])
    if rows.length:
        _divide_kernel[programs(rows.length)](x, starts, rows.row, rows.length, float(divisor), **PASS)


def check(x: Tensor, regions: Sequence[Rows]) -> None:
    """Raise IndexError where an element in rows lies outside of `x`. A host sync where one of the regions is new; others are known."""
    n, ends = x.numel(), []
    new = [each for each in regions if each.length and (each.row, each.length, n) not in _checked.get(each.starts, ())]
    for rows in new:
        count = -(-rows.length // rows.row)
        used = rows.starts[:count].long()
        if used.numel() == count:
            lengths = torch.full_like(used, rows.row)
            lengths[-1] = rows.length - (count - 1) * rows.row  # the last row may be shorter
            ends += [used.min(), (used + lengths).max()]
    found = torch.stack(ends).tolist() if ends else []  # a host sync
    if len(ends) < 2 * len(new) or any(not 0 <= each <= n for each in found):
        raise IndexError(f"rows must lie in [0, {n}) for {n} elements, got some outside")
    for rows in new:
        _checked.setdefault(rows.starts, set()).add((rows.row, rows.length, n))


@triton.jit(do_not_specialize=["divisor"])
def _divide_kernel(x, starts, row, length, divisor, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + lanes(BLOCK)
    inside = place < length
    number = place // row
    at = tl.load(starts + number, mask=inside, other=0).to(tl.int64) + place - number * row
    value = tl.load(x + at, mask=inside, other=0.0)
    tl.store(x + at, tl.div_rn(value, tl.full((BLOCK,), 0.0, tl.float32) + divisor), mask=inside)
