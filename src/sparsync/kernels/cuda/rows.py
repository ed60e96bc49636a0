"""Selecting from elements in rows: they are copied together by torch, then ranked by the kernels of whole vectors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sparsync.core import Rows
from sparsync.kernels.cuda.exact_top_k import top_k
from sparsync.kernels.cuda.passes import accumulate
from sparsync.kernels.reference import of_rows

# Any: what the signature in `operations` says, or NotImplemented for what Triton does not take.


def top_k_of_rows(x: Tensor, rows: Rows, k: int, bound: float | None = None) -> Any:
    return top_k(of_rows(x, rows), k, bound)


def accumulate_top_k_of_rows(
    residual: Tensor,
    grad: Tensor,
    regions: Sequence[Rows],
    counts: Sequence[int],
    out: Tensor,
    bounds: Sequence[float | None],
) -> Any:
    finite = accumulate(residual, grad, out)
    if finite is NotImplemented:
        return NotImplemented
    return [top_k_of_rows(out, *each) for each in zip(regions, counts, bounds, strict=True)], finite
