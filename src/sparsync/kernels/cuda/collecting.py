"""Passes over a whole vector that add to it and collect what lies in a range of magnitudes, positions ascending.

Every block reserves a piece of a pool with one atomic addition, so pieces lie in the order in which blocks got there; a second, small
kernel copies them to where they belong. So a pass reads and writes every element once, and no block waits for another.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels.cpu import NONE, bits_of
from sparsync.kernels.cuda.launching import (
    ANY,
    BLOCK,
    INFINITY,
    PASS,
    lanes,
    loaded,
    local,
    magnitude,
    on_its_device,
    programs,
    rank_key,
    store,
)

SHARE = 25  # one in so many elements fits into a pool, where nothing is known about how many there are
COPYING = {"PIECE": 128, "num_warps": 1}  # elements of a piece that are copied at once, by how much of a program


@dataclass(frozen=True)
class Pool:
    """What the blocks of one pass collected: block b found `counts[b]` elements and has the pool from `offsets[b]` on for them.

    Only pieces that end inside the pool are in it. `state` [2]: how many were found in all, and whether something was not finite.
    """

    index: Tensor
    value: Tensor
    counts: Tensor
    offsets: Tensor
    state: Tensor

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What kernels are given."""
        return self.index, self.value, self.counts, self.offsets, self.state

    @property
    def capacity(self) -> int:
        """How many elements there is room for."""
        return self.index.numel()

    def outcome(self) -> tuple[int, bool]:
        """How many were found, and whether all was finite. A host sync: how many there are depends on the data."""
        total, bad = self.state.tolist()
        return total, not bad


def pool_for(x: Tensor, capacity: int) -> Pool:
    """An empty pool for the blocks of `x` [n] with room for `capacity` elements, or `n` if that is less."""
    room = min(x.numel(), capacity)
    counts, offsets = torch.empty((2, *programs(x.numel())), dtype=torch.int32, device=x.device)
    return Pool(
        torch.empty(room, dtype=torch.int32, device=x.device),
        torch.empty(room, dtype=torch.float32, device=x.device),
        counts,
        offsets,
        torch.zeros(2, dtype=torch.int32, device=x.device),
    )


@on_its_device
def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> bool:
    """Whether residual + grad [n], which is written to `out`, is finite everywhere. One host sync."""
    n = residual.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
    if n:
        _add_kernel[programs(n)](residual, grad, out, bad, n, ADD=True, **PASS)
    return not int(bad)  # a host sync: what is sent depends on it


@on_its_device
def all_finite(x: Tensor) -> bool:
    """Whether `x` [n], of 16 or 32 bits, is finite everywhere. One host sync; torch's own operations would read `x` three times."""
    n = x.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    if n:
        _add_kernel[programs(n)](x, x, x, bad, n, ADD=False, **PASS)
    return not int(bad)  # a host sync: what is sent depends on it


