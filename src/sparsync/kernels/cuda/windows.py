"""Kernels that find the k-th largest rank keys of regions of a vector, and write the elements that reach them in order.

A window is a range of keys, stored in `STATE` numbers per region. `ROW` numbers describe a region: see `exact_top_k`.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import triton
import triton.language as tl

from sparsync.kernels.cuda.launch import lanes, loaded, local, magnitude, rank_key, store

BINS: tl.constexpr = tl.constexpr(65536)  # parts of a window: 2^31 keys take two rounds
LARGEST: tl.constexpr = tl.constexpr(0x7F800000)  # the rank key of infinity and NaN
ROW: tl.constexpr = tl.constexpr(11)  # numbers that describe a region
# The lowest key of a window, how many keys it has, and how many elements are above its only key; -1: not known.
STATE: tl.constexpr = tl.constexpr(3)


@triton.jit
def _read(x, about, place, inside, ROWS: tl.constexpr):
    """Read elements of a region at arbitrary places."""
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
    """Read a block of a region, and compute rank keys: -1 for missing and skipped elements."""
    if ROWS:  # noqa: SIM108  # a branch: only one of the two is compiled
        value = _read(x, about, first.to(tl.int32) + lane, lane < left, ROWS)
    else:
        value = loaded(x + first, lane, left, BLOCK)
    return value, _key_of(value, about, first, left, lane)


@triton.jit
def _key_of(value, about, first, left, lane):
    """Compute the rank keys of a block: -1 for missing and skipped elements. A span with stop < start skips everything outside."""
    start, stop = tl.load(about + 5), tl.load(about + 6)
    behind, before = lane >= local(start, first, left), lane < local(stop, first, left)
    skipped = tl.where(start <= stop, behind & before, behind | before)
    return tl.where((lane < left) & ~skipped, rank_key(value), -1)


@triton.jit
def _block(about, BLOCK: tl.constexpr):
    """Return the description of this program's region, and the start and number of elements of its block."""
    about += tl.program_id(1) * ROW
    first = tl.program_id(0).to(tl.int64) * BLOCK
    return about, first, tl.minimum(tl.load(about + 2) - first, BLOCK).to(tl.int32)


@triton.jit
def _shift(size):
    """Return the right shift that maps the places of `size` keys below BINS."""
    return tl.sum((((size - 1) >> (16 + tl.arange(0, 16))) > 0).to(tl.int32))


@triton.jit
def _clear(bins, CHUNK: tl.constexpr):
    for done in range(0, BINS, CHUNK):
        tl.store(bins + done + tl.arange(0, CHUNK), 0)
    tl.store(bins + BINS, 0)


@triton.jit
def guess_kernel(
    x, grad, about, state, bins, ADD: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr, CHUNK: tl.constexpr
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
    for bit in range(31):  # the largest keys that enough elements of the sample reach
        low_next, high_next = low | (1 << (30 - bit)), high | (1 << (30 - bit))
        low = tl.where(tl.sum((key >= low_next).to(tl.int32)) >= tl.load(about + 8), low_next, low)
        high = tl.where(tl.sum((key >= high_next).to(tl.int32)) >= tl.load(about + 9), high_next, high)
    high = tl.minimum(high, LARGEST)
    tl.store(state + region * STATE, low)
    tl.store(state + region * STATE + 1, high - low + 1)
    tl.store(state + region * STATE + 2, -1)  # not known
    _clear(bins + region * (BINS + 1), CHUNK)


@triton.jit(do_not_specialize=["blocks"])
def count_kernel(
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
    """Count the keys by part of the window, for a region whose window has more than one key."""
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
        # Many equal elements, such as zeros, are mostly the smallest in a window: add them at once.
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
def narrow_kernel(about, state, bins, CHUNK: tl.constexpr):
    """Narrow the window to the part with the k-th largest key, or move it to all keys below or above; clear the counts."""
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
def tally_kernel(x, about, state, tally, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Count a block's elements above and equal to the k-th largest key, if the last wider window contained any."""
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
def choose_kernel(
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
    """Write the elements above the k-th largest key, and the first elements equal to it, in order."""
    region = tl.program_id(1)
    about, first, left = _block(about, BLOCK)
    if left > 0:
        at, apart = region * blocks + tl.program_id(0), tl.num_programs(1) * blocks
        over, on = tl.load(tally + at), tl.load(tally + apart + at)
        level = tl.load(state + region * STATE)
        spare = (tl.load(about + 3) - tl.load(state + region * STATE + 2)).to(tl.int32)  # selected elements equal to it
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
