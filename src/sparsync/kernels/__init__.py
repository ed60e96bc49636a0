"""The hot loops over whole vectors, one signature each; `reference` and `sparse_reference` are their specification in plain torch.

Each function runs on the backend that `backend()` names, and on the reference where that backend lacks the tensor's device or type: the
C++ one takes float32 in this machine's memory, and gradients in bfloat16 and float16 too; so does the Triton one on a GPU, where `move_`,
`isin`, `split` and `merge` are torch's own operations. Results are the same bits on every backend, but for the bits inside a NaN.
`threads` is for the C++ backend; the others do as torch does.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync.core import Span, Sparse
from sparsync.kernels import candidates, cpu, reference, sparse_reference
from sparsync.kernels.dispatch import backend, backends, native, on_triton, set_backend

__all__ = [
    "above",
    "accumulate",
    "accumulate_select_",
    "accumulate_top_k",
    "accumulate_top_k_nonzero",
    "all_finite",
    "argtopk",
    "backend",
    "backends",
    "clear_",
    "coalesce",
    "histogram",
    "isin",
    "merge",
    "move_",
    "scatter_add_",
    "select_ge",
    "set_backend",
    "split",
    "top_k",
    "top_k_nonzero",
]

_INTEGERS = (torch.int32, torch.int64)


def accumulate(
    residual: Float[Tensor, " n"], grad: Float[Tensor, " n"], out: Float[Tensor, " n"], threads: int = 1
) -> bool:
    """Whether residual + grad, which is written to `out`, is finite everywhere. `out` may be `residual`."""
    _check_threads(threads)
    found = _for_sum(residual, grad, out)
    if found is None:
        if triton := _triton(residual, out, grad=grad):
            return triton.accumulate(residual, grad, out)
        return reference.accumulate(residual, grad, out)
    return cpu.accumulate(found, residual, grad, out, threads)


def accumulate_select_(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    threshold: float,
    span: Span | None = None,
    threads: int = 1,
) -> tuple[Sparse, bool]:
    """What of residual + grad reaches `threshold` in magnitude inside `span`, and whether the sum is finite everywhere.

    `residual` becomes the sum, with zeros where it was selected. Where the sum is not finite it stays as it was there, and nothing is
    selected. Without a span everything is looked at.
    """
    _check_threads(threads)
    n = residual.numel()
    span = Span(0, n) if span is None else span
    _check_span(span, n)
    found = _for_sum(residual, grad)
    if found is None:
        if triton := _triton(residual, grad=grad):
            return triton.accumulate_select_(residual, grad, threshold, span)
        return reference.accumulate_select_(residual, grad, threshold, span)
    return cpu.accumulate_select_(found, residual, grad, threshold, span, threads)


def accumulate_top_k(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    k: int,
    out: Float[Tensor, " n"],
    bound: float | None = None,
    threads: int = 1,
) -> tuple[Sparse, bool]:
    """`top_k` of residual + grad, which is written to `out`, and whether it is finite everywhere. `out` may be `residual`."""
    _check_threads(threads)
    _check_count(k, residual.numel())
    found = _for_sum(residual, grad, out)
    if found is None:
        if triton := _triton(residual, out, grad=grad):
            return triton.accumulate_top_k(residual, grad, k, out, bound)
        finite = accumulate(residual, grad, out)
        return top_k(out, k, bound), finite
    return cpu.accumulate_top_k(found, residual, grad, k, out, bound, threads)


def accumulate_top_k_nonzero(
    residual: Float[Tensor, " n"],
    grad: Float[Tensor, " n"],
    k: int,
    out: Float[Tensor, " n"],
    skip: Span | None = None,
    bound: float | None = None,
    threads: int = 1,
) -> tuple[Sparse, bool]:
    """`top_k_nonzero` of residual + grad, which is written to `out`, and whether it is finite everywhere. `out` may be `residual`."""
    _check_threads(threads)
    _check_span(skip or Span(0, 0), residual.numel())
    found = _for_sum(residual, grad, out)
    if found is None:
        if k >= 0 and (triton := _triton(residual, out, grad=grad)):
            return triton.accumulate_top_k_nonzero(residual, grad, k, out, skip, bound)
        finite = accumulate(residual, grad, out)
        return top_k_nonzero(out, k, skip, bound), finite
    return cpu.accumulate_top_k(found, residual, grad, k, out, bound, threads, skip, zeros=False)


def all_finite(x: Float[Tensor, " n"]) -> bool:
    """Whether `x` holds neither NaN nor Inf."""
    found = _for(x)
    if found is None:
        triton = _triton(grad=x)
        return triton.all_finite(x) if triton else reference.all_finite(x)
    return cpu.all_finite(found, x)


def above(x: Float[Tensor, " n"], threshold: float, threads: int = 1) -> Sparse:
    """The elements of `x` whose magnitude is `threshold` or more, zeros included where that is 0. NaN is not; positions ascend."""
    _check_threads(threads)
    found = _for(x)
    if found is None:
        triton = _triton(x)
        return triton.above(x, threshold) if triton else sparse_reference.above(x, threshold)
    return cpu.above(found, x, threshold, threads)


def select_ge(x: Float[Tensor, " n"], threshold: float, threads: int = 1) -> Sparse:
    """The non-zero elements of `x` whose magnitude is `threshold` or more, NaN as infinity. Positions ascend."""
    _check_threads(threads)
    found = _for(x)
    if found is None:
        triton = _triton(x)
        return triton.select_ge(x, threshold) if triton else sparse_reference.select_ge(x, threshold)
    return cpu.select_ge(found, x, threshold, threads)


def top_k(x: Float[Tensor, " n"], k: int, bound: float | None = None, threads: int = 1) -> Sparse:
    """The `k` elements of `x` of largest magnitude; among equal magnitudes the ones that come first. Positions ascend.

    NaN counts as infinity. `bound` is a magnitude that k elements, and not many more, are expected to reach, such as a little less than
    the last step's smallest; it changes how long this takes and nothing else. Raises ValueError when `k` is not in [0, n].
    """
    _check_threads(threads)
    _check_count(k, x.numel())
    found = _for(x)
    if found is None:
        triton = _triton(x)
        return triton.top_k(x, k, bound) if triton else candidates.top_k(x, k)
    return cpu.top_k(found, x, k, bound, threads)


def top_k_nonzero(
    x: Float[Tensor, " n"], k: int, skip: Span | None = None, bound: float | None = None, threads: int = 1
) -> Sparse:
    """What `top_k` would select outside the span `skip`, without zeros: fewer than `k` elements where fewer are not zero."""
    _check_threads(threads)
    _check_span(skip or Span(0, 0), x.numel())
    found = _for(x)
    if found is None:
        triton = _triton(x) if k >= 0 else None
        return triton.top_k_nonzero(x, k, skip, bound) if triton else sparse_reference.top_k_nonzero(x, k, skip)
    return cpu.top_k(found, x, k, bound, threads, skip, zeros=False)


def argtopk(magnitude: Float[Tensor, " n"], k: int) -> Int[Tensor, " k"]:
    """The positions of the `k` largest of `magnitude`, int64, ascending; among equal ones those that come first. No NaN.

    Numbers may be negative. Raises ValueError when `k` is not in [0, n].
    """
    _check_count(k, magnitude.numel())
    found = _for(magnitude)
    if found is None:
        triton = _triton(magnitude)
        return triton.argtopk(magnitude, k) if triton else reference.argtopk(magnitude, k)
    return cpu.argtopk(found, magnitude, k)


def histogram(magnitude: Float[Tensor, " n"]) -> Int[Tensor, " levels"]:
    """How many of `magnitude` have each value of the upper 16 bits of a float32, int64; negative ones do not count.

    What exceeds float32, and NaN, counts as its largest number.
    """
    found = _for(magnitude)
    if found is None:
        triton = _triton(magnitude)
        return triton.histogram(magnitude) if triton else reference.histogram(magnitude)
    return cpu.histogram(found, magnitude, reference.LEVELS)


def scatter_add_(out: Float[Tensor, " n"], part: Sparse) -> None:
    """Adds the elements of `part` to `out`. Raises IndexError, before anything is written, for positions outside of it."""
    found = _for(out, part.value) if _plain(part.index) else None
    if found is None:
        (_triton_at(part.index, out, part.value) or reference).scatter_add_(out, part)
    else:
        cpu.scatter_add_(found, out, part)


def clear_(x: Float[Tensor, " n"], index: Int[Tensor, " k"]) -> None:
    """Sets `x` to zero at the positions `index`. Raises IndexError, before anything is written, for positions outside of it."""
    found = _for(x) if _plain(index) else None
    if found is None:
        (_triton_at(index, x) or reference).clear_(x, index)
    else:
        cpu.clear_(found, x, index)


def put_(x: Float[Tensor, " n"], index: Int[Tensor, " k"], value: Float[Tensor, " k"]) -> None:
    """Sets `x` to `value` at the positions `index`, distinct or with equal values.

    Raises IndexError, before anything is written, for positions outside of it.
    """
    if value.shape != index.shape:
        raise ValueError(f"there must be a value for each position, got {value.numel()} for {index.numel()}")
    found = _for(x, value) if _plain(index) else None
    if found is None:
        (_triton_at(index, x, value) or reference).put_(x, index, value)
    else:
        cpu.put_(found, x, index, value)


def gather(x: Float[Tensor, " n"], index: Int[Tensor, " k"]) -> Float[Tensor, " k"]:
    """The elements of `x` at the positions `index`. Raises IndexError for positions outside of it."""
    found = _for(x) if _plain(index) else None
    return (_triton_at(index, x) or reference).gather(x, index) if found is None else cpu.gather(found, x, index)


def move_(to: Float[Tensor, " n"], source: Float[Tensor, " n"]) -> None:
    """Copies `source` to `to`, which does not overlap with it, and sets it to zero."""
    if to.shape != source.shape:
        raise ValueError(
            f"what is moved must have the shape of its new place, got {tuple(source.shape)} and {tuple(to.shape)}"
        )
    found = _for(to, source)
    if found is None:
        reference.move_(to, source)
    else:
        cpu.move_(found, to, source)


def merge(parts: Sequence[Sparse]) -> Sparse:
    """All elements of `parts`, which have no position in common, as one; positions ascend."""
    found = _for_parts(parts)
    return sparse_reference.merge(parts) if found is None else cpu.merged(found, parts, add=False)


def coalesce(parts: Sequence[Sparse]) -> Sparse:
    """The sum of `parts` as one, added in their order, starting from 0; positions ascend."""
    found = _for_parts(parts)
    if found is None:
        triton = _triton(*(part.value for part in parts))
        return triton.coalesce(parts) if triton else sparse_reference.coalesce(parts)
    return cpu.merged(found, parts, add=True)


def split(part: Sparse, regions: Sequence[Span]) -> list[Sparse]:
    """`part` cut at adjacent `regions` that cover it; positions become relative to the start of their region."""
    found = _for_parts([part])
    if found is None:
        return sparse_reference.split(part, regions)
    return sparse_reference.cut(part, regions, cpu.ends(found, part.index, [region.stop for region in regions]))


def isin(index: Int[Tensor, " a"], others: Int[Tensor, " b"]) -> Tensor:
    """Whether each of `index` is one of the ascending `others`, bool [a]."""
    found = native(index, others) if index.dtype == others.dtype == torch.int32 else None
    return sparse_reference.isin(index, others) if found is None else cpu.isin(found, index, others)


def _plain(index: Tensor) -> bool:
    return index.dtype in _INTEGERS and index.is_contiguous() and index.device.type == "cpu"


def _for(*tensors: Tensor) -> cpu.Native | None:
    return native(*tensors) if all(each.dtype == torch.float32 for each in tensors) else None


def _triton(*tensors: Tensor, grad: Tensor | None = None) -> ModuleType | None:
    if any(each.dtype != torch.float32 for each in tensors) or (grad is not None and grad.dtype not in cpu.TYPES):
        return None
    return on_triton(*tensors, *([] if grad is None else [grad]))


def _triton_at(index: Tensor, *tensors: Tensor) -> ModuleType | None:
    """The Triton kernels, where they take these positions and vectors, which may be of 16 bits too."""
    if index.dtype not in _INTEGERS or any(each.dtype not in cpu.TYPES for each in tensors):
        return None
    return on_triton(index, *tensors)


def _for_sum(residual: Tensor, grad: Tensor, *out: Tensor) -> cpu.Native | None:
    for each in (grad, *out):
        if each.shape != residual.shape:
            raise ValueError(
                f"residual, gradient and result must have one shape, got {tuple(residual.shape)} and {tuple(each.shape)}"
            )
    if grad.dtype not in cpu.TYPES or not grad.is_contiguous():
        return None
    return _for(residual, *out) if native(grad) is not None else None


def _for_parts(parts: Sequence[Sparse]) -> cpu.Native | None:
    if any(part.index.dtype != torch.int32 or not part.index.is_contiguous() for part in parts):
        return None
    return _for(*(part.value for part in parts))


def _check_threads(threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")


def _check_count(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"k must be in [0, {n}] for {n} elements, got {k}")


def _check_span(span: Span, n: int) -> None:
    if not 0 <= span.start <= span.stop <= n:
        raise ValueError(f"a span of {n} elements must lie in [0, {n}], got [{span.start}, {span.stop})")
