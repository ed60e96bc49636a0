"""The codecs of ascending positions on the device: the names, bytes and refusals of `codec_reference`, without a loop on the host.

One host sync for each packet, two for Rice ones. What is wrong with a packet is found after it has been decoded, as no bytes can make
that read or write outside.
"""

import torch
from torch import Tensor

from sparsync.kernels import codec_reference as reference
from sparsync.kernels.codec_reference import (
    BLOCK,
    COUNT,
    MOST_BITS,
    ORDER,
    OUTSIDE,
    SIZE,
    WIDTH,
    Codec,
    Plan,
    block_sizes,
    block_widths,
    elias_fano_bits,
    elias_fano_nbytes,
    gaps,
    refusal,
)
from sparsync.kernels.cuda.bits import marked, pack_blocks_, packed, places, strays, unpacked, unpacked_blocks
from sparsync.kernels.cuda.launching import on_its_device


@on_its_device
def ascend(index: Tensor, span: int) -> bool:
    """Whether `index` ascends inside [0, span)."""
    return not bool(torch.cat(strays(index, span)).any())  # a host sync; an encoder would write nonsense


def encode(codec: Codec, index: Tensor, span: int, plan: Plan) -> Tensor:
    """As the reference's. No host sync, as the plan tells all lengths."""
    if codec == "raw":
        return reference.encode(codec, index, span, plan)
    if codec == "packed":
        return pack(index, plan.bits)
    if codec == "delta":
        return delta_encode(index, plan)
    if codec == "bitmap":
        return bitmap_encode(index, span)
    return rice_encode(index, plan) if codec == "rice" else elias_fano_encode(index, span)


@on_its_device
def pack(x: Tensor, bits: int) -> Tensor:
    """As the reference's. No host sync."""
    return packed(x, bits) if bits <= MOST_BITS else reference.pack(x, bits)


