"""Packets of positions, of values, and of both: a Sparse as bytes, and back.

Count and span determine the codec and the length of each packet, so neither is sent. The sender knows what the receiver decodes,
decode(encode(x)), and keeps the difference in the residual. In every format but float32 a decoded value has at most 15 significant bits,
so it and its multiples by small integers are exact in float32. Rounding makes no infinities: a finite value beyond the largest number of
its format becomes that number. `kernels/codec_reference.py` specifies the codecs of positions.
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
# Of Raw.
_INDEX_NBYTES = 4
_MAX_LENGTH = 2**31 - 1


@lru_cache(maxsize=4096)
def fixed_length_codec(k: int, span: int) -> PositionCodec:
    """Return the codec with the shortest packet of any `k` positions inside [0, span); the first of equals."""
    return min(get_args(PositionCodec), key=lambda codec: size_of(codec, k, span))


def fixed_length_nbytes(k: int, span: int) -> int:
    """Return the bytes of `encode_fixed_length` for any `k` positions inside [0, span): none for all of them.

    Spans of 2^31 or more have a size too, although their positions cannot be encoded: a plan need not run here.
    """
    return 0 if k == span else size_of(fixed_length_codec(k, span), k, span)


def encode_fixed_length(index: Int[Tensor, " k"], span: int) -> UInt8[Tensor, " nbytes"]:
    """Return the packet of `index`, which must ascend inside [0, span), by the codec that k and the span determine.

    Raises ValueError for other positions, and for spans of 2^31 or more.
    """
    if index.numel() == span:
        if not torch.equal(index, torch.arange(span, dtype=index.dtype, device=index.device)):
            raise ValueError(f"{span} positions inside [0, {span}) must be all of them in order, got others")
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    return encode_positions(fixed_length_codec(index.numel(), span), index, span)


def decode_fixed_length(packet: UInt8[Tensor, " nbytes"], k: int, span: int) -> Int[Tensor, " k"]:
    """Return the positions that were encoded, int32. Raises RuntimeError for an invalid packet."""
    if k == span and not packet.numel():
        return torch.arange(span, dtype=torch.int32, device=packet.device)
    return decode_positions(fixed_length_codec(k, span), packet, k, span)


@dataclass(frozen=True)
class ValueCodec:
    """One format of values.

    "float32"                   values as they are, float64 ones too
    "bfloat16", "float16"       16 bits; at most 3.39e38 and 65504
    "int8", "int4", "int3"      value / scale rounded to nearest, the scale being that of the block's greatest magnitude, which is 127,
                                7 or -4 times the scale; in int3 the scale has a sign
    "ternary"                   minus the scale, 0 or the scale, whichever is nearest; the scale is 1.224 root mean squares of the block
    "sign"                      the sign, the scale being the block's mean magnitude

    NaN and Inf pass in the float formats. In the others their block of 256 is decoded as NaN.
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
        """Return the bits of a value, or TERNARY, if kernels fuse the format with sums of float32; else None."""
        return None if self.exact else _BITS.get(self.format)

    def nbytes(self, k: int, dtype: torch.dtype) -> int:
        """Return the bytes of `k` values of `dtype`."""
        if self.exact:
            return k * dtype.itemsize
        return values_nbytes(k, _BITS[self.format]) if self.format in _BITS else 2 * k

    def encode(self, value: Float[Tensor, " k"]) -> UInt8[Tensor, " nbytes"]:
        """Return the packet of `value`."""
        if self.exact:
            return value.contiguous().view(torch.uint8)
        if self.format in _FLOATS:
            return rounded(value, _FLOATS[self.format]).contiguous().view(torch.uint8)
        return values_encode(rounded(value, torch.float32), _BITS[self.format])

    def decode(self, packet: UInt8[Tensor, " nbytes"], k: int, dtype: torch.dtype) -> Float[Tensor, " k"]:
        """Return the `k` values of a packet in `dtype`. Raises RuntimeError if the packet has another length."""
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
    """Raise ValueError unless `values`, of the setting `name`, names a format of values."""
    check_one_of(name, values, Values)


