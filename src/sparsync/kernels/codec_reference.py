"""The specification of the codecs of ascending positions, in plain torch: short and slow. The faster ones write the same bytes.

All bit streams begin with the lowest bit of the first byte and are filled up with zeros to whole bytes. `gap` is the number of
positions left out before one. Decoders take any bytes: what comes out ascends inside [0, span), or a RuntimeError says why not.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn.functional import pad

Codec = Literal["raw", "packed", "delta", "bitmap", "rice", "elias_fano"]
Decoded = Literal["delta", "bitmap", "rice", "elias_fano"]  # those with a decoder of their own
Packet = UInt8[Tensor, " nbytes"]
BLOCK = 128  # gaps that share a width in a delta packet
MOST_BITS = 31  # of a position, a gap or their low bits
SIZE, COUNT, WIDTH, ORDER, OUTSIDE = (
    1,
    2,
    3,
    4,
    5,
)  # what can be wrong with a packet; the C++ codecs return the same numbers


class Plan(NamedTuple):
    """How a codec writes positions: the bits of a number, where a packet has one width of them, and the bytes of the packet."""

    bits: int
    nbytes: int


def refusal(reason: int, k: int, span: int, nbytes: int) -> RuntimeError:
    """The error that says what is wrong with a packet that should hold `k` positions inside [0, span)."""
    what = {
        SIZE: f"its {nbytes} bytes are not what {k} positions take",
        COUNT: f"it does not hold {k} positions",
        WIDTH: f"it names a width above {MOST_BITS} bits",
        ORDER: f"its {k} positions do not ascend",
        OUTSIDE: f"it has positions outside [0, {span - 1}]",
    }[reason]
    return RuntimeError(
        f"a packet of positions cannot be decoded: {what}; sender and receiver must agree on codec, span and count"
    )


def encode(codec: Codec, index: Int[Tensor, " k"], span: int, plan: Plan) -> Packet:
    """The packet of the ascending `index` inside [0, span)."""
    if codec == "raw":
        return index.clone(memory_format=torch.contiguous_format).to(torch.int32).view(torch.uint8)
    if codec == "packed":
        return pack(index, plan.bits)
    if codec == "delta":
        return delta_encode(index)
    if codec == "bitmap":
        return bitmap_encode(index, span)
    return rice_encode(index) if codec == "rice" else elias_fano_encode(index, span)


def pack(x: Int[Tensor, " k"], bits: int) -> Packet:
    """The low `bits` bits of each of `x`, after each other without gaps."""
    places = torch.arange(bits, device=x.device, dtype=x.dtype)
    return _bytes_of(((x[:, None] >> places) & 1).view(-1))


def unpack(packet: Packet, k: int, bits: int) -> Int[Tensor, " k"]:
    """The `k` numbers that were packed, int32. Raises RuntimeError when the packet is not as long as they are."""
    if packet.numel() != -(-k * bits // 8):
        raise refusal(SIZE, k, 1 << bits, packet.numel())
    places = torch.arange(bits, device=packet.device, dtype=torch.int32)
    return (_bits_of(packet)[: k * bits].view(k, bits).to(torch.int32) << places).sum(1, dtype=torch.int32)


def delta_plan(index: Int[Tensor, " k"]) -> Plan:
    """The bytes of the delta packet of `index`, which has a width for each block."""
    sizes = block_sizes(block_widths(gaps(index)), index.numel())
    return Plan(0, sizes.numel() + int(sizes.sum()))


def delta_encode(index: Int[Tensor, " k"]) -> Packet:
    """A byte with the width of each block of 128 gaps, then the blocks, each packed in its width and filled up to whole bytes."""
    gap = gaps(index)
    widths = block_widths(gap)
    parts = gap.split(BLOCK) if gap.numel() else ()  # split would return one empty part
    blocks = [pack(part, width) for part, width in zip(parts, widths.tolist(), strict=True)]
    return torch.cat([widths.to(torch.uint8), *blocks])


def delta_decode(packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """The positions of a delta packet, int32."""
    count = -(-k // BLOCK)
    widths = packet[:count].to(torch.int64)
    if widths.numel() < count:
        raise refusal(SIZE, k, span, packet.numel())
    if count and int(widths.max()) > MOST_BITS:
        raise refusal(WIDTH, k, span, packet.numel())
    sizes = block_sizes(widths, k)
    if packet.numel() != count + int(sizes.sum()):
        raise refusal(SIZE, k, span, packet.numel())
    parts = packet[count:].split(sizes.tolist())
    lengths = [min(BLOCK, k - start) for start in range(0, k, BLOCK)]
    blocks = [unpack(*each) for each in zip(parts, lengths, widths.tolist(), strict=True)] if k else []
    return positions(torch.cat([packet[:0].to(torch.int32), *blocks]), span, packet.numel())


def bitmap_encode(index: Int[Tensor, " k"], span: int) -> Packet:
    """A bit for each position of the span, set where it is one of `index`."""
    return _bytes_of(_marked(index.long(), span))


def bitmap_decode(packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """The positions of a bitmap packet, int32."""
    if packet.numel() != -(-span // 8):
        raise refusal(SIZE, k, span, packet.numel())
    index = _bits_of(packet).nonzero().view(-1).to(torch.int32)
    if index.numel() != k:
        raise refusal(COUNT, k, span, packet.numel())
    return checked(index, span, packet.numel())


def rice_plan(index: Int[Tensor, " k"]) -> Plan:
    """How many low bits the Rice packet of `index` keeps apart, the first of three candidates that is shortest, and its bytes."""
    k = index.numel()
    if k == 0:
        return Plan(0, 0)
    gap = gaps(index).long()
    middle = max(
        1, (int(gap.sum()) // k).bit_length() - 1
    )  # as a geometric distribution of this mean wants it, give or take one
    stream = {bits: k + int((gap >> bits).sum()) for bits in range(middle - 1, middle + 2)}
    bits = min(stream, key=lambda bits: (bits * k + stream[bits], bits))
    return Plan(bits, 1 + -(-k * bits // 8) + -(-stream[bits] // 8))


def rice_encode(index: Int[Tensor, " k"]) -> Packet:
    """A byte with the number of low bits; the low bits of all gaps; for each gap as many zeros as its high part counts, and a one."""
    k = index.numel()
    if k == 0:
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    bits, _ = rice_plan(index)
    gap = gaps(index)
    place = ((gap.long() >> bits) + 1).cumsum(0) - 1
    high = _marked(place, int(place[-1]) + 1)
    return torch.cat([torch.tensor([bits], dtype=torch.uint8, device=index.device), pack(gap, bits), _bytes_of(high)])


def rice_decode(packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """The positions of a Rice packet, int32."""
    if k == 0 or packet.numel() == 0:
        if k or packet.numel():
            raise refusal(SIZE, k, span, packet.numel())
        return packet.to(torch.int32)
    bits = int(packet[0])
    if bits > MOST_BITS:
        raise refusal(WIDTH, k, span, packet.numel())
    start = 1 + -(-k * bits // 8)
    if packet.numel() < start:
        raise refusal(SIZE, k, span, packet.numel())
    place = _bits_of(packet[start:]).nonzero().view(-1)
    if place.numel() != k:
        raise refusal(COUNT, k, span, packet.numel())
    if packet.numel() != start + int(place[-1]) // 8 + 1:
        raise refusal(SIZE, k, span, packet.numel())
    zeros = torch.diff(place, prepend=place.new_tensor([-1])) - 1
    low = unpack(packet[1:start], k, bits).long()
    return positions(zeros << bits | low, span, packet.numel())


@lru_cache(maxsize=4096)
def elias_fano_bits(k: int, span: int) -> int:
    """How many low bits the shortest Elias-Fano packet of any `k` positions inside [0, span) keeps apart; the fewest of equals."""
    near = range(MOST_BITS + 1)
    if k >= BLOCK:  # so many that rounding to bytes moves the best by one bit at most from where 2^bits is the mean gap
        middle = (span // k).bit_length()
        near = range(max(0, middle - 3), min(MOST_BITS, middle + 2) + 1)
    return min(near, key=lambda bits: (_elias_fano_nbytes(k, span, bits), bits))


def elias_fano_nbytes(k: int, span: int) -> int:
    """The bytes of the Elias-Fano packet of any `k` positions inside [0, span)."""
    return _elias_fano_nbytes(k, span, elias_fano_bits(k, span))


def elias_fano_encode(index: Int[Tensor, " k"], span: int) -> Packet:
    """The low bits of all positions, then a stream that has its i-th one at i + the high part of position i."""
    k = index.numel()
    if k == 0:
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    bits = elias_fano_bits(k, span)
    place = (index.long() >> bits) + torch.arange(k, device=index.device)
    return torch.cat([pack(index, bits), _bytes_of(_marked(place, k + (span - 1 >> bits)))])


def elias_fano_decode(packet: Packet, k: int, span: int) -> Int[Tensor, " k"]:
    """The positions of an Elias-Fano packet, int32."""
    if packet.numel() != elias_fano_nbytes(k, span):
        raise refusal(SIZE, k, span, packet.numel())
    if k == 0:
        return packet.to(torch.int32)
    bits = elias_fano_bits(k, span)
    start = -(-k * bits // 8)
    place = _bits_of(packet[start:]).nonzero().view(-1)
    if place.numel() != k:
        raise refusal(COUNT, k, span, packet.numel())
    high = place - torch.arange(k, device=packet.device)
    return checked(high << bits | unpack(packet[:start], k, bits).long(), span, packet.numel())


def gaps(index: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
    """How many positions are left out before each of the ascending `index`."""
    return torch.diff(index, prepend=index.new_tensor([-1])) - 1


def positions(gap: Int[Tensor, " k"], span: int, nbytes: int) -> Int[Tensor, " k"]:
    """The positions with these gaps, int32. Raises RuntimeError when they leave [0, span)."""
    if gap.numel() and int(gap.max()) >= span:  # so that the sum cannot overflow
        raise refusal(OUTSIDE, gap.numel(), span, nbytes)
    return checked((gap.long() + 1).cumsum(0) - 1, span, nbytes)


def checked(index: Int[Tensor, " k"], span: int, nbytes: int) -> Int[Tensor, " k"]:
    """`index` as int32. Raises RuntimeError when it leaves [0, span) or does not ascend."""
    k = index.numel()
    if k and (
        int(index.min()) < 0 or int(index.max()) >= span
    ):  # a host sync; a bad position would write outside the span
        raise refusal(OUTSIDE, k, span, nbytes)
    if not bool((index[1:] > index[:-1]).all()):  # a position twice would be cleared once and added twice
        raise refusal(ORDER, k, span, nbytes)
    return index.to(torch.int32)


def _elias_fano_nbytes(k: int, span: int, bits: int) -> int:
    return -(-k * bits // 8) + -(-(k + (span - 1 >> bits)) // 8) if k else 0


def block_widths(gap: Tensor) -> Tensor:
    """The bits of the largest gap of each block, int64."""
    if not gap.numel():
        return gap.long()
    largest = pad(gap.long(), (0, -gap.numel() % BLOCK)).view(-1, BLOCK).amax(1)
    return (largest[:, None] >> torch.arange(MOST_BITS, device=gap.device) > 0).sum(1)


def block_sizes(widths: Tensor, k: int) -> Tensor:
    """The bytes of each block of `k` gaps, int64."""
    sizes = widths * BLOCK // 8
    if k % BLOCK:
        sizes[-1] = (widths[-1] * (k % BLOCK) + 7) // 8
    return sizes


def _marked(place: Tensor, length: int) -> Tensor:
    """`length` bits, one where `place` says."""
    return torch.zeros(length, dtype=torch.uint8, device=place.device).index_fill_(0, place, 1)


def _bytes_of(bits: Tensor) -> Packet:
    """The bits, one an element, as bytes."""
    whole = pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (whole << torch.arange(8, device=bits.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _bits_of(packet: Packet) -> Tensor:
    """The bits of the bytes, one an element."""
    return ((packet[:, None] >> torch.arange(8, device=packet.device, dtype=torch.uint8)) & 1).view(-1)
