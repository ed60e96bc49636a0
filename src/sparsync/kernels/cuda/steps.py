"""The passes of `step_reference`: each reads gradients, or moves weights, where they lie, in one launch for all chunks of a vector.

What lies where is a table of pieces, one row each: where it starts and stops in the vector, its address (0 where there is no tensor), and
the numbers of its span, its tensor and that one's type. Each operation is rounded, as in torch: nothing is fused to a multiply-add.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Span
from sparsync.kernels.cuda.launch import local, magnitude, on_one_device, programs, stream_of, table, takes_all
from sparsync.kernels.cuda.values import (
    INFINITE,
    ROUNDED,
    decoded,
    fold,
    grid_of,
    places,
    share,
    store_packet,
)
from sparsync.kernels.step_reference import HASH, Move, Spread, chunks_of, encode_share
from sparsync.kernels.value_reference import TERNARY, nan_packet, values_nbytes

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
NUMBERS = {each: number for number, each in enumerate(TYPES)}  # of types, in a table of pieces
SEVERAL: tl.constexpr = tl.constexpr("several")
ROW: tl.constexpr = tl.constexpr(6)  # numbers of a piece
SPREAD: tl.constexpr = tl.constexpr(5)  # numbers of a span: rate, beta2, 1 - beta2, eps, unbiased
MOVE: tl.constexpr = tl.constexpr(4)  # beta1, 1 - beta1, kept, length
FIRST, SECOND, THIRD = (tl.constexpr(each) for each in HASH)
NOWHERE = 2**62
EXACT = {"enable_fp_fusion": False}
PARTIAL = 1024  # sums of squares, and the elements of a program that makes sketches

_Pieces = tuple[Tensor, int]  # the table, and how many there are

# Any: what the signature in `operations` says, or NotImplemented for what is not taken.


def squares_fit(tensors: Sequence[Tensor], factors: Sequence[float], most: float) -> Any:
    if not tensors or (kind := _type_of([], tensors)) is None:
        return NotImplemented
    device = tensors[0].device
    starts = list(accumulate((each.numel() for each in tensors), initial=0))
    n = starts.pop()
    with torch.cuda.device_of(tensors[0]):
        pieces = _pieces_of(tensors, starts, [Span(0, n)])
        numbers = table([*factors, 1.0], torch.float32, device)
        count = max(1, min(PARTIAL, *programs(n, PARTIAL)))
        partial, fit = tensors[0].new_empty(count, dtype=torch.float64), tensors[0].new_empty((), dtype=torch.bool)
        _squares_kernel[(count,)](*pieces, numbers, partial, n, count, TYPE=kind, BLOCK=PARTIAL, **EXACT)
        (limit,) = struct.unpack("q", struct.pack("d", most))  # Triton would make a float32 of it
        _fit_kernel[(1,)](partial, fit, limit, count, BLOCK=PARTIAL)
    return fit


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
    kind = _type_of([out, square, ratio], gradients, skip)
    if kind is None:
        return NotImplemented
    if n := out.numel():
        with torch.cuda.device_of(out):
            pieces = _pieces_of(gradients, starts, spans, out)
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
    out, moments = residual if out is None else out, [each for each in (square, ratio) if each is not None]
    kind = _type_of([residual, out, *moments], gradients, skip)
    if kind is None:
        return NotImplemented
    n, chunks = residual.numel(), chunks_of(residual.numel(), P)
    sizes = [values_nbytes(len(chunk), bits) for owner, chunk in enumerate(chunks) if owner != rank]
    packets = torch.empty(sum(sizes), dtype=torch.uint8, device=residual.device)
    if not n:
        return packets
    with torch.cuda.device_of(residual):
        pieces = _pieces_of(gradients, starts, spans if moments else [Span(0, n)], residual)
        floats = table([*_spread(spans, numbers), *factors, 1.0], torch.float32, residual.device)
        form = {"P": P, "MADE": bool(moments), "ADDS": bool(gradients), "SKIPS": skip is not None, "TYPE": kind}
        form |= {"RATIO": block, **ROUNDED}
        about = (*(moments or (residual, residual)), packets, residual if skip is None else skip)
        given = (residual, out, *about, *pieces, floats, len(spans), n)
        if bits != TERNARY:
            _encode_steps_kernel[grid_of(triton.cdiv(n, P), P)](*given, P, rank, BITS=bits, **form)
            return packets
        before = out if skip is None else out.clone()
        _encode_steps_kernel[grid_of(n)](*given, 1, 0, BITS=8, **form)  # all of it is an own chunk, without a packet
        sent = [chunk for owner, chunk in enumerate(chunks) if owner != rank]
        found = [encode_share(chunk.of(out), bits, P) for chunk in sent]
        if skip is not None:
            skipped = skip.reshape(()) != 0
            out.copy_(torch.where(skipped, before, out))
            nothing = [nan_packet(len(chunk), bits, residual.device) for chunk in sent]
            found = [torch.where(skipped, *pair) for pair in zip(nothing, found, strict=True)]
        return torch.cat([packets[:0], *found])


def move_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Tensor,
    mean: Tensor,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> Any:
    return _move(targets, starts, momentum, mean, None, 0, spans, numbers, skip)


def apply_steps_(
    targets: Sequence[Tensor],
    starts: Sequence[int],
    momentum: Tensor,
    packets: Sequence[Tensor],
    bits: int,
    spans: Sequence[Span],
    numbers: Sequence[Move],
    skip: Tensor | None = None,
) -> Any:
    sizes = [values_nbytes(len(chunk), bits) for chunk in chunks_of(momentum.numel(), len(packets))]
    if [each.numel() for each in packets] != sizes or not takes_all([momentum, *packets]):
        return NotImplemented  # the reference says what is wrong with lengths
    return _move(targets, starts, momentum, momentum, packets, bits, spans, numbers, skip)


def packets_fit(
    packets: Sequence[Tensor], lengths: Sequence[int], bits: int, times: int, dtype: torch.dtype = torch.float32
) -> Any:
    if not any(lengths) or dtype not in TYPES or not takes_all(packets):
        return NotImplemented
    fits = torch.ones((), dtype=torch.bool, device=packets[0].device)
    with torch.cuda.device_of(fits):
        rows = zip(packets, lengths, strict=True)
        where = table([number for packet, k in rows for number in (packet.data_ptr(), k)], torch.int64, fits.device)
        form = {"TIMES": times, "TYPE": TYPES[dtype], "BITS": bits, **ROUNDED}
        _packets_fit_kernel[grid_of(max(lengths), len(lengths))](where, fits, **form)
    return fits


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
    fitting = [each.numel() for each in packets] == [values_nbytes(len(chunk), bits) for chunk in chunks_of(n, P)]
    kept = [each for each in (error, residual) if each is not None]
    if not fitting or _type_of(kept, [grad], skip) is None or not takes_all([grad, *packets]):
        return NotImplemented
    if n:
        with torch.cuda.device_of(grad):
            where = table([each.data_ptr() for each in packets], torch.int64, grad.device)
            form = {"P": P, "KEEPS": bool(kept), "SKIPS": skip is not None, "BITS": bits, **ROUNDED}
            given = (grad, *(kept or (grad, grad)), where, where if skip is None else skip, n, rank)
            _write_mean_kernel[grid_of(triton.cdiv(n, P), P)](*given, **form)
    return None


def sketch(
    gradients: Sequence[Tensor], starts: Sequence[int], factors: Sequence[float], like: Tensor, block: int, key: int
) -> Any:
    kind, n = _type_of([like], gradients), like.numel()
    if kind is None or block > PARTIAL or block & (block - 1):
        return NotImplemented
    sums, squares = like.new_empty(2, triton.cdiv(n, block))
    if n:
        with torch.cuda.device_of(like):
            pieces = _pieces_of(gradients, starts, [Span(0, n)], like)
            numbers = table([*factors, 1.0], torch.float32, like.device)
            form = {"ROWS": PARTIAL // block, "WIDTH": block, "HALVINGS": block.bit_length() - 1, "TYPE": kind, **EXACT}
            _sketch_kernel[programs(n, PARTIAL)](*pieces, numbers, sums, squares, n, key, **form)
    return sums, squares


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
) -> Any:
    """Move weights by a dense mean, or by that in packets."""
    kind = _type_of([momentum, mean], targets, skip)
    if kind is None or kind == SEVERAL.value:
        return NotImplemented
    if n := momentum.numel():
        with torch.cuda.device_of(momentum):
            pieces = _pieces_of(targets, starts, spans, momentum)
            each = [(beta1, 1 - beta1, *rest) for _, (beta1, *rest) in zip(spans, numbers, strict=True)]
            floats = table([number for row in each for number in row], torch.float32, momentum.device)
            addresses = table([each.data_ptr() for each in packets or [mean]], torch.int64, momentum.device)
            chunks = len(packets or [mean])
            form = {"PACKED": packets is not None, "SKIPS": skip is not None, "TYPE": kind, "BITS": bits, **ROUNDED}
            given = (momentum, mean, addresses, momentum if skip is None else skip, *pieces, floats, n, chunks)
            _move_kernel[grid_of(triton.cdiv(n, chunks), chunks)](*given, **form)
    return None


def _type_of(vectors: Sequence[Tensor], tensors: Sequence[Tensor], skip: Tensor | None = None) -> Any:
    """Return the type of `tensors`, for Triton, SEVERAL, or None where they, or vectors of float32 beside them, are not taken."""
    there = [*vectors, *tensors, *([] if skip is None else [skip])]
    kinds = {each.dtype for each in tensors} or {torch.float32}
    plain = all(each.dtype == torch.float32 for each in vectors) and (not vectors or takes_all(vectors))
    contiguous = all(each.is_contiguous() for each in tensors)
    taken = plain and contiguous and kinds <= set(TYPES) and on_one_device(there)
    return None if not taken else SEVERAL.value if len(kinds) > 1 else TYPES[kinds.pop()]


def _spread(spans: Sequence[Span], numbers: Sequence[Spread]) -> list[float]:
    """Return the numbers of all spans as kernels read them."""
    return [
        number
        for _, (rate, beta2, *rest) in zip(spans, numbers, strict=True)
        for number in (rate, beta2, 1 - beta2, *rest)
    ]


def _pieces_of(
    tensors: Sequence[Tensor], starts: Sequence[int], spans: Sequence[Span], like: Tensor | None = None
) -> _Pieces:
    """Return the table of the pieces of `spans` and `tensors`, on their device, and their number."""
    device = tensors[0].device if like is None else like.device
    lie = tuple(
        (start, start + each.numel(), each.data_ptr(), NUMBERS[each.dtype])
        for start, each in zip(starts, tensors, strict=True)
    )
    return _pieces(lie, tuple((each.start, each.stop) for each in spans), device, stream_of(device))


@lru_cache(maxsize=256)
def _pieces(
    lie: tuple[tuple[int, int, int, int], ...],
    spans: tuple[tuple[int, int], ...],
    device: torch.device,
    stream: int,  # not read: a part of the key
) -> _Pieces:
    rows: list[tuple[int, ...]] = []
    ahead = [*sorted((*each, number) for number, each in enumerate(lie)), (NOWHERE, NOWHERE, 0, 0, len(lie))]
    at = 0
    for span, (start, stop) in sorted(enumerate(spans), key=lambda each: each[1]):
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
def _piece_at(where, pieces, place):
    """Return the last of the pieces that starts at `place` or before, or the first one."""
    low, high = pieces * 0, pieces
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(where + ROW * middle) <= place
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def _chunk_of(chunk, n, chunks):
    """Return where one of `core.spans(n, chunks)` begins, and its length."""
    short, longer = n // chunks, n % chunks
    return chunk * short + tl.minimum(chunk, longer), short + (chunk < longer).to(tl.int64)


@triton.jit
def _nbytes(k, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bytes of a packet of `k` values."""
    return 2 * tl.cdiv(k, BLOCK) + tl.cdiv(k * BITS, 8)


