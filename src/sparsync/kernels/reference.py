"""The specification of the kernels in plain torch: short and slow. Other backends are compared with it bit for bit.

`operations` says what each function does. Codecs are in `codec_reference` and `value_reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.core import Rows, Span, Sparse, exact_divisor

COLUMNS = 509  # a prime, so that rows of a weight that change places land in other columns
MIX = (0x9E3779B97F4A7C15 - (1 << 64), 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))  # splitmix64's
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # by their bytes


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> bool:
    torch.add(residual, grad, out=out)
    return all_finite(out)


def divide_to_(out: Tensor, x: Tensor, divisor: int) -> None:
    exact = torch.promote_types(torch.promote_types(x.dtype, out.dtype), torch.float32)
    x = x.to(exact)
    out.copy_(x / exact_divisor(x, divisor))


def all_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())  # a host sync: what is sent depends on it


def magnitude(x: Tensor) -> Tensor:
    """Return |x|, with NaN as infinity, so that a non-finite element is always among the largest."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def select_ge(x: Tensor, threshold: float) -> Sparse:
    size = magnitude(x)
    index = ((size >= threshold) & (size > 0)).nonzero().view(-1)  # a host sync: how many there are depends on the data
    return Sparse(index.to(torch.int32), x[index], x.numel())


def top_k(x: Tensor, k: int, bound: float | None = None) -> Sparse:
    index = argtopk(magnitude(x), k)
    return Sparse(index.to(torch.int32), x[index], x.numel())


def top_k_nonzero(x: Tensor, k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    skip = skip or Span(0, 0)
    rest = torch.cat([x[: skip.start], x[skip.stop :]])
    top = top_k(rest, min(k, rest.numel()))
    index = torch.where(top.index < skip.start, top.index, top.index + len(skip))
    nonzero = top.value != 0
    return Sparse(index[nonzero], top.value[nonzero], x.numel())


def accumulate_top_k_nonzero(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, skip: Span | None = None, bound: float | None = None
) -> tuple[Sparse, bool]:
    finite = accumulate(residual, grad, out)
    return top_k_nonzero(out, k, skip), finite


def accumulate_select_ge(
    residual: Tensor, grad: Tensor, threshold: float, out: Tensor, span: Span
) -> tuple[Sparse, bool]:
    finite = accumulate(residual, grad, out)
    found = select_ge(span.of(out), threshold)
    return Sparse(found.index + span.start, found.value, out.numel()), finite


def argtopk(magnitude: Tensor, k: int) -> Tensor:
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitude.device)
    threshold = magnitude.topk(k, sorted=False).values.min()
    larger = (magnitude > threshold).nonzero().view(-1)  # a host sync: how many there are depends on the data
    equal = (magnitude == threshold).nonzero().view(-1)[: k - larger.numel()]
    return torch.cat([larger, equal]).sort().values


def smallest_magnitude(x: Tensor) -> float:
    return float(x.abs().min()) if x.numel() else 0.0  # a host sync


def locate(rows: Rows, place: Tensor) -> Tensor:
    if place.numel() and not bool(((place >= 0) & (place < rows.length)).all()):  # a host sync
        raise IndexError(outside(place, rows.length))
    number = torch.div(place, rows.row, rounding_mode="floor")
    return (rows.starts[number.long()] - number * rows.row + place).to(place.dtype)


def of_rows(x: Tensor, rows: Rows) -> Tensor:
    """Return the elements of `x` [n] in rows, copied."""
    at = locate(rows, torch.arange(rows.length, dtype=torch.int32, device=x.device))
    if at.numel() and not 0 <= int(at.min()) <= int(at.max()) < x.numel():  # a host sync
        raise IndexError(f"rows must lie in [0, {x.numel()}) for {x.numel()} elements, got some outside")
    return gather(x, at)


def divide_rows_(x: Tensor, rows: Rows, divisor: int) -> None:
    at = locate(rows, torch.arange(rows.length, dtype=torch.int32, device=x.device))
    put_(x, at, gather(x, at) / exact_divisor(x, divisor))


def write_own_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    weights: Tensor,
    unsent: Tensor,
    rows: Rows | None,
    divisor: int,
    share: float,
) -> Tensor:
    if rows is not None:
        unsent = unsent.clone()
        divide_rows_(unsent, rows, divisor)
    for target, start in zip(targets, starts, strict=True):
        span = Span(start, start + target.numel())
        target.copy_((span.of(weights) - span.of(unsent) * share).view(target.shape))
    return digests(targets)


