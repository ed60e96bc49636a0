"""Exact top-k in plain torch, faster than the reference: the largest of those elements that reach a sampled bound."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.core import Rows, Sparse
from sparsync.kernels import reference

SAMPLE = 16_384  # magnitudes looked at to bound the k-th largest
MARGIN = 4.0  # standard deviations of a sampled count by which the bound is set low


def top_k(x: Tensor, k: int, bound: float | None = None) -> Sparse:
    """Return what `reference.top_k` selects.

    A sample gives a bound that a little more than k elements pass, and the largest are chosen among those. Where fewer than k pass, all
    elements are searched. `bound` is not used: one that is far too low would cost more than the sample.
    """
    n = x.numel()
    if n < 4 * SAMPLE or k == 0:
        return reference.top_k(x, k)
    magnitude = x.abs()
    sample = magnitude[:: n // SAMPLE | 1]  # an odd stride, so that it does not walk down one column of a matrix
    expected = sample.numel() * k / n
    place = min(sample.numel(), int(expected + MARGIN * math.sqrt(expected) + 1))
    low = sample.topk(place, sorted=False).values.min()
    candidates = (~(magnitude < low)).nonzero().view(-1)  # [a little more than k]; NaN is not below anything
    if candidates.numel() < k:
        return reference.top_k(x, k)
    largest = reference.top_k(x[candidates], k)
    return Sparse(candidates[largest.index.long()].to(torch.int32), largest.value, n)


def top_k_of_rows(x: Tensor, rows: Rows, k: int, bound: float | None = None) -> Sparse:
    return top_k(reference.of_rows(x, rows), k)


def accumulate_top_k(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, bound: float | None = None
) -> tuple[Sparse, bool]:
    finite = reference.accumulate(residual, grad, out)
    return top_k(out, k), finite


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> tuple[list[Sparse], bool]:
    finite = reference.accumulate(residual, grad, out)
    return [top_k_of_rows(out, rows, k) for rows, k in zip(regions, counts, strict=True)], finite
