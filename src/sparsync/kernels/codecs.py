"""The codecs of positions and values: in C++ on the CPU, unless `kernels.backend()` is the reference; else in torch. The same bytes.

Positions are int32 or int64, ascending, inside a span that both sides know; they come out as int32. Encoders refuse others with a
ValueError, decoders refuse a packet that cannot be one with a RuntimeError.
"""

from types import ModuleType

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sparsync.kernels import codec_reference as reference
from sparsync.kernels import value_reference
from sparsync.kernels.choice import native as chosen
from sparsync.kernels.codec_reference import elias_fano_bits, elias_fano_nbytes, refusal
from sparsync.kernels.value_reference import scaled_nbytes

__all__ = ["elias_fano_nbytes", "scaled_nbytes"]  # and what is defined here
MAX_SPAN = 2**31 - 1
Packet = UInt8[Tensor, " nbytes"]
Index = Int[Tensor, " k"]


def check(index: Index, span: int) -> None:
    """Raises ValueError when `index` does not ascend inside [0, span), or the span is too long for int32 positions."""
    if not 0 <= span <= MAX_SPAN:
        raise ValueError(
            f"positions are encoded inside spans of at most {MAX_SPAN} elements, got {span}; use smaller buckets"
        )
    native = _native(index)
    if native and index.dtype == torch.int32:
        x = index.contiguous()
        fine = not native.codec_check(x.data_ptr(), x.numel(), span)
    else:
        fine = (
            not index.numel()
            or (  # a host sync; an encoder would write outside its packet
                bool((index[1:] > index[:-1]).all()) and int(index[0]) >= 0 and int(index[-1]) < span
            )
        )
    if not fine:
        raise ValueError(f"positions to encode must ascend inside [0, {span - 1}], without any twice; got {index}")


