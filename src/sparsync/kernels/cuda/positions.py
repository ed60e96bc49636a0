"""Positions in packets and in rows, by torch's operations: the bytes of the reference, and nothing is asked of the device.

What the reference refuses is not noticed. A packet that cannot be one is decoded to positions inside the span, which need not ascend.
"""

from typing import Any

from torch import Tensor

from sparsync.core import Rows
from sparsync.kernels import codec_reference
from sparsync.kernels.codec_reference import PositionCodec
from sparsync.kernels.cuda.launch import BYTES, POSITIONS, takes

# Any: as in `exact_top_k`.


@takes(POSITIONS)
def encode_positions(codec: PositionCodec, index: Tensor, span: int) -> Any:
    return codec_reference.encoded(codec, index, span)


@takes(BYTES)
def decode_positions(codec: PositionCodec, packet: Tensor, k: int, span: int) -> Any:
    if packet.numel() != codec_reference.nbytes(codec, k, span):
        return NotImplemented
    return codec_reference.decoded(codec, packet, k, span).clamp_(0, span - 1).int()


def locate(rows: Rows, place: Tensor) -> Any:
    return _located(place, rows.starts, rows.row)


@takes(POSITIONS)
def _located(place: Tensor, starts: Tensor, row: int) -> Tensor:
    number = place // row
    return (starts[number.long()] - number * row + place).to(place.dtype)
