"""Streams of bits on the device: numbers packed in so many bits, marks at ascending places, and the places of the marks.

They begin with the lowest bit of the first byte. Whatever the bytes, nothing is read or written outside of them and of what is returned.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# (Triton makes its own types of what a kernel is called with; its stubs do not know what reductions return, nor that ranges are iterated.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsync.kernels.cuda.launching import programs

LANES = 1024


def packed(x: Tensor, bits: int) -> Tensor:
    """The low `bits` bits, 31 at most, of each of `x` [k], after each other: uint8."""
    k = x.numel()
    packet = torch.empty(-(-k * bits // 8), dtype=torch.uint8, device=x.device)
    if packet.numel():
        _pack_kernel[programs(packet.numel(), LANES)](x, packet, k, bits, packet.numel(), LANES=LANES)
    return packet


def unpacked(packet: Tensor, k: int, bits: int) -> Tensor:
    """The `k` numbers that were packed in a packet of the right length, int32 [k]."""
    x = torch.empty(k, dtype=torch.int32, device=packet.device)
    if k:
        _unpack_kernel[programs(k, LANES)](packet, x, k, bits, packet.numel(), LANES=LANES)
    return x


def pack_blocks_(packet: Tensor, x: Tensor, widths: Tensor, starts: Tensor, block: int) -> None:
    """Writes every `block` elements of `x` [k] to `packet`, from the byte `starts` on, in `widths` bits each, 31 at most."""
    if x.numel():
        _pack_blocks_kernel[(widths.numel(),)](x, packet, widths, starts, x.numel(), BLOCK=block, LANES=4 * block)


def unpacked_blocks(packet: Tensor, k: int, widths: Tensor, starts: Tensor, block: int) -> Tensor:
    """The `k` numbers that `pack_blocks_` wrote, int32 [k]; where the packet ends before them, zeros."""
    x = torch.empty(k, dtype=torch.int32, device=packet.device)
    if k:
        _unpack_blocks_kernel[(widths.numel(),)](packet, x, widths, starts, k, packet.numel(), BLOCK=block)
    return x


def marked(index: Tensor, shift: int, stride: int, length: int) -> Tensor:
    """`length` bits, filled up to whole bytes, with the i-th mark at (index[i] >> shift) + stride i: uint8. Marks outside are left out."""
    words = torch.zeros(-(-length // 32), dtype=torch.int32, device=index.device)
    if index.numel():
        _mark_kernel[programs(index.numel(), LANES)](index, words, index.numel(), shift, stride, length, LANES=LANES)
    return words.view(torch.uint8)[: -(-length // 8)]


def places(packet: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The places of the first `k` marks, int64 [k], where there are so many, and how many there are, int64 [1], on the device."""
    place = torch.zeros(k, dtype=torch.int64, device=packet.device)
    nbytes = packet.numel()
    if nbytes == 0:
        return place, place.new_zeros(1)
    counts = torch.empty(programs(nbytes, LANES), dtype=torch.int32, device=packet.device)
    _count_kernel[programs(nbytes, LANES)](packet, counts, nbytes, LANES=LANES)
    ends = counts.cumsum(0)  # int64
    _place_kernel[programs(nbytes, LANES)](packet, counts, ends, place, k, nbytes, LANES=LANES)
    return place, ends[-1:]


def strays(position: Tensor, span: int) -> tuple[Tensor, Tensor]:
    """Whether any of `position` lies outside [0, span), and whether any is not above the one before, each int32 [1], on the device."""
    outside, disorder = torch.zeros((2, 1), dtype=torch.int32, device=position.device)
    if position.numel():
        _ascend_kernel[programs(position.numel(), LANES)](
            position, outside, disorder, position.numel(), span, LANES=LANES
        )
    return outside, disorder


@triton.jit
def _mask(bits):
    """The number with the lowest `bits` bits set, 31 at most."""
    return (tl.full([], 1, tl.int64) << bits) - 1


