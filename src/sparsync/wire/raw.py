"""The plain format: k positions as int32, then k values in their own type."""

import torch
from torch import Tensor

from sparsync.core import Sparse

exact = True  # decoding gives back exactly what was encoded
INDEX_NBYTES = 4
MAX_LENGTH = 2**31 - 1


def encode(part: Sparse) -> Tensor:
    """Return a packet, uint8 [k * (4 + bytes of a value)]. Raises ValueError for vectors too long for int32 positions."""
    if part.length > MAX_LENGTH:
        raise ValueError(f"raw packets index at most {MAX_LENGTH} elements, got {part.length}; use smaller buckets")
    return torch.cat([part.index.to(torch.int32).view(torch.uint8), part.value.contiguous().view(torch.uint8)])


def decode(packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse:
    """Return what was encoded. Raises RuntimeError when the packet cannot be one of `k` elements of a vector of `length`."""
    if packet.numel() != nbytes(k, length, dtype):
        raise RuntimeError(
            f"{k} elements of {INDEX_NBYTES + dtype.itemsize} bytes each do not make a packet of {packet.numel()} bytes"
        )
    index = packet[: k * INDEX_NBYTES].clone().view(torch.int32)
    value = packet[k * INDEX_NBYTES :].clone().view(dtype)
    # A host sync. A position outside would write out of bounds.
    if k and not bool(((index >= 0) & (index < length)).all()):
        raise RuntimeError(f"a packet has positions outside [0, {length - 1}]")
    if not bool((index[1:] > index[:-1]).all()):  # a position twice would be cleared once and added twice
        raise RuntimeError(f"the {k} positions of a packet do not ascend")
    return Sparse(index, value, length)


def decode_values(packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor:  # as `nbytes`
    """Return the values of `decode`, [k], without reading the positions."""
    return packet[k * INDEX_NBYTES :].clone().view(dtype)


def nbytes(k: int, length: int, dtype: torch.dtype) -> int:  # other packets depend on the length
    """Return the bytes of a packet of k elements."""
    return k * (INDEX_NBYTES + dtype.itemsize)
