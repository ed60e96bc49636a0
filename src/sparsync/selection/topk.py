"""Exact selection of a share of the elements."""

from jaxtyping import Float
from torch import Tensor

from sparsync import kernels
from sparsync.core import Sparse

WARM = 0.97  # of the smallest magnitude of a step, where to look first at the next; a guess, which changes no result


def count_for(density: float, n: int) -> int:
    """k = density * n rounded down, but at least one element of a bucket that has any."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_density(density: float) -> None:
    """Raises ValueError unless 0 < density <= 1."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], the share of elements to send, got {density}")


def select_top(acc: Float[Tensor, " n"], density: float) -> Sparse:
    """The largest `density` of `acc` [n] by magnitude; among equal magnitudes the ones that come first; NaN before everything."""
    return kernels.top_k(acc, count_for(density, acc.numel()))
