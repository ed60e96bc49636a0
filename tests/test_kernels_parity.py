"""Every backend of the kernels gives the bits of the specification: on awkward inputs, on unaligned views, and on what hypothesis finds."""

import math
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.kernel_cases import DTYPES, KINDS, SPECIAL, SPREADS, TABLE, compare, laid, made, three_spans
from helpers.quick import one_in
from helpers.reference import reference
from helpers.same_bits import bits, same
from sparsync import kernels
from sparsync.core import Rows, Sparse
from sparsync.kernels import dispatch, operations
from sparsync.kernels.value_reference import MAX_CODE, values_encode
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import Elements, Values

NATIVE = [name for name in kernels.backends() if name.startswith("cpp")]
SIZES = [0, 1, 15, 17, 64, 300, 4003]  # fewer than ranks, vectors of instructions and their tails, several blocks
LONG = [2**16 + 5, pytest.param(2**20 + 5000, marks=pytest.mark.slow)]  # beyond blocks, samples and caches
COMPILED = sorted(TABLE.keys() - {"top_k_of_each", "packets_fit"})  # the others are loops over these
WIDE = ["accumulate_top_k", "accumulate_top_k_nonzero", "move_put_", "top_k"]


@pytest.fixture(params=one_in(len(NATIVE), NATIVE), autouse=True, scope="module")  # the fastest one first
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.set_backend(request.param):
        yield request.param


@pytest.mark.parametrize("kind", one_in(8, KINDS))
@pytest.mark.parametrize("operation", COMPILED)
def test_an_operation_is_its_specification(operation: str, kind: str) -> None:
    for n in SIZES if kind == "normal" else SIZES[::3]:
        taken = [compare(dispatch._cpu, operation, arguments) for arguments in TABLE[operation](kind, n)]
        assert any(taken)


@pytest.mark.parametrize("n", LONG)
@pytest.mark.parametrize("operation", WIDE)
def test_an_operation_on_a_long_vector_is_its_specification(operation: str, n: int) -> None:
    for number, arguments in enumerate(TABLE[operation]("normal", n)):
        if number % 3 == 0:
            assert compare(dispatch._cpu, operation, arguments)


def taken(operation: str, *arguments: Any) -> Any:  # Any: as for `dispatch.run`
    """Call the C++ backend itself: the reference would agree with itself."""
    result = getattr(dispatch._cpu, operation)(*arguments)
    assert result is not NotImplemented
    return result


@pytest.mark.parametrize("position", [-1, 4, 2**31 - 1])
def test_a_position_outside_is_refused_before_anything_is_written(position: int) -> None:
    x, index = torch.ones(4), torch.tensor([0, position], dtype=torch.int32)
    rows = Rows(index, 2, 4)
    for call in (
        lambda: kernels.scatter_add_(x, Sparse(index, torch.ones(2), 4)),
        lambda: kernels.clear_(x, index),
        lambda: kernels.put_(x, index, torch.zeros(2)),
        lambda: kernels.gather(x, index),
        lambda: kernels.top_k_of_rows(x, rows, 1),
        lambda: kernels.accumulate_top_k_of_rows(x, torch.zeros(4), [rows], [1], x, [None]),
        lambda: kernels.locate(Rows(index, 2, 4), torch.tensor([0, position], dtype=torch.int32)),
    ):
        with pytest.raises(IndexError, match=r"in \[0, 4\) for 4 elements"):
            call()
    assert x.tolist() == [1.0] * 4


values = st.lists(st.sampled_from(SPECIAL), max_size=70) | st.lists(st.floats(width=32), max_size=70)


@given(values=values, threshold=st.sampled_from(SPECIAL) | st.floats(), data=st.data())
def test_whatever_is_drawn_gives_the_bits_of_the_reference(
    backend: str, values: list[float], threshold: float, data: st.DataObject
) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(0, x.numel()))
    with kernels.set_backend(backend):
        same(kernels.top_k(x, k, threshold), reference.top_k(x, k))
        same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))
        assert kernels.all_finite(x) == reference.all_finite(x)


