"""Positions and values in one packet: the positions by the codec that count and span determine, then the values."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsync.core import Sparse
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values


@dataclass(frozen=True)
class Elements:
    """Packets of sparse vectors whose values are encoded as `values`. A receiver gets `decode(encode(part))`."""

    values: Values = "float32"

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return self._codec.exact

    def encode(self, part: Sparse) -> Tensor:
        """Return the packet, uint8, of a sparse vector whose positions ascend."""
        return torch.cat([indices.encode_fixed_length(part.index, part.length), self._codec.encode(part.value)])

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
        """Return the `k` elements of a span of `length` in a packet. Raises RuntimeError when it cannot be one of them."""
        head = indices.fixed_length_nbytes(k, length)
        index = indices.decode_fixed_length(packet[:head], k, length)
        return Sparse(index, self._codec.decode(packet[head:], k, dtype), length)

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:
        """Return the values of `decode`, [k], without reading the positions."""
        return self._codec.decode(packet[indices.fixed_length_nbytes(k, length) :], k, dtype)

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packet of any `k` elements of a span of `length`."""
        return indices.fixed_length_nbytes(k, length) + self._codec.nbytes(k, dtype)

    @property
    def _codec(self) -> ValueCodec:
        return _codec_of(self.values)


@lru_cache
def _codec_of(values: Values) -> ValueCodec:
    return ValueCodec(values)