@triton.jit
def _piece(where, piece, base, left, lane):
    """Return which places of the block at `base` a piece has, those with a tensor, where these lie, and the numbers of span and tensor."""
    row = where + ROW * piece
    start, address = tl.load(row), tl.load(row + 2)
    begin, end = local(start, base, left), local(tl.load(row + 1), base, left)
    inside = (lane >= begin) & (lane < end)
    there = (lane >= begin) & (lane < tl.where(address != 0, end, 0))
    return inside, there, address, (base - start) + lane, tl.load(row + 3), tl.load(row + 4)


@triton.jit
def _read(where, piece, address, place, there, TYPE: tl.constexpr):
    """Return the elements of a piece at these places, zeros elsewhere, float32. TYPE SEVERAL: each tensor has its own type."""
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
def _gathered(base, left, lane, where, pieces, factors, TYPE: tl.constexpr):
    """Return gradients times their factors at `left` places from `base` on, zeros where there are none, float32."""
    g = tl.zeros_like(lane).to(tl.float32)
    piece = _piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        _, there, address, place, _, tensor = _piece(where, piece, base, left, lane)
        part = _read(where, piece, address, place, there, TYPE)
        g = tl.where(there, part * tl.load(factors + tensor), g)
        piece += 1
    return g


@triton.jit
def _made(base, left, lane, square, ratio, where, pieces, floats, spans, RATIO: tl.constexpr, TYPE: tl.constexpr):
    """Add gradients to second moments at `left` places from `base` on, and return steps, and where there are any: in spans."""
    step, reached = tl.zeros_like(lane).to(tl.float32), lane < 0
    ratios = ratio + base // RATIO + ((base % RATIO).to(tl.int32) + lane) // RATIO
    piece = _piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        inside, there, address, place, span, tensor = _piece(where, piece, base, left, lane)
        number = floats + SPREAD * span
        g = _read(where, piece, address, place, there, TYPE) * tl.load(floats + SPREAD * spans + tensor)
        v = tl.load(square + base + lane, mask=inside, other=0.0) * tl.load(number + 1) + g * g * tl.load(number + 2)
        tl.store(square + base + lane, v, mask=inside)
        r = tl.load(ratios, mask=inside, other=0.0)
        root = tl.sqrt_rn(tl.div_rn(r, tl.zeros_like(r) + tl.load(number + 4)) * v) + tl.load(number + 3)
        step = tl.where(inside, tl.div_rn(g * tl.load(number), root), step)
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
    tl.store(
        out + first + lane, step, mask=reached | ((lane < left) & (lane >= taken))
    )  # zeros everywhere where it is skipped


