"""Passes over a whole vector that add to it, or collect what lies in a range of magnitudes, positions ascending.

Of the latter, every block reserves a range of a pool with one atomic addition, so ranges lie in the order in which blocks got there; a
second, small kernel copies them to where they belong. So a pass reads and writes every element once, and no block waits for another.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels.cuda.launch import (
    ANY,
    BLOCK,
    FLOAT32,
    GRADIENT,
    INFINITY,
    PASS,
    POSITIONS,
    bits_of,
    lanes,
    loaded,
    magnitude,
    programs,
    store,
    takes,
)

NONE = (INFINITY, 0)  # a range of magnitudes that holds none
SHARE = 25  # one in SHARE elements fits into a pool, if the number of candidates is unknown
COPYING = {"STEP": 128, "num_warps": 1}  # elements copied at once, and the size of a program


@dataclass(frozen=True)
class Pool:
    """The elements collected by the blocks of one pass: block b found `counts[b]`, which lie in the pool from `offsets[b]` on.

    Only ranges that end inside the pool are in it. `total` [1] is how many were found in all.
    """

    index: Tensor
    value: Tensor
    counts: Tensor
    offsets: Tensor
    total: Tensor

    @property
    def capacity(self) -> int:
        """Return how many elements there is room for."""
        return self.index.numel()


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> Any:
    bad = added(residual, grad, out)
    return bad if bad is NotImplemented else none(bad)


def none(bad: Tensor) -> Tensor:
    """Return whether nothing was noted in `bad` [1]: a tensor []."""
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
    """Write residual + grad to `out` [n], and return whether something of it is not finite: a number [1] on the device."""
    n = residual.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
    if n:
        _add_kernel[programs(n)](residual, grad, out, bad, n, ADD=True, **PASS)
    return bad


@takes(GRADIENT)
def all_finite(x: Tensor) -> bool:
    """Return whether `x` [n], of 16 or 32 bits, is finite everywhere. One host sync; torch's own operations would read `x` three times."""
    n = x.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    if n:
        _add_kernel[programs(n)](x, x, x, bad, n, ADD=False, **PASS)
    return not int(bad)  # a host sync: what is sent depends on it


@takes(FLOAT32)
def select_ge(x: Tensor, threshold: float) -> Sparse:
    """Return the non-zero elements of `x` [n] with |x| >= `threshold`, and NaN. One host sync; another pass where far more were found."""
    n, bits = x.numel(), bits_of(threshold)
    if n == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], 0)
    low, high = NONE if bits is None else (max(bits, 1), ANY)
    pool = _collected(x, low, high, n // SHARE + BLOCK)
    index, value = _in_order(pool)
    total = int(pool.total)  # a host sync: how many there are depends on the data
    if total > pool.capacity:
        index, value = _in_order(_collected(x, low, high, total))
    return Sparse(index[:total], value[:total], n)


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_select_ge(residual: Tensor, grad: Tensor, threshold: float, out: Tensor, span: Span) -> Any:
    bad = added(residual, grad, out)
    found = select_ge(span.of(out), threshold)
    return Sparse(found.index + span.start, found.value, out.numel()), none(bad)


def _collected(x: Tensor, low: int, high: int, capacity: int) -> Pool:
    """Return the elements of `x` [n] whose magnitude lies in [low, high], NaN above all others, in a pool for `capacity` of them."""
    room = min(x.numel(), capacity)
    counts, offsets = torch.empty((2, *programs(x.numel())), dtype=torch.int32, device=x.device)
    pool = Pool(
        torch.empty(room, dtype=torch.int32, device=x.device),
        torch.empty(room, dtype=torch.float32, device=x.device),
        counts,
        offsets,
        torch.zeros(1, dtype=torch.int32, device=x.device),
    )
    parts = (pool.index, pool.value, pool.counts, pool.offsets, pool.total)
    _collect_kernel[programs(x.numel())](x, *parts, x.numel(), low, high, room, **PASS)
    return pool


def _in_order(pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the ranges that are in the pool, in the order of their blocks, in memory for all that it has room for."""
    ends = pool.counts.cumsum(0, dtype=torch.int32)
    index, value = torch.empty_like(pool.index), torch.empty_like(pool.value)
    _order_kernel[(pool.counts.numel(),)](
        pool.index, pool.value, index, value, pool.counts, pool.offsets, ends, pool.capacity, **COPYING
    )
    return index, value


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


@triton.jit
def _write_range(index, value, start, first, lane, acc, chosen, taken):
    """Write what is chosen of a block to the pool from `start` on."""
    rank = start + tl.cumsum(taken, 0) - taken
    # HACK: the compiler is told that four ranks at a time follow each other, which they need not, so that it leaves four neighbours with
    # the thread that loaded them; otherwise all of the block goes through shared memory before it is stored, with three times the barriers
    # and half as many instructions again. Price: it may not store four at once, which it does not as the mask differs between neighbours;
    # the test of what it makes counts the wide stores.
    rank = tl.max_contiguous(tl.multiple_of(rank, 4), 4)
    tl.store(index + rank, first.to(tl.int32) + lane, mask=chosen)
    tl.store(value + rank, acc, mask=chosen)


@triton.jit(do_not_specialize=["low", "high", "capacity"])
def _collect_kernel(x, index, value, counts, offsets, total, n, low, high, capacity, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    lane = lanes(BLOCK)
    left = tl.minimum(n - first, BLOCK).to(tl.int32)
    acc = loaded(x + first, lane, left, BLOCK)
    size = magnitude(acc)
    chosen = (lane < left) & (size >= low) & (size <= high)
    taken = chosen.to(tl.int32)
    count = tl.sum(taken)
    start = tl.atomic_add(total, count, sem="relaxed")
    tl.store(counts + block, count)
    tl.store(offsets + block, start)
    if start + count <= capacity:
        _write_range(index, value, start, first, lane, acc, chosen, taken)


@triton.jit(do_not_specialize=["capacity"])
def _order_kernel(index, value, index_out, value_out, counts, offsets, ends, capacity, STEP: tl.constexpr):
    block = tl.program_id(0)
    count = tl.load(counts + block)
    source = tl.load(offsets + block)
    end = tl.load(ends + block)
    if (source + count <= capacity) & (end <= capacity):
        lane = tl.arange(0, STEP)
        for done in range(0, count, STEP):
            inside = lane < count - done
            tl.store(
                index_out + end - count + done + lane, tl.load(index + source + done + lane, mask=inside), mask=inside
            )
            tl.store(
                value_out + end - count + done + lane, tl.load(value + source + done + lane, mask=inside), mask=inside
            )
