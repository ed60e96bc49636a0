"""Every backend of the kernels gives the bits of the specification: on awkward inputs, on unaligned views, and on what hypothesis finds."""

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.kernel_cases import DTYPES, KINDS, SPECIAL, SPREADS, TABLE, compare, laid, made, parts, three_spans
from helpers.quick import one_in
from helpers.reference import reference
from helpers.same_bits import bits, same
from sparsync import kernels
from sparsync.core import Rows, Sparse
from sparsync.kernels import dispatch, operations
from sparsync.kernels.value_reference import MAX_CODE, values_encode
from sparsync.schemes import Span
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import Elements, ValueCodec, Values

NATIVE = [name for name in kernels.backends() if name.startswith("cpp")]
SIZES = [0, 1, 15, 17, 64, 300, 4003]  # fewer than ranks, vectors of instructions and their tails, several blocks
LONG = [2**16 + 5, 2**20 + 5000]  # beyond blocks, samples and caches
COMPILED = sorted(TABLE.keys() - {"top_k_of_each", "packets_fit"})  # the others are loops over these
WIDE = ["accumulate_top_k", "accumulate_top_k_nonzero", "move_put_", "top_k"]


@pytest.fixture(params=one_in(len(NATIVE), NATIVE), autouse=True, scope="module")  # the fastest one first
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.set_backend(request.param):
        yield request.param


@pytest.mark.parametrize("kind", one_in(4, KINDS))
@pytest.mark.parametrize("operation", COMPILED)
def test_an_operation_is_its_specification(operation: str, kind: str) -> None:
    for n in SIZES:
        taken = [compare(dispatch._cpu, operation, arguments) for arguments in TABLE[operation](kind, n)]
        assert any(taken)


@pytest.mark.parametrize("n", one_in(2, LONG))
@pytest.mark.parametrize("operation", WIDE)
def test_an_operation_on_a_long_vector_is_its_specification(operation: str, n: int) -> None:
    for number, arguments in enumerate(TABLE[operation]("normal", n)):
        if number % 3 == 0:
            assert compare(dispatch._cpu, operation, arguments)


def taken(operation: str, *arguments: Any) -> Any:  # Any: as for `dispatch.run`
    """Return what the C++ backend itself returns: the reference would agree with itself."""
    result = getattr(dispatch._cpu, operation)(*arguments)
    assert result is not NotImplemented
    return result


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_is_noticed_wherever_it_is(bad: float) -> None:
    n = 131
    for position in range(n):
        x = torch.ones(n)
        x[position] = bad
        assert not kernels.all_finite(x)
        assert not kernels.accumulate(torch.zeros(n), x, torch.empty(n))
    assert kernels.all_finite(torch.full((n,), torch.finfo(torch.float32).max))


def test_every_half_precision_number_is_converted_exactly() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        grad, out = every.view(dtype), torch.empty(2**16)
        kernels.accumulate(torch.zeros(2**16), grad, out)
        assert torch.equal(bits(out), bits(torch.zeros(2**16) + grad))


@pytest.mark.parametrize("outside", [-1, 5, 2**31 - 1])
def test_rows_outside_are_refused(outside: int) -> None:
    rows, x = Rows(torch.tensor([0, outside], dtype=torch.int32), 4, 8), torch.ones(8)
    with pytest.raises(IndexError, match=r"must be in \[0, 8\) for 8 elements|must lie in \[0, 8\) for 8 elements"):
        kernels.top_k_of_rows(x, rows, 1)
    with pytest.raises(IndexError):
        kernels.accumulate_top_k_of_rows(x, x, [rows], [1], x, [None])
    for place in (-1, 8):
        with pytest.raises(IndexError, match=r"positions must be in \[0, 8\) for 8 elements"):
            kernels.locate(rows, torch.tensor([0, place], dtype=torch.int32))


