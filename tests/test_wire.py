"""Wire: what is encoded is decoded to the bit, and what cannot be a packet is refused."""

import math

import pytest
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


@given(positions=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), length=st.integers(0, 6))
def test_positions_outside_twice_or_out_of_order_are_refused(positions: list[int], length: int) -> None:
    valid = positions == sorted(set(positions)) and all(0 <= position < length for position in positions)
    packet = raw.encode(sparse(positions, [1.0] * len(positions), length, torch.float32))
    if valid:
        assert raw.decode(packet, len(positions), length, torch.float32).index.tolist() == positions
    else:
        with pytest.raises(RuntimeError, match="positions"):
            raw.decode(packet, len(positions), length, torch.float32)


@pytest.mark.parametrize(
    ("positions", "told"),
    [
        ([0, 5], r"positions outside \[0, 4\]"),
        ([-1, 3], r"positions outside \[0, 4\]"),
        ([3, 1], "the 2 positions of a packet do not ascend"),
        ([2, 2], "the 2 positions of a packet do not ascend"),
    ],
    ids=["beyond", "negative", "descending", "twice"],
)
def test_a_bad_packet_says_what_is_wrong(positions: list[int], told: str) -> None:
    packet = raw.encode(sparse(positions, [1.0, 1.0], 5, torch.float32))
    with pytest.raises(RuntimeError, match=told):
        raw.decode(packet, 2, 5, torch.float32)


@pytest.mark.parametrize("nbytes", [1, 7, 9])
def test_a_cut_packet_is_refused(nbytes: int) -> None:
    with pytest.raises(RuntimeError, match=f"1 elements of 8 bytes each do not make a packet of {nbytes} bytes"):
        raw.decode(torch.zeros(nbytes, dtype=torch.uint8), 1, 5, torch.float32)


def test_a_packet_may_start_anywhere_in_memory() -> None:
    """A slice of a receive buffer is not aligned to the types in it."""
    part = sparse([1, 4], [0.5, -2.0], 5, torch.float64)
    buffer = torch.cat([torch.zeros(3, dtype=torch.uint8), raw.encode(part)])
    assert raw.decode(buffer[3:], 2, 5, torch.float64).value.tolist() == [0.5, -2.0]


def test_a_decoded_packet_does_not_share_memory_with_what_was_received() -> None:
    packet = raw.encode(sparse([1], [0.5], 5, torch.float32))
    part = raw.decode(packet, 1, 5, torch.float32)
    packet.zero_()
    assert (part.index.tolist(), part.value.tolist()) == ([1], [0.5])


def test_vectors_too_long_for_int32_are_refused() -> None:
    none = torch.empty(0, dtype=torch.int32)
    assert raw.encode(Sparse(none, torch.empty(0), 2**31 - 1)).numel() == 0
    with pytest.raises(
        ValueError, match="raw packets index at most 2147483647 elements, got 2147483648; use smaller buckets"
    ):
        raw.encode(Sparse(none, torch.empty(0), 2**31))
