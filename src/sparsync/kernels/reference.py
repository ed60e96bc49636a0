"""The specification of every kernel, in plain torch: short and slow. Faster backends are compared with it bit for bit."""

import torch
from torch import Tensor

from sparsync.core import Span, Sparse

LEVELS = 0x7F80  # the upper 16 bits of a finite magnitude in float32 are below this


def accumulate(residual: Tensor, grad: Tensor, out: Tensor) -> bool:
    """Whether residual + grad, which is written to `out` [n], is finite everywhere."""
    torch.add(residual, grad, out=out)
    return all_finite(out)


def accumulate_select_(residual: Tensor, grad: Tensor, threshold: float, span: Span) -> tuple[Sparse, bool]:
    """What of residual + grad [n] reaches `threshold` in magnitude inside `span`, and whether the sum is finite everywhere.

    `residual` becomes the sum, with zeros where it was selected. Where the sum is not finite it stays as it was there, and nothing is
    selected.
    """
    acc = residual + grad
    finite = acc.isfinite()
    inside = torch.zeros_like(finite)
    inside[span.start : span.stop] = True
    chosen = (acc.abs() >= threshold) & finite & inside
    index = chosen.nonzero().view(-1)  # a host sync: how many are above depends on the data
    residual.copy_(torch.where(finite, acc.masked_fill(chosen, 0.0), residual))
    return Sparse(index.to(torch.int32), acc[index], acc.numel()), bool(finite.all())


def accumulate_top_k(residual: Tensor, grad: Tensor, k: int, out: Tensor) -> tuple[Sparse, bool]:
    """`top_k` of residual + grad, which is written to `out` [n], and whether it is finite everywhere."""
    finite = accumulate(residual, grad, out)
    return top_k(out, k), finite


def top_k(x: Tensor, k: int) -> Sparse:
    """The `k` elements of `x` [n] of largest magnitude; among equal magnitudes the ones that come first. Positions ascend.

    NaN counts as larger than any number, so that a poisoned element is always sent and every rank hears of it.
    Raises ValueError when `k` is not in [0, n].
    """
    n = x.numel()
    if not 0 <= k <= n:
        raise ValueError(f"k must be in [0, {n}] for {n} elements, got {k}")
    if k == 0:
        return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], n)
    magnitude = x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    threshold = magnitude.topk(k, sorted=False).values.min()
    above = (magnitude > threshold).nonzero().view(-1)  # a host sync: how many are above depends on the data
    if above.numel() < k:
        level = (magnitude == threshold).nonzero().view(-1)[: k - above.numel()]
        above = torch.cat([above, level]).sort().values
    return Sparse(above.to(torch.int32), x[above], n)


def argtopk(magnitude: Tensor, k: int) -> Tensor:
    """The positions of the `k` largest of `magnitude` [n], int64, ascending; among equal ones those that come first. No NaN.

    Raises ValueError when `k` is not in [0, n].
    """
    n = magnitude.numel()
    if not 0 <= k <= n:
        raise ValueError(f"k must be in [0, {n}] for {n} elements, got {k}")
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=magnitude.device)
    threshold = magnitude.topk(k, sorted=False).values.min()
    above = (magnitude > threshold).nonzero().view(-1)  # a host sync: how many are above depends on the data
    level = (magnitude == threshold).nonzero().view(-1)[: k - above.numel()]
    return torch.cat([above, level]).sort().values


def all_finite(x: Tensor) -> bool:
    """Whether `x` [n] holds neither NaN nor Inf."""
    return bool(x.isfinite().all())  # a host sync: what is sent depends on it


def scatter_add_(out: Tensor, part: Sparse) -> None:
    """Adds the elements of `part` to `out` [n]. Positions in `part` are distinct, so the result does not depend on their order."""
    out.index_add_(0, part.index.long(), part.value.to(out.dtype))


def clear_(x: Tensor, index: Tensor) -> None:
    """Sets `x` [n] to zero at the positions `index` [k]."""
    x.index_fill_(0, index.long(), 0.0)


def put_(x: Tensor, index: Tensor, value: Tensor) -> None:
    """Sets `x` [n] to `value` [k] at the positions `index` [k], distinct or with equal values."""
    x.index_copy_(0, index.long(), value.to(x.dtype))


def gather(x: Tensor, index: Tensor) -> Tensor:
    """The elements of `x` [n] at the positions `index` [k]."""
    return x.index_select(0, index.long())


def move_(to: Tensor, source: Tensor) -> None:
    """Copies `source` [n] to `to` and sets it to zero."""
    to.copy_(source)
    source.zero_()


def histogram(magnitude: Tensor) -> Tensor:
    """How many of `magnitude` [n] have each value of the upper 16 bits of a float32, int64 [LEVELS]; negative ones do not count.

    What exceeds float32, and NaN, counts as its largest number.
    """
    limit = torch.finfo(torch.float32).max
    level = magnitude.nan_to_num(nan=limit).clamp(max=limit).to(torch.float32).view(torch.int32) >> 16
    return torch.bincount(level.clamp(min=-1) + 1, minlength=LEVELS + 1)[1:]
