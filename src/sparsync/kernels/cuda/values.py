"""Quantizing values to few bits, and decoding them: the bytes of `value_reference`, several blocks of 256 values per program."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.kernels.cuda.launch import BYTES, FLOAT32, magnitude, table, takes, takes_all
from sparsync.kernels.cuda.pieces import TYPES
from sparsync.kernels.value_reference import BLOCK, TERNARY, values_nbytes

BLOCKS = 4  # blocks of 256 values per program
SIZES = {"BLOCKS": BLOCKS, "BLOCK": BLOCK}
ROUNDED = {**SIZES, "enable_fp_fusion": False}  # every operation rounds, as in torch
FLOAT32_MAX: tl.constexpr = tl.constexpr(0x7F7FFFFF)  # as bits
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)


@takes(FLOAT32)
def values_encode(value: Tensor, bits: int) -> Any:
    """Encode `value` [k] as the reference does."""
    if bits == TERNARY:
        return NotImplemented
    k = value.numel()
    packet = torch.empty(values_nbytes(k, bits), dtype=torch.uint8, device=value.device)
    if k:
        _encode_kernel[grid_of(k)](value, packet, k, BITS=bits, **ROUNDED)
    return packet


@takes(BYTES)
def values_decode(packet: Tensor, k: int, bits: int) -> Any:
    """Decode the `k` values of a packet, float32, as the reference does."""
    if bits == TERNARY:
        return NotImplemented
    value = torch.empty(k, dtype=torch.float32, device=packet.device)
    if k:
        _decode_kernel[grid_of(k)](packet, value, k, BITS=bits, **SIZES)
    return value


def reduce_shares_(
    value: Tensor, packets: Sequence[Tensor], bits: int, P: int, bits_down: int, skip: Tensor | None = None
) -> Any:
    """Reduce as the reference does, in one launch."""
    if TERNARY in (bits, bits_down) or any(part.numel() != values_nbytes(value.numel(), bits) for part in packets):
        return NotImplemented  # the reference reports wrong lengths
    if skip is not None and (skip.dtype != torch.float32 or skip.device != value.device):
        return NotImplemented
    kinds = FLOAT32, *[BYTES] * len(packets), FLOAT32
    return takes(*kinds)(_reduce_shares)(value, packets, bits, P, bits_down, skip)


def packets_fit(
    packets: Sequence[Tensor], lengths: Sequence[int], bits: int, times: int, dtype: torch.dtype = torch.float32
) -> Any:
    if bits == TERNARY or not any(lengths) or dtype not in TYPES or not takes_all(packets):
        return NotImplemented
    fits = torch.ones((), dtype=torch.bool, device=packets[0].device)
    with torch.cuda.device_of(fits):
        rows = zip(packets, lengths, strict=True)
        where = table([number for packet, k in rows for number in (packet.data_ptr(), k)], torch.int64, fits.device)
        form = {"TIMES": times, "TYPE": TYPES[dtype], "BITS": bits, **ROUNDED}
        _packets_fit_kernel[grid_of(max(lengths), len(lengths))](where, fits, **form)
    return fits


def grid_of(k: int, chunks: int = 1) -> tuple[int, int]:
    """Return the grid for `chunks` chunks of at most `k` values."""
    return triton.cdiv(k, BLOCK * BLOCKS), chunks


def _reduce_shares(
    value: Tensor, packets: Sequence[Tensor], bits: int, P: int, bits_down: int, skip: Tensor | None
) -> Tensor:
    k = value.numel()
    packet = torch.empty(values_nbytes(k, bits_down), dtype=torch.uint8, device=value.device)
    if k:
        where = table([part.data_ptr() for part in packets], torch.int64, value.device)
        form = {"P": P, "BITS": bits, "DOWN": bits_down, "SKIPS": skip is not None, **ROUNDED}
        _reduce_kernel[grid_of(k)](value, where, packet, value if skip is None else skip, k, len(packets), **form)
    return packet


@triton.jit
def places(k, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the start and number of values of this program's blocks, and their places, [BLOCKS, BLOCK].

    Places have 32 bits: an address is then a shared base plus a small offset, which takes far fewer registers.
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCKS * BLOCK)
    left = tl.maximum(tl.minimum(k - first, BLOCKS * BLOCK), 0).to(tl.int32)
    return first, left, tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _store_scale(packet, number, upper, inside):
    """Write an upper half by bytes, the low one first, because packets need not be aligned."""
    tl.store(packet + 2 * number, (upper & 0xFF).to(tl.uint8), mask=inside)
    tl.store(packet + 2 * number + 1, (upper >> 8 & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _load_upper(packet, number, inside):
    low = tl.load(packet + 2 * number, mask=inside, other=0).to(tl.int32)
    return tl.load(packet + 2 * number + 1, mask=inside, other=0).to(tl.int32) << 8 | low


@triton.jit
def _scale(upper):
    return (upper << 16).to(tl.float32, bitcast=True)


@triton.jit
def fold(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALVINGS: tl.constexpr):
    """Sum rows, [ROWS, 1], by adding halves, for a fixed order."""
    for done in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, WIDTH >> (done + 1))), axis=1)
    return x


@triton.jit
def _mean(number, count, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Average the first `count` numbers of the blocks, [BLOCKS, 1]; the others are zero."""
    return fold(number.to(tl.float64), BLOCKS, BLOCK, 8) / count.to(tl.float64)


