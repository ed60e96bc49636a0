"""Packets: encode and decode positions, values, and Sparse vectors.

Count and span determine the codec and the length of a packet, so neither is sent. The sender knows the decoded values,
decode(encode(x)), and keeps the error in the residual. In every format but float32 a decoded value has at most 15 significant bits,
so it and its small integer multiples are exact in float32. Rounding never produces infinities: a finite value beyond the largest number
of its format becomes that number. `kernels/codec_reference.py` specifies the codecs of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from sparsync.core import Rows, Sparse, check_one_of, exact_divisor
from sparsync.kernels import operations as kernels
from sparsync.kernels.codec_reference import PositionCodec, decode_positions, encode_positions, size_of
from sparsync.kernels.dispatch import run
from sparsync.kernels.rounding import lacking, rounded
from sparsync.kernels.value_reference import TERNARY, values_decode, values_encode, values_nbytes

Values = Literal["float32", "bfloat16", "float16", "int8", "int4", "int3", "ternary", "sign"]
_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {"float32": 32, "int8": 8, "int4": 4, "int3": 3, "ternary": TERNARY, "sign": 1}
# The limits of Raw.
_INDEX_NBYTES = 4
_MAX_LENGTH = 2**31 - 1


@lru_cache(maxsize=4096)
def fixed_length_codec(k: int, span: int) -> PositionCodec:
    """Choose the codec with the shortest packet for any `k` positions inside [0, span); the first of equals."""
    return min(get_args(PositionCodec), key=lambda codec: size_of(codec, k, span))


def fixed_length_nbytes(k: int, span: int) -> int:
    """Return the packet size of `encode_fixed_length` for any `k` positions inside [0, span): 0 if k = span.

    It is defined for spans of 2^31 or more too, which cannot be encoded, because a plan need not run here.
    """
    return 0 if k == span else size_of(fixed_length_codec(k, span), k, span)


def encode_fixed_length(index: Int[Tensor, " k"], span: int) -> UInt8[Tensor, " nbytes"]:
    """Encode `index`, which must ascend inside [0, span), by the codec that k and the span determine.

    Raises ValueError for other positions, and for spans of 2^31 or more.
    """
    if index.numel() == span:
        if not torch.equal(index, torch.arange(span, dtype=index.dtype, device=index.device)):
            raise ValueError(f"{span} positions inside [0, {span}) must be all of them in order, got others")
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    return encode_positions(fixed_length_codec(index.numel(), span), index, span)


def decode_fixed_length(packet: UInt8[Tensor, " nbytes"], k: int, span: int) -> Int[Tensor, " k"]:
    """Decode the positions of a packet, int32. Raises RuntimeError for an invalid packet."""
    if k == span and not packet.numel():
        return torch.arange(span, dtype=torch.int32, device=packet.device)
    return decode_positions(fixed_length_codec(k, span), packet, k, span)


@dataclass(frozen=True)
class ValueCodec:
    """One format of values.

    "float32"                   unchanged values, also of float64
    "bfloat16", "float16"       16 bits; at most 3.39e38 and 65504
    "int8", "int4", "int3"      value / scale rounded to nearest; the block's element of greatest magnitude is 127, 7 or -4 times the
                                scale, which has a sign in int3
    "ternary"                   the nearest of -scale, 0 and scale; the scale is 1.224 times the root mean square of the block
    "sign"                      the sign; the scale is the block's mean magnitude

    The float formats preserve NaN and Inf. In the others, a block of 256 that contains one decodes as NaN.
    """

    format: Values = "float32"

    def __post_init__(self) -> None:
        check_values(self.format)

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return self.format == "float32"

    @property
    def kernel_bits(self) -> int | None:
        """Return the bits of a value, or TERNARY, if kernels fuse the format with float32 sums; else None."""
        return None if self.exact else _BITS.get(self.format)

    def nbytes(self, k: int, dtype: torch.dtype) -> int:
        """Return the packet size of `k` values of `dtype`, in bytes."""
        if self.exact:
            return k * dtype.itemsize
        return values_nbytes(k, _BITS[self.format]) if self.format in _BITS else 2 * k

    def encode(self, value: Float[Tensor, " k"]) -> UInt8[Tensor, " nbytes"]:
        """Encode `value` as a packet."""
        if self.exact:
            return value.contiguous().view(torch.uint8)
        if self.format in _FLOATS:
            return rounded(value, _FLOATS[self.format]).contiguous().view(torch.uint8)
        return values_encode(rounded(value, torch.float32), _BITS[self.format])

    def decode(self, packet: UInt8[Tensor, " nbytes"], k: int, dtype: torch.dtype) -> Float[Tensor, " k"]:
        """Decode the `k` values of a packet to `dtype`. Raises RuntimeError if the packet has another length."""
        if packet.numel() != self.nbytes(k, dtype):
            raise RuntimeError(
                f"{k} values as {self.format} take {self.nbytes(k, dtype)} bytes, the packet has {packet.numel()}; "
                "sender and receiver must agree on format and count"
            )
        if self.exact:
            return packet.clone().view(dtype)
        if self.format in _FLOATS:
            return packet.clone().view(_FLOATS[self.format]).to(dtype)
        return values_decode(packet, k, _BITS[self.format]).to(dtype)


def check_values(values: str, name: str = "values") -> None:
    """Raise ValueError unless `values` of the setting `name` names a format of values."""
    check_one_of(name, values, Values)


@dataclass(frozen=True)
class Elements:
    """The format of packets of sparse vectors whose values are encoded as `values`. A receiver gets `decode(encode(part))`."""

    values: Values = "float32"

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return self._codec.exact

    def encode(self, part: Sparse) -> Tensor:
        """Encode a sparse vector, whose positions ascend, as a packet, uint8."""
        return torch.cat([encode_fixed_length(part.index, part.length), self._codec.encode(part.value)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """Decode the `k` elements of a span of `length` in a packet. Raises RuntimeError for an invalid packet."""
        head = fixed_length_nbytes(k, length)
        index = decode_fixed_length(packet[:head], k, length)
        return Sparse(index, self._codec.decode(packet[head:], k, dtype), length)

    def encode_each(
        self, parts: Sequence[Sparse], divisor: int = 1, rows: Sequence[Rows] | None = None, n: int = 0
    ) -> tuple[list[Tensor], list[Sparse]]:
        """Encode `parts`, with their values divided by `divisor`. Return the packets and the errors, value - divisor * decoded.

        With `rows`, one per part, a part's positions are places in its rows, and the positions of the errors are those in the vector of
        `n` elements that contains the rows.
        """

        def one_by_one(*_: Any) -> tuple[list[Tensor], list[Sparse]]:  # Any: the arguments of this method
            packets: list[Tensor] = []
            dropped: list[Sparse] = []
            for part in parts:
                sent = part
                if divisor != 1:
                    sent = Sparse(part.index, part.value / exact_divisor(part.value, divisor), part.length)
                packets.append(self.encode(sent))
                received = self.decode_values(packets[-1], part.index.numel(), part.length, part.value.dtype)
                dropped.append(Sparse(part.index, lacking(part.value, received, divisor), part.length))
            return packets, _located(dropped, rows, n)

        return run("encode_packets", one_by_one, parts, _BITS.get(self.values, 0), divisor, rows, n)

    def decode_each(
        self,
        packets: Sequence[Tensor],
        counts: Sequence[int],
        lengths: Sequence[int],
        dtype: torch.dtype,
        rows: Sequence[Rows] | None = None,
        n: int = 0,
    ) -> list[Sparse]:
        """Decode all packets, given their counts and the lengths of their spans; `rows` and `n` as in `encode_each`."""

        def one_by_one(*_: Any) -> list[Sparse]:  # Any: the arguments of this method
            sent = zip(packets, counts, lengths, strict=True)
            return _located([self.decode(packet, count, length, dtype) for packet, count, length in sent], rows, n)

        bits = _BITS.get(self.values, 0) if dtype == torch.float32 else 0
        return run("decode_packets", one_by_one, packets, counts, lengths, bits, rows, n)

    def add_each_(
        self,
        out: Tensor,
        packets: Sequence[Tensor],
        counts: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[Rows],
    ) -> None:
        """Decode as `decode_each` does, and add the parts in order to `out`, the vector that contains the rows."""

        def one_by_one(*_: Any) -> None:  # Any: the arguments of this method
            for part in self.decode_each(packets, counts, lengths, out.dtype, rows, out.numel()):
                kernels.scatter_add_(out, part)

        run("add_packets_", one_by_one, out, packets, counts, lengths, _BITS.get(self.values, 0), rows)

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return the values of `decode`, [k], without reading the positions."""
        return self._codec.decode(packet[fixed_length_nbytes(k, length) :], k, dtype)

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int:
        """Return the packet size of any `k` elements of a span of `length`, in bytes."""
        return _packet_nbytes(self.values, k, length, dtype)

    @property
    def _codec(self) -> ValueCodec:
        return _codec_of(self.values)


