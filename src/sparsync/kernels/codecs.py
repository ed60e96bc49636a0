"""The codecs of positions and values: in C++ on the CPU, in Triton on a GPU, unless `kernels.backend()` is the reference. The same bytes.

Positions are int32 or int64, ascending, inside a span that both sides know; they come out as int32. Encoders refuse others with a
ValueError, decoders refuse a packet that cannot be one with a RuntimeError.
"""

from types import ModuleType

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sparsync.kernels import codec_reference as reference
from sparsync.kernels import value_reference
from sparsync.kernels.codec_reference import Codec, Decoded, Plan, elias_fano_bits, elias_fano_nbytes, refusal
from sparsync.kernels.dispatch import native as chosen
from sparsync.kernels.dispatch import on_triton
from sparsync.kernels.value_reference import scaled_nbytes

__all__ = ["elias_fano_bits", "elias_fano_nbytes", "scaled_nbytes"]  # and what is defined here
MAX_SPAN = 2**31 - 1
MEASURED = ("delta", "rice")  # whose length depends on where positions are
Packet = UInt8[Tensor, " nbytes"]
Index = Int[Tensor, " k"]


def check(index: Index, span: int) -> None:
    """Raises ValueError when `index` does not ascend inside [0, span), or the span is too long for int32 positions."""
    check_span(span)
    native = _native(index)
    if native and index.dtype == torch.int32:
        x = index.contiguous()
        fine = not native.codec_check(x.data_ptr(), x.numel(), span)
    elif triton := on_triton(index):
        fine = triton.positions.ascend(index, span)
    else:
        fine = (
            not index.numel()
            or (  # a host sync; an encoder would write outside its packet
                bool((index[1:] > index[:-1]).all()) and int(index[0]) >= 0 and int(index[-1]) < span
            )
        )
    if not fine:
        raise _disorder(index, span)


def check_span(span: int) -> None:
    """Raises ValueError when the span is too long for int32 positions."""
    if not 0 <= span <= MAX_SPAN:
        raise ValueError(
            f"positions are encoded inside spans of at most {MAX_SPAN} elements, got {span}; use smaller buckets"
        )


