"""Helpers to launch Triton kernels: checks of tensors, the block size, and loads and stores of blocks."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, wraps
from itertools import cycle
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Sparse

BLOCK = 2048  # elements per program of a pass over a whole vector
WARPS = 8  # warps of such a program: 8 elements per thread, so that four programs share a processor and some load while others wait
R = TypeVar("R")
PASS = {"BLOCK": BLOCK, "num_warps": WARPS}  # launch options of such programs

FLOAT32 = frozenset({torch.float32})
GRADIENT = frozenset({torch.float32, torch.bfloat16, torch.float16})
POSITIONS = frozenset({torch.int32, torch.int64})
BYTES = frozenset({torch.uint8})


class _Devices:
    """Whether kernels support tensors of any device, as the interpreter does, or only those on a GPU."""

    any = False


def take_tensors_of_any_device(wanted: bool) -> None:
    """Support tensors of any device from now on, for the backend "triton", or only those on a GPU."""
    _Devices.any = wanted


def takes(*kinds: frozenset[torch.dtype]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a function return NotImplemented unless the tensors among its arguments are of these types, and on a GPU.

    `kinds` are the types of the tensors in order, a Sparse counting as positions and values; they repeat for a list of Sparse.
    The device of the tensors becomes current, because Triton launches on the current device and its current stream.
    """

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def checked(*arguments: Any) -> Any:  # Any: whatever the function takes
            tensors = list(_tensors(arguments))
            fitting = all(tensor.dtype in kind for tensor, kind in zip(tensors, cycle(kinds), strict=False))
            if not fitting or not takes_all(tensors):
                return NotImplemented
            with torch.cuda.device_of(tensors[0]):  # does nothing for a tensor of the interpreter
                return function(*arguments)

        return checked

    return decorated


def takes_all(tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors, of any types, are contiguous vectors on one supported device; false for none."""
    if not tensors:
        return False
    device = tensors[0].device
    return (device.type == "cuda" or _Devices.any) and all(
        tensor.device == device and tensor.dim() == 1 and tensor.is_contiguous() and tensor.numel() < 2**31
        for tensor in tensors
    )


def on_one_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors, of any types and shapes, are on one supported device; false for none."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == 1 and (_Devices.any or devices.pop().type == "cuda")


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:  # Any: the arguments of a kernel
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, Sparse):
            yield from (argument.index, argument.value)
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def bits_of(threshold: float) -> int | None:
    """Return the bits of the float32 nearest to `threshold`, 0 for a negative one, None for NaN."""
    if threshold != threshold:
        return None
    return max(0, int(torch.tensor(threshold, dtype=torch.float64, device="cpu").to(torch.float32).view(torch.int32)))


def programs(n: int, block: int = BLOCK) -> tuple[int]:
    """Return a grid with one program per block of `n` elements."""
    return (triton.cdiv(n, block),)


def table(values: Sequence[int | float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a vector on `device`, without a host sync; the same numbers are copied once."""
    return _table(tuple(values), dtype, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the current stream of a device: a copy on one stream may not have finished for others."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(maxsize=256)
def _table(values: tuple[int | float, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """Return 0, 1, ... BLOCK - 1, four adjacent ones per thread for every type.

    Then 16-bit and 32-bit numbers of an element are in the same thread, without shared memory.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def loaded(x, lane, left, BLOCK: tl.constexpr):
    """Load the first `left` elements of a block, and zeros after them.

    Whole blocks are loaded without a mask, because with one that may differ between neighbours a load of four becomes four loads.
    """
    if left >= BLOCK:  # noqa: SIM108  # a branch, which runs only one of the two
        value = tl.load(x + lane)
    else:
        value = tl.load(x + lane, mask=lane < left, other=0)
    return value


@triton.jit
def store(x, lane, value, left, BLOCK: tl.constexpr):
    """Write the first `left` elements of a block; whole blocks without a mask, as `loaded` does."""
    if left >= BLOCK:
        tl.store(x + lane, value)
    else:
        tl.store(x + lane, value, mask=lane < left)


@triton.jit
def local(place, first, left):
    """Convert the position `place` to a place in the block of `left` elements at `first`: 0 before it, `left` after it."""
    return tl.minimum(tl.maximum(place - first, 0), left).to(tl.int32)


@triton.jit
def magnitude(x):
    """Return the bits of |x|, int32, which have the order of the numbers, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rank_key(x):
    """Compute rank keys, int32: the bits of |x|, with NaN as infinity."""
    return tl.minimum(magnitude(x), 0x7F800000)
