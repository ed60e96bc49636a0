"""Exact top-k of regions of a vector: one chain of launches for all regions, whatever the data, and nothing is asked of the device.

A sample gives a window of rank keys in which a region's k-th largest is expected. A round counts the keys in parts of the window, and the
part that holds the k-th is the next window: after two rounds that is one key. Where the sample has misled, it is so after three; a third
round reads nothing otherwise. Then each block knows how many of its elements are chosen, and writes these. Positions are then in order.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Rows, Span, Sparse
from sparsync.kernels.cuda.launch import (
    BLOCK,
    FLOAT32,
    GRADIENT,
    PASS,
    POSITIONS,
    lanes,
    loaded,
    local,
    magnitude,
    rank_key,
    store,
    table,
    takes,
    takes_all,
)
from sparsync.kernels.cuda.passes import added, none

MARGIN = 4.0  # standard deviations of a sampled count by which the first window is set wide
SAMPLE = 8192  # elements of a region that are looked at to guess where its k-th largest lies
ROUNDS = 3
SEARCH = {"CHUNK": 4096, "num_warps": 8}  # how the counts of a window are searched, by one program for each region
BINS: tl.constexpr = tl.constexpr(65536)  # parts of a window: 2^31 keys take two rounds
LARGEST: tl.constexpr = tl.constexpr(0x7F800000)  # the rank key of infinity and NaN
ROW: tl.constexpr = tl.constexpr(11)  # numbers that describe a region: see `_described`
STATE: tl.constexpr = tl.constexpr(
    3
)  # of its window: the lowest key, how many keys, and how many elements are above its only key

NOWHERE = Span(0, 0)
_Region = tuple[int, int, int, int, Span]  # the address of the starts of its rows, row, length, k, and what is skipped

# Any: what the signature in `operations` says, or NotImplemented for what Triton does not take.


@takes(FLOAT32)
def top_k(x: Tensor, k: int, bound: float | None = None) -> Any:
    return _largest(x, k)


@takes(FLOAT32)
def top_k_nonzero(x: Tensor, k: int, skip: Span | None = None, bound: float | None = None) -> Any:
    """Do as the reference's. A host sync: how many are not zero depends on the data."""
    skip = skip or NOWHERE
    return _nonzero(_largest(x, min(k, x.numel() - len(skip)), skip))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k(residual: Tensor, grad: Tensor, k: int, out: Tensor, bound: float | None = None) -> Any:
    bad = torch.zeros(1, dtype=torch.int32, device=out.device)
    found = _largest(residual, k, NOWHERE, grad, out, bad)
    return found if found is NotImplemented else (found, none(bad))


@takes(FLOAT32, GRADIENT, FLOAT32)
def accumulate_top_k_nonzero(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, skip: Span | None = None, bound: float | None = None
) -> Any:
    """Do as the reference's. A host sync: as `top_k_nonzero`."""
    skip, bad = skip or NOWHERE, torch.zeros(1, dtype=torch.int32, device=out.device)
    found = _nonzero(_largest(residual, min(k, out.numel() - len(skip)), skip, grad, out, bad))
    return found, none(bad)


def top_k_of_rows(x: Tensor, rows: Rows, k: int, bound: float | None = None) -> Any:
    found = top_k_of_each(x, [rows], [k])
    return found if found is NotImplemented else found[0]


def top_k_of_each(
    x: Tensor, regions: Sequence[Rows], counts: Sequence[int], bounds: Sequence[float | None] = ()
) -> Any:
    """Return the `top_k_of_rows` of each region, of which elements outside of `x` count as zero."""
    return _of_each(x, regions, counts) if _taken(x, regions, counts) else NotImplemented


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> Any:
    bad = added(residual, grad, out) if _taken(out, regions, counts) else NotImplemented
    if bad is NotImplemented:
        return NotImplemented
    return _of_each(out, regions, counts), none(bad)


def _taken(x: Tensor, regions: Sequence[Rows], counts: Sequence[int]) -> bool:
    starts = [each.starts.contiguous() for each in regions]
    fit = all(k <= rows.length for rows, k in zip(regions, counts, strict=True))
    return fit and x.dtype in FLOAT32 and all(each.dtype in POSITIONS for each in starts) and takes_all([x, *starts])