def pack(x: Index, bits: int) -> Packet:
    """The low `bits` bits of each of `x`, after each other without gaps."""
    native = _native(x)
    if not native or bits > reference.MOST_BITS:
        return _of_positions(x).pack(x, bits)
    x, out = _int32(x), _bytes(-(-x.numel() * bits // 8))
    native.codec_pack(x.data_ptr(), x.numel(), bits, out.data_ptr())
    return out


def unpack(packet: Packet, k: int, bits: int) -> Index:
    """The `k` numbers that were packed."""
    native = _native(packet)
    if not native or bits > reference.MOST_BITS or packet.numel() != -(-k * bits // 8):
        return _of_positions(packet).unpack(packet, k, bits)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.int32, device="cpu")
    native.codec_unpack(packet.data_ptr(), k, bits, out.data_ptr())
    return out


def measured(index: Index, span: int) -> dict[str, Plan]:
    """How delta and rice, whose length depends on `index`, write it: one walk, which checks it too. Raises ValueError as `check` does."""
    native = _native(index)
    if not native or index.dtype != torch.int32:
        check(index, span)
    if not native:
        codecs = _of_positions(index)
        return {"delta": codecs.delta_plan(index), "rice": codecs.rice_plan(index)}
    check_span(span)
    x = _int32(index)
    reason, delta_nbytes, rice_bits, rice_nbytes = native.codec_measure(x.data_ptr(), x.numel(), span)
    if reason:
        raise _disorder(index, span)
    return {"delta": Plan(0, delta_nbytes), "rice": Plan(rice_bits, rice_nbytes)}


def encode(codec: Codec, index: Index, span: int, plan: Plan, head: bytes = b"") -> Packet:
    """`head`, and behind it the packet of `index`, written as `plan` tells, which is that of `measured` for delta and rice.

    Raises ValueError as `check` does, but expects delta and rice to be checked, because they are measured.
    """
    native = _native(index)
    if codec not in MEASURED and (not native or index.dtype != torch.int32):
        check(index, span)
    if not native:
        return _behind(head, _of_positions(index).encode(codec, index, span, plan))
    check_span(span)
    x, out = _int32(index), _bytes(len(head) + plan.nbytes)
    if head:
        out[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    write = getattr(native, f"codec_{codec}_encode")
    if write(x.data_ptr(), x.numel(), span, plan.bits, out.data_ptr() + len(head), plan.nbytes):
        raise _disorder(index, span)
    return out


def decode(codec: Decoded, packet: Packet, k: int, span: int) -> Index:
    """The `k` positions in a packet, or a RuntimeError that says why it cannot be one."""
    if not 0 <= k <= span <= MAX_SPAN:
        raise refusal(reference.COUNT, k, span, packet.numel())
    native = _native(packet)
    if not native:
        return getattr(_of_positions(packet), f"{codec}_decode")(packet, k, span)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.int32, device="cpu")
    reason = getattr(native, f"codec_{codec}_decode")(packet.data_ptr(), packet.numel(), k, span, out.data_ptr())
    if reason:
        raise refusal(reason, k, span, packet.numel())
    return out


def scaled_encode(value: Float[Tensor, " k"], bits: int, noise: Float[Tensor, " k"] | None = None) -> Packet:
    """Values in 8 or 4 bits with a scale for each block; `noise` in [0, 1) rounds at random."""
    native = _native(value)
    if not native:
        return _of_values(value, *(() if noise is None else (noise,))).scaled_encode(value, bits, noise)
    value, out = value.contiguous(), _bytes(scaled_nbytes(value.numel(), bits))
    if noise is not None and noise.shape != value.shape:
        raise ValueError(f"there must be a number for each of {value.numel()} values, got {noise.numel()}")
    noise = noise.to(value).contiguous() if noise is not None else None
    at = noise.data_ptr() if noise is not None else 0
    native.codec_scaled_encode(value.data_ptr(), value.numel(), bits, at, out.data_ptr())
    return out


def scaled_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """What `scaled_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_values(packet, k, bits)
    native = _native(packet)
    if not native:
        return _of_values(packet).scaled_decode(packet, k, bits)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.float32, device="cpu")
    native.codec_scaled_decode(packet.data_ptr(), k, bits, out.data_ptr())
    return out


def sign_encode(value: Float[Tensor, " k"]) -> Packet:
    """Signs, and the mean magnitude of each block."""
    native = _native(value)
    if not native:
        return _of_values(value).sign_encode(value)
    value, out = value.contiguous(), _bytes(scaled_nbytes(value.numel(), 1))
    native.codec_sign_encode(value.data_ptr(), value.numel(), out.data_ptr())
    return out


def sign_decode(packet: Packet, k: int) -> Float[Tensor, " k"]:
    """What `sign_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_values(packet, k, 1)
    native = _native(packet)
    if not native:
        return _of_values(packet).sign_decode(packet, k)
    packet, out = packet.contiguous(), torch.empty(k, dtype=torch.float32, device="cpu")
    native.codec_sign_decode(packet.data_ptr(), k, out.data_ptr())
    return out


def _native(x: Tensor) -> ModuleType | None:
    """The C++ codecs, where they are built and can read `x`."""
    found = chosen() if x.device.type == "cpu" else None
    return found[0] if found else None


def _of_positions(x: Tensor) -> ModuleType:
    """The codecs of positions that are not in C++: Triton's where they take `x`, else the reference."""
    triton = on_triton(x)
    return triton.positions if triton else reference


def _of_values(*tensors: Tensor) -> ModuleType:
    """The same of values: Triton's take float32, and packets."""
    fine = all(each.dtype in (torch.float32, torch.uint8) for each in tensors)
    triton = on_triton(*tensors) if fine else None
    return triton.values if triton else value_reference


def _disorder(index: Tensor, span: int) -> ValueError:
    return ValueError(f"positions to encode must ascend inside [0, {span - 1}], without any twice; got {index}")


def _behind(head: bytes, packet: Tensor) -> Tensor:
    return torch.cat([torch.tensor(list(head), dtype=torch.uint8, device=packet.device), packet]) if head else packet


def _check_values(packet: Tensor, k: int, bits: int) -> None:
    if packet.numel() != scaled_nbytes(k, bits):
        raise RuntimeError(
            f"{k} values of {bits} bits take {scaled_nbytes(k, bits)} bytes with their scales, the packet has {packet.numel()}; "
            "sender and receiver must agree on codec and count"
        )


def _int32(index: Tensor) -> Tensor:
    return index if index.dtype == torch.int32 and index.is_contiguous() else index.to(torch.int32).contiguous()


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")
