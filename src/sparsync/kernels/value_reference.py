"""The specification of the codecs that quantize values to few bits, in plain torch. The faster ones write the same bytes.

Blocks of 256 values share a scale of 16 bits: the upper half of a float32. A code of at most 8 bits times such a scale is a float32
without rounding, so what is decoded, and the error against it, are exact. A block with NaN or Inf has the scale NaN, and all of it is
decoded as NaN.
"""

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
SCALE_NBYTES = 2
MAX_CODE = {8: 127, 4: 7}  # of so many bits
_NAN = 0x7FC0


def scaled_nbytes(k: int, bits: int) -> int:
    """Return the bytes of `k` values of `bits` bits each, with the scales of their blocks."""
    return -(-k // BLOCK) * SCALE_NBYTES + -(-k * bits // 8)


def scaled_encode(
    value: Float[Tensor, " k"], bits: int, noise: Float[Tensor, " k"] | None = None
) -> UInt8[Tensor, " nbytes"]:
    """Return the scales of all blocks, then codes of 8 or 4 bits, two's complement, the first in the low half: value / scale, rounded.

    To nearest, ties to even; with `noise` in [0, 1) up or down, such that uniform noise makes the mean right.
    """
    if bits not in MAX_CODE:
        raise ValueError(f"values are rounded to 8 or 4 bits, got {bits}")
    max_code = MAX_CODE[bits]
    block = _blocks(value)
    greatest = block.abs().amax(1)
    upper = (greatest / max_code).view(torch.int32) + 0xFFFF >> 16  # rounded up, so that no code exceeds `max_code`
    # The greatest scale that times `max_code` is finite.
    ceiling = (torch.finfo(torch.float32).max / torch.tensor(float(max_code), dtype=torch.float32)).view(
        torch.int32
    ) >> 16
    upper = torch.where(greatest.isfinite(), upper.clamp(max=int(ceiling)), _NAN)
    quotient = block / _scale(upper)[:, None]
    rounded = quotient.round() if noise is None else (quotient + _blocks(noise)).floor()
    code = (
        rounded.nan_to_num(0.0, 0.0, 0.0)
        .clamp(-max_code, max_code)
        .to(torch.int8)
        .view(-1)[: value.numel()]
        .view(torch.uint8)
    )
    if bits == 4:
        pair = pad(code & 15, (0, code.numel() % 2)).view(-1, 2)
        code = pair[:, 0] | pair[:, 1] << 4
    return torch.cat([_two_bytes(upper), code])


def scaled_decode(packet: UInt8[Tensor, " nbytes"], k: int, bits: int) -> Float[Tensor, " k"]:
    """Return the values that the packet of `k` stands for, float32; its length must be right."""
    if bits not in MAX_CODE:
        raise ValueError(f"values are rounded to 8 or 4 bits, got {bits}")
    scale, code = _split(packet, k)
    if bits == 4:
        code = torch.stack([code << 4, code & 0xF0], 1).view(-1)[:k].view(torch.int8) >> 4
    return (_blocks(code.view(torch.int8).to(torch.float32)) * scale[:, None]).view(-1)[:k]


def sign_encode(value: Float[Tensor, " k"]) -> UInt8[Tensor, " nbytes"]:
    """Return the mean magnitude of all blocks, then one bit a value, set where its sign is."""
    upper = _mean_scale(_blocks(value.abs()), value.numel())
    sign = pad(value.signbit().to(torch.uint8), (0, -value.numel() % 8)).view(-1, 8)
    code = (sign << torch.arange(8, device=value.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
    return torch.cat([_two_bytes(upper), code])


def sign_decode(packet: UInt8[Tensor, " nbytes"], k: int) -> Float[Tensor, " k"]:
    """Return plus or minus the scale, float32, for a packet of `k` values; its length must be right."""
    scale, code = _split(packet, k)
    negative = (code[:, None] >> torch.arange(8, device=code.device, dtype=torch.uint8)) & 1
    sign = 1.0 - 2.0 * negative.view(-1)[:k].to(torch.float32)
    return (_blocks(sign) * scale[:, None]).view(-1)[:k]


def _mean_scale(magnitude: Tensor, k: int) -> Tensor:
    """Return the upper half of the mean of each block, rounded to nearest, int32. Halves are added in float64, so the order is fixed."""
    total = magnitude.to(torch.float64)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    count = torch.full_like(total[:, 0], BLOCK)
    if k % BLOCK:
        count[-1] = k % BLOCK
    mean = (total[:, 0] / count).to(torch.float32)
    bits = mean.view(torch.int32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).clamp(max=0x7F7F)
    return torch.where(mean.isfinite(), nearest, _NAN)


def _blocks(x: Tensor) -> Tensor:
    """Return `x` in rows of 256, filled up with zeros."""
    return pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)


def _scale(upper: Tensor) -> Tensor:
    """Return the float32 with this upper half."""
    return (upper.to(torch.int32) << 16).view(torch.float32)


def _two_bytes(upper: Tensor) -> Tensor:
    return torch.stack([upper & 0xFF, upper >> 8 & 0xFF], 1).to(torch.uint8).view(-1)


def _split(packet: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the scales and the codes of a packet of `k` values."""
    count = -(-k // BLOCK)
    pair = packet[: SCALE_NBYTES * count].view(count, SCALE_NBYTES).to(torch.int32)
    return _scale(pair[:, 0] | pair[:, 1] << 8), packet[SCALE_NBYTES * count :]
