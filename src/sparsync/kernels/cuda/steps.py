"""The passes of `step_reference`, which read gradients, or move weights, in place, in one launch for all chunks of a vector.

Every operation rounds, as in torch, without fused multiply-adds. The reference handles ternary values.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import table, takes_all
from sparsync.kernels.cuda.pieces import ROW, SEVERAL, gathered, piece_at, piece_of, pieces_of, read, type_of
from sparsync.kernels.cuda.values import ROUNDED, decoded, grid_of, places, rounded, share, store_packet
from sparsync.kernels.step_reference import Move, Scales, Spread, chunks_of
from sparsync.kernels.value_reference import TERNARY, values_nbytes

SPREAD: tl.constexpr = tl.constexpr(5)  # numbers per span: rate, beta2, 1 - beta2, eps, unbiased
MOVE: tl.constexpr = tl.constexpr(4)  # numbers per span: beta1, 1 - beta1, kept, length; with scales also SPREAD

# Any: the result that `operations` declares, or NotImplemented for unsupported arguments.


def make_steps_(
    out: Tensor,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Tensor,
    ratio: Tensor,
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    skip: Tensor | None = None,
) -> Any:
    kind = type_of([out, square, ratio], gradients, skip)
    if kind is None:
        return NotImplemented
    if n := out.numel():
        with torch.cuda.device_of(out):
            pieces = pieces_of(gradients, starts, spans, out)
            floats = table([*_spread(spans, numbers), *factors, 1.0], torch.float32, out.device)
            form = {"SKIPS": skip is not None, "TYPE": kind, "RATIO": block, **ROUNDED}
            given = (out, square, ratio, out if skip is None else skip, *pieces, floats, len(spans), n)
            _make_kernel[grid_of(n)](*given, **form)
    return None


def encode_steps_(
    residual: Tensor,
    gradients: Sequence[Tensor],
    starts: Sequence[int],
    factors: Sequence[float],
    square: Tensor | None,
    ratio: Tensor | None,
    block: int,
    spans: Sequence[Span],
    numbers: Sequence[Spread],
    rank: int,
    P: int,
    bits: int,
    skip: Tensor | None = None,
    out: Tensor | None = None,
) -> Any:
    out, moments = residual if out is None else out, [moment for moment in (square, ratio) if moment is not None]
    kind = type_of([residual, out, *moments], gradients, skip)
    if kind is None or bits == TERNARY:
        return NotImplemented
    n, chunks = residual.numel(), chunks_of(residual.numel(), P)
    sizes = [values_nbytes(len(chunk), bits) for owner, chunk in enumerate(chunks) if owner != rank]
    packets = torch.empty(sum(sizes), dtype=torch.uint8, device=residual.device)
    if not n:
        return packets
    with torch.cuda.device_of(residual):
        pieces = pieces_of(gradients, starts, spans if moments else [Span(0, n)], residual)
        floats = table([*_spread(spans, numbers), *factors, 1.0], torch.float32, residual.device)
        form = {"P": P, "MADE": bool(moments), "ADDS": bool(gradients), "SKIPS": skip is not None, "TYPE": kind}
        form |= {"RATIO": block, **ROUNDED}
        about = (*(moments or (residual, residual)), packets, residual if skip is None else skip)
        given = (residual, out, *about, *pieces, floats, len(spans), n)
        _encode_steps_kernel[grid_of(triton.cdiv(n, P), P)](*given, rank, BITS=bits, **form)
    return packets


def move_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Tensor,
    mean: Tensor,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
    scales: Scales | None = None,
) -> Any:
    return _move(targets, starts, momentum, mean, None, 0, spans, numbers, skip, scales)


def apply_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Tensor,
    packets: Sequence[Tensor],
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
    scales: Scales | None = None,
) -> Any:
    sizes = [values_nbytes(len(chunk), bits) for chunk in chunks_of(momentum.numel(), len(packets))]
    if bits == TERNARY or [packet.numel() for packet in packets] != sizes or not takes_all([momentum, *packets]):
        return NotImplemented  # the reference reports wrong lengths
    return _move(targets, starts, momentum, momentum, packets, bits, spans, numbers, skip, scales)


def write_mean_(
    grad: Tensor,
    error: Tensor | None,
    residual: Tensor | None,
    packets: Sequence[Tensor],
    bits: int,
    rank: int,
    skip: Tensor | None = None,
) -> Any:
    n, P = grad.numel(), len(packets)
    fitting = [packet.numel() for packet in packets] == [values_nbytes(len(chunk), bits) for chunk in chunks_of(n, P)]
    kept = [vector for vector in (error, residual) if vector is not None]
    taken = bits != TERNARY and fitting and takes_all([grad, *packets])
    if not taken or type_of(kept, [grad], skip) is None:
        return NotImplemented
    if n:
        with torch.cuda.device_of(grad):
            where = table([packet.data_ptr() for packet in packets], torch.int64, grad.device)
            form = {"P": P, "KEEPS": bool(kept), "SKIPS": skip is not None, "BITS": bits, **ROUNDED}
            given = (grad, *(kept or (grad, grad)), where, where if skip is None else skip, n, rank)
            _write_mean_kernel[grid_of(triton.cdiv(n, P), P)](*given, **form)
    return None


def _move(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Tensor,
    mean: Tensor,
    packets: Sequence[Tensor] | None,
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None,
    scales: Scales | None,
) -> Any:
    """Move weights by a dense mean, or by the mean in packets."""
    square, over, block, floor = scales or (momentum, momentum, 1, 0.0)
    kind = type_of([momentum, mean, square, over], targets, skip)
    if kind is None or kind == SEVERAL.value:
        return NotImplemented
    if n := momentum.numel():
        with torch.cuda.device_of(momentum):
            pieces = pieces_of(targets, starts, spans, momentum)
            listed = list[float]()
            for _, (beta1, *rest) in zip(spans, numbers, strict=True):
                listed += [beta1, 1 - beta1, *rest[:4], *(1 - beta2 for beta2 in rest[3:4]), *rest[4:]]
            floats = table(listed, torch.float32, momentum.device)
            addresses = table([vector.data_ptr() for vector in packets or [mean]], torch.int64, momentum.device)
            chunks = len(packets or [mean])
            form = {"PACKED": packets is not None, "SKIPS": skip is not None, "TYPE": kind, "BITS": bits, **ROUNDED}
            form |= {"SCALED": scales is not None, "RATIO": block}
            about = (square, over, addresses, momentum if skip is None else skip)
            given = (momentum, mean, *about, *pieces, floats, floor, n, chunks)
            _move_kernel[grid_of(triton.cdiv(n, chunks), chunks)](*given, **form)
    return None


def _spread(spans: Sequence[Span], numbers: Sequence[Spread]) -> list[float]:
    """List the numbers of all spans as kernels read them."""
    rows = zip(spans, numbers, strict=True)
    return [each for _, (rate, beta2, *rest) in rows for each in (rate, beta2, 1 - beta2, *rest)]


@triton.jit
def _chunk_of(chunk, n, chunks):
    """Return the start and length of a span of `core.spans(n, chunks)`."""
    short, longer = n // chunks, n % chunks
    return chunk * short + tl.minimum(chunk, longer), short + (chunk < longer).to(tl.int64)


@triton.jit
def _nbytes(k, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the packet size of `k` values, in bytes."""
    return 2 * tl.cdiv(k, BLOCK) + tl.cdiv(k * BITS, 8)


