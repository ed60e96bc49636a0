"""Codecs: what is encoded is decoded, in the bytes that were announced, the same in C++ as in torch; what cannot be a packet is refused."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsync.kernels import backends, set_backend
from sparsync.wire import indices, packed
from sparsync.wire.indices import CODECS, Codec
from sparsync.wire.values import Format, ValueCodec

FORMATS: list[Format] = ["bfloat16", "float16", "int8", "int4", "sign"]
BLOCKS: list[Format] = ["int8", "int4", "sign"]
BACKENDS = ["reference", "cpp"] if any(name.startswith("cpp") for name in backends()) else ["reference"]


@st.composite
def selections(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ascending positions in a span: few or many, spread evenly or in clusters, up to the longest span there is."""
    span = draw(st.sampled_from([1, 2, 7, 8, 9, 64, 65, 1000, 5000, 2**20, 2**31 - 1]))
    k = draw(st.integers(0, min(span, draw(st.sampled_from([3, 40, 300, 1000])))))
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    gaps = torch.empty(k).exponential_(generator=source) ** draw(st.sampled_from([0.1, 1.0, 4.0]))
    gaps = gaps / gaps.sum() * (span - k) * draw(st.sampled_from([0.0, 0.5, 1.0]))
    index = gaps.double().floor().long().cumsum(0) + torch.arange(k)
    return index.clamp(max=span - 1).unique().to(torch.int32), span


def sizable(codec: Codec, span: int) -> bool:
    return codec != "bitmap" or span <= 2**20


@settings(max_examples=60, deadline=None)
@given(selections())
def test_positions_come_back_and_take_the_bytes_that_were_told(chosen: tuple[Tensor, int]) -> None:
    index, span = chosen
    for codec in CODECS:
        if sizable(codec, span):
            packet = indices.encode(index, span, codec)
            assert packet.numel() == indices.nbytes(index, span, codec)
            assert torch.equal(indices.decode(packet, index.numel(), span, codec), index)


@settings(max_examples=60, deadline=None)
@given(selections(), st.booleans())
def test_the_cheapest_packet_says_what_it_is_and_then_what_that_codec_writes(
    chosen: tuple[Tensor, int], counted: bool
) -> None:
    index, span = chosen
    for each in (index, index.long(), torch.stack([index, index], 1)[:, 0]):
        for packet in on_all(lambda each=each: indices.encode_cheapest(each, span, counted)):
            best = min(CODECS, key=lambda codec: indices.nbytes(index, span, codec))  # the first of equals
            head = [CODECS.index(best) + 128 * counted, *(index.numel().to_bytes(4, "little") if counted else [])]
            assert packet[: len(head)].tolist() == head
            assert torch.equal(packet[len(head) :], indices.encode(index, span, best))
            assert torch.equal(indices.decode_any(packet, span, None if counted else index.numel()), index)


@settings(max_examples=60, deadline=None)
@given(selections())
def test_the_agreed_packet_is_as_long_as_k_and_the_span_tell(chosen: tuple[Tensor, int]) -> None:
    index, span = chosen
    k = index.numel()
    packet = indices.encode_fixed_length(index, span)
    assert packet.numel() == indices.fixed_length_nbytes(k, span) <= packed.nbytes(k, packed.width(span))
    assert torch.equal(indices.decode_fixed_length(packet, k, span), index)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the C++ codecs are not built")
@settings(max_examples=60, deadline=None)
@given(selections())
def test_every_backend_writes_the_same_bytes(chosen: tuple[Tensor, int]) -> None:
    index, span = chosen
    for codec in CODECS:
        if sizable(codec, span):
            one, other = on_all(lambda codec=codec: indices.encode(index, span, codec))
            assert torch.equal(one, other)


def on_all(work: Callable[[], Tensor]) -> list[Tensor]:
    """What `work` returns on each backend."""
    found = []
    for backend in BACKENDS:
        with set_backend(backend):
            found.append(work())
    return found


def outcome(packet: Tensor, k: int, span: int, codec: Codec) -> Tensor | str:
    """The positions, which are valid, or what the refusal says."""
    try:
        index = indices.decode(packet, k, span, codec)
    except RuntimeError as refused:
        return str(refused)
    positions = index.tolist()
    assert positions == sorted(set(positions))
    assert len(positions) == k
    assert all(0 <= position < span for position in positions)
    return index


def assert_refused_or_valid(packet: Tensor, k: int, span: int, codec: Codec) -> None:
    """The same on every backend."""
    results = []
    for backend in BACKENDS:
        with set_backend(backend):
            results.append(outcome(packet, k, span, codec))
    first = results[0]
    assert all(torch.equal(first, each) if isinstance(first, Tensor) else first == each for each in results)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 300), st.sampled_from([1, 8, 60, 300, 2**16, 2**31 - 1]))
def test_any_bytes_are_refused_or_are_positions(content: bytes, k: int, span: int) -> None:
    packet = torch.tensor(list(content), dtype=torch.uint8)
    for codec in CODECS:
        assert_refused_or_valid(packet, k, span, codec)


