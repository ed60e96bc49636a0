"""Selection: exact top-k against a plain sorted definition, shares of elements, name patterns, and parts of a vector."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.reference import reference
from sparsync.core import ParameterSpan, SpanSet, count_for, matches
from sparsync.schemes import Span
from sparsync.schemes.auto_protect import Disagreement, square_norms

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan]
# Few different values, so that ties are everywhere, among them the ones that compare strangely; or any at all.
values = st.lists(st.sampled_from(SPECIAL), max_size=24) | st.lists(st.floats(width=32), max_size=24)


def sorted_top(x: Tensor, k: int) -> list[int]:
    """The definition: by falling magnitude, NaN as the largest, equals by position; the first k, in order of position."""

    def magnitude(position: int) -> float:
        value = abs(float(x[position]))
        return math.inf if math.isnan(value) else value

    return sorted(sorted(range(x.numel()), key=lambda position: (-magnitude(position), position))[:k])


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).tolist()


@given(values=values, data=st.data(), dtype=st.sampled_from(TYPES))
def test_top_k_is_the_sorted_definition(values: list[float], data: st.DataObject, dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    before, k = bits(x), data.draw(st.integers(0, x.numel()))
    top = reference.top_k(x, k)
    assert top.index.tolist() == sorted_top(x, k)
    assert top.index.dtype == torch.int32
    assert bits(top.value) == bits(x[top.index.long()])
    assert top.length == x.numel()
    assert bits(x) == before


@pytest.mark.parametrize(
    ("density", "n", "k"),
    [
        (0.01, 0, 0),
        (0.01, 1, 1),
        (0.01, 99, 1),
        (0.01, 100, 1),
        (0.01, 250, 2),
        (0.1, 10, 1),
        (0.29, 100, 29),
        (1.0, 7, 7),
    ],
)
def test_a_share_of_elements_is_rounded_down_but_at_least_one(density: float, n: int, k: int) -> None:
    assert count_for(density, n) == k


@pytest.mark.parametrize(
    ("name", "patterns", "matched"),
    [
        ("layer.bias", ("layer.bias",), True),
        ("layer.bias", ("*.bias",), True),
        ("layer.bias", ("layer.*",), True),
        ("layer.bias", ("other", "*.bias"), True),
        ("layer.bias", ("bias",), False),
        ("layer.bias", ("Layer.bias",), False),
        ("layer.bias", (), False),
        ("blocks[0].weight", ("blocks[0].weight",), True),
        ("blocks0.weight", ("blocks[0].weight",), True),
        ("blocks[0].weight", ("blocks[[]0].*",), True),
    ],
)
def test_a_name_matches_itself_and_shell_patterns(name: str, patterns: tuple[str, ...], matched: bool) -> None:
    assert matches(name, patterns) is matched


def slots(*lengths: int) -> tuple[ParameterSpan, ...]:
    stops = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return tuple(
        ParameterSpan(f"p{i}", Span(stop - length, stop))
        for i, (stop, length) in enumerate(zip(stops, lengths, strict=True))
    )


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=8), data=st.data())
def test_a_part_is_taken_and_put_back_without_touching_the_rest(lengths: list[int], data: st.DataObject) -> None:
    chosen = [slot for slot in slots(*lengths) if data.draw(st.booleans())]
    part = SpanSet.of(chosen)
    x = torch.arange(float(sum(lengths)))
    positions = [position for slot in chosen for position in range(slot.span.start, slot.span.stop)]
    assert len(part) == len(positions)
    assert part.take(x).tolist() == positions
    part.put_(x, part.take(x) + 1000)
    assert x.tolist() == [i + 1000 if i in positions else i for i in range(len(x))]
    changed = part.take(x)
    changed -= 1000
    part.put_(x, changed)
    assert x.tolist() == list(range(len(x)))


def test_square_norms_are_exact_in_double_precision() -> None:
    grad = torch.tensor([3.0, 4.0, 2.0**70, 2.0**-70])
    for kept in (grad, grad.double()):
        norms = square_norms(slots(2, 0, 1, 1), kept)
        assert norms.dtype == torch.float64
        assert norms.tolist() == [25.0, 0.0, 2.0**140, 2.0**-140]
        assert torch.equal(kept, grad.to(kept.dtype))


def observed(*grads_of_ranks: list[Tensor], lengths: tuple[int, ...]) -> Disagreement:
    """What was seen after some steps, each the gradients of all ranks."""
    found, layout = Disagreement(), slots(*lengths)
    for grads in grads_of_ranks:
        squares = torch.stack([square_norms(layout, grad) for grad in grads]).mean(dim=0)
        found.observe(layout, squares, torch.stack(grads).mean(dim=0))
    return found


@pytest.mark.parametrize(
    ("share", "chosen"), [(0.0, ()), (0.19, ()), (0.25, ("p2",)), (0.6, ("p1", "p2")), (1.0, ("p0", "p1", "p2"))]
)
def test_most_takes_the_largest_variances_that_fit_the_share(share: float, chosen: tuple[str, ...]) -> None:
    grads = [torch.tensor([5.0, 5.0, 0.0, 0.0, 0.0]), torch.tensor([5.0, 5.0, 2.0, 2.0, 4.0])]
    assert observed(grads, lengths=(2, 2, 1)).most(share) == chosen


def test_what_was_observed_less_often_is_compared_per_step() -> None:
    found = observed([torch.zeros(2), torch.tensor([2.0, 0.0])], lengths=(1, 1))
    found.observe(slots(1), torch.tensor([0.0], dtype=torch.float64), torch.zeros(1))
    found.observe((ParameterSpan("q", Span(0, 1)),), torch.tensor([0.75], dtype=torch.float64), torch.zeros(1))
    assert found.steps == {"p0": 2, "p1": 1, "q": 1}
    assert found.most(0.34) == ("q",)


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf])
def test_a_nonfinite_observation_does_not_decide(nonfinite: float) -> None:
    found = observed([torch.tensor([nonfinite, 0.0]), torch.tensor([0.0, 2.0])], lengths=(1, 1))
    assert all(math.isfinite(value) for value in found.variance.values())
    assert found.most(0.5) == ("p1",)
