"""The kernels for CUDA, in Triton. Same results as the reference, bit for bit, positions in ascending order.

A pass over n elements is cut into blocks. Every block reserves a piece of the output with one atomic addition, so pieces lie in the order
in which blocks got there; a second, small kernel copies them to where they belong. So the pass reads and writes every element once, and
no block waits for another. Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors.
"""

# pyright: reportArgumentType=false
# (Triton makes its own types of the numbers and tensors that a kernel is called with.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Sparse

BLOCK = 4096
BINS = 1 << 15  # magnitudes by the upper 16 bits of their float32; the sign is gone
COPIES = 32  # of the histogram, so that blocks seldom add to the same word


@triton.jit
def _accumulate_kernel(residual, grad, out, bad, n, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    acc = tl.load(residual + place, mask=inside, other=0.0) + tl.load(grad + place, mask=inside, other=0.0).to(
        tl.float32
    )
    tl.store(out + place, acc, mask=inside)
    # acc - acc is zero for finite numbers and NaN for all others
    poisoned = tl.max((acc - acc != 0.0).to(tl.int32))
    if poisoned > 0:  # pyright: ignore[reportOperatorIssue]  # a tensor of Triton
        tl.atomic_max(bad, poisoned)


@triton.jit
def _accumulate_select_kernel(
    residual,
    grad,
    out,
    index,
    value,
    counts,
    offsets,
    state,  # [2]: how many are reserved, whether anything is not finite
    threshold,
    n,
    capacity,
    ACCUMULATE: tl.constexpr,
    NONZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    acc = tl.load(residual + place, mask=inside, other=0.0)
    if ACCUMULATE:
        acc += tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, acc, mask=inside)
    bad = acc - acc != 0.0
    magnitude = tl.abs(acc)
    above = inside & ((magnitude >= threshold) | (acc != acc))
    if NONZERO:
        above = above & (acc != 0.0)
    taken = above.to(tl.int32)
    count = tl.sum(taken)
    poisoned = tl.max(bad.to(tl.int32))
    if poisoned > 0:  # pyright: ignore[reportOperatorIssue]  # a tensor of Triton
        tl.atomic_max(state + 1, poisoned)
    start = tl.atomic_add(state, count)
    tl.store(counts + block, count)
    tl.store(offsets + block, start)
    rank = start + tl.cumsum(taken) - taken
    fits = above & (rank < capacity)
    tl.store(index + rank, place.to(tl.int32), mask=fits)
    tl.store(value + rank, acc, mask=fits)


@triton.jit
def _gather_pieces_kernel(
    index,
    value,
    index_out,
    value_out,
    counts,
    offsets,
    ends,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    count = tl.load(counts + block)
    source = tl.load(offsets + block)
    target = tl.load(ends + block) - count
    place = tl.arange(0, BLOCK)
    inside = place < count
    tl.store(index_out + target + place, tl.load(index + source + place, mask=inside), mask=inside)
    tl.store(value_out + target + place, tl.load(value + source + place, mask=inside), mask=inside)


@triton.jit
def _histogram_kernel(x, counts, n, BINS: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    bits = tl.load(x + place, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    level = (bits & 0x7FFFFFFF) >> 16
    tl.atomic_add(counts + (block % COPIES) * BINS + level, 1, mask=inside)


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> bool:
    """Whether residual + grad [n], float32, which is written to `out`, is finite throughout."""
    n = residual.numel()
    bad = torch.zeros(1, dtype=torch.int32, device=residual.device)
    if n:
        _accumulate_kernel[(triton.cdiv(n, BLOCK),)](residual, grad, out, bad, n, BLOCK=BLOCK)
    return not int(bad)  # a host sync: what is sent depends on it


def accumulate_select(
    residual: Tensor, grad: Tensor, out: Tensor, threshold: float, expected: int
) -> tuple[Sparse, bool]:
    """The elements of acc = residual + grad with |acc| >= `threshold` or NaN, and whether acc is finite; acc is written to `out`.

    One pass over 12 bytes an element when about `expected` elements are found; where more than twice as many are, one more over 4.
    """
    return _selected(residual, grad, out, threshold, expected, nonzero=False)


def at_least(x: Tensor, threshold: float, expected: int) -> Sparse:
    """The non-zero elements of `x` [n] with |x| >= `threshold`, and NaN."""
    return _selected(x, None, x, threshold, expected, nonzero=True)[0]


def magnitude_histogram(x: Tensor) -> Tensor:
    """How many elements of `x` [n] have each upper half of |x| as float32, int64 [BINS]."""
    n = x.numel()
    counts = torch.zeros(COPIES * BINS, dtype=torch.int32, device=x.device)
    if n:
        _histogram_kernel[(triton.cdiv(n, BLOCK),)](x, counts, n, BINS=BINS, COPIES=COPIES, BLOCK=BLOCK)
    return counts.view(COPIES, BINS).sum(0)


def top_k(x: Tensor, k: int, warm: float | None = None) -> Sparse:
    """As the reference's `top_k`. With `warm`, last step's k-th magnitude, all else is left unread where at least k reach it."""
    n = x.numel()
    if not 0 <= k <= n:
        raise ValueError(f"k must be in [0, {n}] for {n} elements, got {k}")
    if k == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], n)
    if warm is not None and warm > 0:
        found = at_least(x, warm, 2 * k)
        if found.index.numel() >= k:
            place = _largest(found.value, k)
            return Sparse(found.index[place], found.value[place], n)
    place = _largest(x, k)
    return Sparse(place.to(torch.int32), x[place], n)


def _largest(x: Tensor, k: int) -> Tensor:
    """The positions of the k largest magnitudes, ascending; of equal ones those that come first; NaN as infinity."""
    magnitude = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    threshold = magnitude.topk(k, sorted=False).values.min()
    above = magnitude > threshold
    level = magnitude == threshold
    spare = k - above.sum()  # stays on the device
    chosen = above | (level & (level.cumsum(0) <= spare))
    return chosen.nonzero().view(-1)  # a host sync: none is needed for the length, but torch makes one


def _selected(
    residual: Tensor, grad: Tensor | None, out: Tensor, threshold: float, expected: int, nonzero: bool
) -> tuple[Sparse, bool]:
    n, device = residual.numel(), residual.device
    if n == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=device), residual[:0].float(), 0), True
    blocks = triton.cdiv(n, BLOCK)
    capacity = min(n, 2 * expected + BLOCK)
    index = torch.empty(capacity, dtype=torch.int32, device=device)
    value = torch.empty(capacity, dtype=torch.float32, device=device)
    counts, offsets = torch.empty((2, blocks), dtype=torch.int32, device=device)
    state = torch.zeros(2, dtype=torch.int32, device=device)
    _accumulate_select_kernel[(blocks,)](
        residual,
        residual if grad is None else grad,
        out,
        index,
        value,
        counts,
        offsets,
        state,
        threshold,
        n,
        capacity,
        ACCUMULATE=grad is not None,
        NONZERO=nonzero,
        BLOCK=BLOCK,
    )
    total, bad = state.tolist()  # a host sync: how many there are depends on the data
    if total > capacity:  # far more than expected; acc is in `out` by now
        return _selected(out, None, out, threshold, total, nonzero)[0], not bad
    ends = counts.cumsum(0, dtype=torch.int32)
    ordered = torch.empty(total, dtype=torch.int32, device=device)
    values = torch.empty(total, dtype=torch.float32, device=device)
    if total:
        _gather_pieces_kernel[(blocks,)](index, value, ordered, values, counts, offsets, ends, BLOCK=BLOCK)
    return Sparse(ordered, values, n), not bad
