"""Agreement: between replicas, between runs, with the dense mean when nothing is left out, and of one rank with itself."""

import torch

from invariants.table import Row, cases, rows
from invariants.world import (
    COUNT,
    assert_mass,
    assert_replicas,
    exact_steps,
    flat_residual,
    integer_sum,
    integers,
    layout,
    reals,
    run,
    same_bits,
    trace,
)
from sparsync import Bucket, Cost


@cases()
def test_all_replicas_end_with_the_same_bits(row: Row, P: int) -> None:
    assert_replicas(trace(row.id, P))


@rows()
def test_the_same_seed_gives_the_same_bits(row: Row) -> None:
    P = 4
    assert P in row.worlds
    again = run([row.make() for _ in range(P)], [[*step.grads] for step in trace(row.id, P)])
    for first, second in zip(trace(row.id, P), again, strict=True):
        assert all(same_bits(a, b) for a, b in zip(first.written, second.written, strict=True))
        assert all(same_bits(a, b) for a, b in zip(first.residuals, second.residuals, strict=True))
        assert first.reports == second.reports


@rows(lambda row: row.complete is not None)
def test_with_nothing_left_out_every_scheme_is_the_dense_mean(row: Row) -> None:
    assert row.complete is not None
    for P in {row.world(2), row.world(5)}:
        for step in run([row.complete() for _ in range(P)], integers(P, COUNT, row.observes + 1)):
            assert torch.equal(step.written[0].double(), integer_sum(step.grads) / P)
            assert not any(residual.any() for residual in step.residuals)


@rows()
def test_one_rank_keeps_its_gradient_and_sends_nothing(row: Row) -> None:
    for step in trace(row.id, 1):
        assert step.counted == [Cost()]
        assert step.reports[0].cost == Cost()
        if not row.has_residual:
            assert same_bits(step.written[0], step.grads[0])
    if row.has_residual:
        assert_mass(exact_steps(row, 1), torch.zeros(COUNT, dtype=torch.float64))


@rows(lambda row: row.has_residual and row.id.startswith("skip"))
def test_one_rank_with_skipping_writes_all_it_has(row: Row) -> None:
    for step in trace(row.id, 1):
        assert same_bits(step.written[0], step.grads[0])
        assert not step.residuals[0].any()


@rows(lambda row: row.has_residual)
def test_the_residual_has_at_least_single_precision(row: Row) -> None:
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        schemes = [row.make() for _ in range(row.world(2))]
        run(schemes, integers(len(schemes), COUNT, 1, dtype=dtype))
        assert {part.dtype for part in schemes[0].state_dict()["residual"].values()} == {kept}


@rows()
def test_a_bucket_without_layout_is_one_parameter(row: Row) -> None:
    """So a scheme works, and keeps its residual, under the bucket's key."""
    P = row.world(2)
    grads = reals(P, COUNT, 1)
    schemes = [row.make() for _ in range(P)]
    slots = Bucket("whole", grads[0][0], 0).layout
    steps = run(schemes, grads, slots=slots, key="whole")
    assert_replicas(steps)
    if row.has_residual:
        assert list(schemes[0].state_dict()["residual"]) == ["whole"]
        assert flat_residual(schemes[0], slots, grads[0][0]).numel() == COUNT != len(layout(COUNT))
