"""core: spans, buckets, costs, reports and the shared random generator."""

import math

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers import annotations
from sparsync import Bucket
from sparsync.core import ParameterSpan, Sparse, generator, spans
from sparsync.schemes import Span


@given(count=st.integers(0, 200), parts=st.integers(1, 70))
def test_spans_are_adjacent_cover_everything_and_the_first_are_the_longer_ones(count: int, parts: int) -> None:
    cut = spans(count, parts)
    lengths = [len(span) for span in cut]
    assert [position for span in cut for position in range(span.start, span.stop)] == list(range(count))
    assert lengths == [count // parts + 1] * (count % parts) + [count // parts] * (parts - count % parts)


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


@pytest.mark.parametrize(
    ("slots", "told"),
    [
        ([("a", 0, 2), ("b", 3, 5)], "parameter 'b' starts at 3, the one before it ends at 2"),
        ([("a", 0, 3), ("b", 2, 5)], "parameter 'b' starts at 2, the one before it ends at 3"),
        ([("a", 0, 3), ("b", 3, 2)], "parameter 'b' starts at 3, the one before it ends at 3"),
        ([("a", 0, 6)], "covers 6 elements, its gradient has 5"),
    ],
    ids=["gap", "overlap", "backwards", "too-long"],
)
def test_a_layout_must_cover_the_gradient_in_order(slots: list[tuple[str, int, int]], told: str) -> None:
    layout = tuple(ParameterSpan(name, Span(start, stop)) for name, start, stop in slots)
    with pytest.raises(ValueError, match=f"the layout of bucket 'b' .*{told}"):
        Bucket("b", torch.zeros(5), 0, layout)


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
