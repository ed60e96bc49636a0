"""The codecs of positions and values, by the backend in use: in C++ in this machine's memory, else the reference. The same bytes.

Positions are int32 or int64, ascending, inside a span that both sides know; they come out as int32. Values are float32. Arguments that
are no such things raise TypeError or ValueError; a packet that cannot be one, because another rank made it, raises RuntimeError.
"""

from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sparsync.kernels.arguments import BYTES, FLOAT32, POSITIONS, check_one_device, check_vector, integer
from sparsync.kernels.codec_reference import MAX_SPAN, PositionCodec, check_codec
from sparsync.kernels.dispatch import run
from sparsync.kernels.value_reference import MAX_CODE, values_nbytes

Packet = UInt8[Tensor, " nbytes"]
SCALED_BITS = tuple(MAX_CODE)
MEANS_BITS = (2, 1)


def encode_positions(codec: PositionCodec, index: Int[Tensor, " k"], span: int) -> Packet:
    """Return the packet of `index`. Raises ValueError unless it ascends inside [0, span), and for spans of 2^31 or more."""
    check_codec(codec)
    check_vector(index, "index", POSITIONS)
    return run("encode_positions", codec, index, _span(span))


def decode_positions(codec: PositionCodec, packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """Return the `k` positions in a packet. Raises RuntimeError where it cannot be one of `k` positions inside [0, span)."""
    check_codec(codec)
    check_vector(packet, "packet", BYTES)
    k, span = integer(k, "k"), _span(span)
    if not 0 <= k <= span:
        raise RuntimeError(
            f"a packet of positions cannot be decoded: it does not hold {k} positions; "
            "sender and receiver must agree on codec, span and count"
        )
    return run("decode_positions", codec, packet, k, span)


def scaled_encode(value: Float[Tensor, " k"], bits: int, noise: Float[Tensor, " k"] | None = None) -> Packet:
    """Return `value` in 8, 4 or 3 bits with a scale for each block; `noise` in [0, 1) rounds at random."""
    check_vector(value, "value", FLOAT32)
    bits = _bits(bits, SCALED_BITS)
    if noise is not None:
        check_vector(noise, "noise", FLOAT32)
        if noise.numel() != value.numel():
            raise ValueError(f"noise must have a number for each of {value.numel()} values, got {noise.numel()}")
        check_one_device(("value", value), ("noise", noise))
    return run("scaled_encode", value, bits, noise)


def scaled_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """Return what `scaled_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    k, bits = integer(k, "k"), _bits(bits, SCALED_BITS)
    _check_length(packet, k, bits)
    return run("scaled_decode", packet, k, bits)


def means_encode(value: Float[Tensor, " k"], bits: int) -> Packet:
    """Return the signs of `value`, and the mean magnitude of each block; with 2 bits also which magnitudes are above it, and two means."""
    check_vector(value, "value", FLOAT32)
    return run("means_encode", value, _bits(bits, MEANS_BITS))


def means_decode(packet: Packet, k: int, bits: int) -> Float[Tensor, " k"]:
    """Return what `means_encode` made of `k` values, float32. Raises RuntimeError when the packet has another length."""
    k, bits = integer(k, "k"), _bits(bits, MEANS_BITS)
    _check_length(packet, k, bits)
    return run("means_decode", packet, k, bits)


def _bits(bits: int, allowed: tuple[int, ...]) -> int:
    if integer(bits, "bits") not in allowed:
        raise ValueError(f"bits must be one of {', '.join(map(str, allowed))} for this codec of values, got {bits}")
    return integer(bits, "bits")


def _span(span: int) -> int:
    span = integer(span, "span")
    if not 0 <= span <= MAX_SPAN:
        raise ValueError(
            f"positions are encoded inside spans of at most {MAX_SPAN} elements, got {span}; use smaller buckets"
        )
    return span


def _check_length(packet: Tensor, k: int, bits: int) -> None:
    check_vector(packet, "packet", BYTES)
    if k < 0:
        raise RuntimeError(f"a packet cannot hold {k} values; sender and receiver must agree on format and count")
    if packet.numel() != values_nbytes(k, bits):
        raise RuntimeError(
            f"{k} values of {bits} bits take {values_nbytes(k, bits)} bytes with their scales, the packet has {packet.numel()}; "
            "sender and receiver must agree on format and count"
        )
