"""Codecs: what is encoded is decoded, in as many bytes as announced, the same in C++ as in torch; no other packet is accepted."""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.same_bits import bits
from sparsync.kernels import backends, set_backend
from sparsync.kernels.codec_reference import PositionCodec, decode_positions, encode_positions, size_of
from sparsync.wire import ValueCodec, Values, decode_fixed_length, encode_fixed_length, fixed_length_nbytes

CODECS: tuple[PositionCodec, ...] = get_args(PositionCodec)
FORMATS: list[Values] = ["bfloat16", "float16", "int8", "int4", "int3", "ternary", "sign"]
BLOCKS: list[Values] = ["int8", "int4", "int3", "ternary", "sign"]
BACKENDS = [name for name in backends() if name in ("cpp/avx2", "cpp/scalar", "reference")]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw ascending positions in a span: few or many, spread evenly or in clusters, up to the longest span there is."""
    span = draw(st.sampled_from([1, 2, 7, 8, 9, 64, 65, 1000, 5000, 2**20, 2**31 - 1]))
    k = draw(st.integers(0, min(span, draw(st.sampled_from([3, 40, 300, 1000])))))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    gaps = torch.empty(k).exponential_(generator=source) ** draw(st.sampled_from([0.1, 1.0, 4.0]))
    gaps = gaps / gaps.sum() * (span - k) * draw(st.sampled_from([0.0, 0.5, 1.0]))
    index = gaps.double().floor().long().cumsum(0) + torch.arange(k)
    return index.clamp(max=span - 1).unique().to(torch.int32), span


def sizable(span: int) -> list[PositionCodec]:
    """Return the codecs whose packets are not too large for a test."""
    return [codec for codec in CODECS if codec != "bitmap" or span <= 2**20]


def on_all(work: Callable[[], Any]) -> list[Any]:
    """Return what `work` returns on each backend."""
    found = []
    for backend in BACKENDS:
        with set_backend(backend):
            found.append(work())
    return found


@settings(max_examples=25)
@given(selections())
def test_positions_come_back_in_the_announced_bytes_the_same_on_every_backend(chosen: tuple[Tensor, int]) -> None:
    index, span = chosen
    k = index.numel()
    for codec in sizable(span):
        for given_index in (index, index.long(), torch.stack([index, index], 1)[:, 0]):
            packets = on_all(lambda codec=codec, each=given_index: encode_positions(codec, each, span))
            assert all(torch.equal(packet, packets[0]) for packet in packets)
        assert packets[0].numel() == size_of(codec, k, span)
        for decoded in on_all(lambda codec=codec, packet=packets[0]: decode_positions(codec, packet, k, span)):
            assert decoded.dtype == torch.int32
            assert torch.equal(decoded, index)


@settings(max_examples=25)
@given(selections())
def test_fixed_length_is_the_shortest_of_all_codecs(chosen: tuple[Tensor, int]) -> None:
    index, span = chosen
    k = index.numel()
    packet = encode_fixed_length(index, span)
    shortest = 0 if k == span else min(size_of(codec, k, span) for codec in CODECS)
    assert packet.numel() == fixed_length_nbytes(k, span) == shortest
    assert torch.equal(decode_fixed_length(packet, k, span), index)


def outcome(packet: Tensor, k: int, span: int, codec: PositionCodec) -> Tensor | str:
    """Return the positions, which are valid, or the message of the error."""
    try:
        index = decode_positions(codec, packet, k, span)
    except RuntimeError as refused:
        return str(refused)
    positions = index.tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == k
    assert all(0 <= position < span for position in positions)
    return index


def assert_refused_or_valid(packet: Tensor, k: int, span: int, codec: PositionCodec) -> None:
    """Assert the same outcome on every backend."""
    first, *others = on_all(lambda: outcome(packet, k, span, codec))
    assert all(torch.equal(first, each) if isinstance(first, Tensor) else first == each for each in others)


@settings(max_examples=40)
@given(st.binary(max_size=80), st.integers(0, 300), st.sampled_from([1, 8, 60, 300, 2**16, 2**31 - 1]))
def test_any_bytes_are_refused_or_are_positions(content: bytes, k: int, span: int) -> None:
    packet = torch.tensor(list(content), dtype=torch.uint8)
    for codec in CODECS:
        assert_refused_or_valid(packet, k, span, codec)


@settings(max_examples=25)
@given(selections(), st.data())
def test_packets_cut_or_with_flipped_bits_are_refused_or_are_positions(
    chosen: tuple[Tensor, int], data: st.DataObject
) -> None:
    index, span = chosen
    for codec in sizable(span):
        packet = encode_positions(codec, index, span)
        cut = packet[: data.draw(st.integers(0, packet.numel()))]
        assert_refused_or_valid(cut, index.numel(), span, codec)
        for _ in range(min(4, packet.numel())):
            place = data.draw(st.integers(0, packet.numel() - 1))
            packet[place] ^= 1 << data.draw(st.integers(0, 7))
        assert_refused_or_valid(packet, index.numel(), span, codec)
        other = data.draw(st.integers(0, min(span, 1000)))
        assert_refused_or_valid(packet, other, data.draw(st.integers(other, 2**20)), codec)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("positions", "which"),
    [
        ([-1, 4], "got -1 as number 0"),
        ([2, 2], "got 2 as number 1"),
        ([1, 10], "got 10 as number 1"),
        ([1, 2**32 + 5], "got 4294967301 as number 1"),
    ],
    ids=str,
)
def test_positions_that_no_decoder_would_accept_are_not_encoded(
    backend: str, codec: PositionCodec, positions: list[int], which: str
) -> None:
    with set_backend(backend):
        for dtype in (torch.int64, torch.int32):
            index = torch.tensor(positions)
            if torch.equal(index, index.to(dtype)):
                with pytest.raises(ValueError, match=rf"must ascend inside \[0, 9\], each once, {which}"):
                    encode_positions(codec, index.to(dtype), 10)


# ---- values


FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, -3e-39, 3.4028234663852886e38, math.nan, math.inf])


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Up to three blocks of values, most of them of one scale, some odd ones among them."""
    k = draw(st.sampled_from([0, 1, 2, 255, 256, 257, 600]))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    value = torch.randn(k, generator=source) * 10.0 ** draw(st.integers(-44, 37))
    for odd in draw(st.lists(FLOATS, max_size=min(k, 3))):
        value[draw(st.integers(0, k - 1))] = odd
    return value


