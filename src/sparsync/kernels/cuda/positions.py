"""Positions in packets and in rows: the bytes of the reference, in a few launches without a host sync.

Arguments that the reference refuses are not detected. An invalid packet decodes to positions inside the span, which need not ascend.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.core import Rows
from sparsync.kernels.codec_reference import MAX_SPAN, PositionCodec, elias_fano_bits, packed_bits, size_of
from sparsync.kernels.cuda.launch import BYTES, POSITIONS, programs, takes

LANES = 1024

# Any: as in `exact_top_k`.


@takes(POSITIONS)
def encode_positions(codec: PositionCodec, index: Tensor, span: int) -> Any:
    if span > MAX_SPAN:
        return NotImplemented
    k, device = index.numel(), index.device
    bits = packed_bits(span) if codec == "packed" else elias_fano_bits(k, span) if codec == "elias_fano" else 0
    low = torch.empty(triton.cdiv(k * bits, 8), dtype=torch.uint8, device=device)
    if low.numel():
        _pack_kernel[programs(low.numel(), LANES)](index, low, k, low.numel(), BITS=bits, LANES=LANES)
    if codec == "packed":
        return low
    high = size_of(codec, k, span) - low.numel()
    words = torch.zeros(triton.cdiv(high, 4), dtype=torch.int32, device=device)
    if k:
        _mark_kernel[programs(k, LANES)](
            index, words, k, 32 * words.numel(), BITS=bits, UNARY=codec != "bitmap", LANES=LANES
        )
    marked = words.view(torch.uint8)[:high]
    return torch.cat([low, marked]) if low.numel() else marked


@takes(BYTES)
def decode_positions(codec: PositionCodec, packet: Tensor, k: int, span: int) -> Any:
    if span > MAX_SPAN or packet.numel() != size_of(codec, k, span):
        return NotImplemented
    index = torch.zeros(k, dtype=torch.int32, device=packet.device)
    if not k:
        return index
    if codec == "packed":
        _unpack_kernel[programs(k, LANES)](packet, index, k, span, BITS=packed_bits(span), LANES=LANES)
        return index
    bits = elias_fano_bits(k, span) if codec == "elias_fano" else 0
    high = packet[triton.cdiv(k * bits, 8) :]
    ones = torch.empty(high.numel(), dtype=torch.int32, device=packet.device)
    grid = programs(high.numel(), LANES)
    _ones_kernel[grid](high, ones, high.numel(), LANES=LANES)
    ends = ones.cumsum(0, dtype=torch.int32)
    given = (packet, high, ones, ends, index, high.numel(), k, span)
    _places_kernel[grid](*given, BITS=bits, UNARY=codec != "bitmap", LANES=LANES)
    return index


def locate(rows: Rows, place: Tensor) -> Any:
    return _located(place, rows.starts, rows.row)


@takes(POSITIONS)
def _located(place: Tensor, starts: Tensor, row: int) -> Tensor:
    k, located = place.numel(), torch.empty_like(place)
    if k:
        _locate_kernel[programs(k, LANES)](place, starts, located, k, starts.numel(), row, LANES=LANES)
    return located


@triton.jit
def _lanes(LANES: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)


@triton.jit
def _pack_kernel(index, out, k, size, BITS: tl.constexpr, LANES: tl.constexpr):
    """Write the low BITS of the positions without gaps, a byte per lane."""
    lane = _lanes(LANES)
    byte = tl.zeros((LANES,), tl.int32)
    for place in range(8):
        at = lane * 8 + place
        value = tl.load(index + at // BITS, mask=at // BITS < k, other=0).to(tl.int32)
        byte |= ((value >> (at % BITS).to(tl.int32)) & 1) << place
    tl.store(out + lane, byte.to(tl.uint8), mask=lane < size)


@triton.jit
def _unpacked(packet, lane, inside, BITS: tl.constexpr):
    """Read the numbers of BITS bits at some places."""
    value = tl.zeros_like(lane)
    if BITS > 0:
        first = lane * BITS
        for byte in range((BITS + 14) // 8):  # the most bytes that a number spans
            at = first // 8 + byte
            here = inside & (8 * at < first + BITS)
            loaded = tl.load(packet + at, mask=here, other=0).to(tl.int64)
            value |= (loaded << (8 * byte)) >> (first % 8)
    return value & ((1 << BITS) - 1)


@triton.jit
def _unpack_kernel(packet, index, k, span, BITS: tl.constexpr, LANES: tl.constexpr):
    lane = _lanes(LANES)
    value = _unpacked(packet, lane, lane < k, BITS)
    tl.store(index + lane, tl.minimum(value, span - 1).to(tl.int32), mask=lane < k)


@triton.jit
def _mark_kernel(index, words, k, size, BITS: tl.constexpr, UNARY: tl.constexpr, LANES: tl.constexpr):
    """Set a bit per position, or with UNARY per high part, shifted by the number of earlier positions."""
    lane = _lanes(LANES)
    place = tl.load(index + lane, mask=lane < k, other=0).to(tl.int64)
    if UNARY:
        place = (place >> BITS) + lane
    one = tl.full((LANES,), 1, tl.int32) << (place % 32).to(tl.int32)
    tl.atomic_or(words + place // 32, one, mask=(lane < k) & (place >= 0) & (place < size), sem="relaxed")


@triton.jit
def _ones_kernel(high, ones, size, LANES: tl.constexpr):
    lane = _lanes(LANES)
    byte = tl.load(high + lane, mask=lane < size, other=0).to(tl.int32)
    count = tl.zeros((LANES,), tl.int32)
    for place in range(8):
        count += (byte >> place) & 1
    tl.store(ones + lane, count, mask=lane < size)


@triton.jit
def _places_kernel(
    packet, high, ones, ends, index, size, k, span, BITS: tl.constexpr, UNARY: tl.constexpr, LANES: tl.constexpr
):
    """Write the positions that the bits of a byte stand for; with UNARY a bit gives the high part."""
    lane = _lanes(LANES)
    inside = lane < size
    byte = tl.load(high + lane, mask=inside, other=0).to(tl.int32)
    number = (tl.load(ends + lane, mask=inside, other=0) - tl.load(ones + lane, mask=inside, other=0)).to(tl.int64)
    for place in range(8):
        there = ((byte >> place) & 1) > 0
        written = there & (number < k)
        position = lane * 8 + place
        if UNARY:
            position = ((position - number) << BITS) | _unpacked(packet, number, written, BITS)
        tl.store(index + number, tl.minimum(position, span - 1).to(tl.int32), mask=written)
        number += there.to(tl.int64)


@triton.jit
def _locate_kernel(place, starts, found, k, rows, row, LANES: tl.constexpr):
    lane = _lanes(LANES)
    at = tl.load(place + lane, mask=lane < k, other=0).to(tl.int64)
    number = at // row
    start = tl.load(starts + number, mask=(lane < k) & (number >= 0) & (number < rows), other=0).to(tl.int64)
    tl.store(found + lane, (start + at - number * row).to(found.dtype.element_ty), mask=lane < k)
