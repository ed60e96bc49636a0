"""The specification of the kernels on sparse vectors, in plain torch: selecting by a threshold, splitting, ordering and intersecting."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels.reference import top_k


def magnitude(x: Tensor) -> Tensor:
    """|x|, with NaN as infinity, so that a poisoned element is always among the largest."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def select_ge(x: Float[Tensor, " n"], threshold: float) -> Sparse:
    """The non-zero elements of `x` whose magnitude is `threshold` or more. Positions ascend."""
    size = magnitude(x)
    index = ((size >= threshold) & (size > 0)).nonzero().view(-1)  # a host sync: how many there are depends on the data
    return Sparse(index.to(torch.int32), x[index], x.numel())


def above(x: Float[Tensor, " n"], threshold: float) -> Sparse:
    """The elements of `x` whose magnitude is `threshold` or more, zeros included where that is 0. NaN is not; positions ascend."""
    index = (x.abs() >= threshold).nonzero().view(-1)  # a host sync: how many there are depends on the data
    return Sparse(index.to(torch.int32), x[index], x.numel())


def top_k_nonzero(x: Float[Tensor, " n"], k: int, skip: Span | None = None) -> Sparse:
    """What `top_k` would select outside the span `skip`, without zeros: fewer than `k` elements where fewer are not zero."""
    skip = skip or Span(0, 0)
    rest = torch.cat([x[: skip.start], x[skip.stop :]])
    top = top_k(rest, min(k, rest.numel()))
    index = torch.where(top.index < skip.start, top.index, top.index + len(skip))
    kept = top.value != 0
    return Sparse(index[kept], top.value[kept], x.numel())


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """`part` cut at adjacent `regions` that cover it; positions become relative to the start of their region."""
    stops = torch.tensor([region.stop for region in regions], dtype=torch.int32, device=part.index.device)
    ends = torch.searchsorted(part.index, stops).tolist()  # a host sync: the lengths depend on the data
    return cut(part, regions, ends)


def cut(part: Sparse, regions: Sequence[Span], ends: Sequence[int]) -> list[Sparse]:
    """`part` cut after its first `ends[r]` elements for each region r; positions become relative to the start of their region."""
    starts = [0, *ends[:-1]]
    return [
        Sparse(part.index[a:b] - region.start, part.value[a:b], len(region))
        for region, a, b in zip(regions, starts, ends, strict=True)
    ]


def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Tensor:
    """Whether each of `index` is one of the ascending `others`, bool [a]."""
    if not others.numel():
        return torch.zeros(index.numel(), dtype=torch.bool, device=index.device)
    place = torch.searchsorted(others, index).clamp_(max=others.numel() - 1)
    return others[place] == index


def merge(parts: Sequence[Sparse]) -> Sparse:
    """All elements of `parts`, which have no position in common, as one; positions ascend."""
    index, order = torch.cat([part.index for part in parts]).sort()
    return Sparse(index, torch.cat([part.value for part in parts])[order], parts[0].length)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """The sum of `parts` as one, added in their order, starting from 0; positions ascend."""
    index, place = torch.cat([part.index for part in parts]).unique(return_inverse=True)
    value = torch.cat([part.value for part in parts])
    return Sparse(index, value.new_zeros(index.numel()).index_add_(0, place, value), parts[0].length)