@on_its_device
def unpack(packet: Tensor, k: int, bits: int) -> Tensor:
    """As the reference's. No host sync."""
    if packet.numel() != -(-k * bits // 8) or bits > MOST_BITS:
        return reference.unpack(packet, k, bits)
    return unpacked(packet, k, bits)


@on_its_device
def bitmap_encode(index: Tensor, span: int) -> Tensor:
    """As the reference's. No host sync."""
    return marked(index, 0, 0, span)


@on_its_device
def bitmap_decode(packet: Tensor, k: int, span: int) -> Tensor:
    """As the reference's."""
    if packet.numel() != -(-span // 8):
        raise refusal(SIZE, k, span, packet.numel())
    place, total = places(packet, k)
    _check(place, span, packet, total)
    return place.to(torch.int32)


@on_its_device
def elias_fano_encode(index: Tensor, span: int) -> Tensor:
    """As the reference's. No host sync."""
    k = index.numel()
    if k == 0:
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    bits = elias_fano_bits(k, span)
    return torch.cat([packed(index, bits), marked(index, bits, 1, k + (span - 1 >> bits))])


@on_its_device
def elias_fano_decode(packet: Tensor, k: int, span: int) -> Tensor:
    """As the reference's."""
    if packet.numel() != elias_fano_nbytes(k, span):
        raise refusal(SIZE, k, span, packet.numel())
    if k == 0:
        return packet.to(torch.int32)
    bits = elias_fano_bits(k, span)
    start = -(-k * bits // 8)
    place, total = places(packet[start:], k)
    high = place - torch.arange(k, device=packet.device)
    position = high << bits | unpacked(packet[:start], k, bits).long()
    _check(position, span, packet, total)
    return position.to(torch.int32)


@on_its_device
def delta_plan(index: Tensor) -> Plan:
    """As the reference's."""
    sizes = block_sizes(block_widths(gaps(index)), index.numel())
    return Plan(0, sizes.numel() + int(sizes.sum()))  # a host sync


@on_its_device
def delta_encode(index: Tensor, plan: Plan) -> Tensor:
    """As the reference's, in the bytes that `delta_plan` told. No host sync."""
    gap = gaps(index)
    widths = block_widths(gap)
    sizes = block_sizes(widths, gap.numel())
    packet = torch.empty(plan.nbytes, dtype=torch.uint8, device=index.device)
    packet[: sizes.numel()] = widths
    pack_blocks_(packet, gap, widths, sizes.cumsum(0) + sizes.numel() - sizes, BLOCK)
    return packet


@on_its_device
def delta_decode(packet: Tensor, k: int, span: int) -> Tensor:
    """As the reference's."""
    count = -(-k // BLOCK)
    if packet.numel() < count or (k == 0 and packet.numel()):
        raise refusal(SIZE, k, span, packet.numel())
    if k == 0:
        return packet.to(torch.int32)
    widths = packet[:count].long()
    sizes = block_sizes(widths, k)
    ends = sizes.cumsum(0) + count
    gap = unpacked_blocks(packet, k, widths, ends - sizes, BLOCK)
    position = (gap.long() + 1).cumsum(0) - 1
    outside, _ = strays(position, span)
    # a host sync; what is wrong with the widths counts first, as what follows depends on them
    width, length, bad = torch.stack([widths.max(), ends[-1], outside[0].long()]).tolist()
    if width > MOST_BITS:
        raise refusal(WIDTH, k, span, packet.numel())
    if packet.numel() != length:
        raise refusal(SIZE, k, span, packet.numel())
    if bad:
        raise refusal(OUTSIDE, k, span, packet.numel())
    return position.to(torch.int32)


@on_its_device
def rice_plan(index: Tensor) -> Plan:
    """As the reference's. Two host syncs."""
    k = index.numel()
    if k == 0:
        return Plan(0, 0)
    gap = gaps(index).long()
    middle = max(1, (int(gap.sum()) // k).bit_length() - 1)  # a host sync
    near = range(middle - 1, middle + 2)
    high = torch.stack([(gap >> bits).sum() for bits in near]).tolist()  # a host sync
    stream = {bits: k + count for bits, count in zip(near, high, strict=True)}
    bits = min(stream, key=lambda bits: (bits * k + stream[bits], bits))
    return Plan(bits, 1 + -(-k * bits // 8) + -(-stream[bits] // 8))


@on_its_device
def rice_encode(index: Tensor, plan: Plan) -> Tensor:
    """As the reference's, in the bytes that `rice_plan` told. No host sync."""
    if index.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device=index.device)
    gap = gaps(index).long()
    place = ((gap >> plan.bits) + 1).cumsum(0) - 1
    head = torch.full((1,), plan.bits, dtype=torch.uint8, device=index.device)
    low = packed(gap, plan.bits)
    return torch.cat([head, low, marked(place, 0, 0, 8 * (plan.nbytes - 1 - low.numel()))])


@on_its_device
def rice_decode(packet: Tensor, k: int, span: int) -> Tensor:
    """As the reference's. Two host syncs."""
    nbytes = packet.numel()
    if k == 0 or nbytes == 0:
        if k or nbytes:
            raise refusal(SIZE, k, span, nbytes)
        return packet.to(torch.int32)
    bits = int(packet[0])  # a host sync: where the stream begins depends on it
    if bits > MOST_BITS:
        raise refusal(WIDTH, k, span, nbytes)
    start = 1 + -(-k * bits // 8)
    if nbytes < start:
        raise refusal(SIZE, k, span, nbytes)
    place, total = places(packet[start:], k)
    zeros = torch.diff(place, prepend=place.new_tensor([-1])) - 1
    gap = zeros << bits | unpacked(packet[1:start], k, bits).long()
    position = (gap + 1).cumsum(0) - 1
    outside, _ = strays(position, span)
    bad = (gap >= span).any() | (outside[0] > 0)  # where a gap is too long, the sum may be anything
    found, last, far = torch.stack([total[0], place[-1], bad.long()]).tolist()  # a host sync
    if found != k:
        raise refusal(COUNT, k, span, nbytes)
    if nbytes != start + last // 8 + 1:
        raise refusal(SIZE, k, span, nbytes)
    if far:
        raise refusal(OUTSIDE, k, span, nbytes)
    return position.to(torch.int32)


def _check(position: Tensor, span: int, packet: Tensor, total: Tensor) -> None:
    """Raises RuntimeError unless the packet holds as many positions as there are here, which ascend inside [0, span)."""
    found, outside, disorder = torch.cat(
        [total, *strays(position, span)]
    ).tolist()  # a host sync: they came from elsewhere
    k = position.numel()
    for wrong, reason in ((found != k, COUNT), (outside, OUTSIDE), (disorder, ORDER)):
        if wrong:
            raise refusal(reason, k, span, packet.numel())
