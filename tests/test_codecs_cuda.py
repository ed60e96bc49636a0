"""The codecs in Triton write the reference's bytes, and take and refuse what it does: on a GPU, else in Triton's interpreter."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.on_triton import DEVICE, KINDS, made
from helpers.same_bits import bits
from sparsync.kernels import codecs, set_backend
from sparsync.wire import indices
from sparsync.wire.indices import CODECS, Codec

LONGEST_BITMAP = 2**16


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ascending positions in a span, int32 or int64."""
    span = draw(st.sampled_from([1, 8, 9, 1000, 40_000, 2**31 - 1]))
    k = draw(st.integers(0, min(span, 300)))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    index = torch.randint(span, (k,), generator=source).unique()
    if draw(st.booleans()):  # crowded
        index = (index[:1] + torch.arange(k)).clamp(max=span - 1).unique()
    return index.to(draw(st.sampled_from([torch.int32, torch.int64]))).to(DEVICE), span


def outcome(work: Callable[[], Tensor], backend: str) -> Tensor | str:
    """What `work` returns on this backend, or what the refusal says."""
    with set_backend(backend):
        try:
            return work()
        except RuntimeError as refused:
            return str(refused)


def config_fingerprint(work: Callable[[], Tensor]) -> Tensor | str:
    """What `work` returns, the same in Triton as in the reference."""
    found, wanted = (outcome(work, backend) for backend in ("triton", "reference"))
    if isinstance(found, Tensor) and isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(bits(found), bits(wanted))
    else:
        assert found == wanted
    return found


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=6, deadline=None)
@given(chosen=selections(), data=st.data())
def test_positions_and_spoilt_packets_are_the_reference(
    codec: Codec, chosen: tuple[Tensor, int], data: st.DataObject
) -> None:
    index, span = chosen
    span = min(span, LONGEST_BITMAP) if codec == "bitmap" else span
    index = index[index < span]
    k = index.numel()
    packet = config_fingerprint(lambda: indices.encode(index, span, codec))
    assert isinstance(packet, Tensor)
    found = config_fingerprint(lambda: indices.decode(packet, k, span, codec))
    assert isinstance(found, Tensor)
    assert found.tolist() == index.tolist()
    spoilt = packet.clone()
    if packet.numel():
        spoilt[data.draw(st.integers(0, packet.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    config_fingerprint(lambda: indices.decode(spoilt, k, span, codec))
    cut = packet[: data.draw(st.integers(0, packet.numel()))]
    config_fingerprint(lambda: indices.decode(cut, k, span, codec))
    config_fingerprint(lambda: indices.decode(packet, min(span, k + 1), span, codec))


@pytest.mark.parametrize("codec", ["bitmap", "delta", "rice", "elias_fano"])
@settings(max_examples=12, deadline=None)
@given(content=st.binary(max_size=80), k=st.integers(0, 300), span=st.sampled_from([1, 8, 60, 300, 2**16, 2**31 - 1]))
def test_any_bytes_are_taken_or_refused_as_the_reference_does(codec: Codec, content: bytes, k: int, span: int) -> None:
    packet = torch.tensor(list(content), dtype=torch.uint8, device=DEVICE)
    config_fingerprint(lambda: indices.decode(packet, k, span, codec))


@pytest.mark.parametrize("content", [[3, 3], [3, 2], [-1, 2], [0, 9]])
@pytest.mark.parametrize("codec", CODECS)
def test_positions_that_do_not_ascend_inside_the_span_are_refused(content: list[int], codec: Codec) -> None:
    with set_backend("triton"), pytest.raises(ValueError, match=r"must ascend inside \[0, 8\]"):
        indices.encode(torch.tensor(content, device=DEVICE), 9, codec)


@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_values_in_few_bits_are_the_reference(kind: str, width: int) -> None:
    for k in (0, 1, 513):
        value = made(kind, k)
        if kind == "ties":
            value[::3] *= 1e-39  # so that quotients are denormal
        for noise in (None, torch.rand(k, device=DEVICE), torch.zeros(k, device=DEVICE)):
            packet = config_fingerprint(partial(codecs.scaled_encode, value, width, noise))
            assert isinstance(packet, Tensor)
            config_fingerprint(partial(codecs.scaled_decode, packet, k, width))
    with set_backend("triton"), pytest.raises(RuntimeError, match="513 values of"):
        codecs.scaled_decode(torch.zeros(9, dtype=torch.uint8, device=DEVICE), 513, width)
