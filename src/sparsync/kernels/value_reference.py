"""The specification of the codecs that quantize values to few bits, in plain torch. The faster codecs write the same bytes.

Blocks of 256 values share a 16-bit scale: the upper half of a float32. A code of at most 8 bits times such a scale is exact in
float32, so decoded values and errors are exact. A block with NaN or Inf has the scale NaN, and decodes as NaN.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

from sparsync.kernels.codec_reference import pack, unpack
from sparsync.kernels.dispatch import operation

BLOCK = 256
SCALE_NBYTES = 2
MAX_CODE = {8: 127, 4: 7, 3: 3}  # by number of bits
TERNARY = -5  # replaces the number of bits: five values per byte
POWERS = (1, 3, 9, 27, 81)  # powers of 3, the weights of the five codes in a byte
LEVEL = 1.224  # the ternary scale in root mean squares, with the least error for normally distributed values
NAN_SCALE = 0x7FC0


def values_nbytes(k: int, bits: int) -> int:
    """Return the packet size of `k` values of `bits` bits, with the scales of their blocks, in bytes."""
    codes = -(-k // len(POWERS)) if bits == TERNARY else -(-k * bits // 8)
    return -(-k // BLOCK) * SCALE_NBYTES + codes


def nan_packet(k: int, bits: int, device: torch.device) -> UInt8[Tensor, " nbytes"]:
    """Encode `k` values that are all NaN."""
    packet = torch.zeros(values_nbytes(k, bits), dtype=torch.uint8, device=device)
    scales = packet[: SCALE_NBYTES * -(-k // BLOCK)]
    scales[::2], scales[1::2] = NAN_SCALE & 0xFF, NAN_SCALE >> 8
    return packet


@operation
def values_encode(value: Float[Tensor, " k"], bits: int) -> UInt8[Tensor, " nbytes"]:
    """Encode `value`: the scales of all blocks, then all codes."""
    if bits == TERNARY:
        return _ternary_encode(value)
    return _signs_encode(value) if bits == 1 else _scaled_encode(value, bits)


@operation
def values_decode(packet: UInt8[Tensor, " nbytes"], k: int, bits: int) -> Float[Tensor, " k"]:
    """Decode a packet of `k` values, float32; its length must be right."""
    scale, packed = _split(packet, k)
    if bits == TERNARY:
        code = ((packed[:, None] // _powers_on(packet.device) + 1) % 3).view(-1)[:k].to(torch.int8) - 1
    elif bits == 1:
        # From the bit, so that zeros get a sign too.
        size = scale[:, None].expand(-1, BLOCK).reshape(-1)[:k]
        return torch.where(unpack(packed, k, 1).bool(), -size, size)
    else:
        code = packed.view(torch.int8) if bits == 8 else unpack(packed, k, bits) << 32 - bits >> 32 - bits
    return (_blocks(code.to(torch.float32)) * scale[:, None]).view(-1)[:k]


def _scaled_encode(value: Tensor, bits: int) -> Tensor:
    """Encode as scales of all blocks, then codes of 8, 4 or 3 bits, value / scale in two's complement, the first in the low bits.

    Codes round to nearest, ties to even. 3 bits use all codes, one more below zero than above. The scale's sign gives the lowest
    code to the block's greatest magnitude, and is positive if both signs reach it. Values of the other sign that would round beyond
    the last code get the last code.
    """
    max_code = MAX_CODE[bits]
    signed = bits == 3  # with 15 or 255 codes, one more does not improve training
    lowest = -max_code - signed
    block = _blocks(value)
    greatest = block.abs().amax(1)
    upper = (greatest / -lowest).view(torch.int32) + 0xFFFF >> 16  # rounded up, so that no code is below `lowest`
    # The greatest scale whose product with `lowest` is finite.
    ceiling = (torch.finfo(torch.float32).max / torch.tensor(float(-lowest), dtype=torch.float32)).view(
        torch.int32
    ) >> 16
    upper = upper.clamp(max=int(ceiling))
    if signed:
        upper = torch.where((block.amax(1) > -block.amin(1)) & (upper > 0), upper | 0x8000, upper)
    upper = torch.where(greatest.isfinite(), upper, NAN_SCALE)
    rounded = (block / _scale(upper)[:, None]).round().nan_to_num(0.0, 0.0, 0.0)
    code = rounded.clamp(lowest, max_code).to(torch.int8).view(-1)[: value.numel()]
    packed = code.view(torch.uint8) if bits == 8 else pack(code, bits)
    return torch.cat([_two_bytes(upper), packed])


def _signs_encode(value: Tensor) -> Tensor:
    """Encode as mean magnitudes of all blocks, then the signs of the values, the first in the lowest bit."""
    mean = _mean(_blocks(value.abs()), _counts(value))
    return torch.cat([_two_bytes(_mean_scale(mean)), pack(value.signbit().to(torch.uint8), 1)])


def _ternary_encode(value: Tensor) -> Tensor:
    """Encode as scales of LEVEL root mean squares of all blocks, then five codes per byte, in base 3 with the first lowest.

    A code is 1 above half the scale, 2 below minus half the scale, and 0 between them.
    """
    block = _blocks(value)
    upper = _mean_scale(_mean(block.to(torch.float64).square(), _counts(value)).sqrt() * LEVEL)
    half = _scale(upper)[:, None] / 2  # exact
    code = ((block > half).to(torch.uint8) + 2 * (block < -half).to(torch.uint8)).view(-1)[: value.numel()]
    fives = pad(code, (0, -code.numel() % len(POWERS))).view(-1, len(POWERS))
    return torch.cat([_two_bytes(upper), (fives * _powers_on(value.device)).sum(1, dtype=torch.uint8)])


def _powers_on(device: torch.device) -> Tensor:
    return torch.tensor(POWERS, dtype=torch.uint8, device=device)


def greatest_of(packets: Sequence[Tensor], lengths: Sequence[int], bits: int) -> Float[Tensor, ""]:
    """Bound the magnitudes in one or more packets of these lengths, from their scales alone; NaN if a block is NaN."""
    pairs = zip(packets, lengths, strict=True)
    scales = torch.cat([packet[: SCALE_NBYTES * -(-k // BLOCK)] for packet, k in pairs]).view(torch.bfloat16)
    # 2^(bits - 1) is the greatest magnitude of a code.
    return scales.abs().max().to(torch.float32) * (1 if bits < 3 else 2 ** (bits - 1))


def _counts(value: Tensor) -> Tensor:
    """Count the values by block, float64."""
    start = torch.arange(0, value.numel(), BLOCK, dtype=torch.float64, device=value.device)
    return (value.numel() - start).clamp(max=BLOCK)


def _mean(number: Tensor, count: Tensor) -> Tensor:
    """Average the first `count` numbers of every block; the others are zero. Adds halves, in float64, for a fixed order."""
    total = number.to(torch.float64)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total[:, 0] / count


def _mean_scale(mean: Tensor) -> Tensor:
    """Round means, float64, to scales: the upper half of a float32, int32. A finite mean has a finite scale."""
    bits = mean.to(torch.float32).view(torch.int32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).clamp(max=0x7F7F)
    return torch.where(mean.isfinite(), nearest, NAN_SCALE)


def _blocks(x: Tensor) -> Tensor:
    """Reshape `x` to rows of 256, padded with zeros."""
    return pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scale(upper: Tensor) -> Tensor:
    """Convert an upper half to a float32."""
    return (upper.to(torch.int32) << 16).view(torch.float32)


def _two_bytes(upper: Tensor) -> Tensor:
    return torch.stack([upper & 0xFF, upper >> 8 & 0xFF], 1).to(torch.uint8).view(-1)


def _split(packet: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Split a packet of `k` values into scales and codes."""
    count = -(-k // BLOCK)
    pair = packet[: SCALE_NBYTES * count].view(count, SCALE_NBYTES).to(torch.int32)
    return _scale(pair[:, 0] | pair[:, 1] << 8), packet[SCALE_NBYTES * count :]
