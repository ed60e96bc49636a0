"""Randomness: shared by all ranks, fair to each of them within a round of P steps, and independent of global state."""

from itertools import pairwise

import pytest
import torch

from invariants.world import marks
from sparsync.collectives.skipping import random_offsets, random_shift
from sparsync.schemes import SkipReduce
from sparsync.schemes.skip_reduce import Form
from sparsync.testing.world import COUNT, run, started

ROUNDS = 6
MANY = (2, 3, 4, 5, 8, 13, 16)


def shifts(P: int, seed: int = 0, key: str = "bucket0") -> list[int]:
    return [random_shift(P, seed, key, step) for step in range(ROUNDS * P)]


@pytest.mark.parametrize("P", MANY)
def test_each_round_of_steps_takes_every_shift_once_and_none_stays_for_two_steps(P: int) -> None:
    for seed in range(20):
        drawn = shifts(P, seed)
        for start in range(0, len(drawn), P):
            assert sorted(drawn[start : start + P]) == list(range(P))
        assert all(a != b for a, b in pairwise(drawn))  # also across rounds, whose orders are drawn separately


@pytest.mark.parametrize("P", [P for P in MANY if P > 2])
def test_rounds_buckets_and_seeds_are_shuffled_apart(P: int) -> None:
    rounds = {tuple(shifts(P)[start : start + P]) for start in range(0, ROUNDS * P, P)}
    assert len(rounds) > 1
    assert len({tuple(shifts(P, seed)) for seed in range(4)}) == 4
    assert len({tuple(shifts(P, key=f"bucket{i}")) for i in range(4)}) == 4


@pytest.mark.parametrize("P", MANY)
def test_random_offsets_are_a_set_of_the_size_asked_for(P: int) -> None:
    for skip in range(P):
        for step in range(4):
            offsets = random_offsets(skip, P, 0, "bucket0", step)
            assert len(offsets) == skip
            assert list(offsets) == sorted(set(offsets))
            assert set(offsets) <= set(range(1, P))


def mean_over_a_round(scheme: SkipReduce, P: int) -> torch.Tensor:
    """Average over a round in float64: sums of P quotients are exact if counts of contributors are powers of two."""
    steps = run(started(scheme, P), marks(P, COUNT, P // scheme.node_size, 24))
    return torch.stack([step.written[0].double() for step in steps]).mean(dim=0)


@pytest.mark.parametrize(
    ("P", "skip", "node_size"),
    [
        *((*each, 1) for each in ((2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 1), (5, 3), (8, 4), (8, 6), (8, 7))),
        (8, 2, 2),
    ],
)
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_random_skipping_is_unbiased_over_a_round(form: Form, P: int, skip: int, node_size: int) -> None:
    """Contributor counts here are powers of two, so the mean over a round is bit-identical to the dense mean."""
    dense = torch.full((COUNT,), float(2**P - 1), dtype=torch.float64) / P
    assert torch.equal(mean_over_a_round(SkipReduce(skip=skip, node_size=node_size, form=form), P), dense)


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_naive_skipping_is_biased(form: Form) -> None:
    P = 4
    dense = torch.full((COUNT,), float(2**P - 1), dtype=torch.float64) / P
    assert not (mean_over_a_round(SkipReduce(skip=2, mode="naive", form=form), P) == dense).any()


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_every_rank_is_left_out_of_every_element_equally_often_in_a_round(form: Form) -> None:
    P, skip = 8, 3
    left_out = torch.zeros(P, COUNT, dtype=torch.int64)
    for step in run(started(SkipReduce(skip, form=form, divide_by="ranks"), P), marks(P, COUNT, P, 24)):
        total = (step.written[0] * P).long()
        left_out += torch.stack([(total & 2**rank) == 0 for rank in range(P)])
    assert torch.equal(left_out, torch.full_like(left_out, skip))
