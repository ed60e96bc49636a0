"""Positions inside a known span, each in as few bits as the span's length needs."""

from jaxtyping import Int, UInt8
from torch import Tensor

from sparsync.kernels import codecs


def width(length: int) -> int:
    """The bits of one position in a span of `length` elements; 0 when there is only one."""
    return max(0, length - 1).bit_length()


def nbytes(k: int, bits: int) -> int:
    """The bytes of k positions of `bits` bits each."""
    return -(-k * bits // 8)


def encode(index: Int[Tensor, " k"], bits: int) -> UInt8[Tensor, " nbytes"]:
    """The positions, each in [0, 2^bits), lowest bit first and without gaps; the last byte is filled up with zeros."""
    return codecs.pack(index, bits)


def decode(packet: UInt8[Tensor, " nbytes"], k: int, bits: int, length: int) -> Int[Tensor, " k"]:
    """The k positions that were encoded, int64. Raises RuntimeError when the packet cannot be one for a span of `length` elements."""
    if packet.numel() != nbytes(k, bits):
        raise RuntimeError(
            f"{k} positions of {bits} bits take {nbytes(k, bits)} bytes, the packet has {packet.numel()}"
        )
    index = codecs.unpack(packet, k, bits).long()
    if k and int(index.max()) >= length:  # a host sync; a bad position would write outside the span
        raise RuntimeError(f"a packet has positions outside [0, {length - 1}]")
    return index