@dataclass(frozen=True)
class Elements:
    """Packets of sparse vectors whose values are encoded as `values`. A receiver gets `decode(encode(part))`."""

    values: Values = "float32"

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return self._codec.exact

    def encode(self, part: Sparse) -> Tensor:
        """Return the packet, uint8, of a sparse vector whose positions ascend."""
        return torch.cat([encode_fixed_length(part.index, part.length), self._codec.encode(part.value)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """Return the `k` elements of a span of `length` in a packet. Raises RuntimeError for an invalid packet."""
        head = fixed_length_nbytes(k, length)
        index = decode_fixed_length(packet[:head], k, length)
        return Sparse(index, self._codec.decode(packet[head:], k, dtype), length)

    def encode_each(
        self, parts: Sequence[Sparse], divisor: int = 1, rows: Sequence[Rows] | None = None, n: int = 0
    ) -> tuple[list[Tensor], list[Sparse]]:
        """Return the packets of `parts` with their values divided by `divisor`, and value - divisor * decoded of each.

        With `rows`, one for each part, the positions of a part count the elements in its rows, and the positions of the differences are
        those in the vector of `n` elements that the rows lie in.
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
        """Return `decode` of each packet, with its count and the length of its span; `rows` and `n` as in `encode_each`."""

        def one_by_one(*_: Any) -> list[Sparse]:  # Any: the arguments of this method
            each = zip(packets, counts, lengths, strict=True)
            return _located([self.decode(packet, count, length, dtype) for packet, count, length in each], rows, n)

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
        """Add what `decode_each` returns for these arguments, in order, to `out`, the vector that the rows lie in."""

        def one_by_one(*_: Any) -> None:  # Any: the arguments of this method
            for part in self.decode_each(packets, counts, lengths, out.dtype, rows, out.numel()):
                kernels.scatter_add_(out, part)

        run("add_packets_", one_by_one, out, packets, counts, lengths, _BITS.get(self.values, 0), rows)

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return the values of `decode`, [k], without reading the positions."""
        return self._codec.decode(packet[fixed_length_nbytes(k, length) :], k, dtype)

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packet of any `k` elements of a span of `length`."""
        return _packet_nbytes(self.values, k, length, dtype)

    @property
    def _codec(self) -> ValueCodec:
        return _codec_of(self.values)


def _located(parts: list[Sparse], rows: Sequence[Rows] | None, n: int) -> list[Sparse]:
    """Return `parts` as elements of the vector of `n` elements that their rows, if any, lie in."""
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
    """The plain format: k positions as int32, then k values in their own type."""

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return True

    def encode(self, part: Sparse) -> Tensor:
        """Return a packet, uint8 [k * (4 + bytes of a value)]. Raises ValueError for vectors too long for int32 positions."""
        if part.length > _MAX_LENGTH:
            raise ValueError(
                f"raw packets index at most {_MAX_LENGTH} elements, got {part.length}; use smaller buckets"
            )
        return torch.cat([part.index.to(torch.int32).view(torch.uint8), part.value.contiguous().view(torch.uint8)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """Return what was encoded. Raises RuntimeError if the packet cannot hold `k` elements of a vector of `length`."""
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
        """Return the bytes of a packet of k elements."""
        return k * (_INDEX_NBYTES + dtype.itemsize)


def in_passes(values: tuple[Values, Values], residual: Tensor) -> tuple[tuple[Values, Values], Tensor] | None:
    """Return formats, up and down, and a residual [n] if passes over all of it read and write both; see `Scheme.whole_form`."""
    fused = all(ValueCodec(each).kernel_bits is not None for each in values)
    return (values, residual) if fused and residual.dtype == torch.float32 else None