@triton.jit(do_not_specialize=["pieces", "spans", "n", "chunks", "own"])
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
    chunks,
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
    start, k = _chunk_of(chunk, n, chunks)
    first, left, lane = places(k, BLOCKS, BLOCK)
    live = tl.load(skip) == 0 if SKIPS else True
    base, taken = start + first, tl.where(live, left, 0)
    acc = tl.load(residual + base + lane, mask=lane < taken, other=0.0)
    if MADE:
        step, _ = _made(base, taken, lane, square, ratio, where, pieces, floats, spans, RATIO, TYPE)
        acc += step
    elif ADDS:
        acc += _gathered(base, taken, lane, where, pieces, floats, TYPE)
    upper, code, error = share(acc, left, P, BITS, BLOCKS, BLOCK)
    tl.store(out + base + lane, tl.where(chunk == own, acc, error), mask=lane < taken)
    _, longest = _chunk_of(0, n, chunks)
    _, mine = _chunk_of(own, n, chunks)
    short = _nbytes(n // chunks, BITS, BLOCK)
    offset = chunk * short + tl.minimum(chunk, n % chunks) * (_nbytes(longest, BITS, BLOCK) - short)
    offset -= tl.where(chunk > own, _nbytes(mine, BITS, BLOCK), 0)
    upper = tl.where(live, upper, 0x7FC0)  # a skipped packet is NaN
    store_packet(packets + offset, upper, code, first, tl.where(chunk == own, 0, left), k, BITS, BLOCKS, BLOCK)


@triton.jit(do_not_specialize=["pieces", "n", "chunks"])
def _move_kernel(
    momentum,
    mean,
    packets,
    skip,
    where,
    pieces,
    floats,
    n,
    chunks,
    PACKED: tl.constexpr,
    SKIPS: tl.constexpr,
    TYPE: tl.constexpr,
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
    piece = _piece_at(where, pieces, base)
    while tl.load(where + ROW * piece) < base + left:
        inside, there, address, place, span, _ = _piece(where, piece, base, left, lane)
        target, number = address.to(tl.pointer_type(TYPE)) + place, floats + MOVE * span
        m = tl.load(momentum + base + lane, mask=inside, other=0.0) * tl.load(number) + taken * tl.load(number + 1)
        tl.store(momentum + base + lane, m, mask=inside)
        weight = tl.load(target, mask=there, other=0).to(tl.float32)
        tl.store(target, (weight * tl.load(number + 2) - m * tl.load(number + 3)).to(TYPE), mask=there)
        piece += 1


@triton.jit
def _rounded(x, TYPE: tl.constexpr):
    """Return `x`, float32, rounded to nearest. Of bfloat16 by its bits, which the interpreter cuts off."""
    if tl.bfloat16 == TYPE:
        word = x.to(tl.int32, bitcast=True)
        x = ((word + 0x7FFF + (word >> 16 & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(TYPE)


@triton.jit
def _packets_fit_kernel(
    where, fits, TIMES: tl.constexpr, TYPE: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    row = where + 2 * tl.program_id(1)
    k = tl.load(row + 1)
    first, left, lane = places(k, BLOCKS, BLOCK)
    value = decoded(tl.load(row).to(tl.pointer_type(tl.uint8)), first, left, lane, k, BITS, BLOCKS, BLOCK)
    value = tl.where(lane < left, value, 0.0)  # signs are decoded behind the end too
    worst = tl.maximum(magnitude(TIMES * value), magnitude(_rounded(value, TYPE).to(tl.float32)))
    if tl.max(worst) >= INFINITE:
        tl.store(fits, 0)


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
    written = _rounded(mean, grad.dtype.element_ty)
    if KEEPS:
        kept = tl.load(error + base + lane, mask=lane < left, other=0.0)
        if grad.dtype.element_ty != tl.float32:
            kept = tl.where(chunk == rank, kept + P * (mean - written.to(tl.float32)), kept)
        tl.store(residual + base + lane, kept, mask=lane < tl.where(live, left, 0))
    tl.store(grad + base + lane, tl.where(live, written, float("nan")), mask=lane < left)


@triton.jit(do_not_specialize=["pieces", "n", "programs"])
def _squares_kernel(where, pieces, factors, partial, n, programs, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    while first < n:
        left = tl.minimum(n - first, BLOCK).to(tl.int32)
        g = _gathered(first, left, tl.arange(0, BLOCK), where, pieces, factors, TYPE).to(tl.float64)
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
    g = _gathered(first, left, lane, where, pieces, factors, TYPE)
    word = (first + lane).to(tl.uint32) * FIRST + key.to(tl.uint32)
    word = (word ^ word >> 16) * SECOND
    word = (word ^ word >> 13) * THIRD
    sign = tl.where(lane < left, ((word ^ word >> 16) & 1).to(tl.int32) << 31, 0)
    # By its bit: compiled, -g is 0 - g.
    signed = (g.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)
    at, inside = first // WIDTH + row, row * WIDTH < left
    tl.store(sums + at, fold(signed, ROWS, WIDTH, HALVINGS), mask=inside)
    tl.store(squares + at, fold(g * g, ROWS, WIDTH, HALVINGS), mask=inside)