@settings(max_examples=80, deadline=None)
@given(selections(), st.data())
def test_packets_cut_or_with_flipped_bits_are_refused_or_are_positions(
    chosen: tuple[Tensor, int], data: st.DataObject
) -> None:
    index, span = chosen
    for codec in CODECS:
        if not sizable(codec, span):
            continue
        packet = indices.encode(index, span, codec)
        cut = packet[: data.draw(st.integers(0, packet.numel()))]
        assert_refused_or_valid(cut, index.numel(), span, codec)
        for _ in range(min(4, packet.numel())):
            place = data.draw(st.integers(0, packet.numel() - 1))
            packet[place] ^= 1 << data.draw(st.integers(0, 7))
        assert_refused_or_valid(packet, index.numel(), span, codec)
        other = data.draw(st.integers(0, min(span, 1000)))
        assert_refused_or_valid(packet, other, data.draw(st.integers(other, 2**20)), codec)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.integers(0, 2**31 - 1), st.none() | st.integers(0, 20))
def test_any_bytes_that_name_a_codec_are_refused_or_are_positions(content: bytes, span: int, k: int | None) -> None:
    try:
        index = indices.decode_any(torch.tensor(list(content), dtype=torch.uint8), span, k)
    except RuntimeError:
        return
    assert index.tolist() == sorted(set(index.tolist()))
    assert all(0 <= position < span for position in index.tolist())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("codec", "content", "k", "told"),
    [
        ("raw", [1, 0, 0], 1, "its 3 bytes are not what 1 positions take"),
        ("packed", [0x0F], 1, "positions outside"),
        ("packed", [0x11], 2, "its 2 positions do not ascend"),
        ("delta", [32, 0, 0, 0, 0], 1, "a width above 31 bits"),
        ("delta", [3, 7], 1, "positions outside"),
        ("bitmap", [3, 0], 1, "it does not hold 1 positions"),
        ("rice", [0, 1], 2, "it does not hold 2 positions"),
        ("rice", [0, 1, 0], 1, "its 3 bytes are not what 1 positions take"),
        ("elias_fano", [0, 0, 0], 1, "its 3 bytes are not what 1 positions take"),
    ],
)
def test_a_refusal_says_what_is_wrong(backend: str, codec: Codec, content: list[int], k: int, told: str) -> None:
    with set_backend(backend), pytest.raises(RuntimeError, match=told):
        indices.decode(torch.tensor(content, dtype=torch.uint8), k, 7 if codec == "delta" else 10, codec)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("positions", [[3, 2], [2, 2], [-1, 4], [1, 10], [1, 2**32 + 5]], ids=str)
def test_positions_that_no_decoder_would_accept_are_not_encoded(
    backend: str, codec: Codec, positions: list[int]
) -> None:
    with set_backend(backend):
        for dtype in (torch.int64, torch.int32):
            index = torch.tensor(positions)
            if torch.equal(index, index.to(dtype)):
                with pytest.raises(ValueError, match=r"must ascend inside \[0, 9\]"):
                    indices.encode(index.to(dtype), 10, codec)
                with pytest.raises(ValueError, match=r"must ascend inside \[0, 9\]"):
                    indices.encode_cheapest(index.to(dtype), 10)


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the C++ codecs are not built")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("place", [0, 1, 127, 128, 255, 256, 700, 999])
def test_one_position_out_of_order_is_found_wherever_it_is(codec: Codec, place: int) -> None:
    span = 5000
    index = 5 * torch.arange(1000, dtype=torch.int32)
    for wrong in (-1, span, -(2**31), 2**31 - 1, int(index[place - 1]), int(index[(place + 1) % 1000])):
        broken = index.clone()
        broken[place] = wrong
        with pytest.raises(ValueError, match=r"must ascend inside \[0, 4999\]"):
            indices.encode(broken, span, codec)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("span", [-1, 2**31])
def test_a_span_too_long_for_int32_positions_is_refused(backend: str, span: int) -> None:
    none = torch.empty(0, dtype=torch.int32)
    with set_backend(backend):
        for codec in CODECS:
            with pytest.raises(ValueError, match=rf"spans of at most 2147483647 elements, got {span}; use smaller"):
                indices.encode(none, span, codec)
        with pytest.raises(ValueError, match=rf"spans of at most 2147483647 elements, got {span}; use smaller"):
            indices.encode_cheapest(none, span)


def test_spread_positions_take_nearly_as_few_bits_as_there_can_be() -> None:
    """Golomb-Rice within 1 % of the entropy of an element over the density, Elias-Fano within 7 %."""
    for density in (0.01, 0.001):
        n = int(20000 / density)
        index = (torch.rand(n, generator=torch.Generator().manual_seed(1)) < density).nonzero().view(-1).to(torch.int32)
        share = index.numel() / n
        entropy = -(share * math.log2(share) + (1 - share) * math.log2(1 - share)) / share
        assert 8 * indices.nbytes(index, n, "rice") / index.numel() < 1.01 * entropy
        assert 8 * indices.nbytes(index, n, "elias_fano") / index.numel() < 1.07 * entropy


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