@pytest.mark.parametrize("values", one_in(3, get_args(Values)))
@pytest.mark.parametrize("kind", one_in(2, ["special", "normal", "heavy-tailed"]))
def test_several_packets_in_one_call_are_those_of_one_at_a_time(values: Values, kind: str) -> None:
    codec, P = Elements(values), 3
    for n, density in ((0, 1), (2, 1), (100, 0.1), (1000, 0.4), (1000, 1), (20_003, 0.01)):
        x = made(kind, n)
        rows = [BlockCyclic(n, P).rows(p, x.device) for p in range(P)]
        lengths = [each.length for each in rows]
        counts = [math.ceil(density * length) for length in lengths]
        chosen = [kernels.top_k_of_rows(x, each, k) for each, k in zip(rows, counts, strict=True)]
        for divisor, at in product((1, 4), (None, rows)):
            packets, dropped = codec.encode_each(chosen, divisor, at, n)
            with kernels.set_backend("reference"):
                expected, expected_dropped = codec.encode_each(chosen, divisor, at, n)
                arrived = codec.decode_each(expected, counts, lengths, torch.float32, at, n)
            assert [each.tolist() for each in packets] == [each.tolist() for each in expected]
            for one, other in zip(dropped, expected_dropped, strict=True):
                same(one, other)
            for one, other in zip(
                codec.decode_each(packets, counts, lengths, torch.float32, at, n), arrived, strict=True
            ):
                same(one, other)
        total, expected_total = made("normal", n, 1), made("normal", n, 1)
        packets, _ = codec.encode_each(chosen)
        codec.add_each_(total, packets, counts, lengths, rows)
        for part in codec.decode_each(packets, counts, lengths, x.dtype, rows, n):
            operations.scatter_add_(expected_total, part)
        assert torch.equal(bits(total), bits(expected_total))


@pytest.mark.parametrize("wrong", ["short", "bytes", "rows"])
def test_several_packets_of_which_one_cannot_be_decoded_are_refused_before_anything_is_added(wrong: str) -> None:
    codec, rows, x = Elements("int4"), Rows(torch.arange(0, 64, 8, dtype=torch.int32), 8, 64), made("normal", 64)
    packets, _ = codec.encode_each([kernels.top_k(x, 20)] * 2)
    packets[1] = packets[1][:-1] if wrong == "short" else torch.full_like(packets[1], 255)
    regions = [rows, Rows(rows.starts[:2], 8, 64)] if wrong == "rows" else [rows, rows]
    before = x.clone()
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        codec.add_each_(x, packets, [20, 20], [64, 64], regions)
    assert torch.equal(x, before)


