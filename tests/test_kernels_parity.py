"""Every backend of the kernels gives the bits of the reference: on awkward inputs, on unaligned views, and on whatever hypothesis finds."""

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
from torch import Tensor

from helpers.quick import one_in
from helpers.same_bits import bits, same
from sparsync import Span, kernels
from sparsync.core import Rows, Sparse
from sparsync.kernels import dispatch, operations, reference, share_reference, step_reference, value_reference
from sparsync.kernels.value_reference import MAX_CODE, TERNARY, values_encode
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import Elements, ValueCodec, Values

NATIVE = [name for name in kernels.backends() if name.startswith("cpp")]
SHORT = [0, 1, 15, 16, 17, 63, 64, 65, 1000]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan]
LENGTHS = [*SHORT, 20_003]  # the last: several blocks and an odd tail
WIDTHS = [TERNARY, 8, 3, 4, 1]  # bits of rounded values
SOME = [0, 1, 17, 1000, 20_003]


@pytest.fixture(params=one_in(len(NATIVE), NATIVE), autouse=True, scope="module")  # the fastest one first
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.set_backend(request.param):
        yield request.param


def made(kind: str, n: int, seed: int = 0) -> Tensor:
    """A vector of `n` elements, one element into its storage, so that it is not aligned to more than an element."""
    source = torch.Generator().manual_seed(seed)
    normal = torch.randn(n + 1, generator=source)[1:]
    if kind == "special":
        return torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (n + 1,), generator=source)][1:]
    return {
        "normal": lambda: normal,
        "equal": lambda: torch.full((n + 1,), -2.0)[1:],
        "zeros": lambda: torch.zeros(n + 1)[1:],
        "two-valued": normal.sign,
        "sorted": lambda: normal.sort().values,
        "falling": lambda: normal.sort(descending=True).values,
        "heavy-tailed": lambda: normal**9,
        "few-values": (3 * normal).round,
        "denormal": lambda: normal * 1e-41,
        "mostly-nan": lambda: torch.where(normal > -1, torch.nan, normal),
    }[kind]()


KINDS = [
    "normal",
    "special",
    "equal",
    "zeros",
    "two-valued",
    "sorted",
    "falling",
    "heavy-tailed",
    "few-values",
    "denormal",
    "mostly-nan",
]
THRESHOLDS = [-1.0, 0.0, 1e-45, 1.0, 2.0, 2.1, 3e38, math.inf, math.nan]