def pack(x: Index, bits: int) -> Packet:
    """The low `bits` bits of each of `x`, after each other without gaps."""
    native = _native(x)
    if not native or bits > reference.MOST_BITS:
        return reference.pack(x, bits)
    x, out = _int32(x), _bytes(-(-x.numel() * bits // 8))
    native.codec_pack(x.data_ptr(), x.numel(), bits, out.data_ptr())
    return out


def unpack(packet: Packet, k: int, bits: int) -> Index:
    """The `k` numbers that were packed."""
    native = _native(packet)
    if not native or bits > reference.MOST_BITS or packet.numel() != -(-k * bits // 8):
        return reference.unpack(packet, k, bits)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.int32, device="cpu")
    native.codec_unpack(packet.data_ptr(), k, bits, out.data_ptr())
    return out


def delta_nbytes(index: Index) -> int:
    """The bytes of the delta packet of `index`."""
    native = _native(index)
    if not native:
        return reference.delta_nbytes(index)
    x = _int32(index)
    return native.codec_delta_nbytes(x.data_ptr(), x.numel())


def delta_encode(index: Index, span: int) -> Packet:
    """Blocks of 128 gaps, each packed in the bits of its largest one."""
    check(index, span)
    native = _native(index)
    if not native:
        return reference.delta_encode(index)
    x = _int32(index)
    out = _bytes(native.codec_delta_nbytes(x.data_ptr(), x.numel()))
    native.codec_delta_encode(x.data_ptr(), x.numel(), out.data_ptr())
    return out


def delta_decode(packet: Packet, k: int, span: int) -> Index:
    """The positions of a delta packet."""
    return _decoded("delta", packet, k, span)


def bitmap_encode(index: Index, span: int) -> Packet:
    """A bit for each position of the span."""
    check(index, span)
    native = _native(index)
    if not native:
        return reference.bitmap_encode(index, span)
    x, out = _int32(index), _bytes(-(-span // 8))
    native.codec_bitmap_encode(x.data_ptr(), x.numel(), out.data_ptr(), out.numel())
    return out


def bitmap_decode(packet: Packet, k: int, span: int) -> Index:
    """The positions of a bitmap packet."""
    return _decoded("bitmap", packet, k, span)


def rice_plan(index: Index) -> tuple[int, int]:
    """How many low bits the Rice packet of `index` keeps apart, and its bytes."""
    native = _native(index)
    if not native:
        return reference.rice_plan(index)
    x = _int32(index)
    return native.codec_rice_plan(x.data_ptr(), x.numel())


def rice_encode(index: Index, span: int) -> Packet:
    """Gaps in Golomb-Rice codes: low bits apart, high parts in unary."""
    check(index, span)
    native = _native(index)
    if not native:
        return reference.rice_encode(index)
    x = _int32(index)
    bits, nbytes = native.codec_rice_plan(x.data_ptr(), x.numel())
    out = _bytes(nbytes)
    native.codec_rice_encode(x.data_ptr(), x.numel(), bits, out.data_ptr(), nbytes)
    return out


def rice_decode(packet: Packet, k: int, span: int) -> Index:
    """The positions of a Rice packet."""
    return _decoded("rice", packet, k, span)


def elias_fano_encode(index: Index, span: int) -> Packet:
    """Positions in Elias-Fano code, as long as `elias_fano_nbytes` tells, whichever they are."""
    check(index, span)
    native = _native(index)
    if not native:
        return reference.elias_fano_encode(index, span)
    x, out = _int32(index), _bytes(elias_fano_nbytes(index.numel(), span))
    bits = elias_fano_bits(x.numel(), span)
    native.codec_elias_fano_encode(x.data_ptr(), x.numel(), bits, out.data_ptr(), out.numel())
    return out


def elias_fano_decode(packet: Packet, k: int, span: int) -> Index:
    """The positions of an Elias-Fano packet."""
    return _decoded("elias_fano", packet, k, span)


def scaled_encode(value: Float[Tensor, " k"], bits: int, noise: Float[Tensor, " k"] | None = None) -> Packet:
    """Values in 8 or 4 bits with a scale for each block; `noise` in [0, 1) rounds at random."""
    native = _native(value)
    if not native:
        return value_reference.scaled_encode(value, bits, noise)
    value, out = value.contiguous(), _bytes(scaled_nbytes(value.numel(), bits))
    noise = noise.contiguous() if noise is not None else None
    at = noise.data_ptr() if noise is not None else 0
    native.codec_scaled_encode(value.data_ptr(), value.numel(), bits, at, out.data_ptr())
    return out


def scaled_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """What `scaled_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_values(packet, k, bits)
    native = _native(packet)
    if not native:
        return value_reference.scaled_decode(packet, k, bits)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.float32, device="cpu")
    native.codec_scaled_decode(packet.data_ptr(), k, bits, out.data_ptr())
    return out


def sign_encode(value: Float[Tensor, " k"]) -> Packet:
    """Signs, and the mean magnitude of each block."""
    native = _native(value)
    if not native:
        return value_reference.sign_encode(value)
    value, out = value.contiguous(), _bytes(scaled_nbytes(value.numel(), 1))
    native.codec_sign_encode(value.data_ptr(), value.numel(), out.data_ptr())
    return out


def sign_decode(packet: Packet, k: int) -> Float[Tensor, " k"]:
    """What `sign_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_values(packet, k, 1)
    native = _native(packet)
    if not native:
        return value_reference.sign_decode(packet, k)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.float32, device="cpu")
    native.codec_sign_decode(packet.data_ptr(), k, out.data_ptr())
    return out


def _native(x: Tensor) -> ModuleType | None:
    """The C++ codecs, where they are built and can read `x`."""
    found = chosen() if x.device.type == "cpu" else None
    return found[0] if found else None


def _decoded(name: str, packet: Tensor, k: int, span: int) -> Tensor:
    if not 0 <= k <= span <= MAX_SPAN:
        raise refusal(reference.COUNT, k, span, packet.numel())
    native = _native(packet)
    if not native:
        return getattr(reference, f"{name}_decode")(packet, k, span)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.int32, device="cpu")
    reason = getattr(native, f"codec_{name}_decode")(packet.data_ptr(), packet.numel(), k, span, out.data_ptr())
    if reason:
        raise refusal(reason, k, span, packet.numel())
    return out


def _check_values(packet: Tensor, k: int, bits: int) -> None:
    if packet.numel() != scaled_nbytes(k, bits):
        raise RuntimeError(
            f"{k} values of {bits} bits take {scaled_nbytes(k, bits)} bytes with their scales, the packet has {packet.numel()}; "
            "sender and receiver must agree on codec and count"
        )


def _int32(index: Tensor) -> Tensor:
    return index.to(torch.int32).contiguous()


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")
