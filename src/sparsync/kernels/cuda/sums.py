"""Sums over all gradients of a vector, the squared norm and sketches of blocks, and means of blocks."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import FLOAT32, programs, table, takes
from sparsync.kernels.cuda.pieces import gathered, pieces_of, type_of
from sparsync.kernels.cuda.values import fold
from sparsync.kernels.step_reference import HASH

FIRST, SECOND, THIRD = (tl.constexpr(factor) for factor in HASH)
EXACT = {"enable_fp_fusion": False}
PARTIAL = 1024  # the number of partial sums of squares, and the elements per program in sketches

# Any: the result that `operations` declares, or NotImplemented for unsupported arguments.


def squares_fit(tensors: Sequence[Tensor], factors: Sequence[float], most: float) -> Any:
    if not tensors or (kind := type_of([], tensors)) is None:
        return NotImplemented
    device = tensors[0].device
    starts = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
    n = starts.pop()
    with torch.cuda.device_of(tensors[0]):
        pieces = pieces_of(tensors, starts, [Span(0, n)])
        numbers = table([*factors, 1.0], torch.float32, device)
        count = max(1, min(PARTIAL, *programs(n, PARTIAL)))
        partial, fit = tensors[0].new_empty(count, dtype=torch.float64), tensors[0].new_empty((), dtype=torch.bool)
        _squares_kernel[(count,)](*pieces, numbers, partial, n, count, TYPE=kind, BLOCK=PARTIAL, **EXACT)
        (limit,) = struct.unpack("q", struct.pack("d", most))  # Triton would convert a float to float32
        _fit_kernel[(1,)](partial, fit, limit, count, BLOCK=PARTIAL)
    return fit


def sketch(
    gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Tensor, block: int, key: int
) -> Any:
    kind, n = type_of([like], gradients), like.numel()
    if kind is None or (form := _form_of(block)) is None:
        return NotImplemented
    sums, squares = like.new_empty(2, triton.cdiv(n, block))
    if n:
        with torch.cuda.device_of(like):
            pieces = pieces_of(gradients, starts, [Span(0, n)], like)
            numbers = table([*factors, 1.0], torch.float32, like.device)
            _sketch_kernel[programs(n, PARTIAL)](*pieces, numbers, sums, squares, n, key, TYPE=kind, **form)
    return sums, squares


@takes(FLOAT32)
def over_means(x: Tensor, block: int, least: float) -> Any:
    if (form := _form_of(block)) is None:
        return NotImplemented
    out = x.new_empty(triton.cdiv(n := x.numel(), block))
    if n:
        _over_means_kernel[programs(n, PARTIAL)](x, out, n, least, **form)
    return out


def _form_of(block: int) -> dict[str, Any] | None:
    rows, halvings = PARTIAL // block, block.bit_length() - 1
    return {"ROWS": rows, "WIDTH": block, "HALVINGS": halvings, **EXACT} if rows << halvings == PARTIAL else None


@triton.jit(do_not_specialize=["pieces", "n", "programs"])
def _squares_kernel(where, pieces, factors, partial, n, programs, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        left = tl.minimum(n - first, BLOCK).to(tl.int32)
        g = gathered(first, left, tl.arange(0, BLOCK), where, pieces, factors, TYPE).to(tl.float64)
        total += g * g
        first += programs.to(tl.int64) * BLOCK
    tl.store(partial + tl.program_id(0), tl.sum(total))


@triton.jit(do_not_specialize=["limit", "count"])
def _fit_kernel(partial, fit, limit, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(partial + lane, mask=lane < count, other=0.0))
    tl.store(fit, total <= limit.to(tl.int64).to(tl.float64, bitcast=True))


@triton.jit(do_not_specialize=["pieces", "n", "key"])
def _sketch_kernel(
    where,
    pieces,
    factors,
    sums,
    squares,
    n,
    key,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALVINGS: tl.constexpr,
    TYPE: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    left = tl.minimum(n - first, ROWS * WIDTH).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    lane = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    g = gathered(first, left, lane, where, pieces, factors, TYPE)
    word = (first + lane).to(tl.uint32) * FIRST + key.to(tl.uint32)
    word = (word ^ word >> 16) * SECOND
    word = (word ^ word >> 13) * THIRD
    sign = tl.where(lane < left, ((word ^ word >> 16) & 1).to(tl.int32) << 31, 0)
    # Flip the sign bit, because compiled -g is 0 - g.
    signed = (g.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    at, inside = first // WIDTH + row, row * WIDTH < left
    tl.store(sums + at, fold(signed, ROWS, WIDTH, HALVINGS), mask=inside)
    tl.store(squares + at, fold(g * g, ROWS, WIDTH, HALVINGS), mask=inside)


@triton.jit(do_not_specialize=["n", "least"])
def _over_means_kernel(x, out, n, least, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    left = tl.minimum(n - first, ROWS * WIDTH).to(tl.int32)
    row = tl.arange(0, ROWS)[:, None]
    lane = row * WIDTH + tl.arange(0, WIDTH)[None, :]
    sums = fold(tl.load(x + first + lane, mask=lane < left, other=0.0), ROWS, WIDTH, HALVINGS)
    mean = tl.div_rn(sums, tl.maximum(tl.minimum(left - row * WIDTH, WIDTH), 1).to(tl.float32))
    over = tl.div_rn(tl.full((ROWS, 1), 1.0, tl.float32), tl.where(mean < least, least, mean))
    tl.store(out + first // WIDTH + row, over, mask=row * WIDTH < left)