@triton.jit
def _spread_over(g, v, number, ratio):
    """Return the second moments `v` with gradients `g`, and the steps."""
    v = v * tl.load(number + 1) + g * g * tl.load(number + 2)
    scale = tl.div_rn(tl.zeros_like(v) + ratio, tl.zeros_like(v) + tl.load(number + 4))
    return v, tl.div_rn(g * tl.load(number), tl.sqrt_rn(scale * v) + tl.load(number + 3))


@triton.jit
def _made(base, left, lane, square, ratio, where, pieces, floats, spans, RATIO: tl.constexpr, TYPE: tl.constexpr):
    """Add gradients to second moments at `left` places from `base` on. Return the steps, and a mask of places in spans."""
    step, reached = tl.zeros_like(lane).to(tl.float32), lane < 0
    ratios = ratio + base // RATIO + ((base % RATIO).to(tl.int32) + lane) // RATIO
    piece = piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        inside, there, address, place, span, tensor = piece_of(where, piece, base, left, lane)
        number = floats + SPREAD * span
        g = read(where, piece, address, place, there, TYPE) * tl.load(floats + SPREAD * spans + tensor)
        before = tl.load(square + base + lane, mask=inside, other=0.0)
        v, taken = _spread_over(g, before, number, tl.load(ratios, mask=inside, other=0.0))
        tl.store(square + base + lane, v, mask=inside)
        step = tl.where(inside, taken, step)
        reached = reached | inside
        piece += 1
    return step, reached