RANDOM: dict[Format, Format] = {"int8": "int8_stochastic", "int4": "int4_stochastic"}


def code(format: Format, value: Tensor, noisy: bool = False) -> tuple[Tensor, Tensor]:
    codec = ValueCodec(RANDOM.get(format, format) if noisy else format)
    packet = codec.encode(value)
    assert packet.numel() == codec.nbytes(value.numel(), value.dtype)
    return packet, codec.decode(packet, value.numel(), value.dtype)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@pytest.mark.skipif(len(BACKENDS) == 1, reason="the C++ codecs are not built")
@settings(max_examples=100, deadline=None)
@given(vectors(), st.booleans())
def test_every_backend_rounds_values_alike(value: Tensor, noisy: bool) -> None:
    for format in BLOCKS:
        packets = on_all(lambda format=format: code(format, value, noisy)[0])
        assert same_bits(*packets)
        decoded = on_all(lambda format=format: code(format, value, noisy)[1])
        assert torch.equal(decoded[0].isnan(), decoded[1].isnan())
        assert same_bits(decoded[0].nan_to_num(0.0), decoded[1].nan_to_num(0.0))


@settings(max_examples=100, deadline=None)
@given(vectors())
def test_rounding_to_nearest_plus_its_error_is_the_value_without_rounding(value: Tensor) -> None:
    """So the residual can take the error in float32 and no mass is lost. Where what is decoded is finite."""
    for format in FORMATS[:4]:
        _, decoded = code(format, value)
        fine = decoded.isfinite() & value.isfinite()
        error = value - decoded
        assert torch.equal((error.double() + decoded.double())[fine], value.double()[fine])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_value_poisons_its_block_and_no_other(backend: str, poison: float) -> None:
    value = torch.ones(600)
    value[300] = poison
    with set_backend(backend):
        for format in BLOCKS:
            _, decoded = code(format, value)
            assert decoded[256:512].isnan().all()
            assert decoded[:256].isfinite().all()
            assert decoded[512:].isfinite().all()
        for format in ("bfloat16", "float16"):
            _, decoded = code(format, value)
            assert same_bits(decoded.nan_to_num(-7.0), value.nan_to_num(-7.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("format", "steps"), [("int8", 127), ("int4", 7)])
def test_no_value_moves_by_more_than_half_a_step_and_random_rounding_by_less_than_one(
    backend: str, format: Format, steps: int
) -> None:
    """A step is the largest magnitude of the block over 127 or 7, and up to 1/128 more."""
    value = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    step = value.view(-1, 256).abs().amax(1).repeat_interleave(256) / steps * (1 + 2**-7)
    with set_backend(backend):
        assert ((code(format, value)[1] - value).abs() <= step / 2).all()
        assert ((code(format, value, noisy=True)[1] - value).abs() < step).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_random_rounding_is_right_on_average(backend: str, format: Format) -> None:
    """4000 draws of 256 values: the mean of 4000 errors of a step or less stays below 6 of its standard deviations, step/2/sqrt(4000)."""
    value = torch.randn(256, generator=torch.Generator().manual_seed(5))
    step = float(value.abs().max()) / (127 if format == "int8" else 7) * (1 + 2**-7)
    codec = ValueCodec(RANDOM[format])
    with set_backend(backend):
        packet = codec.encode(value.repeat(4000))
        mean = codec.decode(packet, 256 * 4000, value.dtype).view(4000, 256).double().mean(0)
    assert float((mean - value).abs().max()) < 6 * step / 2 / math.sqrt(4000)


def test_random_rounding_draws_the_same_for_the_same_values_and_something_else_for_others() -> None:
    value = torch.randn(2560, generator=torch.Generator().manual_seed(7))
    first, torch_state = code("int4", value, noisy=True)[0], torch.get_rng_state()
    assert torch.equal(first, code("int4", value.clone(), noisy=True)[0])
    assert torch.equal(torch_state, torch.get_rng_state()), "nobody else's random numbers are used up"
    up = code("int4", value, noisy=True)[1] > value
    other = code("int4", value * (1 + 2**-20), noisy=True)[1] > value
    assert 0.3 < float((up == other).float().mean()) < 0.8


def test_a_sign_goes_with_the_mean_magnitude_of_its_block() -> None:
    value = torch.tensor([1.0, -3.0]).repeat(256)
    assert code("sign", value)[1].tolist() == [2.0, -2.0] * 256


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", ["float32", *FORMATS])
def test_a_packet_of_values_of_another_length_is_refused(backend: str, format: Format) -> None:
    codec = ValueCodec(format)
    packet = codec.encode(torch.ones(300))
    with set_backend(backend):
        for wrong in (packet[:-1], torch.cat([packet, packet[:1]]), packet[:0]):
            with pytest.raises(RuntimeError, match=f"300 values as {format} take {packet.numel()} bytes"):
                codec.decode(wrong, 300, torch.float32)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"values are sent as one of float32, .*, got 'int3'"):
        ValueCodec("int3")  # pyright: ignore[reportArgumentType]
