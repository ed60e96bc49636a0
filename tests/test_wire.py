"""Wire: what is encoded is decoded to the bit, and what cannot be a packet is refused."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsync.core import Sparse
from sparsync.wire import Raw

raw = Raw()
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FLOATS = st.floats(width=16) | st.sampled_from([math.nan, math.inf, -math.inf, -0.0, 6e-8])


def sparse(positions: list[int], values: list[float], length: int, dtype: torch.dtype) -> Sparse:
    return Sparse(
        torch.tensor(positions, dtype=torch.int32), torch.tensor(values, dtype=torch.float64).to(dtype), length
    )


@given(length=st.integers(0, 60), dtype=st.sampled_from(TYPES), data=st.data())
def test_a_packet_brings_back_what_went_in_to_the_bit(length: int, dtype: torch.dtype, data: st.DataObject) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, length - 1)))) if length else []
    values = data.draw(st.lists(FLOATS, min_size=len(positions), max_size=len(positions)))
    part = sparse(positions, values, length, dtype)
    packet = raw.encode(part)
    assert packet.dtype == torch.uint8
    assert packet.numel() == raw.nbytes(len(positions), length, dtype) == len(positions) * (4 + dtype.itemsize)
    again = raw.decode(packet, len(positions), length, dtype)
    assert again.index.tolist() == positions
    assert again.value.dtype == dtype
    assert torch.equal(again.value.view(torch.uint8), part.value.view(torch.uint8))
    assert again.length == length


@given(packet=st.binary(max_size=60), length=st.integers(0, 40), dtype=st.sampled_from(TYPES))
def test_any_bytes_are_either_refused_or_a_valid_vector(packet: bytes, length: int, dtype: torch.dtype) -> None:
    received = torch.tensor(list(packet), dtype=torch.uint8)
    try:
        part = raw.decode(received, received.numel() // (4 + dtype.itemsize), length, dtype)
    except RuntimeError:
        return
    positions = part.index.tolist()
    assert positions == sorted(set(positions))
    assert all(0 <= position < length for position in positions)
    assert part.value.numel() == len(positions)
    assert raw.encode(part).tolist() == list(packet)


def test_a_packet_may_start_anywhere_in_memory() -> None:
    """A slice of a receive buffer is not aligned to the types in it."""
    part = sparse([1, 4], [0.5, -2.0], 5, torch.float64)
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), raw.encode(part)])
    again = raw.decode(buffer[3:], 2, 5, torch.float64)
    buffer.zero_()  # what was decoded shares no memory with it
    assert (again.index.tolist(), again.value.tolist()) == ([1, 4], [0.5, -2.0])
