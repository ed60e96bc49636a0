"""The specification of the codecs of ascending positions, in plain torch: short and slow. The faster codecs write the same bytes.

    packed      per selected position, the bits that the last position of the span needs
    bitmap      one bit per position of the span
    elias_fano  the low bits of all positions, then their high parts as ones in a stream

All bit streams begin with the lowest bit of the first byte and are padded with zeros to whole bytes. The length of a packet depends on k
and the span alone. Decoders accept any bytes: the result ascends inside [0, span), or a RuntimeError says why not.
"""

from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn.functional import pad

from sparsync.kernels.dispatch import operation

PositionCodec = Literal["packed", "bitmap", "elias_fano"]
Packet = UInt8[Tensor, " nbytes"]
MAX_SPAN = 2**31 - 1
MAX_BITS = 31  # bits of a position, or of its low part


@operation
def encode_positions(codec: PositionCodec, index: Int[Tensor, " k"], span: int) -> Packet:
    """Encode the ascending `index` inside [0, span). Raises ValueError for spans of 2^31 or more."""
    if not 0 <= span <= MAX_SPAN:
        raise ValueError(
            f"positions are encoded inside spans of at most {MAX_SPAN} elements, got {span}; use smaller buckets"
        )
    _check(index, span)
    if codec == "packed":
        return pack(index, packed_bits(span))
    if codec == "bitmap":
        return _bytes_of(_marked(index.long(), span))
    if not index.numel():
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    k, bits = index.numel(), elias_fano_bits(index.numel(), span)
    place = (index.long() >> bits) + torch.arange(k, device=index.device)
    return torch.cat([pack(index, bits), _bytes_of(_marked(place, k + (span - 1 >> bits)))])


@operation
def decode_positions(codec: PositionCodec, packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """Decode `k` positions, int32."""

    def refused(what: str) -> RuntimeError:
        return RuntimeError(
            f"a packet of positions cannot be decoded: {what}; sender and receiver must agree on codec, span and count"
        )

    if not 0 <= k <= span <= MAX_SPAN:
        raise refused(f"it does not hold {k} positions")
    if packet.numel() != size_of(codec, k, span):
        raise refused(f"its {packet.numel()} bytes are not what {k} positions take")
    if codec != "packed":
        start = -(-k * elias_fano_bits(k, span) // 8) if codec == "elias_fano" else 0
        if int(_bits_of(packet[start:]).sum()) != k:
            raise refused(f"it does not hold {k} positions")
    index = _decoded(codec, packet, k, span)
    if k and int(index.max()) >= span:  # a host sync; a bad position would write outside the span
        raise refused(f"it has positions outside [0, {span - 1}]")
    if not bool((index[1:] > index[:-1]).all()):  # a position twice would be cleared once and added twice
        raise refused(f"its {k} positions do not ascend")
    return index.to(torch.int32)


def _decoded(codec: PositionCodec, packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """Decode a packet of the right length, valid or not, in time that does not depend on its content."""
    if codec == "packed":
        return unpack(packet, k, packed_bits(span))
    bits = elias_fano_bits(k, span) if codec == "elias_fano" else 0
    start = -(-k * bits // 8)
    ones = _bits_of(packet[start:]).cumsum(0, dtype=torch.int32)
    number = torch.arange(k, dtype=torch.int32, device=packet.device)
    place = torch.searchsorted(ones, number + 1)  # places of the ones
    return place if codec == "bitmap" else place - number << bits | unpack(packet[:start], k, bits)


def size_of(codec: PositionCodec, k: int, span: int) -> int:
    """Return the packet size of any `k` positions inside [0, span), in bytes, also for spans that are too long to be encoded."""
    if codec == "packed":
        return -(-k * packed_bits(span) // 8)
    return -(-span // 8) if codec == "bitmap" else _elias_fano_nbytes(k, span, elias_fano_bits(k, span))


def packed_bits(span: int) -> int:
    """Return the bits of one position in a span; 0 if the span has one position."""
    return max(0, span - 1).bit_length()


@lru_cache(maxsize=4096)
def elias_fano_bits(k: int, span: int) -> int:
    """Choose the number of low bits with the shortest Elias-Fano packet of any `k` positions inside [0, span); the fewest of equals."""
    first, last = 0, MAX_BITS
    if k >= 128:  # then rounding to bytes moves the best number by at most one bit from a mean gap of 2^bits
        middle = (span // k).bit_length()
        first, last = max(0, middle - 3), min(MAX_BITS, middle + 2)
    best, least = first, _elias_fano_nbytes(k, span, first)
    for bits in range(first + 1, last + 1):
        if k * bits >= 8 * least:  # from here on the low bits alone take as much
            break
        nbytes = _elias_fano_nbytes(k, span, bits)
        if nbytes < least:
            best, least = bits, nbytes
    return best


def _elias_fano_nbytes(k: int, span: int, bits: int) -> int:
    return -(-k * bits // 8) + -(-(k + (span - 1 >> bits)) // 8) if k else 0


def _check(index: Tensor, span: int) -> None:
    """Raise ValueError unless `index` ascends inside [0, span)."""
    bad = (index < 0) | (index >= span)
    bad[1:] |= index[1:] <= index[:-1]
    if bool(bad.any()):  # a host sync; an encoder would write outside its packet
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"positions to encode must ascend inside [0, {span - 1}], each once, got {int(index[first])} as number {first}"
        )


def pack(x: Tensor, bits: int) -> Packet:
    """Pack the low `bits` bits of the integers `x` [k] without gaps."""
    places = torch.arange(bits, device=x.device, dtype=x.dtype)
    return _bytes_of(((x[:, None] >> places) & 1).view(-1))


def unpack(packet: Packet, k: int, bits: int) -> Int[Tensor, " k"]:
    """Unpack `k` numbers, int32."""
    places = torch.arange(bits, device=packet.device, dtype=torch.int32)
    return (_bits_of(packet)[: k * bits].view(k, bits) << places).sum(1, dtype=torch.int32)


def _marked(place: Tensor, length: int) -> Tensor:
    """Return `length` bits with ones at `place`."""
    return torch.zeros(length, dtype=torch.uint8, device=place.device).index_fill_(0, place, 1)


def _bytes_of(bits: Tensor) -> Packet:
    """Pack bits, one per element, to bytes."""
    whole = pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _bits_of(packet: Packet) -> Tensor:
    """Unpack bytes to bits, one per element."""
    return ((packet[:, None] >> torch.arange(8, device=packet.device, dtype=torch.uint8)) & 1).view(-1)