@pytest.mark.parametrize("position", [-1, 4, 2**31 - 1, -(2**31)])
def test_a_position_outside_is_refused_before_anything_is_written(position: int) -> None:
    x, index = torch.ones(4), torch.tensor([0, position], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"positions must be in \[0, 4\) for 4 elements"):
        kernels.scatter_add_(x, Sparse(index, torch.ones(2), 4))
    with pytest.raises(IndexError, match=r"positions must be in \[0, 4\) for 4 elements"):
        kernels.clear_(x, index)
    with pytest.raises(IndexError, match=r"positions must be in \[0, 4\) for 4 elements"):
        kernels.put_(x, index, torch.zeros(2))
    with pytest.raises(IndexError, match=r"positions must be in \[0, 4\) for 4 elements"):
        kernels.gather(x, index)
    assert x.tolist() == [1.0] * 4


@given(first=st.lists(st.integers(0, 40), max_size=30), second=st.sets(st.integers(0, 40)))
def test_isin_is_the_reference_also_where_the_first_list_is_in_no_order(
    backend: str, first: list[int], second: set[int]
) -> None:
    index, others = torch.tensor(first, dtype=torch.int32), torch.tensor(sorted(second), dtype=torch.int32)
    with kernels.set_backend(backend):
        assert kernels.isin(index, others).tolist() == reference.isin(index, others).tolist()


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


def test_what_is_written_may_lie_in_what_is_moved(backend: str) -> None:
    source, to = torch.arange(1.0, 9.0), torch.zeros(8)
    written = [Sparse(torch.tensor([0, 5], dtype=torch.int32), source[3:5], 8)]
    kernels.move_put_(to, source, [], written)
    assert (source.tolist(), to.tolist()) == ([4, 0, 0, 0, 0, 5, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8])


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


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a backend is one that runs here, cpp.*, reference, got 'cuda'"):
        kernels.set_backend("cuda")