def _located(parts: list[Sparse], rows: Sequence[Rows] | None, n: int) -> list[Sparse]:
    """Convert places in the rows, if any, to positions in the vector of `n` elements that contains them."""
    if rows is None:
        return parts
    return [Sparse(kernels.locate(its, part.index), part.value, n) for its, part in zip(rows, parts, strict=True)]


@lru_cache(maxsize=4096)
def _packet_nbytes(values: Values, k: int, length: int, dtype: torch.dtype) -> int:
    return fixed_length_nbytes(k, length) + _codec_of(values).nbytes(k, dtype)


@lru_cache
def _codec_of(values: Values) -> ValueCodec:
    return ValueCodec(values)


@dataclass(frozen=True)
class Raw:
    """The plain format: k positions as int32, then k unchanged values."""

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return True

    def encode(self, part: Sparse) -> Tensor:
        """Encode a packet, uint8 [k * (4 + bytes of a value)]. Raises ValueError for vectors too long for int32 positions."""
        if part.length > _MAX_LENGTH:
            raise ValueError(
                f"raw packets index at most {_MAX_LENGTH} elements, got {part.length}; use smaller buckets"
            )
        return torch.cat([part.index.to(torch.int32).view(torch.uint8), part.value.contiguous().view(torch.uint8)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """Decode a packet. Raises RuntimeError if it does not hold `k` elements of a vector of `length`."""
        if packet.numel() != self.nbytes(k, length, dtype):
            raise RuntimeError(
                f"{k} elements of {_INDEX_NBYTES + dtype.itemsize} bytes each do not make a packet of {packet.numel()} bytes"
            )
        index = packet[: k * _INDEX_NBYTES].clone().view(torch.int32)
        value = self.decode_values(packet, k, length, dtype)
        # A host sync. A position outside would write out of bounds.
        if k and not bool(((index >= 0) & (index < length)).all()):
            raise RuntimeError(f"a packet has positions outside [0, {length - 1}]")
        if not bool((index[1:] > index[:-1]).all()):  # a position twice would be cleared once and added twice
            raise RuntimeError(f"the {k} positions of a packet do not ascend")
        return Sparse(index, value, length)

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:  # as `nbytes`
        """Return the values of `decode`, [k], without reading the positions."""
        return packet[k * _INDEX_NBYTES :].clone().view(dtype)

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int:  # other packets depend on the length
        """Return the packet size of k elements, in bytes."""
        return k * (_INDEX_NBYTES + dtype.itemsize)


def in_passes(values: tuple[Values, Values], residual: Tensor) -> tuple[tuple[Values, Values], Tensor] | None:
    """Return the formats, up and down, and the residual [n] if kernels support them in whole passes. See `State.whole_form`."""
    fused = all(ValueCodec(format).kernel_bits is not None for format in values)
    return (values, residual) if fused and residual.dtype == torch.float32 else None