def code(format: Values, value: Tensor) -> tuple[Tensor, Tensor]:
    codec = ValueCodec(format)
    packet = codec.encode(value)
    assert packet.numel() == codec.nbytes(value.numel(), value.dtype)
    return packet, codec.decode(packet, value.numel(), value.dtype)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the C++ codecs are not built")
@settings(max_examples=25)
@given(vectors())
def test_every_backend_quantizes_to_the_same_bytes(value: Tensor) -> None:
    for format in BLOCKS:
        packets = on_all(lambda format=format: code(format, value)[0])
        assert all(torch.equal(each, packets[0]) for each in packets)
        decoded = on_all(lambda format=format: code(format, value)[1])
        assert all(torch.equal(bits(each), bits(decoded[0])) for each in decoded)


@settings(max_examples=25)
@given(vectors())
def test_rounding_to_nearest_plus_its_error_is_the_value_without_rounding(value: Tensor) -> None:
    """So the residual can take the error in float32 and no mass is lost. Where the format has larger numbers than the value."""
    for format in FORMATS[:4]:
        _, decoded = code(format, value)
        fine = decoded.isfinite() & value.isfinite()
        if format == "float16":
            fine &= value.abs() <= 65504
        error = value - decoded
        assert torch.equal((error.double() + decoded.double())[fine], value.double()[fine])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("non_finite", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_makes_nan_of_its_block_and_of_no_other(backend: str, non_finite: float) -> None:
    value = torch.ones(600)
    value[300] = non_finite
    with set_backend(backend):
        for format in BLOCKS:
            _, decoded = code(format, value)
            assert decoded[256:512].isnan().all()
            assert decoded[:256].isfinite().all()
            assert decoded[512:].isfinite().all()
        for format in ("bfloat16", "float16"):
            _, decoded = code(format, value)
            assert torch.equal(bits(decoded), bits(value))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["float32", *FORMATS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_makes_no_infinities(backend: str, format: Values, dtype: torch.dtype) -> None:
    """Of the largest numbers of the type, of either sign, beside small ones; float64 ones are beyond float32, too."""
    value = torch.linspace(-1, 1, 300, dtype=dtype) * torch.finfo(dtype).max
    with set_backend(backend):
        _, decoded = code(format, value)
    assert decoded.isfinite().all()
    assert (decoded.sign() * value.sign() >= 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "steps"), [("int8", 127), ("int4", 7), ("int3", 4)])
def test_no_value_moves_by_more_than_half_a_step_or_one_at_the_end_of_the_other_sign(
    backend: str, format: Values, steps: int
) -> None:
    """A step is the largest magnitude of the block over 127, 7 or 4, and up to 1/128 more."""
    value = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    blocks = value.view(-1, 256)
    step = blocks.abs().amax(1, keepdim=True) / steps * (1 + 2**-7)
    ends_in_minus = blocks.amin(1, keepdim=True) == -blocks.abs().amax(1, keepdim=True)
    other_end = (torch.where(ends_in_minus, blocks, -blocks) > (steps - 1) * step) & (steps == 4)
    with set_backend(backend):
        error = (code(format, value)[1] - value).view(-1, 256).abs()
    assert (error <= step * (0.5 + 0.5 * other_end)).all()
    assert 16 * other_end.sum() < value.numel()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1, -1])
def test_three_bits_have_all_codes_one_more_for_the_sign_of_the_greatest_magnitude(backend: str, sign: int) -> None:
    value = sign * torch.arange(-4, 4).float()
    with set_backend(backend):
        assert torch.equal(code("int3", value)[1], value)
        # Where both signs reach the greatest magnitude it is the negative one that has a code.
        assert code("int3", torch.tensor([4.0, -4.0]))[1].tolist() == [3, -4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ternary_values_are_zero_up_to_half_their_scale_and_five_take_a_byte(backend: str) -> None:
    value = torch.tensor([1.0, -1.0, 2.083, -2.083]).repeat(128)  # 1.224 times the root mean square rounds to 2
    value[0] = torch.nextafter(value[0], torch.tensor(2.0))
    with set_backend(backend):
        packet, decoded = code("ternary", value)
    assert decoded.tolist() == [2.0, 0.0, 2.0, -2.0, *[0.0, 0.0, 2.0, -2.0] * 127]
    assert packet[:5].tolist() == [0x00, 0x40, 0x00, 0x40, 1 + 9 + 2 * 27]
    assert packet.numel() == 2 * 2 + 103  # no byte ends with a block


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["float32", *FORMATS])
def test_a_packet_of_values_of_another_length_is_refused(backend: str, format: Values) -> None:
    codec = ValueCodec(format)
    packet = codec.encode(torch.ones(300))
    with set_backend(backend):
        for wrong in (packet[:-1], torch.cat([packet, packet[:1]]), packet[:0]):
            with pytest.raises(RuntimeError, match=f"300 values as {format} take {packet.numel()} bytes"):
                codec.decode(wrong, 300, torch.float32)
