"""Exact top-k: the elements that reach a bound are collected in one pass, and the k largest chosen among those.

The bound is the caller's; where it has none, or fewer than k reach it, or far more, a sample's. Where that is no better, the k largest of
the whole vector are found by the digits of its rank keys, in a fixed number of passes: a bad bound costs time and never changes the result.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels.candidates import MARGIN, SAMPLE
from sparsync.kernels.cuda.launch import (
    BLOCK,
    FLOAT32,
    GRADIENT,
    INFINITY,
    bits_of,
    local,
    programs,
    rank_key,
    takes,
)
from sparsync.kernels.cuda.passes import Pool, accumulate, collect, pool_for
from sparsync.kernels.cuda.radix_select import ordered, ranked

STEP = 128  # elements of a range of the pool that are looked at once
FEW = 32 * BLOCK  # elements that are not worth a search for candidates
MANY = 4  # if one in MANY elements or more is selected, candidates would be most of the vector
LOWEST = -(2**31) + 1  # the rank key that none is below, where numbers have signs

NOWHERE = Span(0, 0)


@dataclass(frozen=True)
class Wanted:
    """The k elements to select: those of the largest rank keys, of `least` or more, outside of `skip`."""

    k: int
    least: int = 0
    skip: Span = NOWHERE
    signed: bool = False
    bound: float | None = None


@takes(FLOAT32)
def top_k(x: Tensor, k: int, bound: float | None = None) -> Sparse:
    """Do as the reference's `top_k`. One host sync, two where the bound was no good."""
    return _selected(x, None, x, Wanted(k, bound=bound))[0]


@takes(FLOAT32)
def top_k_nonzero(x: Tensor, k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    """Do as the reference's. Syncs as `top_k`."""
    skip = skip or NOWHERE
    return _selected(x, None, x, Wanted(min(k, x.numel() - len(skip)), 1, skip, bound=bound))[0]


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, bound: float | None = None
) -> tuple[Sparse, bool]:
    """Do as the reference's. Syncs as `top_k`."""
    return _accumulated(residual, grad, out, Wanted(k, bound=bound))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k_nonzero(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, skip: Span | None = None, bound: float | None = None
) -> tuple[Sparse, bool]:
    """Do as the reference's. Syncs as `top_k`."""
    skip = skip or NOWHERE
    return _accumulated(residual, grad, out, Wanted(min(k, residual.numel() - len(skip)), 1, skip, bound=bound))


@takes(FLOAT32)
def argtopk(magnitude: Tensor, k: int) -> Tensor:
    """Do as the reference's. Syncs as `top_k`."""
    return _selected(magnitude, None, magnitude, Wanted(k, LOWEST, signed=True))[0].index.long()


def _accumulated(residual: Tensor, grad: Tensor, out: Tensor, wanted: Wanted) -> tuple[Sparse, bool]:
    """Write residual + grad to `out`, and return what is wanted of it and whether it is finite everywhere."""
    if _has_candidates(residual.numel(), wanted.k):
        return _selected(residual, grad, out, wanted)
    finite = accumulate(residual, grad, out)
    return _selected(out, None, out, wanted)[0], finite


def _selected(x: Tensor, grad: Tensor | None, out: Tensor, wanted: Wanted) -> tuple[Sparse, bool]:
    """Return what is wanted of x [n], or of x + grad, which is written to `out`; and whether that is finite, for a sum only."""
    n, k, finite = x.numel(), wanted.k, True
    if k == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], n), finite
    if _has_candidates(n, k):
        low = _bound(x, grad, wanted)
        complete = not isinstance(low, Tensor) and low <= wanted.least
        pool = pool_for(x, 2 * k + BLOCK)
        collect(x, grad, out, pool, low, least=wanted.least, skip=wanted.skip, signed=wanted.signed)
        index, value = _chosen_of_pool(pool, wanted)
        total, finite = pool.outcome()
        if total <= pool.capacity and (total >= k or complete):
            return Sparse(index[:total], value[:total], n), finite
        if not isinstance(low, Tensor):  # what the caller knew was no good; a sample is worth another pass over `out`
            return _selected(out, None, out, replace(wanted, bound=None))[0], finite
    index, value, count = _chosen_of_all(out, wanted)
    if wanted.least == 1:  # there may be fewer that are not zero
        k = int(count)  # a host sync
    return Sparse(index[:k], value[:k], n), finite


