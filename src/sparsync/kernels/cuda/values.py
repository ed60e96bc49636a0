"""Rounding values to few bits, and back: the bytes of `value_reference`, several blocks of 256 values in each program."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportCallIssue=false, reportAssignmentType=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.kernels.cuda.launch import FLOAT32, magnitude, takes
from sparsync.kernels.share_reference import decode_over_by, encode_share_by, reduce_shares_by
from sparsync.kernels.value_reference import BLOCK, LEVEL, MAX_CODE, POWERS, TERNARY, values_nbytes

BYTES = frozenset({torch.uint8})
BLOCKS = 4  # of 256 values, that one program works on
FLOAT32_MAX: tl.constexpr = tl.constexpr(0x7F7FFFFF)  # its bits


@takes(FLOAT32)
def values_encode(value: Tensor, bits: int) -> Tensor:
    """Return the scales of all blocks of `value` [k], then their codes, as the reference."""
    k = value.numel()
    packet = torch.empty(values_nbytes(k, bits), dtype=torch.uint8, device=value.device)
    if not k:
        return packet
    if bits == TERNARY:
        _ternary_scale_kernel[_programs(k)](value, packet, k, LEVEL=LEVEL, BLOCKS=BLOCKS, BLOCK=BLOCK)
        # Blocks do not end with a byte, so that bytes are written when the scales of all blocks are there.
        fives = triton.cdiv(k, len(POWERS))
        _ternary_codes_kernel[_programs(fives)](value, packet, k, BLOCK=BLOCK, FIVES=BLOCKS * BLOCK)
    elif bits == 1:
        _signs_encode_kernel[_programs(k)](value, packet, k, **_form(bits))
    else:
        _scaled_encode_kernel[_programs(k)](value, packet, k, MAX=MAX_CODE[bits], **_form(bits))
    return packet


@takes(BYTES)
def values_decode(packet: Tensor, k: int, bits: int) -> Tensor:
    """Return the `k` values of a packet, float32, as the reference."""
    value = torch.empty(k, dtype=torch.float32, device=packet.device)
    if k:
        _decode_kernel[_programs(k)](packet, value, k, BITS=bits, TERNARY=bits == TERNARY, BLOCKS=BLOCKS, BLOCK=BLOCK)
    return value


@takes(FLOAT32)
def encode_share_(value: Tensor, bits: int, P: int) -> Tensor:
    """Return the packet of value / P, and leave what it lacks, as the reference."""
    return encode_share_by(values_encode, values_decode, value, bits, P)


def reduce_shares_(value: Tensor, packets: Sequence[Tensor], bits: int, P: int, bits_down: int) -> Tensor:
    """Return the packet of the mean of the values and those in packets, and leave what it lacks, as the reference."""
    return takes(FLOAT32, *[BYTES] * len(packets))(_reduce_shares)(value, packets, bits, P, bits_down)


@takes(BYTES, FLOAT32, FLOAT32)
def decode_over_(packet: Tensor, bits: int, out: Tensor, kept: Tensor | None = None) -> None:
    """Write the values of a packet, as the reference."""
    decode_over_by(values_decode, packet, bits, out, kept)


# Around the codecs torch's own operations do what is left.


def _reduce_shares(value: Tensor, packets: Sequence[Tensor], bits: int, P: int, bits_down: int) -> Tensor:
    return reduce_shares_by(values_encode, values_decode, value, packets, bits, P, bits_down)


def _programs(k: int) -> tuple[int]:
    return (triton.cdiv(k, BLOCK * BLOCKS),)


def _form(bits: int) -> dict[str, int]:
    """Return how codes become bytes: 8 of them a few bytes, or one of 8 bits one; SLOTS is the power of two that holds those bytes."""
    group, nbytes = (1, 1) if bits == 8 else (8, bits)
    slots = triton.next_power_of_2(nbytes)
    return {"BITS": bits, "GROUP": group, "NBYTES": nbytes, "SLOTS": slots, "BLOCKS": BLOCKS, "BLOCK": BLOCK}


@triton.jit
def _places(BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of this program's blocks, [BLOCKS, 1], and the places in a block, [1, BLOCK]."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    return block[:, None], tl.arange(0, BLOCK)[None, :]


@triton.jit
def _store_scale(packet, number, upper, inside):
    """Write an upper half, low byte first: packets begin anywhere."""
    tl.store(packet + 2 * number, (upper & 0xFF).to(tl.uint8), mask=inside)
    tl.store(packet + 2 * number + 1, (upper >> 8 & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _load_scale(packet, number, inside):
    low = tl.load(packet + 2 * number, mask=inside, other=0).to(tl.int32)
    high = tl.load(packet + 2 * number + 1, mask=inside, other=0).to(tl.int32)
    return ((high << 8 | low) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(
    stream,
    code,
    block,
    k,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NBYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the low BITS of each code [BLOCKS, BLOCK] one after the other, the first in the lowest bits."""
    groups: tl.constexpr = BLOCK // GROUP
    shift = BITS * tl.arange(0, GROUP)[None, None, :]
    word = tl.sum(tl.reshape(code & (1 << BITS) - 1, (BLOCKS, groups, GROUP)) << shift, axis=2)  # no bit twice
    slot = tl.arange(0, SLOTS)[None, None, :]
    byte = word[:, :, None] >> 8 * slot & 0xFF
    at = (block * groups + tl.arange(0, groups)[None, :])[:, :, None] * NBYTES + slot
    there = (slot < NBYTES) & (at < (k * BITS + 7) // 8)
    tl.store(stream + at, byte.to(tl.uint8), mask=there)


@triton.jit
def _scaled_encode_kernel(
    value,
    packet,
    k,
    MAX: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NBYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, place = _places(BLOCKS, BLOCK)
    lane, count = block * BLOCK + place, tl.cdiv(k, BLOCK)
    x = tl.load(value + lane, mask=lane < k, other=0.0)
    greatest = tl.max(magnitude(x), axis=1)[:, None]
    lowest: tl.constexpr = -MAX - (BITS == 3)
    most = tl.full((BLOCKS, 1), -lowest, tl.float32)
    largest = tl.full((BLOCKS, 1), FLOAT32_MAX, tl.int32).to(tl.float32, bitcast=True)
    top = tl.div_rn(largest, most).to(tl.int32, bitcast=True) >> 16  # of the scales that times `most` are finite
    share = tl.div_rn(greatest.to(tl.float32, bitcast=True), most)  # of IEEE, which `/` is not
    upper = tl.minimum(share.to(tl.int32, bitcast=True) + 0xFFFF >> 16, top)
    finite, used = greatest < 0x7F800000, (greatest < 0x7F800000) & (upper > 0)
    if BITS == 3:
        upper |= tl.where((tl.max(x, axis=1) > -tl.min(x, axis=1))[:, None] & (upper > 0), 0x8000, 0)
    _store_scale(packet, block, tl.where(finite, upper, 0x7FC0), block < count)
    scale = tl.where(used, upper << 16, 0x3F800000).to(tl.float32, bitcast=True)
    quotient = tl.div_rn(tl.where(used, x, 0.0), tl.broadcast_to(scale, (BLOCKS, BLOCK)))
    rounded = (quotient + 12582912.0) - 12582912.0  # to nearest, ties to even: the fraction leaves the significand
    code = tl.minimum(tl.maximum(rounded, lowest), MAX).to(tl.int32)
    _store_codes(packet + 2 * count, tl.where(used, code, 0), block, k, BITS, GROUP, NBYTES, SLOTS, BLOCKS, BLOCK)


@triton.jit
def _mean(number, count, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the mean of `count` numbers of each block, of which the others are zero, [BLOCKS, 1]. Halves are added: a fixed order."""
    total = number.to(tl.float64)
    half: tl.constexpr = BLOCK // 2
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 2)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 4)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 8)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 16)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 32)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 64)), axis=1)
    total = tl.sum(tl.reshape(total, (BLOCKS, 2, half // 128)), axis=1)
    return total / count.to(tl.float64)


@triton.jit
def _mean_scale(mean):
    """Return the upper half of each mean, float64, rounded to nearest; of a finite one it is finite."""
    size = magnitude(mean.to(tl.float32))
    nearest = tl.minimum(size + 0x7FFF + (size >> 16 & 1) >> 16, 0x7F7F)
    return tl.where(mean < float("inf"), nearest, 0x7FC0)


@triton.jit
def _signs_encode_kernel(
    value,
    packet,
    k,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    NBYTES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, place = _places(BLOCKS, BLOCK)
    lane, count = block * BLOCK + place, tl.cdiv(k, BLOCK)
    x = tl.load(value + lane, mask=lane < k, other=0.0)
    size = magnitude(x).to(tl.float32, bitcast=True)
    inside = block < count
    present = tl.where(inside, tl.minimum(k - block * BLOCK, BLOCK), 1)
    _store_scale(packet, block, _mean_scale(_mean(size, present, BLOCKS, BLOCK)), inside)
    code = (x.to(tl.int32, bitcast=True) < 0).to(tl.int32)
    _store_codes(packet + 2 * count, code, block, k, BITS, GROUP, NBYTES, SLOTS, BLOCKS, BLOCK)


@triton.jit
def _ternary_scale_kernel(value, packet, k, LEVEL: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    block, place = _places(BLOCKS, BLOCK)
    lane = block * BLOCK + place
    x = tl.load(value + lane, mask=lane < k, other=0.0).to(tl.float64)
    inside = block < tl.cdiv(k, BLOCK)
    present = tl.where(inside, tl.minimum(k - block * BLOCK, BLOCK), 1)
    level = tl.full((BLOCKS, 1), LEVEL, tl.float64)
    _store_scale(packet, block, _mean_scale(tl.sqrt(_mean(x * x, present, BLOCKS, BLOCK)) * level), inside)


@triton.jit
def _ternary_codes_kernel(value, packet, k, BLOCK: tl.constexpr, FIVES: tl.constexpr):
    five = tl.program_id(0).to(tl.int64) * FIVES + tl.arange(0, FIVES)
    byte, power = tl.zeros((FIVES,), tl.int32), 1
    for trit in range(5):
        lane = five * 5 + trit
        x = tl.load(value + lane, mask=lane < k, other=0.0)
        half = _load_scale(packet, lane // BLOCK, lane < k) * 0.5
        byte += tl.where(x > half, power, tl.where(x < -half, 2 * power, 0))
        power *= 3
    tl.store(packet + 2 * tl.cdiv(k, BLOCK) + five, byte.to(tl.uint8), mask=five * 5 < k)


@triton.jit
def _decode_kernel(
    packet, value, k, BITS: tl.constexpr, TERNARY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):
    block, place = _places(BLOCKS, BLOCK)
    lane, count = block * BLOCK + place, tl.cdiv(k, BLOCK)
    inside = lane < k
    stream = packet + 2 * count
    scale = _load_scale(packet, block, block < count)
    if TERNARY:
        byte, trit = tl.load(stream + lane // 5, mask=inside, other=0).to(tl.int32), lane % 5
        power = tl.where(trit < 2, tl.where(trit < 1, 1, 3), tl.where(trit < 3, 9, tl.where(trit < 4, 27, 81)))
        code = (byte // power + 1) % 3 - 1
        tl.store(value + lane, code.to(tl.float32) * scale, mask=inside)
    else:
        bit = place * BITS
        at = block * (BLOCK // 8 * BITS) + bit // 8
        word = tl.load(stream + at, mask=inside, other=0).to(tl.int32)
        if BITS == 3:  # a code may continue in the next byte
            more = inside & (at + 1 < (k * BITS + 7) // 8)
            word |= tl.load(stream + at + 1, mask=more, other=0).to(tl.int32) << 8
        code = word >> bit % 8
        if BITS == 1:
            size = tl.broadcast_to(scale, (BLOCKS, BLOCK))
            # By its bit: compiled, -size is 0 - size, which has no sign where the mean is zero. The interpreter keeps the sign.
            signed = size.to(tl.int32, bitcast=True) ^ (code & 1) << 31
            tl.store(value + lane, signed.to(tl.float32, bitcast=True), mask=inside)
        else:
            signed = (code << 32 - BITS) >> 32 - BITS
            tl.store(value + lane, signed.to(tl.float32) * scale, mask=inside)
