"""Randomness: shared by all ranks, fair to each of them within a round of P steps, and nobody else's."""

from itertools import pairwise

import pytest
import torch

from invariants.world import COUNT, run, started
from sparsync.collectives.skipping import random_offsets, random_shift
from sparsync.core import generator
from sparsync.schemes import SkipReduce
from sparsync.schemes.skip_reduce import Form, Mode

ROUNDS = 6
MANY = (2, 3, 4, 5, 8, 13, 16)


def shifts(P: int, seed: int = 0, key: str = "bucket0") -> list[int]:
    return [random_shift(P, seed, key, step) for step in range(ROUNDS * P)]


@pytest.mark.parametrize("P", MANY)
def test_each_round_of_steps_takes_every_shift_once(P: int) -> None:
    for seed in range(5):
        drawn = shifts(P, seed)
        for start in range(0, len(drawn), P):
            assert sorted(drawn[start : start + P]) == list(range(P))


@pytest.mark.parametrize("P", MANY)
def test_the_shift_never_stays_from_one_step_to_the_next(P: int) -> None:
    """Also across rounds, where two orders meet that were drawn apart."""
    for seed in range(20):
        drawn = shifts(P, seed)
        assert all(a != b for a, b in pairwise(drawn))


@pytest.mark.parametrize("P", [P for P in MANY if P > 2])
def test_rounds_buckets_and_seeds_are_shuffled_apart(P: int) -> None:
    rounds = {tuple(shifts(P)[start : start + P]) for start in range(0, ROUNDS * P, P)}
    assert len(rounds) > 1
    assert len({tuple(shifts(P, seed)) for seed in range(4)}) == 4
    assert len({tuple(shifts(P, key=f"bucket{i}")) for i in range(4)}) == 4


def test_the_first_shift_is_uniform_over_seeds() -> None:
    """Chi-square with 7 degrees of freedom: 24.3 is exceeded once in a thousand times; the seeds are fixed, so never or always."""
    P, draws = 8, 1600
    counts = [0] * P
    for seed in range(draws):
        counts[random_shift(P, seed, "bucket0", 0)] += 1
    assert sum((count - draws / P) ** 2 / (draws / P) for count in counts) < 24.3


def test_one_rank_and_two_ranks_have_the_shifts_there_are() -> None:
    assert {random_shift(1, 0, "b", step) for step in range(4)} == {0}
    assert [random_shift(2, 0, "b", step) for step in range(4)] in ([0, 1, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize("P", MANY)
def test_random_offsets_are_a_set_of_the_size_asked_for(P: int) -> None:
    for skip in range(P):
        for step in range(4):
            offsets = random_offsets(skip, P, 0, "bucket0", step)
            assert len(offsets) == skip
            assert list(offsets) == sorted(set(offsets))
            assert set(offsets) <= set(range(1, P))


def test_every_offset_set_comes_up() -> None:
    drawn = {random_offsets(2, 5, 0, "bucket0", step) for step in range(200)}
    assert len(drawn) == 6  # 4 choose 2


def test_generators_differ_by_seed_key_and_step() -> None:
    def draw(seed: int, key: str, step: int) -> float:
        return float(torch.rand((), generator=generator(seed, key, step), dtype=torch.float64))

    names = [(seed, key, step) for seed in (0, 1, 2**40, -1) for key in ("a", "b", "1/2") for step in (0, 1, 10**12)]
    assert len({draw(*each) for each in names}) == len(names)
    assert draw(0, "a", 3) == draw(0, "a", 3)


def constant(P: int) -> list[torch.Tensor]:
    """Each rank's gradient is its own power of two, everywhere and always."""
    return [torch.full((COUNT,), float(2**rank)) for rank in range(P)]


def mean_over_a_round(scheme: SkipReduce, P: int) -> torch.Tensor:
    """float64: the sums of P quotients are exact, for counts of contributors that are powers of two."""
    steps = run(started(scheme, P), [constant(P)] * P)
    return torch.stack([step.written[0].double() for step in steps]).mean(dim=0)


@pytest.mark.parametrize(
    ("P", "skip"), [(2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 1), (5, 3), (8, 4), (8, 6), (8, 7)]
)
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_random_skipping_is_unbiased_over_a_round(form: Form, P: int, skip: int) -> None:
    """Contributor counts here are powers of two, so the mean over P steps equals the dense mean to the last bit."""
    dense = torch.full((COUNT,), float(2**P - 1), dtype=torch.float64) / P
    assert torch.equal(mean_over_a_round(SkipReduce(skip=skip, form=form), P), dense)


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_random_skipping_of_nodes_is_unbiased_over_a_round_of_nodes(form: Form) -> None:
    N, G = 4, 2
    P = N * G
    steps = run(started(SkipReduce(skip=2, node_size=G, form=form), P), [constant(P)] * N)
    mean = torch.stack([step.written[0].double() for step in steps]).mean(dim=0)
    assert torch.equal(mean, torch.full((COUNT,), float(2**P - 1), dtype=torch.float64) / P)


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_naive_skipping_is_biased(form: Form) -> None:
    P = 4
    dense = torch.full((COUNT,), float(2**P - 1), dtype=torch.float64) / P
    assert not (mean_over_a_round(SkipReduce(skip=2, mode="naive", form=form), P) == dense).any()


@pytest.mark.parametrize("mode", ["random", "naive"])
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_dividing_by_ranks_shrinks_the_update_by_what_was_left_out(form: Form, mode: Mode) -> None:
    P, skip = 8, 4
    by_ranks = run(started(SkipReduce(skip, mode, form=form, divide_by="ranks"), P), [constant(P)] * P)
    by_contributors = run(started(SkipReduce(skip, mode, form=form), P), [constant(P)] * P)
    for shrunk, full in zip(by_ranks, by_contributors, strict=True):
        assert torch.equal(shrunk.written[0], full.written[0] * ((P - skip) / P))


@pytest.mark.parametrize("form", ["ring", "direct"])
def test_every_rank_is_left_out_of_every_element_equally_often_in_a_round(form: Form) -> None:
    P, skip = 8, 3
    left_out = torch.zeros(P, COUNT, dtype=torch.int64)
    for step in run(started(SkipReduce(skip, form=form, divide_by="ranks"), P), [constant(P)] * P):
        total = (step.written[0] * P).long()
        left_out += torch.stack([(total & 2**rank) == 0 for rank in range(P)])
    assert torch.equal(left_out, torch.full_like(left_out, skip))


def test_buckets_of_one_step_and_schemes_of_other_seeds_leave_out_other_ranks() -> None:
    P, steps = 8, [constant(8)] * 8

    def drawn(seed: int, key: str) -> list[list[float]]:
        return [step.written[0].tolist() for step in run(started(SkipReduce(seed=seed), P), steps, key=key)]

    assert drawn(0, "bucket0") == drawn(0, "bucket0")
    assert drawn(0, "bucket0") != drawn(0, "bucket1")
    assert drawn(0, "bucket0") != drawn(1, "bucket0")
