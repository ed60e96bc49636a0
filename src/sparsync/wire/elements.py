"""Positions and values in one packet, whose length count and span tell: the positions by the codec they agree on, then the values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.core import Sparse
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values


@dataclass(frozen=True)
class Elements:
    """Packets whose values travel as `values`. What a reader gets is `decode(encode(part))`, for the sender too."""

    values: Values = "float32"

    @property
    def exact(self) -> bool:
        """Whether what is decoded is what was encoded."""
        return self._codec.exact

    def encode(self, part: Sparse) -> Tensor:
        """The packet, uint8, of a part whose positions ascend."""
        return torch.cat([indices.encode_fixed_length(part.index, part.length), self._codec.encode(part.value)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """The `k` elements of a span of `length` that a packet tells. Raises RuntimeError when it cannot be one of them."""
        head = indices.fixed_length_nbytes(k, length)
        index = indices.decode_fixed_length(packet[:head], k, length)
        return Sparse(index, self._codec.decode(packet[head:], k, dtype), length)

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:
        """The values of `decode`, [k], where the positions are known."""
        return self._codec.decode(packet[indices.fixed_length_nbytes(k, length) :], k, dtype)

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int:
        """The bytes of a packet of any `k` elements of a span of `length`."""
        return indices.fixed_length_nbytes(k, length) + self._codec.nbytes(k, dtype)

    @property
    def _codec(self) -> ValueCodec:
        return ValueCodec(self.values)