def test_set_backend_restores_the_backend_in_use_before(backend: str) -> None:
    assert kernels.backend() == backend
    with kernels.set_backend("reference"):
        assert kernels.backend() == "reference"
    assert kernels.backend() == backend


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_default_type_of_torch(dtype: torch.dtype) -> None:
    x, part = made("normal", 1000), parts(1000, 2, apart=True)
    wanted = reference.top_k(x, 50), reference.merge(part)
    codecs = [ValueCodec(values) for values in get_args(Values)[1:]]
    packets = [codec.encode(x) for codec in codecs]
    torch.set_default_dtype(dtype)
    try:
        same(kernels.top_k(x, 50), wanted[0])
        same(kernels.merge(part), wanted[1])
        assert torch.equal(kernels.gather(x, wanted[0].index), wanted[0].value)
        assert all(torch.equal(codec.encode(x), packet) for codec, packet in zip(codecs, packets, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("width", [8, 4, 3])
def test_values_next_to_the_middle_between_two_codes_are_rounded_as_the_reference_does(width: int) -> None:
    lowest = -4 if width == 3 else -MAX_CODE[width]
    middle = torch.arange(lowest, MAX_CODE[width]) + 0.5
    for exponent in (
        -140,
        -104,
        -103,
        -101,
        -100,
        -99,
        -20,
        0,
        89,
        90,
        91,
        110,
    ):  # of scales that are divided by, and others
        scale = (
            torch.arange(128, 256).to(torch.float64)[:, None] * 2.0**exponent
        )  # all that a scale's significand can be
        between = (middle * scale).to(torch.float32).view(-1)
        near = [between, *(torch.nextafter(between, torch.full_like(between, end)) for end in (-math.inf, math.inf))]
        rest = torch.cat([each.view(128, -1) for each in near], 1)
        rest = torch.nn.functional.pad(rest, (0, -rest.shape[1] % 255)).view(128, -1, 255)
        first = (
            (lowest * scale).to(torch.float32)[:, None].expand(-1, rest.shape[1], -1)
        )  # makes this the scale of its block
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


def test_steps_outside_of_a_vector_are_refused() -> None:
    outside: dict[str, Any] = {"gradients": [torch.ones(2)], "starts": [299], "factors": [1.0]}
    few: dict[str, Any] = {"ratio": torch.ones(1)}
    for wrong, message in (
        (outside, r"2 elements from 299 on do not lie in \[0, 300\)"),
        (few, "300 elements do not lie in 1 blocks of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            operations.make_steps_(torch.zeros(300), **steps_of(torch.float32) | wrong)
    with pytest.raises(RuntimeError, match="100 values of 3 bits take 40 bytes with their scales, the packet has 39"):
        operations.apply_steps_([], [], torch.zeros(300), [torch.zeros(39, dtype=torch.uint8)] * 3, 3, [], [])


def test_packets_and_bits_of_shares_that_do_not_fit_are_refused() -> None:
    x = torch.ones(300)
    packet = values_encode(x, 4)
    about: list[Any] = [[], [], [], None, None, 1, [], [], 0]
    with pytest.raises(RuntimeError, match="300 values of 4 bits take 154 bytes with their scales, the packet has 153"):
        operations.reduce_shares_(x, [packet[1:]], 4, 2, 4)
    with pytest.raises(RuntimeError, match="300 values of 8 bits take 304 bytes"):
        operations.write_mean_(x, None, None, [packet], 8, 0)
    with pytest.raises(ValueError, match="gradient and residual must have one length, got 299 and 300"):
        taken("write_mean_", x, x, x[1:].clone(), [packet], 4, 0, None)
    with pytest.raises(ValueError, match=r"values are rounded to 8, 4, 3 or 1 bits, or five to a byte \(-5\), got 5"):
        operations.encode_steps_(x, *about, P=2, bits=5)
    with pytest.raises(ValueError, match="a mean is over 1 rank or more, got 0"):
        operations.encode_steps_(x, *about, P=0, bits=4)
    assert torch.equal(x, torch.ones(300))


TENSORS = st.builds(
    lambda n, dtype, stride: torch.zeros(n * stride).to(dtype)[::stride],
    st.integers(0, 20),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]),
    st.integers(1, 2),
)
ROWS = st.builds(
    lambda starts, row, length: Rows(torch.tensor(starts, dtype=torch.int32), row, length),
    st.lists(st.integers(-3, 20), max_size=4),
    st.integers(-2, 2**40),
    st.integers(-2, 2**40),
)


PARTS = st.builds(
    # As a Sparse, whose annotations would refuse it.
    lambda index, k, length: SimpleNamespace(
        index=torch.tensor(index, dtype=torch.int32), value=torch.ones(k), length=length
    ),
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4),
    st.integers(0, 4),
    st.integers(-2, 20),
)
ARGUMENTS = st.one_of(
    st.none(),
    st.integers(-(2**40), 2**40),
    st.floats(),
    st.text(max_size=3),
    st.builds(Span, st.integers(-3, 20), st.integers(-3, 20)),
    TENSORS,
    ROWS,
    PARTS,
)
SMALL = st.integers(-1, 20)
EACH = st.lists(PARTS, max_size=3) | st.lists(ARGUMENTS, max_size=3)
PACKETS = st.lists(st.builds(lambda it: torch.tensor(list(it), dtype=torch.uint8), st.binary(max_size=20)), max_size=3)
REGIONS = st.none() | st.lists(ROWS, max_size=3)
FORMAT = [
    st.lists(SMALL, max_size=3),
    st.lists(SMALL, max_size=3),
    st.sampled_from([32, 8, 4, 3, 1, 0, -7]),
    REGIONS,
]
SIGNATURES = {
    "encode_packets": [EACH, FORMAT[2], SMALL, REGIONS, SMALL],
    "decode_packets": [PACKETS | EACH, *FORMAT, SMALL],
    "add_packets_": [TENSORS, PACKETS | EACH, *FORMAT],
    "finite_each": [EACH, SMALL],
}


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the C++ kernels are not built")
@pytest.mark.parametrize("operation", sorted({*COMPILED, *SIGNATURES}))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_compiled_functions_take_any_objects_without_a_crash(operation: str, data: st.DataObject) -> None:
    """Whatever comes is taken, refused with an error, or left to the next backend."""
    from sparsync.kernels import _cpu  # type: ignore[attr-defined]

    count = {
        "accumulate_top_k_nonzero": 6,
        "accumulate_top_k_of_rows": 6,
        "accumulate_top_k": 5,
        "accumulate_select_ge": 5,
    }.get(operation)
    drawn = st.lists(ARGUMENTS, min_size=count or 1, max_size=count or 4)
    arguments: Any = data.draw(st.tuples(*SIGNATURES[operation]) if operation in SIGNATURES else drawn)
    with suppress(ValueError, IndexError, TypeError, RuntimeError, AttributeError, MemoryError):
        getattr(_cpu, operation)(*arguments)
