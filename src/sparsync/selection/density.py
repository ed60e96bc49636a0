"""How many elements a density stands for."""


def count_for(density: float, n: int) -> int:
    """Return k = density * n rounded down, but at least one element of a bucket that has any."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_density(density: float) -> None:
    """Raise ValueError unless 0 < density <= 1."""
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], the share of elements to send, got {density}")