def _of_each(x: Tensor, regions: Sequence[Rows], counts: Sequence[int]) -> list[Sparse]:
    with torch.cuda.device_of(x):
        if any(each.starts.numel() * each.row < each.length for each in regions):
            raise IndexError(f"rows must begin somewhere, got fewer starts than rows in {regions}")
        starts = [each.starts.to(torch.int32).contiguous() for each in regions]  # kept until all is launched
        about = [
            (first.data_ptr(), rows.row, rows.length, k, NOWHERE)
            for first, rows, k in zip(starts, regions, counts, strict=True)
        ]
        return _chosen(x, about, True)


def _largest(
    x: Tensor, k: int, skip: Span = NOWHERE, grad: Tensor | None = None, out: Tensor | None = None, bad: Any = None
) -> Any:
    """Return the k largest of `x` [n], or of x + grad, which is written to `out`, outside of `skip`; note in `bad` what is not finite."""
    if k > x.numel() - len(skip):
        return NotImplemented
    if not k and grad is not None:
        bad += added(x, grad, out)
    return _chosen(x, [(0, 1, x.numel(), k, skip)], False, grad, out, bad)[0]


def _nonzero(found: Sparse) -> Sparse:
    kept = found.value.nonzero().view(-1)  # a host sync
    return Sparse(found.index[kept], found.value[kept], found.length)


def _described(regions: Sequence[_Region], n: int) -> list[int]:
    """Return the numbers of `ROW`: those of each region, with its first place in the output before what is skipped, and of its sample.

    Of that the stride, and the places of the lowest and the highest key of the first window, counted from the largest. Then n.
    """
    rows: list[int] = []
    offset = 0
    for starts, row, length, k, skip in regions:
        stride = triton.cdiv(length, SAMPLE) | 1  # odd, so that it does not walk down one column of a matrix
        expected = k / stride
        margin = MARGIN * math.sqrt(expected) + 1
        rows += [starts, row, length, k, offset, skip.start, skip.stop, stride]
        rows += [int(expected + margin), max(0, int(expected - margin)), n]
        offset += k
    return rows


def _chosen(
    x: Tensor,
    regions: Sequence[_Region],
    in_rows: bool,
    grad: Tensor | None = None,
    out: Tensor | None = None,
    bad: Tensor | None = None,
) -> list[Sparse]:
    """Return the largest elements of each region of `x`, or of x + grad, which is written to `out`: ten launches."""
    counts, device, summed = [k for *_, k, _ in regions], x.device, x if out is None else out
    index = torch.empty(sum(counts), dtype=torch.int32, device=device)
    value = torch.empty(sum(counts), dtype=torch.float32, device=device)
    wanted = [each for each, k in zip(regions, counts, strict=True) if k]
    if wanted:
        number, blocks = len(wanted), max(triton.cdiv(length, BLOCK) for _, _, length, _, _ in wanted)
        about = table(_described(wanted, x.numel()), torch.int64, device)
        state = torch.empty((number, STATE.value), dtype=torch.int32, device=device)
        bins = torch.empty((number, BINS.value + 1), dtype=torch.int32, device=device)
        tally = torch.empty((2, number, blocks), dtype=torch.int32, device=device)
        one, grid, adds = (number,), (blocks, number), grad is not None
        _guess_kernel[one](x, grad if adds else x, about, state, bins, ADD=adds, ROWS=in_rows, SAMPLE=SAMPLE, **SEARCH)
        for turn in range(ROUNDS):
            adds = grad is not None and turn == 0
            given = (x, grad, out, bad) if adds else (summed, summed, summed, tally)
            _count_kernel[grid](*given, about, state, bins, tally, blocks, ADD=adds, ROWS=in_rows, **PASS)
            _narrow_kernel[one](about, state, bins, **SEARCH)
        _tally_kernel[grid](summed, about, state, tally, blocks, ROWS=in_rows, **PASS)
        ends = tally.cumsum(2, dtype=torch.int32)
        _choose_kernel[grid](summed, about, state, tally, ends, index, value, blocks, ROWS=in_rows, **PASS)
    parts = zip(index.split(counts), value.split(counts), regions, strict=True)
    return [Sparse(place, each, length) for place, each, (_, _, length, _, _) in parts]


@triton.jit
def _read(x, about, place, inside, ROWS: tl.constexpr):
    """Return elements of a region at some places, one by one."""
    at = place
    if ROWS:
        row = tl.load(about + 1).to(tl.int32)
        number = place // row
        starts = tl.load(about).to(tl.pointer_type(tl.int32))
        at = tl.load(starts + number, mask=inside, other=0) + place - number * row
        inside &= (at >= 0) & (at < tl.load(about + 10))
    return tl.load(x + at, mask=inside, other=0.0)


