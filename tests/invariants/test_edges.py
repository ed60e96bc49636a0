"""Edges: few elements or none, zeros, ties, poisoned gradients, every floating type."""

import math

import pytest
import torch

from invariants.table import Row, rows
from invariants.world import (
    COUNT,
    Step,
    assert_mass,
    assert_replicas,
    assert_traffic,
    integer_sum,
    integers,
    run,
)


def assert_invariants(row: Row, steps: list[Step]) -> None:
    assert_replicas(steps)
    assert_traffic(steps)
    if row.has_residual:
        assert_mass(steps, torch.zeros(steps[0].grads[0].numel(), dtype=torch.float64))


@pytest.mark.parametrize("n", [0, 1, 4, 97, 1000])
@rows()
def test_any_number_of_elements_is_reduced(row: Row, n: int) -> None:
    """None, fewer than ranks, fewer than 1/density, not a multiple of the ranks, many."""
    P = 5 if row.node_size == 1 else row.world(4)
    steps = run([row.make() for _ in range(P)], integers(P, n, row.observes + 1))
    assert_invariants(row, steps)
    for step in steps:
        assert all(report.elements == n for report in step.reports)
        assert all(0 <= report.selected <= n and 0 <= report.union <= n for report in step.reports)
        assert all(report.density == (report.union / n if n else 1.0) for report in step.reports)
        if n == 0 and not row.observes:
            assert {(cost.messages, cost.nbytes) for cost in step.counted} == {(0, 0)}


@rows()
def test_zeros_equal_values_and_ties_are_reduced(row: Row) -> None:
    P = row.world(3)
    zero, equal = torch.zeros(COUNT), torch.full((COUNT,), 3.0 * P)
    ties = equal * torch.tensor([1.0, -1.0, 0.0, -0.0, 1.0]).repeat(COUNT)[:COUNT]
    grads = [[zero] * P, [equal] * P, [ties] * P, [equal] * (P - 1) + [zero]]
    steps = run([row.make() for _ in range(P)], grads * (1 + row.observes // 2))
    assert_invariants(row, steps)
    assert not steps[0].written[0].any()
    assert not any(residual.any() for residual in steps[0].residuals)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@rows()
def test_gradients_of_every_floating_type_are_reduced(row: Row, dtype: torch.dtype) -> None:
    P = row.world(2)
    assert_invariants(row, run([row.make() for _ in range(P)], integers(P, COUNT, row.observes + 2, dtype=dtype)))
    if row.complete is not None:
        for step in run([row.complete() for _ in range(P)], integers(P, COUNT, 1, dtype=dtype)):
            assert torch.equal(step.written[0].double(), integer_sum(step.grads) / P)


POISONS = {
    "nan": {1: math.nan},
    "inf": {1: math.inf},
    "inf-and-minus-inf": {1: math.inf, 2: -math.inf},
}


@pytest.mark.parametrize("poison", POISONS)
@rows()
def test_poison_reaches_all_ranks_alike_and_is_gone_the_step_after(row: Row, poison: str) -> None:
    """NaN or Inf of some ranks, at some elements: what is written is the same everywhere, what is kept back stays finite."""
    P = row.world(3)
    grads = integers(P, COUNT, row.observes + 3)
    for rank, value in POISONS[poison].items():
        for step in (0, row.observes):
            grads[step][rank][[3, 50, 96]] = value
    steps = run([row.make() for _ in range(P)], grads)
    assert_replicas(steps)
    assert_traffic(steps)
    for step in steps:
        assert all(residual.isfinite().all() for residual in step.residuals)
    assert steps[-1].written[0].isfinite().all()
    assert steps[-2].written[0].isfinite().all()


@pytest.mark.parametrize("poison", POISONS)
@rows(lambda row: not row.id.startswith(("skip", "ring", "random")))
def test_a_scheme_that_leaves_no_rank_out_shows_the_poison(row: Row, poison: str) -> None:
    """So that a loss scaler finds it; and such a step leaves the residual as it was. Schemes in one bucket decide each for its part."""
    P = 4
    grads = integers(P, COUNT, 2)
    for rank, value in POISONS[poison].items():
        grads[1][rank][[3, 50, 96]] = value
    first, poisoned = run([row.make() for _ in range(P)], grads)
    assert not poisoned.written[0].isfinite().all()
    if row.id == "per-parameter":
        return
    for before, after in zip(first.residuals, poisoned.residuals, strict=True):
        assert torch.equal(before, after)