def digests(tensors: Sequence[Tensor]) -> Tensor:
    found = [_digest(each.detach()) for each in tensors]
    return torch.stack([each.to(found[0].device) for each in found]) if found else torch.empty(0, dtype=torch.int64)


def _digest(x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    nbytes = word_of(flat)
    if flat.storage_offset() * flat.element_size() % nbytes:
        flat = flat.clone()
    words = flat.view(WORDS[nbytes])
    if words.numel() >= 2 * COLUMNS:
        # The number of rows is made odd: with an even one the highest bits of all rows could change and no sum would.
        rest = COLUMNS + words.numel() % (2 * COLUMNS)
        words = torch.cat([words[:rest].long(), words[rest:].view(-1, COLUMNS).sum(0, dtype=torch.int64)])
    z = words.long() + torch.arange(1, words.numel() + 1, device=x.device) * MIX[0]
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * MIX[1]  # without the sign, which a shift repeats
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * MIX[2]
    return (z ^ (z >> 31 & (1 << 33) - 1)).sum()


def word_of(flat: Tensor) -> int:
    """Return the bytes of the words that a digest of this vector reads."""
    return next(size for size in WORDS if flat.nbytes % size == 0)


def scatter_add_(out: Tensor, part: Sparse) -> None:
    # Positions in `part` are distinct, so the result does not depend on their order.
    out.index_add_(0, check_inside(part.index, out), part.value.to(out.dtype))


def clear_(x: Tensor, index: Tensor) -> None:
    x.index_fill_(0, check_inside(index, x), 0.0)


def put_(x: Tensor, index: Tensor, value: Tensor) -> None:
    x.index_copy_(0, check_inside(index, x), value.to(x.dtype))


def gather(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, check_inside(index, x))


def move_put_(
    to: Tensor, source: Tensor, kept: Sequence[Sparse], written: Sequence[Sparse], skip: Tensor | None = None
) -> None:
    for part in (*kept, *written):
        check_inside(part.index, to)
    written = [Sparse(part.index, part.value.clone(), part.length) for part in written]  # they may lie in the source
    for part in kept:
        put_(source, part.index, part.value)
    # A GPU, where this runs too, knows alone whether to skip.
    to.copy_(source if skip is None else torch.where(skip == 0, source, to))
    source.zero_()
    for part in written:
        put_(source, part.index, part.value)


def merge(parts: Sequence[Sparse]) -> Sparse:
    index, order = torch.cat([part.index for part in parts]).sort()
    return Sparse(index, torch.cat([part.value for part in parts])[order], parts[0].length)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    index, place = torch.cat([part.index for part in parts]).unique(return_inverse=True)
    value = torch.cat([part.value for part in parts])
    return Sparse(index, value.new_zeros(index.numel()).index_add_(0, place, value), parts[0].length)


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    stops = torch.tensor([region.stop for region in regions], dtype=torch.int32, device=part.index.device)
    ends = torch.searchsorted(part.index, stops).tolist()  # a host sync: the lengths depend on the data
    return [
        Sparse(part.index[start:end] - region.start, part.value[start:end], len(region))
        for region, start, end in zip(regions, [0, *ends[:-1]], ends, strict=True)
    ]


def isin(index: Tensor, others: Tensor) -> Tensor:
    if not others.numel():
        return torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    place = torch.searchsorted(others, index).clamp_(max=others.numel() - 1)
    return others[place] == index


def outside(index: Tensor, n: int) -> str:
    """Return the message of the IndexError for positions `index` [k] of which some lie outside of [0, n)."""
    return f"positions must be in [0, {n}) for {n} elements, got {int(index.min())} to {int(index.max())}"


def check_inside(index: Tensor, x: Tensor) -> Tensor:
    """Return `index` as int64. Raises IndexError where a position is outside of `x`, and TypeError where it is no integer."""
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"positions must be integers such as int32, got {index.dtype}")
    # A host sync; torch would count negative ones from the end.
    if not bool(((index >= 0) & (index < x.numel())).all()):
        raise IndexError(outside(index, x.numel()))
    return index.long()
