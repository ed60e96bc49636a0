"""Exact selection of a share of the elements."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync.core import Sparse
from sparsync.kernels import reference

SAMPLE = 16_384  # magnitudes looked at to bound the k-th largest
MARGIN = 4.0  # standard deviations of a sampled count by which the bound is set low


def count_for(density: float, n: int) -> int:
    """k = density * n rounded down, but at least one element of a bucket that has any."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], the share of elements to send, got {density}")


def select_top(acc: Float[Tensor, " n"], density: float) -> Sparse:
    """The largest `density` of `acc` [n] by magnitude; among equal magnitudes the ones that come first; NaN before everything.

    Exact, whatever the values: a sample gives a bound that a little more than k elements pass, and the largest are chosen among those.
    Where fewer than k pass, all elements are searched.
    """
    n, k = acc.numel(), count_for(density, acc.numel())
    if n < 4 * SAMPLE:
        return reference.top_k(acc, k)
    magnitude = acc.abs()
    sample = magnitude[:: n // SAMPLE | 1]  # an odd stride, so that it does not walk down one column of a matrix
    expected = sample.numel() * k / n
    place = min(sample.numel(), int(expected + MARGIN * math.sqrt(expected) + 1))
    bound = sample.topk(place, sorted=False).values.min()
    candidates = (~(magnitude < bound)).nonzero().view(-1)  # [a little more than k]; NaN is not below anything
    if candidates.numel() < k:
        return reference.top_k(acc, k)
    largest = reference.top_k(acc[candidates], k)
    return Sparse(candidates[largest.index.long()].to(torch.int32), largest.value, n)