@triton.jit
def _bytes_of(x, lane, k, bits, LANES: tl.constexpr):
    """The bytes `lane` of the first `k` of `x`, packed."""
    element = lane * 8 // bits  # the first one with a bit in this byte
    ahead = (element * bits - lane * 8).to(tl.int32)  # where its lowest bit lies: in this byte, or before it
    value = tl.zeros((LANES,), tl.int64)
    for _each in range(7 // bits + 2):
        number = tl.load(x + element, mask=element < k, other=0).to(tl.int64) & _mask(bits)
        behind = number << tl.minimum(tl.maximum(ahead, 0), 8)
        before = number >> tl.maximum(-ahead, 0)
        value = value | tl.where(ahead >= 0, behind, before)  # 8 bits behind it adds nothing to this byte
        element += 1
        ahead += bits
    return (value & 255).to(tl.uint8)


@triton.jit
def _numbers_of(packet, lane, k, bits, nbytes):
    """The numbers `lane` of the `k` that were packed."""
    at = lane * bits
    value = tl.zeros_like(at)
    for byte in tl.static_range(5):  # as many as 31 bits can touch
        here = (at >> 3) + byte
        read = tl.load(packet + here, mask=(lane < k) & (here < nbytes), other=0).to(tl.int64)
        value = value | (read << (8 * byte))
    return ((value >> (at & 7)) & _mask(bits)).to(tl.int32)


@triton.jit(do_not_specialize=["k", "bits", "nbytes"])
def _pack_kernel(x, packet, k, bits, nbytes, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    tl.store(packet + lane, _bytes_of(x, lane, k, bits, LANES), mask=lane < nbytes)


@triton.jit(do_not_specialize=["k", "bits", "nbytes"])
def _unpack_kernel(packet, x, k, bits, nbytes, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    tl.store(x + lane, _numbers_of(packet, lane, k, bits, nbytes), mask=lane < k)


@triton.jit(do_not_specialize=["k"])
def _pack_blocks_kernel(x, packet, widths, starts, k, BLOCK: tl.constexpr, LANES: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES).to(tl.int64)
    bits = tl.load(widths + block).to(tl.int32)
    count = tl.minimum(k - block * BLOCK, BLOCK).to(tl.int32)
    if bits > 0:
        content = _bytes_of(x + block * BLOCK, lane, count, bits, LANES)
        tl.store(packet + tl.load(starts + block) + lane, content, mask=lane < (count * bits + 7) // 8)


@triton.jit(do_not_specialize=["k", "nbytes"])
def _unpack_blocks_kernel(packet, x, widths, starts, k, nbytes, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    start = tl.load(starts + block)
    bits = tl.minimum(tl.load(widths + block), 31).to(tl.int32)
    count = tl.minimum(k - block * BLOCK, BLOCK).to(tl.int32)
    number = _numbers_of(packet + start, lane, count, bits, nbytes - start)
    tl.store(x + block * BLOCK + lane, number, mask=lane < count)


@triton.jit(do_not_specialize=["k", "shift", "stride", "length"])
def _mark_kernel(index, words, k, shift, stride, length, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    place = (tl.load(index + lane, mask=lane < k, other=0).to(tl.int64) >> shift) + lane * stride
    inside = (lane < k) & (place >= 0) & (place < length)
    bit = tl.full((LANES,), 1, tl.int32) << (place & 31).to(tl.int32)
    tl.atomic_or(words + (place >> 5), bit, mask=inside, sem="relaxed")


@triton.jit
def _byte_bits(packet, nbytes, LANES: tl.constexpr):
    """The bytes of this program, and how many bits are set in each."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    byte = tl.load(packet + lane, mask=lane < nbytes, other=0).to(tl.int32)
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return lane, byte, (fours + (fours >> 4)) & 0x0F


@triton.jit(do_not_specialize=["nbytes"])
def _count_kernel(packet, counts, nbytes, LANES: tl.constexpr):
    _, _, count = _byte_bits(packet, nbytes, LANES)
    tl.store(counts + tl.program_id(0), tl.sum(count))


@triton.jit(do_not_specialize=["k", "nbytes"])
def _place_kernel(packet, counts, ends, place, k, nbytes, LANES: tl.constexpr):
    block = tl.program_id(0)
    lane, byte, count = _byte_bits(packet, nbytes, LANES)
    rank = tl.load(ends + block) - tl.load(counts + block) + tl.cumsum(count, 0) - count
    for bit in tl.static_range(8):
        mark = (byte >> bit) & 1
        tl.store(place + rank, lane * 8 + bit, mask=(mark > 0) & (rank < k))
        rank += mark


@triton.jit(do_not_specialize=["k", "span"])
def _ascend_kernel(position, outside, disorder, k, span, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    there = lane < k
    here = tl.load(position + lane, mask=there, other=0)
    before = tl.load(position + lane - 1, mask=there & (lane > 0), other=-1)
    if tl.max((there & ((here < 0) | (here >= span))).to(tl.int32)) > 0:
        tl.atomic_max(outside, 1, sem="relaxed")
    if tl.max((there & (lane > 0) & (here <= before)).to(tl.int32)) > 0:
        tl.atomic_max(disorder, 1, sem="relaxed")