@triton.jit
def _ranked(x, about, first, left, lane, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the elements of a block of a region, and their rank keys: -1 where there is none, or it is skipped."""
    if ROWS:  # noqa: SIM108  # a branch: only one of the two is compiled
        value = _read(x, about, first.to(tl.int32) + lane, lane < left, ROWS)
    else:
        value = loaded(x + first, lane, left, BLOCK)
    return value, _key_of(value, about, first, left, lane)


@triton.jit
def _key_of(value, about, first, left, lane):
    skipped = (lane >= local(tl.load(about + 5), first, left)) & (lane < local(tl.load(about + 6), first, left))
    return tl.where((lane < left) & ~skipped, rank_key(value), -1)


@triton.jit
def _block(about, BLOCK: tl.constexpr):
    """Return where the region of this program is described, and where its block begins and how many elements it has; none behind."""
    about += tl.program_id(1) * ROW
    first = tl.program_id(0).to(tl.int64) * BLOCK
    return about, first, tl.minimum(tl.load(about + 2) - first, BLOCK).to(tl.int32)


@triton.jit
def _shift(size):
    """Return by how many bits the places of `size` keys are shifted to be less than BINS."""
    return tl.sum((((size - 1) >> (16 + tl.arange(0, 16))) > 0).to(tl.int32))


@triton.jit
def _clear(bins, CHUNK: tl.constexpr):
    for done in range(0, BINS, CHUNK):
        tl.store(bins + done + tl.arange(0, CHUNK), 0)
    tl.store(bins + BINS, 0)


@triton.jit
def _guess_kernel(
    x,
    grad,
    about,
    state,
    bins,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    SAMPLE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Choose the first window, and clear the counts."""
    region = tl.program_id(0)
    about += region * ROW
    length, stride = tl.load(about + 2), tl.load(about + 7)
    place = tl.arange(0, SAMPLE) * stride
    inside = place < length
    place = tl.where(inside, place, 0).to(tl.int32)
    value = _read(x, about, place, inside, ROWS)
    if ADD:
        value += tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    skipped = (place >= tl.load(about + 5)) & (place < tl.load(about + 6))
    key = tl.where(inside & ~skipped, rank_key(value), -1)
    low, high = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for bit in range(31):  # the largest keys that as many reach as lie before those places
        low_next, high_next = low | (1 << (30 - bit)), high | (1 << (30 - bit))
        low = tl.where(tl.sum((key >= low_next).to(tl.int32)) >= tl.load(about + 8), low_next, low)
        high = tl.where(tl.sum((key >= high_next).to(tl.int32)) >= tl.load(about + 9), high_next, high)
    high = tl.minimum(high, LARGEST)
    tl.store(state + region * STATE, low)
    tl.store(state + region * STATE + 1, high - low + 1)
    tl.store(state + region * STATE + 2, -1)  # not known
    _clear(bins + region * (BINS + 1), CHUNK)


@triton.jit(do_not_specialize=["blocks"])
def _count_kernel(
    x,
    grad,
    out,
    bad,
    about,
    state,
    bins,
    tally,  # [2, regions, blocks]: how many elements are above the window, and in it
    blocks,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the keys of each part of the window of a region that is not narrow yet."""
    region = tl.program_id(1)
    about, first, left = _block(about, BLOCK)
    state += region * STATE
    if (left > 0) & (tl.load(state + 2) < 0):
        lane = lanes(BLOCK)
        if ADD:
            value = loaded(x + first, lane, left, BLOCK) + loaded(grad + first, lane, left, BLOCK).to(tl.float32)
            store(out + first, lane, value, left, BLOCK)
            if tl.max(magnitude(value)) >= LARGEST:
                tl.atomic_max(bad, 1, sem="relaxed")
            key = _key_of(value, about, first, left, lane)
        else:
            _, key = _ranked(x, about, first, left, lane, ROWS, BLOCK)
        low, size = tl.load(state), tl.load(state + 1)
        over = tl.sum((key >= low + size).to(tl.int32))
        inside = (key >= low) & (key < low + size)
        part = (key - low) >> _shift(size)
        # Many equal elements, such as zeros, are mostly the smallest of a window: these are added at once.
        least = tl.min(tl.where(inside, part, BINS))
        several = inside & (part == least)
        count = tl.sum(several.to(tl.int32))
        bins += region * (BINS + 1)
        if count > 0:
            tl.atomic_add(bins + least, count, sem="relaxed")
        tl.atomic_add(bins + part, tl.full((BLOCK,), 1, tl.int32), mask=inside & ~several, sem="relaxed")
        if over > 0:
            tl.atomic_add(bins + BINS, over, sem="relaxed")
        at = region * blocks + tl.program_id(0)
        tl.store(tally + at, over)
        tl.store(tally + tl.num_programs(1) * blocks + at, tl.sum(inside.to(tl.int32)))


@triton.jit
def _narrow_kernel(about, state, bins, CHUNK: tl.constexpr):
    """Make the part of the window that holds the k-th largest key the next one, or all below or above it; clear the counts."""
    region = tl.program_id(0)
    state += region * STATE
    bins += region * (BINS + 1)
    if tl.load(state + 2) < 0:
        low, size = tl.load(state), tl.load(state + 1)
        k = tl.load(about + region * ROW + 3).to(tl.int32)
        over = tl.load(bins + BINS)
        lane = tl.arange(0, CHUNK)
        passed, before, start = over, over, tl.full([], BINS - CHUNK, tl.int32)
        for done in range(CHUNK, BINS + 1, CHUNK):  # from the largest on
            short = passed < k
            start = tl.where(short, BINS - done, start)
            before = tl.where(short, passed, before)
            passed += tl.sum(tl.load(bins + BINS - done + lane))
        here = tl.load(bins + start + lane)
        found = tl.max(tl.where(before + tl.cumsum(here, 0, reverse=True) >= k, lane, 0))
        shift = _shift(size)
        larger, smaller = over >= k, passed < k  # than all keys of the window
        first = low + tl.where(larger | smaller, 0, (start + found) << shift)
        most = tl.minimum(1 << shift, low + size - first)
        above = before + tl.sum(tl.where(lane > found, here, 0))
        tl.store(state, tl.where(larger, low + size, tl.where(smaller, 0, first)))
        tl.store(state + 1, tl.where(larger, LARGEST + 1 - low - size, tl.where(smaller, low, most)))
        tl.store(state + 2, tl.where(larger | smaller | (most > 1), -1, above))
        _clear(bins, CHUNK)


@triton.jit(do_not_specialize=["blocks"])
def _tally_kernel(x, about, state, tally, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Count how many elements of a block are above the k-th largest key, and on it, where some were in the last wider window."""
    region = tl.program_id(1)
    about, first, left = _block(about, BLOCK)
    over = tally + region * blocks + tl.program_id(0)
    on = over + tl.num_programs(1) * blocks
    if (left > 0) & (tl.load(on) > 0):
        _, key = _ranked(x, about, first, left, lanes(BLOCK), ROWS, BLOCK)
        level = tl.load(state + region * STATE)
        larger, equal = tl.sum((key > level).to(tl.int32)), tl.sum((key == level).to(tl.int32))
        tl.store(over, larger)
        tl.store(on, equal)


@triton.jit(do_not_specialize=["blocks"])
def _choose_kernel(
    x,
    about,
    state,
    tally,
    ends,  # [2, regions, blocks]: sums of `tally`
    index,
    value,
    blocks,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write what is above the k-th largest key, and the first ones on it, in the order of their places."""
    region = tl.program_id(1)
    about, first, left = _block(about, BLOCK)
    if left > 0:
        at, apart = region * blocks + tl.program_id(0), tl.num_programs(1) * blocks
        over, on = tl.load(tally + at), tl.load(tally + apart + at)
        level = tl.load(state + region * STATE)
        spare = (tl.load(about + 3) - tl.load(state + region * STATE + 2)).to(tl.int32)  # how many on it are chosen
        over_before, on_before = tl.load(ends + at) - over, tl.load(ends + apart + at) - on
        if (over > 0) | ((on > 0) & (on_before < spare)):
            lane = lanes(BLOCK)
            acc, key = _ranked(x, about, first, left, lane, ROWS, BLOCK)
            equal = (key == level).to(tl.int32)
            chosen = (key > level) | ((equal > 0) & (on_before + tl.cumsum(equal, 0) <= spare))
            taken = chosen.to(tl.int32)
            target = tl.load(about + 4) + over_before + tl.minimum(on_before, spare) + tl.cumsum(taken, 0) - taken
            tl.store(index + target, first.to(tl.int32) + lane, mask=chosen)
            tl.store(value + target, acc, mask=chosen)