@triton.jit
def _mean_scale(mean):
    """Round means, float64, to scales: the upper half of a float32. A finite mean has a finite scale."""
    size = magnitude(mean.to(tl.float32))
    nearest = tl.minimum(size + 0x7FFF + (size >> 16 & 1) >> 16, 0x7F7F)
    return tl.where(mean < float("inf"), nearest, 0x7FC0)


@triton.jit
def scales_and_codes(x, left, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute the upper halves of the blocks' scales, [BLOCKS, 1], and codes; after `left` values come zeros."""
    if BITS == 1:
        size = magnitude(x).to(tl.float32, bitcast=True)
        present = tl.minimum(tl.maximum(left - tl.arange(0, BLOCKS)[:, None] * BLOCK, 1), BLOCK)
        upper = _mean_scale(_mean(size, present, BLOCKS, BLOCK))
        code = (x.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    else:
        MAX: tl.constexpr = (1 << (BITS - 1)) - 1
        lowest: tl.constexpr = -MAX - (BITS == 3)
        greatest = tl.max(magnitude(x), axis=1)[:, None]
        most = tl.full((BLOCKS, 1), -lowest, tl.float32)
        largest = tl.full((BLOCKS, 1), FLOAT32_MAX, tl.int32).to(tl.float32, bitcast=True)
        top = tl.div_rn(largest, most).to(tl.int32, bitcast=True) >> 16  # the largest with a finite product with `most`
        part = tl.div_rn(greatest.to(tl.float32, bitcast=True), most)  # IEEE division, which `/` is not
        upper = tl.minimum(part.to(tl.int32, bitcast=True) + 0xFFFF >> 16, top)
        used = (greatest < INFINITE) & (upper > 0)
        if BITS == 3:
            upper |= tl.where((tl.max(x, axis=1) > -tl.min(x, axis=1))[:, None] & (upper > 0), 0x8000, 0)
        scale = _scale(tl.where(used, upper, 0x3F80))
        quotient = tl.div_rn(tl.where(used, x, 0.0), tl.broadcast_to(scale, (BLOCKS, BLOCK)))
        rounded = (quotient + 12582912.0) - 12582912.0  # to nearest, ties to even: the sum has no bits for the fraction
        code = tl.where(used, tl.minimum(tl.maximum(rounded, lowest), MAX).to(tl.int32), 0)
        upper = tl.where(greatest < INFINITE, upper, 0x7FC0)
    return upper, code


@triton.jit
def _values(upper, code, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Convert codes to values, float32."""
    if BITS == 1:
        # Sets the sign bit, because compiled -size is 0 - size, which has no sign if the mean is zero. The interpreter keeps the sign.
        value = (tl.broadcast_to(upper << 16, (BLOCKS, BLOCK)) ^ code << 31).to(tl.float32, bitcast=True)
    else:
        value = code.to(tl.float32) * _scale(upper)
    return value


@triton.jit
def share(acc, left, P: tl.constexpr, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute scales and codes of acc / P, and the error, acc - P * decoded."""
    times = tl.full((BLOCKS, BLOCK), P, tl.float32)
    part = acc * (1.0 / P) if P & (P - 1) == 0 else tl.div_rn(acc, times)  # the reciprocal of a power of two is exact
    upper, code = scales_and_codes(part, left, BITS, BLOCKS, BLOCK)
    received = _values(upper, code, BITS, BLOCKS, BLOCK)
    error = acc - P * received
    if tl.max(magnitude(error)) >= INFINITE:
        # P times the received value may overflow float32 although the difference does not.
        wide = (acc.to(tl.float64) - P * received.to(tl.float64)).to(tl.float32)
        error = tl.where(magnitude(error) < INFINITE, error, wide)
    return upper, code, error


@triton.jit
def store_packet(packet, upper, code, first, left, k, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write scales, and the low BITS of the codes without gaps, the first in the lowest bits, to a packet of `k` values."""
    number = tl.arange(0, BLOCKS)[:, None]
    _store_scale(packet + 2 * (first // BLOCK), number, upper, number * BLOCK < left)
    GROUP: tl.constexpr = 1 if BITS == 8 else 8  # codes that become a few bytes
    NBYTES: tl.constexpr = 1 if BITS == 8 else BITS
    SLOTS: tl.constexpr = 4 if NBYTES == 3 else NBYTES  # the power of two that holds these bytes
    groups: tl.constexpr = BLOCK // GROUP
    shift = BITS * tl.arange(0, GROUP)[None, None, :]
    word = tl.sum(tl.reshape(code & (1 << BITS) - 1, (BLOCKS, groups, GROUP)) << shift, axis=2)  # no bit twice
    slot = tl.arange(0, SLOTS)[None, None, :]
    byte = word[:, :, None] >> 8 * slot & 0xFF
    at = (number * groups + tl.arange(0, groups)[None, :])[:, :, None] * NBYTES + slot
    stream = packet + 2 * tl.cdiv(k, BLOCK) + first // 8 * BITS
    tl.store(stream + at, byte.to(tl.uint8), mask=(slot < NBYTES) & (at < (left * BITS + 7) // 8))


@triton.jit
def decoded(packet, first, left, lane, k, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Decode some blocks of a packet of `k` values."""
    number, inside = tl.arange(0, BLOCKS)[:, None], lane < left
    upper = _load_upper(packet + 2 * (first // BLOCK), number, number * BLOCK < left)
    stream = packet + 2 * tl.cdiv(k, BLOCK)
    stream += first // 8 * BITS
    bit = lane * BITS
    at = bit // 8
    word = tl.load(stream + at, mask=inside, other=0).to(tl.int32)
    if BITS == 3:  # a code may continue in the next byte
        more = inside & (at + 1 < (left * BITS + 7) // 8)
        word |= tl.load(stream + at + 1, mask=more, other=0).to(tl.int32) << 8
    code = word >> bit % 8
    if BITS > 1:
        code = (code << 32 - BITS) >> 32 - BITS
    return _values(upper, code, BITS, BLOCKS, BLOCK)


@triton.jit(do_not_specialize=["k"])
def _encode_kernel(value, packet, k, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    k = k.to(tl.int64)
    first, left, lane = places(k, BLOCKS, BLOCK)
    x = tl.load(value + first + lane, mask=lane < left, other=0.0)
    upper, code = scales_and_codes(x, left, BITS, BLOCKS, BLOCK)
    store_packet(packet, upper, code, first, left, k, BITS, BLOCKS, BLOCK)


@triton.jit(do_not_specialize=["k"])
def _decode_kernel(packet, value, k, BITS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    k = k.to(tl.int64)
    first, left, lane = places(k, BLOCKS, BLOCK)
    tl.store(value + first + lane, decoded(packet, first, left, lane, k, BITS, BLOCKS, BLOCK), mask=lane < left)


@triton.jit(do_not_specialize=["k", "packets"])
def _reduce_kernel(
    value,
    where,
    packet,
    skip,
    k,
    packets,
    P: tl.constexpr,
    BITS: tl.constexpr,
    DOWN: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    k = k.to(tl.int64)
    first, left, lane = places(k, BLOCKS, BLOCK)
    total = tl.load(value + first + lane, mask=lane < left, other=0.0).to(tl.float64)
    for number in range(packets):
        received = tl.load(where + number).to(tl.pointer_type(tl.uint8))
        total += P * decoded(received, first, left, lane, k, BITS, BLOCKS, BLOCK).to(tl.float64)
    exact = total * (1.0 / P) if P & (P - 1) == 0 else total / P
    mean = exact.to(tl.float32)
    # A finite mean beyond float32 becomes its largest number, with the sign of the mean.
    sign = mean.to(tl.int32, bitcast=True) & -0x80000000
    largest = (sign | FLOAT32_MAX).to(tl.float32, bitcast=True)
    mean = tl.where((magnitude(mean) == INFINITE) & (tl.abs(exact) < float("inf")), largest, mean)
    live = tl.load(skip) == 0 if SKIPS else True
    taken = tl.where(live, left, 0)
    mean = tl.where(lane < taken, mean, 0.0)  # sign bits decode to non-zeros after the end too
    upper, code = scales_and_codes(mean, left, DOWN, BLOCKS, BLOCK)
    lacks = total - P * _values(upper, code, DOWN, BLOCKS, BLOCK).to(tl.float64)
    tl.store(value + first + lane, lacks.to(tl.float32), mask=lane < taken)
    upper = tl.where(live, upper, 0x7FC0)  # a skipped packet is NaN
    store_packet(packet, upper, code, first, left, k, DOWN, BLOCKS, BLOCK)


@triton.jit
def rounded(x, TYPE: tl.constexpr):
    """Round `x`, float32, to the nearest number of TYPE; for bfloat16 explicitly, because the interpreter truncates."""
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
    value = tl.where(lane < left, value, 0.0)  # sign bits decode to non-zeros after the end too
    worst = tl.maximum(magnitude(TIMES * value), magnitude(rounded(value, TYPE).to(tl.float32)))
    if tl.max(worst) >= INFINITE:
        tl.store(fits, 0)