@on_its_device
def accumulate_select_(residual: Tensor, grad: Tensor, threshold: float, span: Span) -> tuple[Sparse, bool]:
    """As the reference's, in one pass over 12 bytes an element and one host sync.

    A block whose selection no longer fits into the pool leaves its part of the residual as it was; where there are such blocks, they are
    done again, into a pool that fits.
    """
    n = residual.numel()
    if n == 0:
        return _empty(residual), True
    low, _ = _range(threshold, 0, INFINITY)

    def select(pool: Pool, filled: int, again: bool) -> None:
        limits = (n, low, span.start, span.stop, filled, pool.capacity)
        _accumulate_select_kernel[programs(n)](
            residual, grad, *pool.parts, *limits, WHOLE=len(span) == n, AGAIN=again, **PASS
        )

    pool = pool_for(residual, len(span) // SHARE + BLOCK)
    select(pool, 0, again=False)
    index, value = _in_order(pool)
    total, finite = pool.outcome()
    if total > pool.capacity:
        wider = _widened(pool, total)
        select(wider, pool.capacity, again=True)
        index, value = _in_order(wider)
    return Sparse(index[:total], value[:total], n), finite


@on_its_device
def above(x: Tensor, threshold: float) -> Sparse:
    """The elements of `x` [n] with |x| >= `threshold`; NaN is not. One host sync; another pass where far more were found."""
    return _in_range(x, *_range(threshold, 0, INFINITY))


@on_its_device
def select_ge(x: Tensor, threshold: float) -> Sparse:
    """The non-zero elements of `x` [n] with |x| >= `threshold`, and NaN. Syncs as `above`."""
    return _in_range(x, *_range(threshold, 1, ANY))


def collect(
    x: Tensor,
    grad: Tensor | None,
    out: Tensor,
    pool: Pool,
    low: int | Tensor,
    high: int = ANY,
    least: int = 0,
    skip: Span | None = None,
    signed: bool = False,
) -> None:
    """Fills `pool` with the elements of x [n], or of x + grad, which is written to `out`, whose rank key lies in [low, high].

    NaN ranks above all others here. `low` may be a number on the device; never less than `least`. Elements inside `skip` are left out.
    """
    skip, sampled = skip or Span(0, 0), isinstance(low, Tensor)
    _collect_kernel[programs(x.numel())](
        x,
        x if grad is None else grad,
        out,
        *pool.parts,
        low if sampled else pool.state,
        x.numel(),
        least if sampled else max(low, least),
        high,
        skip.start,
        skip.stop,
        pool.capacity,
        ACCUMULATE=grad is not None,
        SIGNED=signed,
        SAMPLED=sampled,
        SKIPS=len(skip) > 0,
        **PASS,
    )


def _in_range(x: Tensor, low: int, high: int) -> Sparse:
    n = x.numel()
    if n == 0:
        return _empty(x)
    pool = pool_for(x, n // SHARE + BLOCK)
    collect(x, None, x, pool, low, high)
    index, value = _in_order(pool)
    total, _ = pool.outcome()
    if total > pool.capacity:
        wider = pool_for(x, total)
        collect(x, None, x, wider, low, high)
        index, value = _in_order(wider)
    return Sparse(index[:total], value[:total], n)


def _range(threshold: float, least: int, high: int) -> tuple[int, int]:
    """The magnitudes, as bits, of at least `threshold`, between `least` and `high`; none for NaN."""
    low = bits_of(threshold)
    return NONE if low is None else (max(low, least), high)


def _widened(pool: Pool, capacity: int) -> Pool:
    """The same pool with room for more; every block keeps the piece that it reserved."""
    index, value = pool.index.new_empty(capacity), pool.value.new_empty(capacity)
    index[: pool.capacity], value[: pool.capacity] = pool.index, pool.value
    return Pool(index, value, pool.counts, pool.offsets, pool.state)


def _in_order(pool: Pool) -> tuple[Tensor, Tensor]:
    """The pieces that are in the pool, in the order of their blocks, in memory for all that it has room for."""
    ends = pool.counts.cumsum(0, dtype=torch.int32)
    index, value = torch.empty_like(pool.index), torch.empty_like(pool.value)
    _order_kernel[(pool.counts.numel(),)](
        pool.index, pool.value, index, value, pool.counts, pool.offsets, ends, pool.capacity, **COPYING
    )
    return index, value


def _empty(x: Tensor) -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0].float(), 0)


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
def _reserved(counts, offsets, state, block, count, size):
    """Where the piece of this block begins, which is noted; and that something is not finite, where it is so."""
    start = tl.atomic_add(state, count, sem="relaxed")
    tl.store(counts + block, count)
    tl.store(offsets + block, start)
    if tl.max(size) >= 0x7F800000:
        tl.atomic_max(state + 1, 1, sem="relaxed")
    return start


@triton.jit
def _write_piece(index, value, start, first, lane, acc, chosen, taken):
    """Writes what is chosen of a block to the pool from `start` on."""
    rank = start + tl.cumsum(taken, 0) - taken
    # HACK: the compiler is told that four ranks at a time follow each other, which they need not, so that it leaves four neighbours with
    # the thread that loaded them; otherwise all of the block goes through shared memory before it is stored, with three times the barriers
    # and half as many instructions again. Price: it may not store four at once, which it does not as the mask differs between neighbours;
    # the test of what it makes counts the wide stores.
    rank = tl.max_contiguous(tl.multiple_of(rank, 4), 4)
    tl.store(index + rank, first.to(tl.int32) + lane, mask=chosen)
    tl.store(value + rank, acc, mask=chosen)