@triton.jit(do_not_specialize=["pieces", "spans", "n"])
def _make_kernel(
    out,
    square,
    ratio,
    skip,
    where,
    pieces,
    floats,
    spans,
    n,
    SKIPS: tl.constexpr,
    TYPE: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first, left, lane = places(n.to(tl.int64), BLOCKS, BLOCK)
    live = tl.load(skip) == 0 if SKIPS else True
    taken = tl.where(live, left, 0)
    step, reached = _made(first, taken, lane, square, ratio, where, pieces, floats, spans, RATIO, TYPE)
    # Zeros everywhere where it is skipped.
    tl.store(out + first + lane, step, mask=reached | ((lane < left) & (lane >= taken)))


@triton.jit(do_not_specialize=["pieces", "spans", "n", "own"])
def _encode_steps_kernel(
    residual,
    out,
    square,
    ratio,
    packets,
    skip,
    where,
    pieces,
    floats,
    spans,
    n,
    own,
    P: tl.constexpr,
    MADE: tl.constexpr,
    ADDS: tl.constexpr,
    SKIPS: tl.constexpr,
    TYPE: tl.constexpr,
    RATIO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk, n = tl.program_id(1), n.to(tl.int64)
    start, k = _chunk_of(chunk, n, P)
    first, left, lane = places(k, BLOCKS, BLOCK)
    live = tl.load(skip) == 0 if SKIPS else True
    base, taken = start + first, tl.where(live, left, 0)
    acc = tl.load(residual + base + lane, mask=lane < taken, other=0.0)
    if MADE:
        step, _ = _made(base, taken, lane, square, ratio, where, pieces, floats, spans, RATIO, TYPE)
        acc += step
    elif ADDS:
        acc += gathered(base, taken, lane, where, pieces, floats, TYPE)
    upper, code, error = share(acc, left, P, BITS, BLOCKS, BLOCK)
    tl.store(out + base + lane, tl.where(chunk == own, acc, error), mask=lane < taken)
    _, longest = _chunk_of(0, n, P)
    _, mine = _chunk_of(own, n, P)
    short = _nbytes(n // P, BITS, BLOCK)
    offset = chunk * short + tl.minimum(chunk, n % P) * (_nbytes(longest, BITS, BLOCK) - short)
    offset -= tl.where(chunk > own, _nbytes(mine, BITS, BLOCK), 0)
    upper = tl.where(live, upper, 0x7FC0)  # a skipped packet is NaN
    store_packet(packets + offset, upper, code, first, tl.where(chunk == own, 0, left), k, BITS, BLOCKS, BLOCK)


@triton.jit(do_not_specialize=["pieces", "floor", "n", "chunks"])
def _move_kernel(
    momentum,
    mean,
    square,
    over,
    packets,
    skip,
    where,
    pieces,
    floats,
    floor,
    n,
    chunks,
    PACKED: tl.constexpr,
    SCALED: tl.constexpr,
    SKIPS: tl.constexpr,
    TYPE: tl.constexpr,
    RATIO: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(1)
    start, k = _chunk_of(chunk, n.to(tl.int64), chunks)
    first, left, lane = places(k, BLOCKS, BLOCK)
    if SKIPS:
        left = tl.where(tl.load(skip) == 0, left, 0)
    base = start + first
    if PACKED:
        packet = tl.load(packets + chunk).to(tl.pointer_type(tl.uint8))
        taken = decoded(packet, first, left, lane, k, BITS, BLOCKS, BLOCK)
    else:
        taken = tl.load(mean + base + lane, mask=lane < left, other=0.0)
    piece = piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        inside, there, address, place, span, _ = piece_of(where, piece, base, left, lane)
        target, number, step = address.to(tl.pointer_type(TYPE)) + place, floats + MOVE * span, taken
        if SCALED:
            number += SPREAD * span
            v = tl.load(square + base + lane, mask=inside, other=0.0)
            blocks = over + base // RATIO + ((base % RATIO).to(tl.int32) + lane) // RATIO
            scale = tl.sqrt_rn(tl.load(blocks, mask=inside, other=0.0) * v) + floor
            v, step = _spread_over(scale * taken, v, number + MOVE, 1.0)
            tl.store(square + base + lane, v, mask=inside)
        m = tl.load(momentum + base + lane, mask=inside, other=0.0) * tl.load(number) + step * tl.load(number + 1)
        tl.store(momentum + base + lane, m, mask=inside)
        weight = tl.load(target, mask=there, other=0).to(tl.float32)
        tl.store(target, (weight * tl.load(number + 2) - m * tl.load(number + 3)).to(TYPE), mask=there)
        piece += 1


@triton.jit(do_not_specialize=["n", "rank"])
def _write_mean_kernel(
    grad,
    error,
    residual,
    packets,
    skip,
    n,
    rank,
    P: tl.constexpr,
    KEEPS: tl.constexpr,
    SKIPS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(1)
    start, k = _chunk_of(chunk, n.to(tl.int64), P)
    first, left, lane = places(k, BLOCKS, BLOCK)
    base, live = start + first, tl.load(skip) == 0 if SKIPS else True
    packet = tl.load(packets + chunk).to(tl.pointer_type(tl.uint8))
    mean = decoded(packet, first, left, lane, k, BITS, BLOCKS, BLOCK)
    written = rounded(mean, grad.dtype.element_ty)
    if KEEPS:
        kept = tl.load(error + base + lane, mask=lane < left, other=0.0)
        if grad.dtype.element_ty != tl.float32:
            kept = tl.where(chunk == rank, kept + P * (mean - written.to(tl.float32)), kept)
        tl.store(residual + base + lane, kept, mask=lane < tl.where(live, left, 0))
    tl.store(grad + base + lane, tl.where(live, written, float("nan")), mask=lane < left)
