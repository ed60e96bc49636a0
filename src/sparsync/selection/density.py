"""How many elements a density stands for."""

from numbers import Real


def count_for(density: float, n: int) -> int:
    """Return k = density * n rounded down, but at least one element of a bucket that has any."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_density(density: object) -> None:
    """Raise ValueError unless `density` is a number with 0 < density <= 1."""
    if isinstance(density, bool) or not isinstance(density, Real):
        raise ValueError(
            f"density must be a number in (0, 1], the share of elements to send, got {density!r} of type {type(density).__name__}"
        )
    if not 0 < float(density) <= 1:
        raise ValueError(f"density must be in (0, 1], the share of elements to send, got {density}")