@triton.jit(do_not_specialize=["low", "start", "stop", "filled", "capacity"])
def _accumulate_select_kernel(
    residual,
    grad,
    index,
    value,
    counts,
    offsets,
    state,  # [2]: how many are found, whether anything is not finite
    n,
    low,
    start,
    stop,
    filled,  # AGAIN: pieces that end inside of so many elements are there already
    capacity,
    WHOLE: tl.constexpr,  # from `start` to `stop` is everything
    AGAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    wanted = True
    if AGAIN:
        wanted = tl.load(offsets + block) + tl.load(counts + block) > filled
    if wanted:
        first = block.to(tl.int64) * BLOCK
        lane = lanes(BLOCK)
        left = tl.minimum(n - first, BLOCK).to(tl.int32)
        before = loaded(residual + first, lane, left, BLOCK)
        acc = before + loaded(grad + first, lane, left, BLOCK).to(tl.float32)
        size = magnitude(acc)
        finite = size < 0x7F800000
        chosen = finite & (size >= low) & (lane < left)
        if not WHOLE:
            chosen = chosen & (lane >= local(start, first, left)) & (lane < local(stop, first, left))
        taken = chosen.to(tl.int32)
        count = tl.sum(taken)
        reserved = tl.load(offsets + block) if AGAIN else _reserved(counts, offsets, state, block, count, size)
        if reserved + count <= capacity:  # all of the block, or nothing: what is cleared has been written elsewhere
            _write_piece(index, value, reserved, first, lane, acc, chosen, taken)
            kept = tl.where(finite, tl.where(chosen, 0.0, acc), before)
            store(residual + first, lane, kept, left, BLOCK)


@triton.jit(do_not_specialize=["low", "high", "start", "stop", "capacity"])
def _collect_kernel(
    x,
    grad,
    out,
    index,
    value,
    counts,
    offsets,
    state,
    sampled,  # SAMPLED: what `low` is at least
    n,
    low,
    high,
    start,  # of what is left out
    stop,
    capacity,
    ACCUMULATE: tl.constexpr,
    SIGNED: tl.constexpr,
    SAMPLED: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    first = block.to(tl.int64) * BLOCK
    lane = lanes(BLOCK)
    left = tl.minimum(n - first, BLOCK).to(tl.int32)
    acc = loaded(x + first, lane, left, BLOCK)
    if ACCUMULATE:
        acc += loaded(grad + first, lane, left, BLOCK).to(tl.float32)
        store(out + first, lane, acc, left, BLOCK)
    size = magnitude(acc)
    key = rank_key(acc, True) if SIGNED else size
    low = tl.maximum(low, tl.load(sampled)) if SAMPLED else low
    chosen = (lane < left) & (key >= low) & (key <= high)
    if SKIPS:
        chosen = chosen & ((lane < local(start, first, left)) | (lane >= local(stop, first, left)))
    taken = chosen.to(tl.int32)
    count = tl.sum(taken)
    reserved = _reserved(counts, offsets, state, block, count, size)
    if reserved + count <= capacity:
        _write_piece(index, value, reserved, first, lane, acc, chosen, taken)


@triton.jit(do_not_specialize=["capacity"])
def _order_kernel(index, value, index_out, value_out, counts, offsets, ends, capacity, PIECE: tl.constexpr):
    block = tl.program_id(0)
    count = tl.load(counts + block)
    source = tl.load(offsets + block)
    end = tl.load(ends + block)
    if (source + count <= capacity) & (end <= capacity):
        lane = tl.arange(0, PIECE)
        for done in range(0, count, PIECE):
            inside = lane < count - done
            tl.store(
                index_out + end - count + done + lane, tl.load(index + source + done + lane, mask=inside), mask=inside
            )
            tl.store(
                value_out + end - count + done + lane, tl.load(value + source + done + lane, mask=inside), mask=inside
            )
