"""MiCRO: the invariants of exclusive selections, the published rules, and what the plain setting holds."""

import math
from itertools import pairwise

import pytest
import torch

from helpers import exclusive_invariants as streams
from helpers.exclusive_invariants import run, whole_numbers
from helpers.plain_micro import Restated
from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.core import Bucket
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import ROW, ExactMiCRO
from sparsync.schemes.exdyna import ExDyna
from sparsync.schemes.micro import MiCRO, ThresholdScaling
from sparsync.selection.exclusive import BlockCyclic

PLAIN = {"exact_micro": ExactMiCRO, "exact_exdyna": ExactExDyna}


@pytest.mark.parametrize("kind", [ExactMiCRO, MiCRO, ExactExDyna, ExDyna])
def test_nan_that_its_rank_does_not_examine_shows_on_all_ranks_and_changes_no_residual(kind: type[Scheme]) -> None:
    P, steps = 4, [whole_numbers(97, 4, step) for step in range(3)]
    steps[1][2][40] = math.nan  # rank 2 examines the end of the vector, or other rows
    for first, dirty, last in run(lambda: kind(density=0.1), P, steps):  # pyright: ignore[reportCallIssue]
        assert dirty.report.details["overflow"] and bool(dirty.grad.isnan().all())
        assert torch.equal(dirty.residual, first.residual)
        assert bool(last.grad.isfinite().all())


def test_a_state_of_other_settings_brings_its_residual_and_the_rest_starts_again() -> None:
    def body(comm: LocalComm) -> int:
        scheme, other = ExactMiCRO(0.1).start(), MiCRO(0.1).start()
        scheme.load_state_dict(other.state_dict() | {"residual": {"bucket": torch.ones(60)}})
        return scheme.reduce(Bucket("bucket", torch.zeros(60), 7), comm).union

    assert LocalWorld(3).run(body) == [6] * 3


def test_a_step_waits_for_three_exchanges_or_two_where_the_union_is_small() -> None:
    P = 4
    for kind in PLAIN.values():
        for n, steps in ((2000, {2}), (200_000, {3})):
            seen = run(lambda kind=kind: kind(density=0.01), P, [whole_numbers(n, P, step) for step in range(3)])
            assert {each.report.cost.steps for shown in seen for each in shown} == steps


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize(
    ("P", "n"),
    [
        (1, 50),
        (4, 50),
        (4, 1550),
        (4, 20_000),
        (16, 100),
        *(pytest.param(P, 1550, marks=pytest.mark.slow) for P in (16, 64)),
    ],
)
def test_exactly_as_many_elements_as_asked_are_sent_at_any_scale(kind: str, P: int, n: int) -> None:
    """Also where every gradient is 10 times as large as the one before it, from 1e-8 to 1e8, or the other way."""
    scales = [10.0**power for power in (-8, 0, 8, 7, -8)]
    seen = run(lambda: PLAIN[kind](density=0.01), P, [streams.layered(n, P, t, s) for t, s in enumerate(scales)])
    for each in seen:
        counts = [shown.report.union for shown in each]
        ends = [int(0.01 * n * step + 1e-6) for step in range(len(scales) + 1)]
        assert counts == [max(1, stop - start) for start, stop in pairwise(ends)]


def test_the_rank_whose_partition_holds_what_is_large_sends_the_most() -> None:
    """Rank 0 examines partition 1 at step 1, and has sent a sketch of it at step 0."""
    P, n = 4, 4000
    grad = torch.full((n,), 1e-3)
    partition = BlockCyclic(n, P, ROW)
    grad[partition.positions(1, torch.arange(partition.lengths()[1]))] = 1.0
    seen = run(lambda: ExactMiCRO(density=0.01), P, [[grad] * P] * 2)
    assert [each[0].report.selected for each in seen] == [10] * 4
    assert seen[0][1].report.selected > 30


@pytest.mark.parametrize("bug_compatible", [False, True])
@pytest.mark.parametrize(
    ("start", "P"),
    [
        *((0.05, 2), (30.0, 2), (1.0, 4)),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((1.0, 2), (0.05, 4), (30.0, 4), (0.05, 8), (1.0, 8), (30.0, 8))
        ),
    ],
)
def test_published_is_the_restated_algorithm_bit_for_bit(bug_compatible: bool, P: int, start: float) -> None:
    n, density = 1003, 0.05
    scale = start / (2 * math.sqrt(density * n)) / 6
    steps = [streams.layered(n, P, step, scale) for step in range(40)]
    restated = Restated(n, P, density, bug_compatible, blocks=False)
    restated.check(steps, run(lambda: MiCRO(density=density, bug_compatible=bug_compatible), P, steps))


@pytest.mark.parametrize("bug_compatible", [False, True])
def test_the_published_threshold_grows_or_shrinks_by_how_many_the_last_union_had(bug_compatible: bool) -> None:
    """By the paper's factors and bands, of which the authors' program does not reach the third."""
    third = 1.00125 if bug_compatible else 0.9987
    for union, factor in ((1101, 1.005), (1100, 1.00125), (1001, 1.00125), (1000, third), (910, third), (909, 0.995)):
        assert ThresholdScaling(step=1, threshold=2.0, union=union).next(1000, bug_compatible) == 2 * factor
    assert ThresholdScaling().next(100, bug_compatible) == 1 / 20
