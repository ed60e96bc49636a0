"""The specification of the kernels on whole vectors, in plain torch: short and slow. Other backends are compared with it bit for bit.

Selections and sparse vectors are in `sparse_reference`, codecs in `codec_reference` and `value_reference`.
"""

import torch
from torch import Tensor

from sparsync.core import Sparse


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> bool:
    """Write residual + grad to `out` [n], and return whether it is finite everywhere."""
    torch.add(residual, grad, out=out)
    return all_finite(out)


def accumulate_top_k(
    residual: Tensor, grad: Tensor, k: int, out: Tensor, bound: float | None = None
) -> tuple[Sparse, bool]:
    """Write residual + grad to `out` [n], and return its `top_k` and whether it is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return top_k(out, k), finite


def top_k(x: Tensor, k: int, bound: float | None = None) -> Sparse:
    """Return the `k` elements of `x` [n] of largest magnitude; among equal magnitudes the ones that come first. Positions ascend.

    NaN counts as larger than any number, so that a non-finite element is always among the selected. `bound` is a hint for faster backends.
    """
    n = x.numel()
    if k == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], n)
    magnitude = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    index = argtopk(magnitude, k)
    return Sparse(index.to(torch.int32), x[index], n)


def argtopk(magnitude: Tensor, k: int) -> Tensor:
    """Return the positions of the `k` largest of `magnitude` [n], int64, ascending; among equal ones those that come first. No NaN."""
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitude.device)
    threshold = magnitude.topk(k, sorted=False).values.min()
    larger = (magnitude > threshold).nonzero().view(-1)  # a host sync: how many there are depends on the data
    equal = (magnitude == threshold).nonzero().view(-1)[: k - larger.numel()]
    return torch.cat([larger, equal]).sort().values


def all_finite(x: Tensor) -> bool:
    """Return whether `x` [n] holds neither NaN nor Inf."""
    return bool(x.isfinite().all())  # a host sync: what is sent depends on it


def scatter_add_(out: Tensor, part: Sparse) -> None:
    """Add the elements of `part` to `out` [n]. Positions in `part` are distinct, so the result does not depend on their order."""
    out.index_add_(0, check_inside(part.index, out), part.value.to(out.dtype))


def clear_(x: Tensor, index: Tensor) -> None:
    """Set `x` [n] to zero at the positions `index` [k]."""
    x.index_fill_(0, check_inside(index, x), 0.0)


def put_(x: Tensor, index: Tensor, value: Tensor) -> None:
    """Set `x` [n] to `value` [k] at the positions `index` [k], distinct or with equal values."""
    x.index_copy_(0, check_inside(index, x), value.to(x.dtype))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the elements of `x` [n] at the positions `index` [k]."""
    return x.index_select(0, check_inside(index, x))


def smallest_magnitude(x: Tensor) -> float:
    """Return the smallest |x|; NaN where there is one, 0 where there are no elements."""
    return float(x.abs().min()) if x.numel() else 0.0  # a host sync


def outside(index: Tensor, n: int) -> str:
    """Return the message of the IndexError for positions `index` [k] of which some lie outside of [0, n)."""
    return f"positions must be in [0, {n}) for {n} elements, got {int(index.min())} to {int(index.max())}"


def check_inside(index: Tensor, x: Tensor) -> Tensor:
    """Return `index` as int64. Raises IndexError where a position is outside of `x`, and TypeError where it is no integer."""
    if index.is_floating_point() or index.dtype == torch.bool:
        raise TypeError(f"positions must be integers such as int32, got {index.dtype}")
    if not bool(
        ((index >= 0) & (index < x.numel())).all()
    ):  # a host sync; torch would count negative ones from the end
        raise IndexError(outside(index, x.numel()))
    return index.long()
