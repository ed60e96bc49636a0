"""The codec that rounds values to 8 or 4 bits, on the device: the bytes of `value_reference`. Signs are encoded by that, in torch."""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# (Triton makes its own types of what a kernel is called with, and its stubs do not know those of what reductions return.)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.kernels.cuda.launching import ONE_WARP, magnitude, on_its_device, programs
from sparsync.kernels.value_reference import BLOCK, LARGEST, scaled_nbytes, sign_decode, sign_encode

__all__ = ["scaled_decode", "scaled_encode", "sign_decode", "sign_encode"]


@on_its_device
def scaled_encode(value: Tensor, bits: int, noise: Tensor | None = None) -> Tensor:
    """As the reference's, for float32. No host sync."""
    k = value.numel()
    packet = torch.empty(scaled_nbytes(k, bits), dtype=torch.uint8, device=value.device)
    if k:
        _encode_kernel[programs(k, BLOCK)](
            value,
            value if noise is None else noise,
            packet,
            k,
            packet.numel(),
            MOST=LARGEST[bits],
            CEILING=_ceiling(LARGEST[bits]),
            NOISY=noise is not None,
            PER_BYTE=8 // bits,
            BLOCK=BLOCK,
            **ONE_WARP,
        )
    return packet


@on_its_device
def scaled_decode(packet: Tensor, k: int, bits: int) -> Tensor:
    """As the reference's. No host sync."""
    value = torch.empty(k, dtype=torch.float32, device=packet.device)
    if k:
        _decode_kernel[programs(k, BLOCK)](packet, value, k, PER_BYTE=8 // bits, BLOCK=BLOCK, **ONE_WARP)
    return value


@cache
def _ceiling(most: int) -> int:
    """The upper half of the largest scale that does not exceed float32 when it is multiplied by `most`."""
    limit = torch.tensor(torch.finfo(torch.float32).max, dtype=torch.float32, device="cpu")
    return int((limit / most).view(torch.int32)) >> 16


@triton.jit
def _code(value, scale, noise, MOST: tl.constexpr, NOISY: tl.constexpr):
    """value / scale as an integer; 0 where that is not finite, as in a block of zeros."""
    quotient = tl.math.div_rn(value, scale)
    total = quotient + noise if NOISY else quotient
    rounded = (total + 12582912.0) - 12582912.0  # 1.5 * 2^23: to nearest, ties to even
    if NOISY:  # down; the compiler's floor takes denormal numbers for zero
        rounded = tl.where(rounded > total, rounded - 1.0, rounded)
    rounded = tl.minimum(tl.maximum(rounded, -MOST), MOST)
    return tl.where(magnitude(quotient) < 0x7F800000, rounded, 0.0).to(tl.int32)


@triton.jit
def _encode_kernel(
    value,
    noise,
    packet,
    k,
    nbytes,
    MOST: tl.constexpr,
    CEILING: tl.constexpr,
    NOISY: tl.constexpr,
    PER_BYTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK // PER_BYTE)
    first = block * BLOCK + byte * PER_BYTE
    low = tl.load(value + first, mask=first < k, other=0.0)
    high = tl.load(value + first + 1, mask=(first + 1 < k) & (PER_BYTE > 1), other=0.0)
    largest = tl.max(tl.maximum(magnitude(low), magnitude(high)))
    share = tl.math.div_rn(tl.cast(largest, tl.float32, bitcast=True), MOST * 1.0)
    upper = tl.minimum((share.to(tl.int32, bitcast=True) + 0xFFFF) >> 16, CEILING)
    upper = tl.where(largest < 0x7F800000, upper, 0x7FC0)
    scale = (upper << 16).to(tl.float32, bitcast=True)
    low_noise, high_noise = low, high
    if NOISY:
        low_noise = tl.load(noise + first, mask=first < k, other=0.0)
        high_noise = tl.load(noise + first + 1, mask=(first + 1 < k) & (PER_BYTE > 1), other=0.0)
    code = _code(low, scale, low_noise, MOST, NOISY)
    if PER_BYTE > 1:
        code = (code & 15) | (_code(high, scale, high_noise, MOST, NOISY) << 4)
    scales = (k + BLOCK - 1) // BLOCK * 2
    at = scales + block * (BLOCK // PER_BYTE) + byte
    tl.store(packet + at, (code & 255).to(tl.uint8), mask=at < nbytes)
    tl.store(packet + 2 * block, (upper & 255).to(tl.uint8))
    tl.store(packet + 2 * block + 1, (upper >> 8).to(tl.uint8))


@triton.jit
def _decode_kernel(packet, value, k, PER_BYTE: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    upper = tl.load(packet + 2 * block).to(tl.int32) | (tl.load(packet + 2 * block + 1).to(tl.int32) << 8)
    scale = (upper << 16).to(tl.float32, bitcast=True)
    scales = (k + BLOCK - 1) // BLOCK * 2
    code = tl.load(packet + scales + lane // PER_BYTE, mask=lane < k, other=0).to(tl.int32)
    if PER_BYTE > 1:
        code = (code >> ((lane & 1) * 4).to(tl.int32)) & 15
        code = (code ^ 8) - 8
    else:
        code = (code ^ 128) - 128
    tl.store(value + lane, code.to(tl.float32) * scale, mask=lane < k)
