"""Positions on the wire: several codecs, the one that takes the fewest bytes, and a packet that says how it is to be read.

Both sides know the span, and the count k unless the packet carries it. `agreed` chooses by k and the span alone among the codecs whose
length they tell, so that receivers know the length of a packet beforehand and nothing about it needs to be sent.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sparsync.kernels import codecs
from sparsync.kernels.codec_reference import ORDER, OUTSIDE, SIZE, refusal
from sparsync.wire import packed

Codec = Literal["raw", "packed", "delta", "bitmap", "rice", "elias_fano"]
CODECS: tuple[Codec, ...] = get_args(Codec)
Agreed = Literal["packed", "bitmap", "elias_fano"]
HEADER_NBYTES = 1
COUNT_NBYTES = 4
_COUNTED = 0x80  # in the header byte: the count follows
_RAW_NBYTES = 4


def encode(index: Int[Tensor, " k"], span: int, codec: Codec) -> UInt8[Tensor, " nbytes"]:
    """The packet of the ascending `index` inside [0, span). Raises ValueError for other positions."""
    if codec == "delta":
        return codecs.delta_encode(index, span)
    if codec == "bitmap":
        return codecs.bitmap_encode(index, span)
    if codec == "rice":
        return codecs.rice_encode(index, span)
    if codec == "elias_fano":
        return codecs.elias_fano_encode(index, span)
    codecs.check(index, span)
    if codec == "packed":
        return codecs.pack(index, packed.width(span))
    if codec == "raw":
        return index.to(torch.int32).contiguous().view(torch.uint8).clone()
    raise ValueError(f"a codec of positions is one of {', '.join(CODECS)}, got {codec!r}")


def decode(packet: UInt8[Tensor, " nbytes"], k: int, span: int, codec: Codec) -> Int[Tensor, " k"]:
    """The `k` positions that were encoded, int32, ascending in [0, span). Raises RuntimeError for a packet that cannot be one of them."""
    if codec == "delta":
        return codecs.delta_decode(packet, k, span)
    if codec == "bitmap":
        return codecs.bitmap_decode(packet, k, span)
    if codec == "rice":
        return codecs.rice_decode(packet, k, span)
    if codec == "elias_fano":
        return codecs.elias_fano_decode(packet, k, span)
    if codec not in CODECS:
        raise ValueError(f"a codec of positions is one of {', '.join(CODECS)}, got {codec!r}")
    if packet.numel() != (packed.nbytes(k, packed.width(span)) if codec == "packed" else _RAW_NBYTES * k):
        raise refusal(SIZE, k, span, packet.numel())
    if codec == "packed":
        return _checked(codecs.unpack(packet, k, packed.width(span)), span, packet.numel())
    return _checked(
        packet.clone().view(torch.int32), span, packet.numel()
    )  # a slice of a buffer is not aligned: a copy is


def nbytes(index: Int[Tensor, " k"], span: int, codec: Codec) -> int:
    """The bytes of the packet of `index`, without encoding it."""
    if codec == "delta":
        return codecs.delta_nbytes(index)
    if codec == "rice":
        return codecs.rice_plan(index)[1]
    return _RAW_NBYTES * index.numel() if codec == "raw" else counted_nbytes(index.numel(), span, codec)


def counted_nbytes(k: int, span: int, codec: Codec) -> int:
    """The bytes of any `k` positions inside [0, span), for a codec whose length depends on nothing else."""
    sizes = _counted_sizes(k, span)
    if codec not in sizes:
        raise ValueError(f"the length of a packet is known beforehand for {', '.join(sizes)}, not for {codec!r}")
    return sizes[codec]


def cheapest(index: Int[Tensor, " k"], span: int) -> Codec:
    """The codec that takes the fewest bytes; the first of equals."""
    return min(CODECS, key=lambda codec: nbytes(index, span, codec))


def encode_cheapest(index: Int[Tensor, " k"], span: int, counted: bool = False) -> UInt8[Tensor, " nbytes"]:
    """A byte that names the cheapest codec, k in 4 bytes if `counted`, then the packet."""
    codecs.check(index, span)
    codec = cheapest(index, span)
    head = [CODECS.index(codec) | (_COUNTED if counted else 0)]
    head += list(index.numel().to_bytes(COUNT_NBYTES, "little")) if counted else []
    return torch.cat([torch.tensor(head, dtype=torch.uint8, device=index.device), encode(index, span, codec)])


def decode_any(packet: UInt8[Tensor, " nbytes"], span: int, k: int | None = None) -> Int[Tensor, " k"]:
    """The positions in a packet that names its codec; `k` must be told where the packet does not carry it, and must be its count."""
    if packet.numel() < HEADER_NBYTES:
        raise RuntimeError("a packet of positions begins with a byte that names its codec, got an empty one")
    head = int(packet[0])
    number, counted = head & ~_COUNTED, bool(head & _COUNTED)
    if number >= len(CODECS):
        raise RuntimeError(
            f"the codec of a packet of positions is numbered 0 to {len(CODECS) - 1}, this one says {number}"
        )
    start = HEADER_NBYTES + (COUNT_NBYTES if counted else 0)
    carried = k
    if counted:
        if packet.numel() < start:
            raise RuntimeError(f"a packet that carries its count has at least {start} bytes, this one {packet.numel()}")
        carried = int.from_bytes(packet[HEADER_NBYTES:start].tolist(), "little")
    if carried is None:
        raise RuntimeError(
            "a packet of positions does not carry its count, and none was told; encode with counted=True"
        )
    if (k is not None and carried != k) or carried > span:
        raise RuntimeError(
            f"a packet says it holds {carried} positions, expected {k if k is not None else f'at most {span}'}"
        )
    return decode(packet[start:], carried, span, CODECS[number])


def agreed(k: int, span: int) -> Agreed:
    """The codec with the shortest packet of any `k` positions inside [0, span); the first of equals."""
    sizes = _counted_sizes(k, span)
    return min(sizes, key=lambda codec: sizes[codec])


def agreed_nbytes(k: int, span: int) -> int:
    """The bytes of `encode_agreed` for any `k` positions inside [0, span)."""
    return min(_counted_sizes(k, span).values())


def encode_agreed(index: Int[Tensor, " k"], span: int) -> UInt8[Tensor, " nbytes"]:
    """The packet of the codec that k and the span tell."""
    return encode(index, span, agreed(index.numel(), span))


def decode_agreed(packet: UInt8[Tensor, " nbytes"], k: int, span: int) -> Int[Tensor, " k"]:
    """What `encode_agreed` was given, int32."""
    return decode(packet, k, span, agreed(k, span))


def _counted_sizes(k: int, span: int) -> dict[Agreed, int]:
    return {
        "packed": packed.nbytes(k, packed.width(span)),
        "bitmap": -(-span // 8),
        "elias_fano": codecs.elias_fano_nbytes(k, span),
    }


def _checked(index: Tensor, span: int, nbytes: int) -> Tensor:
    try:
        codecs.check(index, span)
    except ValueError:
        inside = bool(((index >= 0) & (index < span)).all())
        raise refusal(ORDER if inside else OUTSIDE, index.numel(), span, nbytes) from None
    return index
