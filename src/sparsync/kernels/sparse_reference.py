"""The specification of the kernels on sparse vectors, in plain torch: selecting by a threshold, splitting, ordering and intersecting."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels.reference import accumulate, check_inside, put_, top_k


def magnitude(x: Tensor) -> Tensor:
    """Return |x|, with NaN as infinity, so that a non-finite element is always among the largest."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def select_ge(x: Float[Tensor, " n"], threshold: float) -> Sparse:
    """Return the non-zero elements of `x` whose magnitude is `threshold` or more. Positions ascend."""
    size = magnitude(x)
    index = ((size >= threshold) & (size > 0)).nonzero().view(-1)  # a host sync: how many there are depends on the data
    return Sparse(index.to(torch.int32), x[index], x.numel())


def accumulate_top_k_nonzero(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, skip: Span | None = None, bound: float | None = None
) -> tuple[Sparse, bool]:
    """Write residual + grad to `out` [n], and return its `top_k_nonzero` and whether it is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return top_k_nonzero(out, k, skip), finite


def top_k_nonzero(x: Float[Tensor, " n"], k: int, skip: Span | None = None, bound: float | None = None) -> Sparse:
    """Return what `top_k` would select outside the span `skip`, without zeros: fewer than `k` elements where fewer are not zero."""
    skip = skip or Span(0, 0)
    rest = torch.cat([x[: skip.start], x[skip.stop :]])
    top = top_k(rest, min(k, rest.numel()))
    index = torch.where(top.index < skip.start, top.index, top.index + len(skip))
    nonzero = top.value != 0
    return Sparse(index[nonzero], top.value[nonzero], x.numel())


def move_put_(to: Tensor, source: Tensor, kept: Sequence[Sparse], written: Sequence[Sparse]) -> None:
    """Copy `source` [n] to `to` and set it to zero; then put the elements of `kept` into `to`, and those of `written` into `source`."""
    inside = [
        [Sparse(check_inside(part.index, to), part.value, part.length) for part in parts] for parts in (kept, written)
    ]
    to.copy_(source)
    source.zero_()
    for x, parts in zip((to, source), inside, strict=True):
        for part in parts:
            put_(x, part.index, part.value)


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """Cut `part` at adjacent `regions` that cover it; positions become relative to the start of their region."""
    stops = torch.tensor([region.stop for region in regions], dtype=torch.int32, device=part.index.device)
    ends = torch.searchsorted(part.index, stops).tolist()  # a host sync: the lengths depend on the data
    return [
        Sparse(part.index[start:end] - region.start, part.value[start:end], len(region))
        for region, start, end in zip(regions, [0, *ends[:-1]], ends, strict=True)
    ]


def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Tensor:
    """Return for each of `index` whether it is one of the ascending `others`, bool [a]."""
    if not others.numel():
        return torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    place = torch.searchsorted(others, index).clamp_(max=others.numel() - 1)
    return others[place] == index


def merge(parts: Sequence[Sparse]) -> Sparse:
    """Return all elements of `parts`, which have no position in common, as one; positions ascend."""
    index, order = torch.cat([part.index for part in parts]).sort()
    return Sparse(index, torch.cat([part.value for part in parts])[order], parts[0].length)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """Return the sum of `parts` as one, added in their order, starting from 0; positions ascend."""
    index, place = torch.cat([part.index for part in parts]).unique(return_inverse=True)
    value = torch.cat([part.value for part in parts])
    return Sparse(index, value.new_zeros(index.numel()).index_add_(0, place, value), parts[0].length)
