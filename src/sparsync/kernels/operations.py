"""The operations on whole vectors and on selections: their specification in plain torch, short and slow.

`dispatch.operation` calls C++ and Triton kernels if they support the arguments: C++ supports float32 in host memory, and gradients in
bfloat16 and float16; Triton supports the same on a GPU. Results have the same bits everywhere, except the bits inside a NaN. Positions
must lie inside the vector; no other argument is checked. On a GPU, where a check would be a host sync, elements outside are ignored.

All vectors are one-dimensional; n is their length, k a number of positions, which are int32 or int64. The passes of exchanged steps are in
`step_reference`, codecs in `value_reference` and `codec_reference`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sparsync.core import Rows, Span, Sparse, exact_divisor
from sparsync.kernels.dispatch import operation
from sparsync.kernels.step_reference import apply_steps_ as apply_steps_
from sparsync.kernels.step_reference import encode_steps_ as encode_steps_
from sparsync.kernels.step_reference import make_steps_ as make_steps_
from sparsync.kernels.step_reference import move_steps_ as move_steps_
from sparsync.kernels.step_reference import over_means as over_means
from sparsync.kernels.step_reference import packets_fit as packets_fit
from sparsync.kernels.step_reference import reduce_shares_ as reduce_shares_
from sparsync.kernels.step_reference import sketch as sketch
from sparsync.kernels.step_reference import squares_fit as squares_fit
from sparsync.kernels.step_reference import write_mean_ as write_mean_

Vector = Float[Tensor, " n"]
Positions = Int[Tensor, " k"]
COLUMNS = 509  # a prime, so that swapped rows of a weight land in other columns
MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # splitmix64's
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by size in bytes


@operation
def accumulate(residual: Vector, grad: Vector, out: Vector) -> bool | Tensor:
    """Write residual + grad to `out`, which may be `residual`, and return whether it is finite everywhere.

    On a GPU, here and below, the answer is a tensor [], without a host sync.
    """
    torch.add(residual, grad, out=out)
    return all_finite(out)


@operation
def accumulate_top_k(
    residual: Vector, grad: Vector, k: int, out: Vector, bound: float | None = None
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k` and whether it is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return top_k(out, k, bound), finite


@operation
def accumulate_top_k_nonzero(
    residual: Vector, grad: Vector, k: int, out: Vector, skip: Span | None = None, bound: float | None = None
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`, and return its `top_k_nonzero` and whether it is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return top_k_nonzero(out, k, skip, bound), finite


@operation
def accumulate_select_ge(
    residual: Vector, grad: Vector, threshold: float, out: Vector, span: Span
) -> tuple[Sparse, bool | Tensor]:
    """Write residual + grad to `out`, which may be `residual`; return its `select_ge` inside `span` and whether it is finite everywhere.

    Positions are those in the whole vector.
    """
    finite = accumulate(residual, grad, out)
    part = select_ge(span.of(out), threshold)
    return Sparse(part.index + span.start, part.value, out.numel()), finite


@operation
def accumulate_top_k_of_rows(
    residual: Vector,
    grad: Vector,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Vector,
    bounds: Sequence[float | None],
) -> tuple[list[Sparse], bool | Tensor]:
    """Write residual + grad to `out`, which may be either, and return its `top_k_of_each` and whether it is finite everywhere.

    `counts` and `bounds` are k and bound by region. Raises as `top_k_of_rows` does, but after `out` is written.
    """
    finite = accumulate(residual, grad, out)
    return top_k_of_each(out, regions, counts, bounds), finite


@operation
def divide_to_(out: Vector, x: Vector, divisor: int) -> None:
    """Write `x` / `divisor` to `out`, computed in at least float32 and rounded once."""
    exact = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    x = x.to(exact)
    out.copy_(x / exact_divisor(x, divisor))


@operation
def all_finite(x: Vector) -> bool:
    """Return whether `x` holds neither NaN nor Inf."""
    return bool(x.isfinite().all())  # a host sync: the messages depend on it


@operation
def finite_each(parts: Sequence[Sparse], times: int) -> bool | Tensor:
    """Return whether `times` the values of `parts` are finite, in float32 at least; on a GPU a tensor []."""
    values = [part.value.to(torch.promote_types(part.value.dtype, torch.float32)) for part in parts]
    return all(all_finite(value * times) for value in values)


@operation
def select_ge(x: Vector, threshold: float) -> Sparse:
    """Select the non-zero elements of `x` of magnitude `threshold` or more, NaN as infinity. Positions ascend."""
    size = magnitude(x)
    index = ((size >= threshold) & (size > 0)).nonzero().view(-1)  # a host sync: the count depends on the data
    return Sparse(index.to(torch.int32), x[index], x.numel())


@operation
def top_k(x: Vector, k: int, bound: float | None = None) -> Sparse:
    """Select the `k` elements of `x` of largest magnitude; of equal magnitudes the first. Positions ascend.

    NaN counts as infinity. `bound` is a magnitude that k elements, and not many more, are expected to reach, such as a little less than
    the last step's smallest; it affects only the run time.
    """
    index = argtopk(magnitude(x), k)
    return Sparse(index.to(torch.int32), x[index], x.numel())


@operation
def top_k_nonzero(x: Vector, k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    """Select as `top_k` does outside the span `skip`, without zeros: fewer than `k` elements if fewer are non-zero.

    `k` may be more than n.
    """
    skip = skip or Span(0, 0)
    rest = torch.cat([x[: skip.start], x[skip.stop :]])
    top = top_k(rest, min(k, rest.numel()))
    index = torch.where(top.index < skip.start, top.index, top.index + len(skip))
    nonzero = top.value != 0
    return Sparse(index[nonzero], top.value[nonzero], x.numel())


@operation
def top_k_of_rows(x: Vector, rows: Rows, k: int, bound: float | None = None) -> Sparse:
    """Select the `top_k` of the elements of `x` in rows. Positions are places in the rows.

    Raises IndexError for rows outside of `x`.
    """
    at = locate(rows, torch.arange(rows.length, dtype=torch.int32, device=x.device))
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < x.numel():  # a host sync
        raise IndexError(f"rows must lie in [0, {x.numel()}) for {x.numel()} elements, got some outside")
    return top_k(gather(x, at), k, bound)


@operation
def top_k_of_each(
    x: Vector, regions: Sequence[Rows], counts: Sequence[int], bounds: Sequence[float | None]
) -> list[Sparse]:
    """Select the `top_k_of_rows` of all regions. Raises as that does."""
    return [top_k_of_rows(x, *region) for region in zip(regions, counts, bounds, strict=True)]


@operation
def locate(rows: Rows, place: Positions) -> Positions:
    """Convert places in rows to positions in the vector, in the type of `place`. Raises IndexError for places outside the rows."""
    if place.numel() and not bool(((place >= 0) & (place < rows.length)).all()):  # a host sync
        raise IndexError(outside(place, rows.length))
    number = torch.div(place, rows.row, rounding_mode="floor")
    return (rows.starts[number.long()] - number * rows.row + place).to(place.dtype)


@operation
def smallest_magnitude(x: Vector) -> float:
    """Return the smallest |x|; NaN if there is any NaN, and 0 if there are no elements."""
    return float(x.abs().min()) if x.numel() else 0.0  # a host sync


@operation
def divide_rows_(x: Vector, rows: Rows, divisor: int) -> None:
    """Divide the elements of `x` in rows that do not overlap. Raises IndexError for rows outside `x`."""
    at = locate(rows, torch.arange(rows.length, dtype=torch.int32, device=x.device))
    put_(x, at, gather(x, at) / exact_divisor(x, divisor))


@operation
def write_own_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    weights: Vector,
    unsent: Vector,
    rows: Rows | None,
    divisor: int,
    share: float,
) -> Int[Tensor, " targets"]:
    """Write weights - share * unsent to `targets`, of any types and shapes, and return their `digests`.

    `starts` are the positions of the targets' first elements. `unsent` is divided by `divisor` in `rows`, whose starts ascend. Raises
    ValueError for a target that does not lie in `weights`, and IndexError for rows outside.
    """
    if rows is not None:
        unsent = unsent.clone()
        divide_rows_(unsent, rows, divisor)
    for target, start in zip(targets, starts, strict=True):
        span = Span(start, start + target.numel())
        target.copy_((span.of(weights) - span.of(unsent) * share).view(target.shape))
    return digests(targets)


@operation
def digests(tensors: Sequence[Tensor]) -> Int[Tensor, " tensors"]:
    """Hash the bits of the tensors, of any types and shapes, to int64 digests on the device of the first.

    A digest depends only on the bits and the number of elements. It always detects a change of one element, and misses other changes
    with probability 2^-64.
    """
    hashes = [_digest(tensor.detach()) for tensor in tensors]
    return torch.stack([word.to(hashes[0].device) for word in hashes]) if hashes else torch.empty(0, dtype=torch.int64)


@operation
def scatter_add_(out: Vector, part: Sparse) -> None:
    """Add the elements of `part` to `out`. Raises IndexError, before anything is written, for positions outside of it."""
    # Positions in `part` are distinct, so the result does not depend on their order.
    out.index_add_(0, check_inside(part.index, out), part.value.to(out.dtype))


@operation
def clear_(x: Vector, index: Positions) -> None:
    """Set `x` to zero at the positions `index`. Raises IndexError, before anything is written, for positions outside of it."""
    x.index_fill_(0, check_inside(index, x), 0.0)


@operation
def put_(x: Vector, index: Positions, value: Float[Tensor, " k"]) -> None:
    """Set `x` to `value` at the positions `index`, distinct or with equal values.

    Raises IndexError, before anything is written, for positions outside of it.
    """
    x.index_copy_(0, check_inside(index, x), value.to(x.dtype))


@operation
def gather(x: Vector, index: Positions) -> Float[Tensor, " k"]:
    """Return the elements of `x` at the positions `index`. Raises IndexError for positions outside of it."""
    return x.index_select(0, check_inside(index, x))


@operation
def move_put_(
    to: Vector, source: Vector, kept: Sequence[Sparse], written: Sequence[Sparse], skip: Tensor | None = None
) -> None:
    """Copy `source` to `to`, which does not overlap, with `kept` at its positions; then set `source` to `written`, and zero elsewhere.

    Values of `written` may lie in `source`. Raises IndexError, before anything is written, for positions outside. If `skip`, one number,
    is not zero, `to` does not change, and `source` is undefined.
    """
    for part in (*kept, *written):
        check_inside(part.index, to)
    written = [Sparse(part.index, part.value.clone(), part.length) for part in written]  # they may lie in the source
    for part in kept:
        put_(source, part.index, part.value)
    # On a GPU, where this runs too, only the device knows whether to skip.
    to.copy_(source if skip is None else torch.where(skip == 0, source, to))
    source.zero_()
    for part in written:
        put_(source, part.index, part.value)


@operation
def merge(parts: Sequence[Sparse]) -> Sparse:
    """Merge disjoint `parts`; positions ascend."""
    index, order = torch.cat([part.index for part in parts]).sort()
    return Sparse(index, torch.cat([part.value for part in parts])[order], parts[0].length)


@operation
def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """Sum `parts` in order, starting from 0; positions ascend."""
    index, place = torch.cat([part.index for part in parts]).unique(return_inverse=True)
    value = torch.cat([part.value for part in parts])
    return Sparse(index, value.new_zeros(index.numel()).index_add_(0, place, value), parts[0].length)


@operation
def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """Cut `part` at adjacent `regions` that cover it; positions become relative to the start of their region."""
    stops = torch.tensor([region.stop for region in regions], dtype=torch.int32, device=part.index.device)
    ends = torch.searchsorted(part.index, stops).tolist()  # a host sync: the lengths depend on the data
    return [
        Sparse(part.index[start:end] - region.start, part.value[start:end], len(region))
        for region, start, end in zip(regions, [0, *ends[:-1]], ends, strict=True)
    ]


@operation
def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Bool[Tensor, " a"]:
    """Return, by element of `index`, whether the ascending `others` contain it."""
    if not others.numel():
        return torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    place = torch.searchsorted(others, index).clamp_(max=others.numel() - 1)
    return others[place] == index


def magnitude(x: Tensor) -> Tensor:
    """Return |x|, with NaN as infinity, so that a non-finite element is always among the largest."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def argtopk(magnitude: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitude.device)
    threshold = magnitude.topk(k, sorted=False).values.min()
    larger = (magnitude > threshold).nonzero().view(-1)  # a host sync: the count depends on the data
    equal = (magnitude == threshold).nonzero().view(-1)[: k - larger.numel()]
    return torch.cat([larger, equal]).sort().values


