"""core: spans, buckets, costs, reports and the shared random generator."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import annotations
from sparsync import Bucket, Report
from sparsync.comm import Cost
from sparsync.core import ParameterSpan, Sparse, generator, spans
from sparsync.schemes import Span


@given(count=st.integers(0, 200), parts=st.integers(1, 70))
def test_spans_are_adjacent_cover_everything_and_the_first_are_the_longer_ones(count: int, parts: int) -> None:
    cut = spans(count, parts)
    lengths = [len(span) for span in cut]
    assert [position for span in cut for position in range(span.start, span.stop)] == list(range(count))
    assert lengths == [count // parts + 1] * (count % parts) + [count // parts] * (parts - count % parts)


def test_a_span_is_a_view() -> None:
    x = torch.zeros(5)
    Span(1, 3).of(x).fill_(7.0)
    assert x.tolist() == [0, 7, 7, 0, 0]


def test_a_bucket_without_layout_is_one_parameter_called_by_its_key() -> None:
    assert Bucket("whole", torch.zeros(4), 0).layout == (ParameterSpan("whole", Span(0, 4)),)
    assert Bucket("empty", torch.zeros(0), 0).layout == (ParameterSpan("empty", Span(0, 0)),)


@pytest.mark.parametrize(
    "grad",
    [torch.zeros(2, 3), torch.zeros(6)[::2], torch.zeros(4, dtype=torch.int64), torch.zeros(())],
    ids=["two-dimensional", "strided", "integers", "scalar"],
)
def test_a_bucket_refuses_what_is_not_a_flat_floating_vector(grad: torch.Tensor) -> None:
    """Also where nobody executes its annotation, which would say it first."""
    told = (
        r"bucket 'b' must be one-dimensional, contiguous and floating, got shape .*pass grad.flatten\(\).contiguous\(\)"
    )
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=told):
            Bucket("b", grad, 0)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_bucket_takes_every_floating_type(dtype: torch.dtype) -> None:
    assert Bucket("b", torch.zeros(3, dtype=dtype), 0).grad.dtype == dtype


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        ([("a", 0, 2), ("b", 3, 5)], "parameter 'b' starts at 3, the one before it ends at 2"),
        ([("a", 0, 3), ("b", 2, 5)], "parameter 'b' starts at 2, the one before it ends at 3"),
        ([("a", 1, 5)], "parameter 'a' starts at 1, the one before it ends at 0"),
        ([("a", 0, 3), ("b", 3, 2)], "parameter 'b' starts at 3, the one before it ends at 3"),
        ([("a", 0, 4)], "covers 4 elements, its gradient has 5"),
        ([("a", 0, 6)], "covers 6 elements, its gradient has 5"),
    ],
    ids=["gap", "overlap", "late-start", "backwards", "too-short", "too-long"],
)
def test_a_layout_must_cover_the_gradient_in_order(slots: list[tuple[str, int, int]], told: str) -> None:
    layout = tuple(ParameterSpan(name, Span(start, stop)) for name, start, stop in slots)
    with pytest.raises(ValueError, match=f"the layout of bucket 'b' .*{told}"):
        Bucket("b", torch.zeros(5), 0, layout)


def test_a_layout_may_hold_empty_parameters() -> None:
    layout = (ParameterSpan("none", Span(0, 0)), ParameterSpan("all", Span(0, 3)), ParameterSpan("nothing", Span(3, 3)))
    assert Bucket("b", torch.zeros(3), 0, layout).layout == layout


def test_costs_add_up_field_by_field() -> None:
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    assert Cost() + Cost(1, 2, 3) == Cost(1, 2, 3)


def report(elements: int, union: int) -> Report:
    return Report("scheme", "b", 0, elements, selected=0, union=union, cost=Cost())


def test_density_is_the_union_over_the_elements_and_one_for_an_empty_bucket() -> None:
    assert report(8, 2).density == 0.25
    assert report(0, 0).density == 1.0


def test_the_annotations_of_shapes_are_executed(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Else every other test of `make test-annotations` would pass with wrong ones."""
    if not pytestconfig.getoption("annotations"):
        pytest.skip("only --annotations executes them")
    monkeypatch.setattr(annotations, "FIRST_CALLS", math.inf)
    with pytest.raises(TypeError, match="index"):
        Sparse(torch.zeros(2), torch.zeros(2), 5)
    with pytest.raises(TypeError, match="value"):
        Sparse(torch.zeros(2, dtype=torch.int32), torch.zeros(3), 5)


def test_a_generator_is_reproducible_and_not_the_global_one() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = torch.rand(5, generator=generator(1, "key", 2))
    assert torch.equal(first, torch.rand(5, generator=generator(1, "key", 2)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(first, torch.rand(5, generator=generator(1, "key", 2)))