def _has_candidates(n: int, k: int) -> bool:
    """Return whether a bound is of use: not where nothing is wanted, or much of what there is, or all is soon read several times."""
    return k > 0 and MANY * k <= n and n > FEW


def _bound(x: Tensor, grad: Tensor | None, wanted: Wanted) -> int | Tensor:
    """Return a rank key that k elements, and not many more, are expected to reach: the caller's, or one from a sample, on the device."""
    known = None if wanted.bound is None else bits_of(wanted.bound)
    if known is not None:
        return max(wanted.least, min(known, INFINITY))
    stride = x.numel() // SAMPLE | 1  # odd, so that it does not walk down one column of a matrix
    sample = _every(stride, x, wanted.skip)
    if grad is not None:
        sample += _every(stride, grad, wanted.skip)
    bits = sample.view(torch.int32)
    size = bits & 0x7FFFFFFF
    key = torch.where(bits < 0, -size, size) if wanted.signed else size
    expected = key.numel() * wanted.k / (x.numel() - len(wanted.skip))
    place = min(key.numel(), int(expected + MARGIN * math.sqrt(expected) + 1))
    return key.topk(place, sorted=False).values.min().clamp(max=INFINITY)


def _every(stride: int, x: Tensor, skip: Span) -> Tensor:
    """Return one in `stride` elements of what lies outside `skip`, copied."""
    return torch.cat([x[: skip.start : stride], x[skip.stop :: stride]])


