"""What all Triton kernels share: the size of a block, how one is loaded and stored, and on which device it is launched."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements that one program of a pass over a whole vector looks at
WARPS = 8  # of such a program: 8 elements a thread, so few that four programs share a processor, and some load while others wait
P = ParamSpec("P")
R = TypeVar("R")
PASS = {"BLOCK": BLOCK, "num_warps": WARPS}  # how such programs are launched
ONE_WARP = {"num_warps": 1}
INFINITY, ANY = 0x7F800000, 0x7FFFFFFF  # magnitudes as the bits of a float32; above infinity there is NaN


def on_its_device(function: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`function`, with the device of its first argument the current one, which Triton launches on; on that device's current stream."""

    @wraps(function)
    def guarded(x: Tensor, *others: P.args, **named: P.kwargs) -> R:
        with torch.cuda.device_of(x):  # does nothing for a tensor of the interpreter
            return function(x, *others, **named)

    return guarded


def programs(n: int, block: int = BLOCK) -> tuple[int]:
    """A grid of one program for each block of `n` elements."""
    return (triton.cdiv(n, block),)


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """0, 1, ... BLOCK - 1, four after each other in a thread, whatever the type that is loaded: numbers of 16 bits then meet those of 32
    where they are, without a way through shared memory."""
    return tl.max_contiguous(tl.arange(0, BLOCK), 4)


@triton.jit
def loaded(x, lane, left, BLOCK: tl.constexpr):
    """The elements of a block of which `left` are there, zeros behind them.

    Whole blocks are loaded without a mask: one that is not known to be alike for four neighbours would make four loads of one.
    """
    if left >= BLOCK:  # noqa: SIM108  # a branch: only one of the two is done
        value = tl.load(x + lane)
    else:
        value = tl.load(x + lane, mask=lane < left, other=0)
    return value


@triton.jit
def store(x, lane, value, left, BLOCK: tl.constexpr):
    """Writes a block of which `left` elements are there; whole ones without a mask, as `loaded` does."""
    if left >= BLOCK:
        tl.store(x + lane, value)
    else:
        tl.store(x + lane, value, mask=lane < left)


@triton.jit
def local(place, first, left):
    """Where the position `place` lies in the block of `left` elements that begins at `first`: 0 before it, `left` behind it."""
    return tl.minimum(tl.maximum(place - first, 0), left).to(tl.int32)


@triton.jit
def magnitude(x):
    """The bits of |x|, int32: they order as the numbers do, and NaN comes above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def rank_key(x, SIGNED: tl.constexpr):
    """What elements are ranked by, int32: |x| with NaN as infinity, or x itself, of which -0 is 0."""
    size = magnitude(x)
    return tl.where(x.to(tl.int32, bitcast=True) < 0, -size, size) if SIGNED else tl.minimum(size, 0x7F800000)