def counts(n: int) -> list[int]:
    return sorted({0, min(1, n), n // 100, n // 2, max(0, n - 1), n})


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_top_k_is_the_reference(kind: str) -> None:
    for n in LENGTHS:
        x = made(kind, n)
        for k in counts(n):
            expected = reference.top_k(x, k)
            smallest = float(reference.magnitude(expected.value).min()) if k else 0.0
            for bound in (None, smallest, smallest / 2, smallest * 2, math.nan):
                same(kernels.top_k(x, k, bound), expected)


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_top_k_of_what_is_not_zero_skips_a_span(kind: str) -> None:
    for n in LENGTHS:
        x = made(kind, n)
        for skip in (None, Span(0, n), Span(n // 3, n // 2), Span(0, n // 2), Span(n // 2, n)):
            for k in counts(n):
                same(kernels.top_k_nonzero(x, k, skip), reference.top_k_nonzero(x, k, skip))


@pytest.mark.parametrize("kind", one_in(3, KINDS))
@pytest.mark.parametrize("bound", [1.0, *(pytest.param(bound, marks=pytest.mark.slow) for bound in (None, math.nan))])
def test_adding_and_selecting_outside_a_span_is_adding_and_then_selecting(kind: str, bound: float | None) -> None:
    for n in (0, 17, 1000, 20_003 if bound == 1.0 else 70_000):
        residual, grad, out = made(kind, n), made("normal", n, 1), torch.empty(n)
        for skip in (None, Span(0, n), Span(n // 3, n // 2), Span(0, n // 2), Span(n // 2, n)):
            for k in (0, 1, n // 7, n):
                found, finite = kernels.accumulate_top_k_nonzero(residual, grad, k, out, skip, bound)
                assert torch.equal(bits(out), bits(residual + grad))
                same(found, reference.top_k_nonzero(out, k, skip))
                assert finite == bool(out.isfinite().all())


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_adding_and_comparing_inside_a_span_is_adding_and_then_comparing(kind: str) -> None:
    for n in (0, 17, 1000, 20_003):
        residual, grad, out = made(kind, n), made("normal", n, 1), torch.empty(n)
        for span in (Span(0, n), Span(n // 3, n // 2), Span(0, n // 2), Span(n // 2, n), Span(n, n)):
            for threshold in (-1.0, 0.0, 1.0, math.inf, math.nan):
                found, finite = kernels.accumulate_select_ge(residual, grad, threshold, out, span)
                assert torch.equal(bits(out), bits(residual + grad))
                same(found, reference.accumulate_select_ge(residual, grad, threshold, out.clone(), span)[0])
                assert finite == bool(out.isfinite().all())


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_selection_by_a_threshold_is_the_reference(kind: str) -> None:
    for n in LENGTHS:
        x = made(kind, n)
        for threshold in THRESHOLDS:
            same(kernels.select_ge(x, threshold), reference.select_ge(x, threshold))


@pytest.mark.parametrize("grad_kind", one_in(3, KINDS))
def test_accumulating_is_the_reference(grad_kind: str) -> None:
    for n, dtype in product(LENGTHS, DTYPES):
        grad = made(grad_kind, n + 1).to(dtype)[1:]
        residual = made("normal" if grad_kind != "normal" else "special", n, seed=1)
        out, expected = torch.empty(n), torch.empty(n)
        assert kernels.accumulate(residual, grad, out) == reference.accumulate(residual, grad, expected)
        assert torch.equal(bits(out), bits(expected))
        for k in counts(n):
            best, finite = kernels.accumulate_top_k(residual, grad, k, out.zero_())
            same(best, reference.top_k(expected, k))
            assert finite == reference.all_finite(expected)
            assert torch.equal(bits(out), bits(expected))
        in_place = residual.clone()
        assert kernels.accumulate(in_place, grad, in_place) == reference.all_finite(expected)
        assert torch.equal(bits(in_place), bits(expected))


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


def pieces(n: int, P: int, apart: bool, seed: int = 0) -> list[Sparse]:
    """P selections out of `n` elements, with no position in common when `apart`."""
    source = torch.Generator().manual_seed(seed)
    owner = torch.randint(P, (n,), generator=source)
    values = made("special", n, seed)
    result = []
    for part in range(P):
        chosen = owner == part if apart else torch.rand(n, generator=source) < 0.4
        index = chosen.nonzero().view(-1)
        result.append(Sparse(index.to(torch.int32), values[index], n))
    return result


def layouts(n: int) -> list[list[Rows]]:
    """Regions of a vector of `n` elements: those of a scheme, and rows that overlap and come in any order."""
    device = torch.device("cpu")
    cyclic = [[BlockCyclic(n, P).rows(p, device) for p in range(P)] for P in (1, 3, 4)]
    starts = torch.tensor([n // 2, 0, 0, n // 3], dtype=torch.int32)
    return [*cyclic, [Rows(starts, max(1, n // 3), min(n, 3 * (n // 3)))]]


@pytest.mark.parametrize("kind", [*KINDS[:3], *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[3:])])
def test_the_largest_of_elements_in_rows_are_the_reference(kind: str) -> None:
    for n in (1, 15, 1000, 20_003):
        residual, grad, expected = made(kind, n), made("normal", n, 1), torch.empty(n)
        finite = reference.accumulate(residual, grad, expected)
        for regions in layouts(n):
            places = [torch.arange(rows.length, dtype=torch.int32) for rows in regions]
            located = [kernels.locate(rows, place) for rows, place in zip(regions, places, strict=True)]
            for rows, place, position in zip(regions, places, located, strict=True):
                assert torch.equal(position, reference.locate(rows, place))
            for share, bound in product((0, 5, 1), (None, 0.1, 3.0, math.inf, math.nan)):
                counts = [share and rows.length // share for rows in regions]
                wanted = [
                    reference.top_k(expected[position.long()], k) for position, k in zip(located, counts, strict=True)
                ]
                out = torch.empty(n)
                bounds = [bound] * len(regions)
                found, was = kernels.accumulate_top_k_of_rows(residual, grad, regions, counts, out, bounds)
                assert was == finite
                assert torch.equal(bits(out), bits(expected))
                for rows, k, one, right in zip(regions, counts, found, wanted, strict=True):
                    same(one, right)
                    same(kernels.top_k_of_rows(expected, rows, k, bound), right)


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


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_the_smallest_magnitude_is_the_reference(kind: str) -> None:
    for n in SHORT:
        smallest, expected = kernels.smallest_magnitude(made(kind, n)), reference.smallest_magnitude(made(kind, n))
        assert smallest == expected or (math.isnan(smallest) and math.isnan(expected))


@pytest.mark.parametrize("n", [*SHORT, 20_003, 2**20 + 5000])  # the last: past the caches
@pytest.mark.parametrize("start", [0, 1])  # in elements from an aligned address
def test_moving_with_elements_put_into_both_is_the_reference(n: int, start: int) -> None:
    source, to = made("special", n + 1).clone()[start : start + n], torch.full((n + 1,), 7.0)[start : start + n]
    expected_source, expected_to = source.clone(), to.clone()
    kept, written = pieces(n, 3, apart=True, seed=1), pieces(n, 2, apart=True, seed=2)
    kernels.move_put_(to, source, kept, written)
    reference.move_put_(expected_to, expected_source, kept, written)
    assert torch.equal(bits(to), bits(expected_to))
    assert torch.equal(bits(source), bits(expected_source))
    if n > 1:  # in another order, which is left to the reference
        backwards = Sparse(torch.tensor([1, 0], dtype=torch.int32), torch.tensor([3.0, 4.0]), n)
        kernels.move_put_(to, source, [], [backwards])
        assert source[:2].tolist() == [4.0, 3.0]
        outside = Sparse(torch.tensor([0, n], dtype=torch.int32), torch.ones(2), n)
        for parts in (([outside], []), ([], [outside])):
            with pytest.raises(IndexError, match=rf"positions must be in \[0, {n}\) for {n} elements, got 0 to {n}"):
                kernels.move_put_(to, source, *parts)
        assert source[:2].tolist() == [4.0, 3.0]


@pytest.mark.parametrize("P", [1, 2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("n", one_in(2, SHORT))
def test_merging_is_the_reference(P: int, n: int) -> None:
    disjoint, common = pieces(n, P, apart=True), pieces(n, P, apart=False)
    same(kernels.merge(disjoint), reference.merge(disjoint))
    same(kernels.coalesce(common), reference.coalesce(common))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("n", one_in(2, SHORT))
def test_adding_reading_clearing_and_writing_at_positions_are_the_reference(n: int, wide: bool) -> None:
    for part in pieces(n, 3, apart=False):
        index = part.index.long() if wide else part.index
        out, expected = made("special", n, seed=2).clone(), made("special", n, seed=2).clone()
        kernels.scatter_add_(out, Sparse(index, part.value, n))
        reference.scatter_add_(expected, part)
        assert torch.equal(bits(out), bits(expected))
        assert torch.equal(bits(kernels.gather(out, index)), bits(reference.gather(expected, index)))
        kernels.clear_(out, index)
        reference.clear_(expected, index)
        assert torch.equal(bits(out), bits(expected))
        kernels.put_(out, index, part.value)
        reference.put_(expected, index, part.value)
        assert torch.equal(bits(out), bits(expected))


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


@pytest.mark.parametrize("cuts", [(), (0,), (1000,), (0, 0, 3, 500, 500, 999), (1, 2, 3)])
def test_splitting_is_the_reference(cuts: tuple[int, ...]) -> None:
    (part,) = pieces(1000, 1, apart=False)
    regions = [Span(start, stop) for start, stop in zip((0, *cuts), (*cuts, 1000), strict=True)]
    for got, expected in zip(kernels.split(part, regions), reference.split(part, regions), strict=True):
        same(got, expected)


positions = st.lists(st.integers(0, 40), max_size=30)


@given(first=positions, second=st.sets(st.integers(0, 40)))
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
        parts = [kernels.top_k_of_rows(x, each, k) for each, k in zip(rows, counts, strict=True)]
        for divisor, at in product((1, 4), (None, rows)):
            packets, dropped = codec.encode_each(parts, divisor, at, n)
            with kernels.set_backend("reference"):
                expected, expected_dropped = codec.encode_each(parts, divisor, at, n)
                arrived = codec.decode_each(expected, counts, lengths, torch.float32, at, n)
            assert [each.tolist() for each in packets] == [each.tolist() for each in expected]
            for one, other in zip(dropped, expected_dropped, strict=True):
                same(one, other)
            for one, other in zip(
                codec.decode_each(packets, counts, lengths, torch.float32, at, n), arrived, strict=True
            ):
                same(one, other)
        total, expected_total = made("normal", n, 1), made("normal", n, 1)
        packets, _ = codec.encode_each(parts)
        codec.add_each_(total, packets, counts, lengths, rows)
        operations.scatter_add_each_(expected_total, codec.decode_each(packets, counts, lengths, x.dtype, rows, n))
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


@pytest.mark.parametrize("kind", one_in(3, KINDS))
def test_what_is_asked_of_several_vectors_is_the_reference(kind: str) -> None:
    parts = [Sparse(torch.arange(n, dtype=torch.int32), made(kind, n, n), 100) for n in (0, 1, 17, 100)]
    for some in ([], parts[:1], parts[:3], parts):
        expected = [float(operations.smallest_magnitude(each.value)) for each in some]
        assert torch.equal(
            torch.tensor(operations.smallest_each(some)).nan_to_num(-1), torch.tensor(expected).nan_to_num(-1)
        )
        for times in (1, 4):
            finite = all(bool((times * each.value).isfinite().all() & each.value.isfinite().all()) for each in some)
            assert operations.finite_each(some, times) == finite
        x, expected_x = made("normal", 100), made("normal", 100)
        operations.scatter_add_each_(x, some)
        for each in some:
            reference.scatter_add_(expected_x, each)
        assert torch.equal(bits(x), bits(expected_x))


def test_nothing_is_moved_where_that_is_skipped(backend: str) -> None:
    kept = [Sparse(torch.tensor([1], dtype=torch.int32), torch.tensor([5.0]), 2)]
    for skip, expected in ((torch.ones(1), [7.0, 8.0]), (torch.zeros(1), [1.0, 5.0])):
        to = torch.tensor([7.0, 8.0])
        kernels.move_put_(to, torch.tensor([1.0, 2.0]), kept, [], skip)
        assert to.tolist() == expected


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


def test_types_that_the_backend_lacks_are_done_by_the_reference() -> None:
    x = made("normal", 100).double()
    same(kernels.top_k(x, 7), reference.top_k(x, 7))
    matrix = torch.randn(10, 10)[:, 3]
    same(kernels.select_ge(matrix, 0.5), reference.select_ge(matrix, 0.5))


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a backend is one of reference, triton, cpp, .*, got 'cuda'"):
        kernels.set_backend("cuda")


def test_set_backend_restores_the_backend_in_use_before(backend: str) -> None:
    assert kernels.backend() == backend
    with kernels.set_backend("reference"):
        assert kernels.backend() == "reference"
    assert kernels.backend() == backend


@pytest.mark.parametrize("n", one_in(2, SHORT))
@pytest.mark.parametrize(("start", "target"), [(0, 0), (1, 1), (3, 2), (0, 1)])  # in elements from an aligned address
def test_what_is_moved_arrives_and_leaves_zeros(n: int, start: int, target: int) -> None:
    source, to = made("special", n + 8).clone(), torch.full((n + 8,), 7.0)
    before = source.clone()
    kernels.move_put_(to[target : target + n], source[start : start + n], [], [])
    assert torch.equal(bits(to[target : target + n]), bits(before[start : start + n]))
    assert to[:target].tolist() == [7.0] * target
    assert to[target + n :].tolist() == [7.0] * (8 - target)
    before[start : start + n] = 0.0
    assert torch.equal(bits(source), bits(before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_results_do_not_depend_on_the_default_type_of_torch(dtype: torch.dtype) -> None:
    x, part = made("normal", 1000), pieces(1000, 2, apart=True)
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


def steps_of(n: int, kind: str, dtype: torch.dtype, block: int) -> dict[str, Any]:  # Any: arguments of several types
    """Gradients that begin anywhere, with gaps between them, and the state and numbers of three spans."""
    sizes = [n // 7, 0, n // 3, 1, n // 3] if n > 20 else [n // 2]
    starts = [sum(sizes[:i]) + i for i in range(len(sizes))] if n > 20 else [n - n // 2]
    gradients = [made(kind, size, i).to(dtype) for i, size in enumerate(sizes)]
    third = n // 3
    return {
        "gradients": [each.view(1, -1) if i == 2 else each for i, each in enumerate(gradients)],
        "starts": starts,
        "factors": [1.0, 0.5, 1.7, 1.0, 0.3][: len(sizes)],
        "square": made("normal", n, 1).abs(),
        "ratio": made("normal", n // block + 1, 2).abs(),
        "block": block,
        "spans": [Span(0, third), Span(third, third), Span(third, n)],
        "numbers": [(3e-4, 0.95, 1e-8, 0.4), (1.0, 0.5, 1.0, 1.0), (1e-3, 0.99, 1e-6, 0.9)],
    }


def taken(operation: str, *arguments: Any) -> Any:  # Any: as for `dispatch.run`
    """Return what the C++ backend itself returns: the reference would agree with itself."""
    result = getattr(dispatch._cpu, operation)(*arguments)
    assert result is not NotImplemented
    return result


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
        assert torch.equal(taken("values_encode", x, width), value_reference.values_encode(x, width))


MOVES = [(0.9, 0.9997, 1.1), (0.5, 1.0, 1.0), (0.0, 0.9, 1.0)]
STEPPED = [0, 3, 300, 4003]  # elements: fewer than ranks, and chunks and tensors that begin inside of blocks


@pytest.mark.parametrize("kind", one_in(3, ["normal", "special", "zeros", "denormal", "heavy-tailed"]))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [64, 7])
def test_steps_out_of_gradients_are_the_reference(kind: str, dtype: torch.dtype, block: int) -> None:
    for n in STEPPED:
        given, expected_given = steps_of(n, kind, dtype, block), steps_of(n, kind, dtype, block)
        for each in (given, expected_given):
            first, _, last = each["spans"]  # nothing is done outside of them
            each |= {"spans": [first, Span(last.start + n // 9, last.stop)], "numbers": each["numbers"][::2]}
        out, expected = made("normal", n), made("normal", n).clone()
        for skip in (torch.ones(1), None, torch.zeros(1)):
            taken("make_steps_", out, *given.values(), skip)
            step_reference.make_steps_(expected, **expected_given, skip=skip)
            assert torch.equal(bits(out), bits(expected))
            assert torch.equal(bits(given["square"]), bits(expected_given["square"]))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("kind", "dtype", "block"),
    [
        ("normal", torch.float32, 64),
        ("normal", torch.bfloat16, 64),
        ("heavy-tailed", torch.float16, 7),
        ("special", torch.float32, 300),
    ],
)
def test_steps_that_are_encoded_and_applied_are_the_reference(
    kind: str, dtype: torch.dtype, block: int, width: int
) -> None:
    for n, P in product(STEPPED, (1, 3, 4)):
        for rank in {0, P - 1}:
            given, expected_given = steps_of(n, kind, dtype, block), steps_of(n, kind, dtype, block)
            residual, expected = made("normal", n, 3) * 1e-3, made("normal", n, 3) * 1e-3
            for skip in (torch.tensor(True), None, torch.zeros(1, dtype=torch.int64), torch.tensor(0.0)):
                packets = taken("encode_steps_", residual, *given.values(), rank, P, width, skip, None)
                right = step_reference.encode_steps_(expected, **expected_given, rank=rank, P=P, bits=width, skip=skip)
                assert torch.equal(packets, right)
                assert torch.equal(bits(residual), bits(expected))
                assert torch.equal(bits(given["square"]), bits(expected_given["square"]))
                # Without second moments a gradient is added as it is, and with none nothing.
                for gradients in ([given[key] for key in ("gradients", "starts", "factors")], ([], [], [])):
                    out, right = torch.zeros(n), torch.zeros(n)
                    arguments: list[Any] = [*gradients, None, None, 1, [], [], rank, P, width, skip]
                    packets = taken("encode_steps_", residual, *arguments, out if gradients[0] else None)
                    expected_packets = step_reference.encode_steps_(
                        expected, *arguments, out=right if gradients[0] else None
                    )
                    assert torch.equal(packets, expected_packets)
                    assert torch.equal(bits(out), bits(right))
                    assert torch.equal(bits(residual), bits(expected))
        given = steps_of(n, kind, dtype, block)
        lengths = [len(chunk) for chunk in step_reference.chunks_of(n, P)]
        packets = [values_encode(made(kind, length, 4), width) for length in lengths]
        targets = [made("normal", each.numel(), 5).clone().view(each.shape) for each in given["gradients"]]
        moved, momentum, expected = [each.clone() for each in targets], made("normal", n), made("normal", n).clone()
        for skip in (torch.tensor(1), None, torch.tensor(False)):
            taken("apply_steps_", moved, given["starts"], momentum, packets, width, given["spans"], MOVES, skip)
            step_reference.apply_steps_(targets, given["starts"], expected, packets, width, given["spans"], MOVES, skip)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(moved, targets, strict=True))
            assert torch.equal(bits(momentum), bits(expected))
        for error in (made("normal", n), None):  # apart from the gradient, and where that lies
            grads, residuals = ([made("normal", n, seed).clone() for _ in range(2)] for seed in (6, 7))
            taken("write_mean_", grads[0], grads[0] if error is None else error, residuals[0], packets, width, 0, None)
            step_reference.write_mean_(grads[1], grads[1] if error is None else error, residuals[1], packets, width, 0)
            assert all(torch.equal(*map(bits, pair)) for pair in (grads, residuals))


@pytest.mark.parametrize("kind", one_in(2, ["special", "normal", "denormal", "heavy-tailed"]))
def test_moving_weights_is_the_reference(kind: str) -> None:
    for n in STEPPED:
        given = steps_of(n, "normal", torch.float32, 64)
        spans = [given["spans"][0], Span(n // 2, n - n // 9)]
        targets, moved = given["gradients"], [each.clone() for each in given["gradients"]]
        momentum, expected, mean = made("normal", n, 1), made("normal", n, 1).clone(), made(kind, n, 2)
        for skip in (torch.ones(1), None, torch.zeros(1)):
            taken("move_steps_", moved, given["starts"], momentum, mean, spans, MOVES[::2], skip)
            step_reference.move_steps_(targets, given["starts"], expected, mean, spans, MOVES[::2], skip)
            assert all(torch.equal(bits(one), bits(other)) for one, other in zip(moved, targets, strict=True))
            assert torch.equal(bits(momentum), bits(expected))


@pytest.mark.parametrize("kind", one_in(2, ["normal", "special", "heavy-tailed"]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sketch_is_the_reference(kind: str, dtype: torch.dtype) -> None:
    for n, block, key in product(STEPPED, (16, 64, 4096), (0, 2**32 - 1)):
        given = steps_of(n, kind, dtype, 64)
        gradients = given["gradients"], given["starts"], given["factors"]
        found = taken("sketch", *gradients, torch.empty(n), block, key)
        expected = step_reference.sketch(*gradients, torch.empty(n), block, key)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, expected, strict=True))


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


def test_steps_in_other_types_layouts_and_orders_are_done_by_the_reference() -> None:
    n = 300
    wide, apart, backwards = (
        steps_of(n, "normal", dtype, 64) for dtype in (torch.float64, torch.float32, torch.float32)
    )
    wide |= {"square": wide["square"].double(), "ratio": wide["ratio"].double()}
    apart |= {"gradients": [torch.randn(10, 3).t()], "starts": [5], "factors": [1.0]}
    backwards |= {name: value[::-1] for name, value in backwards.items() if isinstance(value, list)}
    for one in (wide, apart, backwards):
        other = one | {"square": one["square"].clone()}
        out, expected = (torch.zeros_like(one["square"]) for _ in range(2))
        packet = operations.encode_steps_(out, **one, rank=0, P=3, bits=3)
        assert torch.equal(packet, step_reference.encode_steps_(expected, **other, rank=0, P=3, bits=3))
        assert torch.equal(out, expected)


def test_steps_outside_of_a_vector_are_refused() -> None:
    outside: dict[str, Any] = {"gradients": [torch.ones(2)], "starts": [299], "factors": [1.0]}
    few: dict[str, Any] = {"ratio": torch.ones(1)}
    for wrong, message in (
        (outside, r"2 elements from 299 on do not lie in \[0, 300\)"),
        (few, "300 elements do not lie in 1 blocks of 64"),
    ):
        with pytest.raises(ValueError, match=message):
            operations.make_steps_(torch.zeros(300), **steps_of(300, "normal", torch.float32, 64) | wrong)
    with pytest.raises(RuntimeError, match="100 values of 3 bits take 40 bytes with their scales, the packet has 39"):
        operations.apply_steps_([], [], torch.zeros(300), [torch.zeros(39, dtype=torch.uint8)] * 3, 3, [], [])


@pytest.mark.parametrize("kind", one_in(2, ["special", "normal", "heavy-tailed"]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_the_reference(kind: str, dtype: torch.dtype) -> None:
    for n in SOME:
        parts = [made(kind, n).to(dtype), made("normal", n, 1).to(dtype).view(1, n)]
        weights, unsent = made("normal", 2 * n + 1), made("normal", 2 * n + 1, 1)
        found, others = [each.clone() for each in parts], [each.clone() for each in parts]
        starts = torch.arange(0, 2 * n + 1, 6, dtype=torch.int32)
        for rows in (None, Rows(starts, 2, 2 * len(starts) - 1), Rows(starts[:1] + n, max(1, n), n)):
            digests = operations.write_own_(found, [1, n + 1], weights, unsent, rows, 4, 0.35)
            assert torch.equal(digests, reference.write_own_(others, [1, n + 1], weights, unsent, rows, 4, 0.35))
            assert torch.equal(digests, reference.digests(found))
            assert all(map(torch.equal, found, others))
    with pytest.raises(ValueError, match=r"2 elements from 2 on do not lie in \[0, 3\)"):
        operations.write_own_([torch.zeros(2)], [2], torch.zeros(3), torch.zeros(3), None, 1, 1.0)


@pytest.mark.parametrize("kind", one_in(3, ["special", "normal", "denormal"]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_divided_as_the_reference_does(kind: str, dtype: torch.dtype) -> None:
    for n, divisor in product(SOME, (2, 3)):
        x, out, expected = made(kind, n).to(dtype), torch.empty(n + 1)[1:], torch.empty(n)
        operations.divide_to_(out, x, divisor)
        reference.divide_to_(expected, x, divisor)
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("kind", one_in(3, ["special", "normal", "zeros", "denormal", "mostly-nan"]))
@pytest.mark.parametrize("width", one_in(2, WIDTHS))
def test_shares_of_a_mean_and_their_sums_are_the_reference(kind: str, width: int) -> None:
    for n, P, down in product((0, 1, 255, 256, 263, 1031), (1, 2, 3), {width, 4}):
        packets = [values_encode(made(kind, n, rank), width) for rank in range(P - 1)]
        own = made(kind, n, P)
        expected = own.clone()
        packet = operations.reduce_shares_(own, packets, width, P, down)
        assert torch.equal(packet, share_reference.reduce_shares_(expected, packets, width, P, down))
        assert torch.equal(bits(own), bits(expected))


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


def test_a_digest_is_the_reference() -> None:
    for n, start in product([*SHORT, 9001, 20_003], (0, 1)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            x = made("normal", n + start).to(dtype)[start:]
            assert torch.equal(operations.digests([x, x.view(1, -1)]), reference.digests([x, x.view(1, -1)]))
    for digests in (operations.digests, reference.digests):
        assert digests([]).tolist() == []


def test_rows_are_divided_as_the_reference_does() -> None:
    for n, P in product((1, 17, 1000, 20_003), (2, 3)):
        rows = BlockCyclic(n, P).rows(P - 1, torch.device("cpu"))
        x = made("special", n)
        expected = x.clone()
        operations.divide_rows_(x, rows, P)
        reference.divide_rows_(expected, rows, P)
        assert torch.equal(bits(x), bits(expected))
    with pytest.raises(IndexError, match="rows must lie in"):
        operations.divide_rows_(torch.zeros(5), Rows(torch.tensor([2], dtype=torch.int32), 4, 4), 2)


OPERATIONS = [name for name in kernels.__all__ if name not in ("backend", "backends", "set_backend")]
CODECS = ("encode_positions", "decode_positions", "values_encode", "values_decode")
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
    "scatter_add_each_": [TENSORS, EACH],
    "finite_each": [EACH, SMALL],
    "smallest_each": [EACH],
}


@pytest.mark.slow
@pytest.mark.skipif(not NATIVE, reason="the C++ kernels are not built")
@pytest.mark.parametrize("operation", [*OPERATIONS, *CODECS, *SIGNATURES])
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
