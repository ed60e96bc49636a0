"""The codecs of positions and values, by the backend in use: in C++ in this machine's memory, else the reference. The same bytes.

Positions are int32 or int64, ascending, inside a span that both sides know; they come out as int32. Encoders refuse others with a
ValueError, decoders refuse a packet that cannot be one with a RuntimeError.
"""

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.dispatch import run
from sparsync.kernels.value_reference import values_nbytes

Packet = UInt8[Tensor, " nbytes"]


def encode_positions(codec: PositionCodec, index: Int[Tensor, " k"], span: int) -> Packet:
    """Return the packet of `index`. Raises ValueError unless it ascends inside [0, span), and for spans of 2^31 or more."""
    return run("encode_positions", codec, index, span)


def decode_positions(codec: PositionCodec, packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """Return the `k` positions in a packet. Raises RuntimeError where it cannot be one of `k` positions inside [0, span)."""
    return run("decode_positions", codec, packet, k, span)


def scaled_encode(value: Float[Tensor, " k"], bits: int, noise: Float[Tensor, " k"] | None = None) -> Packet:
    """Return `value` in 8, 4 or 3 bits with a scale for each block; `noise` in [0, 1) rounds at random."""
    if noise is not None and noise.shape != value.shape:
        raise ValueError(f"there must be a number for each of {value.numel()} values, got {noise.numel()}")
    return run("scaled_encode", value, bits, noise)


def scaled_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """Return what `scaled_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_length(packet, k, bits)
    return run("scaled_decode", packet, k, bits)


def means_encode(value: Float[Tensor, " k"], bits: int) -> Packet:
    """Return the signs of `value`, and the mean magnitude of each block; with 2 bits also which magnitudes are above it, and two means."""
    return run("means_encode", value, bits)


def means_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """Return what `means_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    _check_length(packet, k, bits)
    return run("means_decode", packet, k, bits)


def _check_length(packet: Tensor, k: int, bits: int) -> None:
    if k < 0 or packet.numel() != values_nbytes(k, bits):
        raise RuntimeError(
            f"{k} values of {bits} bits take {values_nbytes(k, bits)} bytes with their scales, the packet has {packet.numel()}; "
            "sender and receiver must agree on format and count"
        )
