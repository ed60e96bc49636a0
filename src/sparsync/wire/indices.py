"""Positions on the wire: several codecs, the one that takes the fewest bytes, and a packet that says how it is to be read.

Both sides know the span, and the count k unless the packet carries it. `agreed` chooses by k and the span alone among the codecs whose
length they tell, so that receivers know the length of a packet beforehand and nothing about it needs to be sent.
"""

from functools import lru_cache
from typing import Literal, get_args

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sparsync.kernels import codecs
from sparsync.kernels.codec_reference import ORDER, OUTSIDE, SIZE, Codec, Plan, refusal
from sparsync.wire import packed

CODECS: tuple[Codec, ...] = get_args(Codec)
FixedLengthCodec = Literal["packed", "bitmap", "elias_fano"]
HEADER_NBYTES = 1
COUNT_NBYTES = 4
_COUNTED = 0x80  # in the header byte: the count follows
_RAW_NBYTES = 4


def encode(index: Int[Tensor, " k"], span: int, codec: Codec) -> UInt8[Tensor, " nbytes"]:
    """The packet of the ascending `index` inside [0, span). Raises ValueError for other positions."""
    return codecs.encode(codec, index, span, _plan(index, span, codec))


def decode(packet: UInt8[Tensor, " nbytes"], k: int, span: int, codec: Codec) -> Int[Tensor, " k"]:
    """The `k` positions that were encoded, int32, ascending in [0, span). Raises RuntimeError for a packet that cannot be one of them."""
    if codec not in CODECS:
        raise _unknown(codec)
    if codec != "raw" and codec != "packed":
        return codecs.decode(codec, packet, k, span)
    if packet.numel() != (packed.nbytes(k, packed.width(span)) if codec == "packed" else _RAW_NBYTES * k):
        raise refusal(SIZE, k, span, packet.numel())
    if codec == "packed":
        return _checked(codecs.unpack(packet, k, packed.width(span)), span, packet.numel())
    return _checked(
        packet.clone().view(torch.int32), span, packet.numel()
    )  # a slice of a buffer is not aligned: a copy is


def nbytes(index: Int[Tensor, " k"], span: int, codec: Codec) -> int:
    """The bytes of the packet of `index`, without encoding it. Raises ValueError as `encode` does for codecs that must look at it."""
    return _plan(index, span, codec).nbytes


def cheapest(index: Int[Tensor, " k"], span: int) -> Codec:
    """The codec that takes the fewest bytes; the first of equals."""
    return _cheapest(index, span)[0]


def encode_cheapest(index: Int[Tensor, " k"], span: int, counted: bool = False) -> UInt8[Tensor, " nbytes"]:
    """A byte that names the cheapest codec, k in 4 bytes if `counted`, then the packet."""
    codec, plan = _cheapest(index, span)
    head = bytes([CODECS.index(codec) | (_COUNTED if counted else 0)])
    head += index.numel().to_bytes(COUNT_NBYTES, "little") if counted else b""
    return codecs.encode(codec, index, span, plan, head)


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


@lru_cache(maxsize=4096)
def fixed_length_codec(k: int, span: int) -> FixedLengthCodec:
    """The codec with the shortest packet of any `k` positions inside [0, span); the first of equals."""
    plans = _counted_plans(k, span)
    return min(plans, key=lambda codec: plans[codec].nbytes)


def fixed_length_nbytes(k: int, span: int) -> int:
    """The bytes of `encode_fixed_length` for any `k` positions inside [0, span)."""
    return min(plan.nbytes for plan in _counted_plans(k, span).values())


def encode_fixed_length(index: Int[Tensor, " k"], span: int) -> UInt8[Tensor, " nbytes"]:
    """The packet of the codec that k and the span tell."""
    return encode(index, span, fixed_length_codec(index.numel(), span))


def decode_fixed_length(packet: UInt8[Tensor, " nbytes"], k: int, span: int) -> Int[Tensor, " k"]:
    """What `encode_fixed_length` was given, int32."""
    return decode(packet, k, span, fixed_length_codec(k, span))


def _cheapest(index: Tensor, span: int) -> tuple[Codec, Plan]:
    plans = {**codecs.measured(index, span), **_counted_plans(index.numel(), span), "raw": _raw_plan(index)}
    codec = min(CODECS, key=lambda codec: plans[codec].nbytes)
    return codec, plans[codec]


def _plan(index: Tensor, span: int, codec: Codec) -> Plan:
    """How `codec` writes `index`. Looks at it only where that depends on it, and raises ValueError where it cannot be encoded."""
    codecs.check_span(span)
    if codec == "delta" or codec == "rice":
        return codecs.measured(index, span)[codec]
    if codec not in CODECS:
        raise _unknown(codec)
    return _raw_plan(index) if codec == "raw" else _counted_plans(index.numel(), span)[codec]


def _raw_plan(index: Tensor) -> Plan:
    return Plan(8 * _RAW_NBYTES, _RAW_NBYTES * index.numel())


@lru_cache(maxsize=4096)
def _counted_plans(k: int, span: int) -> dict[FixedLengthCodec, Plan]:
    """Not to be written to: callers share it."""
    width = packed.width(span)
    return {
        "packed": Plan(width, packed.nbytes(k, width)),
        "bitmap": Plan(1, -(-span // 8)),
        "elias_fano": Plan(codecs.elias_fano_bits(k, span), codecs.elias_fano_nbytes(k, span)),
    }


def _unknown(codec: str) -> ValueError:
    return ValueError(f"a codec of positions is one of {', '.join(CODECS)}, got {codec!r}")


def _checked(index: Tensor, span: int, nbytes: int) -> Tensor:
    try:
        codecs.check(index, span)
    except ValueError:
        inside = bool(((index >= 0) & (index < span)).all())
        raise refusal(ORDER if inside else OUTSIDE, index.numel(), span, nbytes) from None
    return index