def _digest(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    nbytes = word_of(flat)
    if flat.storage_offset() * flat.element_size() % nbytes:
        flat = flat.clone()
    words = flat.view(WORDS[nbytes])
    if words.numel() >= 2 * COLUMNS:
        # Fold an odd number of rows: if all rows of an even number changed in the highest bit, no sum would change.
        rest = COLUMNS + words.numel() % (2 * COLUMNS)
        words = torch.cat([words[:rest].long(), words[rest:].view(-1, COLUMNS).sum(0, dtype=torch.int64)])
    z = words.long() + torch.arange(1, words.numel() + 1, device=x.device) * MIX[0]
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX[1]  # masks the sign bits that the shift repeats
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX[2]
    return (z ^ (z >> 31 & (1 << 33) - 1)).sum()


def word_of(flat: Tensor) -> int:
    """Choose the size, in bytes, of the words that a digest of this vector reads."""
    return next(size for size in WORDS if flat.nbytes % size == 0)


def outside(index: Tensor, n: int) -> str:
    """Word the IndexError for positions `index` [k] that are not all in [0, n)."""
    return f"positions must be in [0, {n}) for {n} elements, got {int(index.min())} to {int(index.max())}"


def check_inside(index: Tensor, x: Tensor) -> Tensor:
    """Return `index` as int64. Raises IndexError for positions outside of `x`, and TypeError for non-integers."""
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"positions must be integers such as int32, got {index.dtype}")
    # A host sync; torch would count negative ones from the end.
    if not bool(((index >= 0) & (index < x.numel())).all()):
        raise IndexError(outside(index, x.numel()))
    return index.long()
