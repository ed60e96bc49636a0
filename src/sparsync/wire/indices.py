"""Positions on the wire: fixed_length, the shortest of three codecs whose packets have a length that k and the span determine.

So receivers know codec and length of a packet beforehand, and nothing about it needs to be sent. `kernels/codec_reference.py` specifies
the codecs.
"""

from functools import lru_cache
from typing import get_args

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from sparsync.kernels import codecs
from sparsync.kernels.codec_reference import PositionCodec, size_of

__all__ = ["PositionCodec", "decode_fixed_length", "encode_fixed_length", "fixed_length_codec", "fixed_length_nbytes"]


@lru_cache(maxsize=4096)
def fixed_length_codec(k: int, span: int) -> PositionCodec:
    """Return the codec with the shortest packet of any `k` positions inside [0, span); the first of equals."""
    return min(get_args(PositionCodec), key=lambda codec: size_of(codec, k, span))


def fixed_length_nbytes(k: int, span: int) -> int:
    """Return the bytes of `encode_fixed_length` for any `k` positions inside [0, span): none for all of them.

    Spans of 2^31 or more have a size too, although none of their positions can be encoded: what a plan is made for need not run here.
    """
    return 0 if k == span else size_of(fixed_length_codec(k, span), k, span)


def encode_fixed_length(index: Int[Tensor, " k"], span: int) -> UInt8[Tensor, " nbytes"]:
    """Return the packet of `index`, which must ascend inside [0, span), by the codec that k and the span determine.

    Raises ValueError for other positions, and for spans of 2^31 or more.
    """
    if index.numel() == span:
        return _nothing_for_all(index, span)
    return codecs.encode_positions(fixed_length_codec(index.numel(), span), index, span)


def decode_fixed_length(packet: UInt8[Tensor, " nbytes"], k: int, span: int) -> Int[Tensor, " k"]:
    """Return what `encode_fixed_length` was given, int32. Raises RuntimeError for a packet that cannot be one of them."""
    if k == span and not packet.numel():
        return torch.arange(span, dtype=torch.int32, device=packet.device)
    return codecs.decode_positions(fixed_length_codec(k, span), packet, k, span)


def _nothing_for_all(index: Tensor, span: int) -> Tensor:
    if not torch.equal(index, torch.arange(span, dtype=index.dtype, device=index.device)):
        raise ValueError(f"{span} positions inside [0, {span}) must be all of them in order, got others")
    return torch.empty(0, dtype=torch.uint8, device=index.device)
