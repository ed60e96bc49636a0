"""A table of the pieces of gradients and weights in a vector, and functions with which kernels read it.

A piece has one row: its start and stop in the vector, its address (0 without a tensor), and the numbers of its span, its
tensor and the tensor's type.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import local, on_one_device, stream_of, table, takes_all

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUMBERS = {kind: number for number, kind in enumerate(TYPES)}  # the numbers of types in a table of pieces
SEVERAL: tl.constexpr = tl.constexpr("several")
ROW: tl.constexpr = tl.constexpr(6)  # numbers per piece
NOWHERE = 2**62

Pieces = tuple[Tensor, int]  # the table, and the number of pieces


def type_of(vectors: Sequence[Tensor], tensors: Sequence[Tensor], skip: Tensor | None = None) -> Any:
    """Return Triton's type of `tensors`, SEVERAL, or None if they, or the float32 `vectors`, are not supported."""
    there = [*vectors, *tensors, *([] if skip is None else [skip])]
    kinds = {tensor.dtype for tensor in tensors} or {torch.float32}
    plain = all(vector.dtype == torch.float32 for vector in vectors) and (not vectors or takes_all(vectors))
    contiguous = all(tensor.is_contiguous() for tensor in tensors)
    taken = plain and contiguous and kinds <= set(TYPES) and on_one_device(there)
    return None if not taken else SEVERAL.value if len(kinds) > 1 else TYPES[kinds.pop()]


def pieces_of(
    tensors: Sequence[Tensor], starts: Sequence[int], spans: Sequence[Span], like: Tensor | None = None
) -> Pieces:
    """Build the table of the pieces of `spans` and `tensors`, on their device."""
    device = tensors[0].device if like is None else like.device
    lie = tuple(
        (start, start + tensor.numel(), tensor.data_ptr(), NUMBERS[tensor.dtype])
        for start, tensor in zip(starts, tensors, strict=True)
    )
    return _table_of(lie, tuple((span.start, span.stop) for span in spans), device, stream_of(device))


@lru_cache(maxsize=256)
def _table_of(
    lie: tuple[tuple[int, int, int, int], ...],
    spans: tuple[tuple[int, int], ...],
    device: torch.device,
    stream: int,  # not read: a part of the key
) -> Pieces:
    rows: list[tuple[int, ...]] = []
    ahead = [*sorted((*place, number) for number, place in enumerate(lie)), (NOWHERE, NOWHERE, 0, 0, len(lie))]
    at = 0
    for span, (start, stop) in sorted(enumerate(spans), key=lambda pair: pair[1]):
        at = max(at, start)
        while at < stop:
            while ahead[0][1] <= at:
                del ahead[0]
            first, end, address, kind, tensor = ahead[0]
            if first <= at:
                nbytes = 2 if kind else 4
                rows.append((at, min(end, stop), address + (at - first) * nbytes, span, tensor, kind))
            else:
                rows.append((at, min(first, stop), 0, span, len(lie), 0))
            at = rows[-1][1]
    numbers = [number for row in [*rows, (NOWHERE, NOWHERE, 0, 0, 0, 0)] for number in row]
    return table(numbers, torch.int64, device), len(rows)


@triton.jit
def piece_at(where, pieces, place):
    """Find the last piece that starts at `place` or before; the first piece if none does."""
    low, high = pieces * 0, pieces
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(where + ROW * middle) <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def piece_of(where, piece, base, left, lane):
    """Return masks of the block at `base`, for a piece and for its tensor; the tensor's address and places; and span and tensor numbers."""
    row = where + ROW * piece
    start, address = tl.load(row), tl.load(row + 2)
    begin, end = local(start, base, left), local(tl.load(row + 1), base, left)
    inside = (lane >= begin) & (lane < end)
    there = (lane >= begin) & (lane < tl.where(address != 0, end, 0))
    return inside, there, address, (base - start) + lane, tl.load(row + 3), tl.load(row + 4)


@triton.jit
def read(where, piece, address, place, there, TYPE: tl.constexpr):
    """Read the elements of a piece at these places, float32; zeros elsewhere. TYPE SEVERAL: the types of tensors differ."""
    if TYPE == SEVERAL:
        kind = tl.load(where + ROW * piece + 5) + tl.zeros_like(place)
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + place, mask=there & (kind == 0), other=0.0)
        brain = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + place, mask=there & (kind == 1), other=0.0)
        half = tl.load(address.to(tl.pointer_type(tl.float16)) + place, mask=there & (kind == 2), other=0.0)
        x = tl.where(kind == 1, brain.to(tl.float32), tl.where(kind == 2, half.to(tl.float32), x))
    else:
        x = tl.load(address.to(tl.pointer_type(TYPE)) + place, mask=there, other=0.0).to(tl.float32)
    return x


@triton.jit
def gathered(base, left, lane, where, pieces, factors, TYPE: tl.constexpr):
    """Read gradients times their factors at `left` places from `base` on, float32; zeros without a gradient."""
    g = tl.zeros_like(lane).to(tl.float32)
    piece = piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        _, there, address, place, _, tensor = piece_of(where, piece, base, left, lane)
        part = read(where, piece, address, place, there, TYPE)
        g = tl.where(there, part * tl.load(factors + tensor), g)
        piece += 1
    return g
