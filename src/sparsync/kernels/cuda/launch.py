"""Launching Triton kernels: which tensors are taken, the size of a block, and how one is loaded and stored."""

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

BLOCK = 2048  # elements for one program of a pass over a whole vector
WARPS = 8  # of such a program: 8 elements a thread, so few that four programs share a processor, and some load while others wait
R = TypeVar("R")
PASS = {"BLOCK": BLOCK, "num_warps": WARPS}  # how such programs are launched

FLOAT32 = frozenset({torch.float32})
GRADIENT = frozenset({torch.float32, torch.bfloat16, torch.float16})
POSITIONS = frozenset({torch.int32, torch.int64})
BYTES = frozenset({torch.uint8})


class _Devices:
    """Whether tensors of any device are taken, as the interpreter can, or only those on a GPU."""

    any = False


def take_tensors_of_any_device(wanted: bool) -> None:
    """Take tensors of any device from now on, because the backend "triton" was asked for, or only those on a GPU."""
    _Devices.any = wanted


def takes(*kinds: frozenset[torch.dtype]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Make a function return NotImplemented unless the tensors among its arguments are of these types, and on a GPU.

    `kinds` are the types of each tensor in order, those of a Sparse being its positions and its values; they repeat for a list of Sparse.
    The device of the tensors is made the current one, which Triton launches on; on that device's current stream.
    """

    def decorated(function: Callable[..., R]) -> Callable[..., R]:
        @wraps(function)
        def checked(*arguments: Any) -> Any:  # Any: whatever the function takes
            tensors = list(_tensors(arguments))
            fitting = all(each.dtype in kind for each, kind in zip(tensors, cycle(kinds), strict=False))
            if not fitting or not takes_all(tensors):
                return NotImplemented
            with torch.cuda.device_of(tensors[0]):  # does nothing for a tensor of the interpreter
                return function(*arguments)

        return checked

    return decorated


def takes_all(tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors, of any types, lie on one device that is taken, and are plain vectors; false for none."""
    if not tensors:
        return False
    device = tensors[0].device
    return (device.type == "cuda" or _Devices.any) and all(
        each.device == device and each.dim() == 1 and each.is_contiguous() and each.numel() < 2**31 for each in tensors
    )


def on_one_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether these tensors, of any types and shapes, lie on one device that is taken; false for none."""
    devices = {each.device for each in tensors}
    return len(devices) == 1 and (_Devices.any or devices.pop().type == "cuda")


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:  # Any: the arguments of a kernel
    for each in arguments:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, Sparse):
            yield from (each.index, each.value)
        elif isinstance(each, list | tuple):
            yield from _tensors(each)


def bits_of(threshold: float) -> int | None:
    """Return the bits of the float32 nearest to `threshold`, 0 for a negative one, None for NaN."""
    if threshold != threshold:
        return None
    return max(0, int(torch.tensor(threshold, dtype=torch.float64, device="cpu").to(torch.float32).view(torch.int32)))


def programs(n: int, block: int = BLOCK) -> tuple[int]:
    """Return a grid of one program for each block of `n` elements."""
    return (triton.cdiv(n, block),)


def table(values: Sequence[int | float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a vector of numbers that a kernel reads on `device`. Nobody waits for the copy, and the same numbers are copied once."""
    return _table(tuple(values), dtype, device, stream_of(device))


def stream_of(device: torch.device) -> int:
    """Return the current stream of a device: what was copied on one stream may not be there on others."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


@lru_cache(maxsize=256)
def _table(values: tuple[int | float, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    host = torch.tensor(values, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """Return 0, 1, ... BLOCK - 1, four after each other in a thread, whatever the type that is loaded.

    Numbers of 16 bits then meet those of 32 where they are, without a way through shared memory.
    """
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def loaded(x, lane, left, BLOCK: tl.constexpr):
    """Return the first `left` elements of a block, and zeros behind them.

    Whole blocks are loaded without a mask: one that is not known to be equal for four neighbours would make four loads of one.
    """
    if left >= BLOCK:  # noqa: SIM108  # a branch: only one of the two is done
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
    """Return where the position `place` lies in the block of `left` elements that begins at `first`: 0 before it, `left` behind it."""
    return tl.minimum(tl.maximum(place - first, 0), left).to(tl.int32)


@triton.jit
def magnitude(x):
    """Return the bits of |x|, int32: they order as the numbers do, and NaN comes above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rank_key(x):
    """Return the rank key of each element, int32: the bits of |x|, with NaN as infinity."""
    return tl.minimum(magnitude(x), 0x7F800000)