def _chosen_of_pool(pool: Pool, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """Return the k largest in the pool, or all where there are fewer; only if all that was found is in it, does this mean something."""
    level = ranked(pool.value, pool.state, pool.capacity, wanted.k, wanted.least, (0, 0), wanted.signed)
    return _chosen(pool.value, pool.index, (pool.counts, pool.offsets), level, pool.capacity, wanted, (0, 0))[:2]


def _chosen_of_all(x: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of `x` [n], or all where there are fewer that count, and how many."""
    skip = (wanted.skip.start, wanted.skip.stop)
    level = ranked(x, None, x.numel(), wanted.k, wanted.least, skip, wanted.signed)
    return _chosen(x, None, None, level, x.numel(), wanted, skip)


def _chosen(
    value: Tensor,
    index: Tensor | None,
    ranges: tuple[Tensor, Tensor] | None,
    level: Tensor,
    capacity: int,
    wanted: Wanted,
    skip: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return those above the level and the first ones on it, in the order of their positions, and how many.

    `ranges` None: the blocks of `value`.
    """
    k, blocks = wanted.k, ranges[0].numel() if ranges else programs(capacity)[0]
    counts, offsets = ranges or (level, level)
    arguments = (value, counts, offsets, level, capacity, wanted.least, *skip)
    shape = {
        "POOL": ranges is not None,
        "SIGNED": wanted.signed,
        "BLOCK": BLOCK,
        "STEP": STEP if ranges else BLOCK,
        "num_warps": 1 if ranges else 8,
    }
    tally = torch.empty((2, blocks), dtype=torch.int32, device=value.device)
    _tally_kernel[(blocks,)](*arguments, tally, blocks, **shape)
    ends = tally.cumsum(1, dtype=torch.int32)  # [2, blocks]
    index_out = torch.empty(k, dtype=torch.int32, device=value.device)
    value_out = torch.empty(k, dtype=torch.float32, device=value.device)
    _choose_kernel[(blocks,)](
        *arguments, tally, blocks, value if index is None else index, ends, index_out, value_out, k, **shape
    )
    return index_out, value_out, ends[0, -1] + torch.minimum(ends[1, -1], level[1])


@triton.jit
def _range(counts, offsets, capacity, POOL: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the elements of this program begin, and how many there are: of a range that is not in the pool, none."""
    block = tl.program_id(0)
    if POOL:
        source = tl.load(offsets + block).to(tl.int64)
        count = tl.load(counts + block)
        count = tl.where(source + count <= capacity, count, 0)
    else:
        source = block.to(tl.int64) * BLOCK
        count = tl.minimum(capacity - source, BLOCK).to(tl.int32)
    return source, count


@triton.jit
def _looked_at(value, source, lane, count, level, least, start, stop, SIGNED: tl.constexpr):
    """Return the elements from `source` on, which of them are above the level, and which on it."""
    acc = tl.load(value + source + lane, mask=lane < count, other=0.0)
    rank = rank_key(acc, SIGNED)
    key = ordered(rank)
    outside = (lane < local(start, source, count)) | (lane >= local(stop, source, count))
    counted = (lane < count) & (rank >= least) & outside
    return acc, counted & (key > level), counted & (key == level)


@triton.jit(do_not_specialize=["capacity", "least", "start", "stop", "blocks"])
def _tally_kernel(
    value,
    counts,
    offsets,
    level,
    capacity,
    least,
    start,
    stop,
    tally,  # [2, blocks]: how many are above the level, and on it
    blocks,
    POOL: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    source, count = _range(counts, offsets, capacity, POOL, BLOCK)
    threshold = tl.load(level)
    lane = tl.arange(0, STEP)
    over = tl.zeros((STEP,), tl.int32)
    on = tl.zeros((STEP,), tl.int32)
    for done in range(0, count, STEP):
        _, larger, equal = _looked_at(value, source + done, lane, count - done, threshold, least, start, stop, SIGNED)
        over += larger.to(tl.int32)
        on += equal.to(tl.int32)
    block = tl.program_id(0)
    tl.store(tally + block, tl.sum(over))
    tl.store(tally + blocks + block, tl.sum(on))


@triton.jit(do_not_specialize=["capacity", "least", "start", "stop", "blocks", "k"])
def _choose_kernel(
    value,
    counts,
    offsets,
    level,
    capacity,
    least,
    start,
    stop,
    tally,
    blocks,
    index,  # of what is in the pool
    ends,  # [2, blocks]: sums of `tally`
    index_out,
    value_out,
    k,
    POOL: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    block = tl.program_id(0)
    source, count = _range(counts, offsets, capacity, POOL, BLOCK)
    threshold = tl.load(level)
    spare = tl.load(level + 1).to(tl.int32)  # how many on the level are chosen: the first ones
    over = tl.load(ends + block) - tl.load(tally + block)  # how many come before
    on = tl.load(ends + blocks + block) - tl.load(tally + blocks + block)
    lane = tl.arange(0, STEP)
    for done in range(0, count, STEP):
        acc, larger, equal = _looked_at(value, source + done, lane, count - done, threshold, least, start, stop, SIGNED)
        level_before = on + tl.cumsum(equal.to(tl.int32), 0) - equal.to(tl.int32)
        chosen = larger | (equal & (level_before < spare))
        taken = chosen.to(tl.int32)
        target = over + tl.minimum(on, spare) + tl.cumsum(taken, 0) - taken
        written = chosen & (target < k)
        at = source + done
        place = tl.load(index + at + lane, mask=written, other=0) if POOL else at.to(tl.int32) + lane
        tl.store(index_out + target, place, mask=written)
        tl.store(value_out + target, acc, mask=written)
        over += tl.sum(larger.to(tl.int32))
        on += tl.sum(equal.to(tl.int32))