@pytest.mark.parametrize("n", [16 * 4096 + 5, 300_000])
def test_a_sample_that_misleads_does_not_change_what_is_selected(n: int) -> None:
    stride = n // 4096 | 1
    on_sample, off_sample = torch.full((n,), 0.5), torch.full((n,), 0.5)
    on_sample[::stride] = 2.0
    off_sample[1::stride] = torch.arange(len(off_sample[1::stride])) + 2.0
    for x in (on_sample, off_sample):
        for k in (1, 40, 4000, 10_000, n // 5):
            same(kernels.top_k(x, k), reference.top_k(x, k))
            same(kernels.accumulate_top_k(torch.zeros(n), x, k, torch.empty(n))[0], reference.top_k(x, k))


@pytest.mark.parametrize("width", [8, 4, 3])
def test_values_next_to_the_middle_between_two_codes_are_rounded_as_the_reference_does(width: int) -> None:
    lowest = -4 if width == 3 else -MAX_CODE[width]
    middle = torch.arange(lowest, MAX_CODE[width]) + 0.5
    # Exponents of scales that are divided by, and others; all significands that a scale can have.
    for exponent in (-140, -104, -103, -101, -100, -99, -20, 0, 89, 90, 91, 110):
        scale = torch.arange(128, 256).to(torch.float64)[:, None] * 2.0**exponent
        between = (middle * scale).to(torch.float32).view(-1)
        near = [between, *(torch.nextafter(between, torch.full_like(between, end)) for end in (-math.inf, math.inf))]
        rest = torch.cat([each.view(128, -1) for each in near], 1)
        rest = torch.nn.functional.pad(rest, (0, -rest.shape[1] % 255)).view(128, -1, 255)
        # The first of each block makes this its scale.
        first = (lowest * scale).to(torch.float32)[:, None].expand(-1, rest.shape[1], -1)
        x = torch.cat([first, rest], 2).view(-1)
        assert torch.equal(taken("values_encode", x, width), reference.values_encode(x, width))


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_that_are_too_large_or_not_numbers_do_not_fit(dtype: torch.dtype) -> None:
    assert taken("squares_fit", [], [], 0.0)
    for n in (1, 70, 5000):
        tensors = [torch.full((n,), 2.0, dtype=dtype), torch.full((2, n), -4.0, dtype=dtype)]
        assert taken("squares_fit", tensors, [1.0, 0.25], 6.0 * n)
        assert not taken("squares_fit", tensors, [1.0, 0.25], 6.0 * n - 1)
        tensors[1][1, n - 1] = math.nan
        assert not taken("squares_fit", tensors, [1.0, 0.25], math.inf)
    assert not taken("squares_fit", [torch.full((2,), 1.7e19)], [1.0], torch.finfo(torch.float32).max)
    assert taken("squares_fit", [torch.full((2,), 1.7e19)], [1.0], 1e39)  # beyond float32


def steps_of(dtype: torch.dtype) -> dict[str, Any]:  # Any: arguments of several types
    """The arguments of steps of 300 elements."""
    gradients, starts, factors = laid("normal", 300, dtype)
    return {
        "gradients": gradients,
        "starts": starts,
        "factors": factors,
        "square": made("normal", 300, 1).abs(),
        "ratio": made("normal", 5, 2).abs(),
        "block": 64,
        "spans": three_spans(300),
        "numbers": SPREADS,
    }


def test_steps_in_other_layouts_and_orders_are_done_by_the_reference() -> None:
    apart, backwards = (steps_of(torch.float32) for _ in range(2))
    apart |= {"gradients": [torch.randn(10, 3).t()], "starts": [5], "factors": [1.0]}
    backwards |= {name: value[::-1] for name, value in backwards.items() if isinstance(value, list)}
    for one in (apart, backwards):
        other = one | {"square": one["square"].clone()}
        out, expected = (torch.zeros_like(one["square"]) for _ in range(2))
        packet = operations.encode_steps_(out, **one, rank=0, P=3, bits=3)
        assert torch.equal(packet, reference.encode_steps_(expected, **other, rank=0, P=3, bits=3))
        assert torch.equal(out, expected)


def test_steps_packets_and_bits_that_do_not_fit_are_refused() -> None:
    outside: dict[str, Any] = {"gradients": [torch.ones(2)], "starts": [299], "factors": [1.0]}
    few: dict[str, Any] = {"ratio": torch.ones(1)}
    x, packet = torch.ones(300), values_encode(torch.ones(300), 4)
    for call, message in (
        (
            lambda: operations.make_steps_(torch.zeros(300), **steps_of(torch.float32) | outside),
            r"2 elements from 299 on do not lie in \[0, 300\)",
        ),
        (
            lambda: operations.make_steps_(torch.zeros(300), **steps_of(torch.float32) | few),
            "300 elements do not lie in 1 blocks of 64",
        ),
        (
            lambda: operations.apply_steps_([], [], torch.zeros(300), [packet[:39]] * 3, 3, [], []),
            "100 values of 3 bits take 40 bytes with their scales, the packet has 39",
        ),
        (lambda: operations.reduce_shares_(x, [packet[1:]], 4, 2, 4), "300 values of 4 bits take 154 bytes"),
        (lambda: operations.write_mean_(x, None, None, [packet], 8, 0), "300 values of 8 bits take 304 bytes"),
        (
            lambda: taken("write_mean_", x, x, x[1:].clone(), [packet], 4, 0, None),
            "gradient and residual must have one length, got 299 and 300",
        ),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()
    assert torch.equal(x, torch.ones(300))
