"""Reading and writing at positions, and summing sparse vectors: deterministic, and safe for positions outside, which are ignored.

torch's operations on a GPU would add with atomics, in any order and with denormal numbers as zero, and a position outside would end
the process. There is no host sync, so the host does not learn of such positions.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Sparse
from sparsync.kernels.cuda.launch import FLOAT32, GRADIENT, POSITIONS, programs, takes

LANES = 1024


@takes(GRADIENT, POSITIONS)
def clear_(x: Tensor, index: Tensor) -> None:
    """Set `x` [n] to zero at the positions `index` [k]."""
    _write(x, index, None)


@takes(GRADIENT, POSITIONS, GRADIENT)
def put_(x: Tensor, index: Tensor, value: Tensor) -> None:
    """Set `x` [n] to `value` [k] at the positions `index` [k]."""
    _write(x, index, value.to(x.dtype))


@takes(GRADIENT, POSITIONS, GRADIENT)
def scatter_add_(out: Tensor, part: Sparse) -> None:
    """Add the elements of `part`, at distinct positions, to `out` [n]."""
    if out.dtype == torch.float32:
        _write(out, part.index, part.value.to(out.dtype), add=True)
    else:  # torch rounds the sum
        _write(out, part.index, gather(out, part.index) + part.value.to(out.dtype))


@takes(GRADIENT, POSITIONS)
def gather(x: Tensor, index: Tensor) -> Tensor:
    """Read the elements of `x` [n] at the positions `index` [k]; 0 outside."""
    k = index.numel()
    value = torch.empty(k, dtype=x.dtype, device=x.device)
    if k:
        _gather_kernel[programs(k, LANES)](x, index, value, k, x.numel(), LANES=LANES)
    return value


@takes(POSITIONS, FLOAT32)
def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """Sum `parts` in order, starting from 0; positions ascend. One host sync."""
    index = torch.cat([part.index for part in parts])
    ordered, order = index.sort(stable=True)  # so that elements of one position stay in the order of the parts
    begins = torch.ones(index.numel(), dtype=torch.bool, device=index.device)
    torch.ne(ordered[1:], ordered[:-1], out=begins[1:])
    first = begins.nonzero().view(-1)  # a host sync: the number of distinct positions depends on the data
    value = torch.cat([part.value for part in parts])
    total = torch.empty(first.numel(), dtype=value.dtype, device=value.device)
    if first.numel():
        _add_runs_kernel[programs(first.numel(), LANES)](
            value, order, first, total, first.numel(), index.numel(), len(parts), LANES=LANES
        )
    return Sparse(ordered[first], total, parts[0].length)


def _write(x: Tensor, index: Tensor, value: Tensor | None, add: bool = False) -> None:
    k = index.numel()
    if k:
        given = x if value is None else value
        _write_kernel[programs(k, LANES)](x, index, given, k, x.numel(), CLEAR=value is None, ADD=add, LANES=LANES)


@triton.jit
def _places(index, k, n, LANES: tl.constexpr):
    """Return the lanes of this program, their positions, and whether these are inside."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    place = tl.load(index + lane, mask=lane < k, other=-1).to(tl.int64)
    return lane, place, (place >= 0) & (place < n)


@triton.jit
def _write_kernel(x, index, value, k, n, CLEAR: tl.constexpr, ADD: tl.constexpr, LANES: tl.constexpr):
    lane, place, inside = _places(index, k, n, LANES)
    if CLEAR:
        tl.store(x + place, tl.zeros((LANES,), x.dtype.element_ty), mask=inside)
    else:
        written = tl.load(value + lane, mask=inside, other=0.0)
        if ADD:
            written += tl.load(x + place, mask=inside, other=0.0)
        tl.store(x + place, written, mask=inside)


@triton.jit
def _gather_kernel(x, index, value, k, n, LANES: tl.constexpr):
    lane, place, inside = _places(index, k, n, LANES)
    tl.store(value + lane, tl.load(x + place, mask=inside, other=0.0), mask=lane < k)


@triton.jit
def _add_runs_kernel(value, order, first, total, count, n, P, LANES: tl.constexpr):
    """Sum every run of equal positions, from its first element on."""
    run = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    begin = tl.load(first + run, mask=run < count, other=0)
    end = tl.load(first + run + 1, mask=run + 1 < count, other=n)
    acc = tl.zeros((LANES,), tl.float32)
    for part in range(P):  # no part has a position twice
        there = (run < count) & (begin + part < end)
        source = tl.load(order + begin + part, mask=there, other=0)
        acc = tl.where(there, acc + tl.load(value + source, mask=there, other=0.0), acc)
    tl.store(total + run, acc, mask=run < count)
