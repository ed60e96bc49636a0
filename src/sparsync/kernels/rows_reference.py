"""The specification of the kernels on elements that lie in rows all over a vector, in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsync.core import Rows, Sparse
from sparsync.kernels.candidates import top_k
from sparsync.kernels.reference import accumulate, gather, outside


def locate(rows: Rows, place: Tensor) -> Tensor:
    """Return the position in the vector of each `place` [k] in rows, in the type of `place`."""
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


def top_k_of_rows(x: Tensor, rows: Rows, k: int, bound: float | None = None) -> Sparse:
    """Return the `top_k` of the elements of `x` [n] in rows; positions are places."""
    return top_k(of_rows(x, rows), k)


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> tuple[list[Sparse], bool]:
    """Write residual + grad to `out` [n], and return the `top_k_of_rows` of each region and whether the sum is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return [top_k_of_rows(out, rows, k) for rows, k in zip(regions, counts, strict=True)], finite
