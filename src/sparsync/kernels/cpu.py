"""The C++ kernels: what is checked, converted and allocated around a call of `_cpu`. Users call `sparsync.kernels` instead.

`Native` is a C++ module and the instruction set to run. Tensors are float32, one-dimensional, contiguous and in this machine's memory
where nothing else is said; the caller has made sure of it.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from sparsync.core import Span, Sparse

Native = tuple[ModuleType, str]

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
INFINITY, ANY = 0x7F800000, 0x7FFFFFFF  # magnitudes as the bits of a float32; above infinity there is NaN
NONE = (INFINITY, 0)  # a range of magnitudes that holds none


def bits_of(threshold: float) -> int | None:
    """The bits of the float32 nearest to `threshold`, 0 for a negative one, None for NaN."""
    if threshold != threshold:
        return None
    return max(0, int(torch.tensor(threshold, dtype=torch.float64, device="cpu").to(torch.float32).view(torch.int32)))


def plain_(native: Native, a: Tensor, b: Tensor, threads: int) -> None:
    """Adds `a` to `b`: the pass over 12 bytes an element that others are measured against."""
    module, level = native
    module.plain(level, a.data_ptr(), b.data_ptr(), a.numel(), threads)


def all_finite(native: Native, x: Tensor) -> bool:
    module, level = native
    return module.largest(level, x.data_ptr(), x.numel()) < INFINITY


def accumulate(native: Native, residual: Tensor, grad: Tensor, out: Tensor, threads: int) -> bool:
    module, level = native
    kind = TYPES[grad.dtype]
    most = module.add(level, residual.data_ptr(), grad.data_ptr(), kind, out.data_ptr(), out.numel(), threads)
    return most < INFINITY


def accumulate_select_(
    native: Native, residual: Tensor, grad: Tensor, threshold: float, span: Span, threads: int
) -> tuple[Sparse, bool]:
    module, level = native
    low = bits_of(threshold)
    bounds = NONE if low is None else (low, INFINITY - 1)
    n, kind = residual.numel(), TYPES[grad.dtype]
    count, most = module.add_take(
        level, residual.data_ptr(), grad.data_ptr(), kind, n, span.start, span.stop, *bounds, threads
    )
    return _taken(native, count, n), most < INFINITY


def accumulate_top_k(
    native: Native,
    residual: Tensor,
    grad: Tensor,
    k: int,
    out: Tensor,
    bound: float | None,
    threads: int,
    skip: Span | None = None,
    zeros: bool = True,
) -> tuple[Sparse, bool]:
    module, level = native
    n, kind = out.numel(), TYPES[grad.dtype]
    span, lowest = (n, n) if skip is None else (skip.start, skip.stop), 0 if zeros else 1
    addresses = residual.data_ptr(), grad.data_ptr(), kind, out.data_ptr()
    count, most = module.add_top(level, *addresses, n, *span, k, lowest, *_guess(bound), threads)
    return _taken(native, count, n), most < INFINITY


def above(native: Native, x: Tensor, threshold: float, threads: int) -> Sparse:
    low = bits_of(threshold)
    return _in_range(native, x, *(NONE if low is None else (low, INFINITY)), threads)


def select_ge(native: Native, x: Tensor, threshold: float, threads: int) -> Sparse:
    low = bits_of(threshold)
    return _in_range(native, x, *(NONE if low is None else (max(1, low), ANY)), threads)


def top_k(
    native: Native, x: Tensor, k: int, bound: float | None, threads: int, skip: Span | None = None, zeros: bool = True
) -> Sparse:
    module, level = native
    n = x.numel()
    start, stop = (n, n) if skip is None else (skip.start, skip.stop)
    lowest = 0 if zeros else 1
    count = module.top(level, x.data_ptr(), n, start, stop, k, False, lowest, *_guess(bound), threads)
    return _taken(native, count, n)


def argtopk(native: Native, magnitude: Tensor, k: int) -> Tensor:
    module, level = native
    n = magnitude.numel()
    lowest = -(2**31)
    count = module.top(level, magnitude.data_ptr(), n, n, n, k, True, lowest, False, 0, 1)
    index = _new(count, torch.int64)
    module.take_wide(index.data_ptr(), 0)
    return index


def histogram(native: Native, magnitude: Tensor, levels: int) -> Tensor:
    counts = _new(levels, torch.int64)
    native[0].histogram(magnitude.data_ptr(), magnitude.numel(), counts.data_ptr())
    return counts


def scatter_add_(native: Native, out: Tensor, part: Sparse) -> None:
    index, wide = part.index, part.index.dtype == torch.int64
    if not native[0].scatter_add(
        out.data_ptr(), out.numel(), index.data_ptr(), wide, part.value.data_ptr(), index.numel()
    ):
        raise IndexError(outside(index, out))


def clear_(native: Native, x: Tensor, index: Tensor) -> None:
    if not native[0].clear(x.data_ptr(), x.numel(), index.data_ptr(), index.dtype == torch.int64, index.numel()):
        raise IndexError(outside(index, x))


def put_(native: Native, x: Tensor, index: Tensor, value: Tensor) -> None:
    wide = index.dtype == torch.int64
    if not native[0].put(x.data_ptr(), x.numel(), index.data_ptr(), wide, value.data_ptr(), index.numel()):
        raise IndexError(outside(index, x))


def gather(native: Native, x: Tensor, index: Tensor) -> Tensor:
    value = _new(index.numel(), torch.float32)
    wide = index.dtype == torch.int64
    if not native[0].gather(x.data_ptr(), x.numel(), index.data_ptr(), wide, value.data_ptr(), index.numel()):
        raise IndexError(outside(index, x))
    return value


def move_(native: Native, to: Tensor, source: Tensor) -> None:
    native[0].move(to.data_ptr(), source.data_ptr(), to.numel())


def merged(native: Native, parts: Sequence[Sparse], add: bool) -> Sparse:
    total = sum(part.index.numel() for part in parts)
    index, value = _new(total, torch.int32), _new(total, torch.float32)
    pieces = [(part.index.data_ptr(), part.value.data_ptr(), part.index.numel()) for part in parts]
    if add:
        total = native[0].merge_and_add(pieces, index.data_ptr(), value.data_ptr())
    else:
        native[0].merge(pieces, index.data_ptr(), value.data_ptr())
    return Sparse(index[:total], value[:total], parts[0].length)


def ends(native: Native, index: Tensor, stops: Sequence[int]) -> list[int]:
    """How many of the ascending `index`, int32, lie below each of the ascending `stops`."""
    return native[0].split(index.data_ptr(), index.numel(), stops)


def isin(native: Native, index: Tensor, others: Tensor) -> Tensor:
    found = _new(index.numel(), torch.bool)
    native[0].among(index.data_ptr(), index.numel(), others.data_ptr(), others.numel(), found.data_ptr())
    return found


def _in_range(native: Native, x: Tensor, low: int, high: int, threads: int) -> Sparse:
    module, level = native
    count = module.select(level, x.data_ptr(), x.numel(), low, high, threads)
    return _taken(native, count, x.numel())


def _guess(bound: float | None) -> tuple[bool, int]:
    bits = None if bound is None else bits_of(bound)
    return (False, 0) if bits is None else (True, min(bits, INFINITY))


def _taken(native: Native, count: int, length: int) -> Sparse:
    """What the last call on this thread selected."""
    index, value = _new(count, torch.int32), _new(count, torch.float32)
    native[0].take(index.data_ptr(), value.data_ptr())
    return Sparse(index, value, length)


def _new(count: int, dtype: torch.dtype) -> Tensor:
    """Memory for the kernels to write to, whatever torch's default type and device are."""
    return torch.empty(count, dtype=dtype, device="cpu")


def outside(index: Tensor, x: Tensor) -> str:
    return (
        f"positions must be in [0, {x.numel()}) for {x.numel()} elements, got {int(index.min())} to {int(index.max())}"
    )
