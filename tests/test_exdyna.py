"""ExDyna's own: published boundaries, blocks for every n, and boundaries that follow equal quotas. The shared invariants: test_micro.py."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import exclusive_invariants as streams
from helpers.exclusive_invariants import run
from helpers.plain_micro import Restated
from sparsync.core import Comm, Span, spans
from sparsync.kernels import operations as kernels
from sparsync.schemes import exact_exdyna
from sparsync.schemes.exact_exdyna import ExactExDyna
from sparsync.schemes.exact_micro import gather_positions
from sparsync.schemes.exdyna import ExDyna, block_edges, block_spans, rebalanced
from sparsync.selection.exclusive import BlockCyclic, Contiguous, budget
from sparsync.selection.shares import Profile, apportion, before_blocks, quotas, relative_magnitudes, sketch
from sparsync.testing import world


@pytest.mark.parametrize("bug_compatible", [False, True])
@pytest.mark.parametrize("P", [4, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 8))])
def test_published_is_the_restated_algorithm_bit_for_bit(bug_compatible: bool, P: int) -> None:
    n, density = 33_000, 0.01
    scale = 1 / (2 * math.sqrt(density * n)) / 8
    steps = [streams.layered(n, P, step, scale) for step in range(25)]
    restated = Restated(n, P, density, bug_compatible, blocks=True)
    restated.check(steps, run(lambda: ExDyna(density=density, bug_compatible=bug_compatible), P, steps))
    assert restated.held != [1024 // P] * P  # boundaries did move


@pytest.mark.parametrize("n", [1, 3, 1000, 1500, 32_767, 32_768, 70_001])
def test_blocks_cover_every_vector_and_none_is_empty(n: int) -> None:
    edges = block_edges(n)
    assert (edges[0], edges[-1], len(edges)) == (0, n, min(1024, n) + 1)
    assert all(start < stop for start, stop in pairwise(edges))
    if n >= 32_768:
        assert all((stop - start) % 32 == 0 for start, stop in pairwise(edges[:-1]))


def test_neighbours_out_of_balance_hand_on_one_block_and_others_none() -> None:
    edges = block_edges(1024 * 64)
    assert rebalanced([256] * 4, [200, 50, 100, 100], 450, edges) == [255, 257, 256, 256]
    assert rebalanced([256] * 4, [100, 100, 50, 200], 450, edges) == [256, 256, 257, 255]
    assert rebalanced([256] * 4, [130, 100, 100, 70], 400, edges) == [256] * 4  # no such pair is adjacent
    assert rebalanced([64, 448, 256, 256], [200, 50, 100, 100], 450, edges) == [64, 448, 256, 256]  # short already
    assert block_spans(edges, [256] * 4)[1] == Span(256 * 64, 512 * 64)


def test_a_block_that_was_handed_on_counts_where_it_is_when_the_next_neighbours_are_compared() -> None:
    """It holds 32 of 32768 selected elements; above 8601 of them, and below 7801, a partition of four is out of balance."""
    edges = block_edges(1024 * 64)
    # 7812 and 8588 are in balance.
    assert rebalanced([256] * 4, [10_000, 7780, 8700, 6288], 32_768, edges) == [255, 257, 255, 257]
    assert rebalanced([256] * 4, [7000, 8620, 7700, 9448], 32_768, edges) == [257, 255, 257, 255]


def test_boundaries_move_until_all_partitions_have_one_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the vector is 8 times as large: with equal partitions the smallest selected magnitudes differ as much."""
    P, n = 4, 8000
    scale = torch.ones(n)
    scale[: n // 2] = 8.0
    draw = torch.Generator().manual_seed(5)
    steps = [[torch.randn(n, generator=draw) * scale for _ in range(P)] for _ in range(60)]
    spreads = list[float]()  # the largest over the smallest threshold, by step

    def gathered(levels: Tensor, index: Tensor, counts: list[int], lengths: list[int], comm: Comm) -> Any:
        heads, places = gather_positions(levels, index, counts, lengths, comm)
        if comm.rank == 0:
            spreads.append(65536 / min(relative_magnitudes(heads.tolist())))
        return heads, places

    monkeypatch.setattr(exact_exdyna, "gather_positions", gathered)
    run(lambda: ExactExDyna(density=0.05), P, steps)
    assert spreads[0] > 6
    assert max(spreads[50:]) < 2


def test_a_profile_cuts_at_equal_mass_and_keeps_the_least_length() -> None:
    profile = Profile()
    assert [len(span) for span in profile.cut(1000, 4, 1)] == [250] * 4
    profile.observe(before_blocks(torch.arange(100), 1000).tolist(), [100], [7], memory=8)
    cut = profile.cut(1000, 4, least=40)
    assert [span.start for span in cut[1:]] == [span.stop for span in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (0, 1000)
    assert cut[0].stop <= 40 and min(len(span) for span in cut) >= 25
    assert [len(span) for span in profile.cut(1000, 4, least=250)] == [250] * 4


@given(n=st.integers(0, 3000), P=st.integers(1, 64), cyclic=st.booleans())
def test_partitions_hold_every_element_once(n: int, P: int, cyclic: bool) -> None:
    partitions, x = BlockCyclic(n, P) if cyclic else Contiguous(spans(n, P)), torch.arange(n)
    rows = [partitions.rows(part, x.device) for part in range(P)]
    parts = [kernels.locate(each, x[:length]) for each, length in zip(rows, partitions.lengths(), strict=True)]
    assert torch.equal(torch.cat(parts).sort().values, x)
    assert max(partitions.lengths()) - min(partitions.lengths()) <= 1


@given(
    shares=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 50)), min_size=1, max_size=20), part=st.floats(0, 1)
)
def test_apportioned_quotas_sum_up_and_fit(shares: list[tuple[int, int]], part: float) -> None:
    weights, free = [weight for weight, _ in shares], [places for _, places in shares]
    total = int(part * sum(free))
    given_out = apportion(weights, free, total)
    assert sum(given_out) == total
    assert all(0 <= count <= places for count, places in zip(given_out, free, strict=True))


def test_quotas_are_the_counts_above_one_common_level() -> None:
    """Against the exact selection of the largest 400 of all partitions."""
    draw = torch.Generator().manual_seed(2)
    points = [25, 100, 400]
    for bits in (15, 31):
        chunks = [torch.randn(2000, generator=draw).abs() * scale for scale in (0.5, 1.0, 1.5, 2.0)]
        exact = torch.cat(chunks).topk(400).values.min()
        sketches = [sketch(chunk, points, bits).tolist() for chunk in chunks]
        assert [sketch(chunk.topk(400).values, points, bits).tolist() for chunk in chunks] == sketches
        found = quotas(sketches, [points] * 4, [2000] * 4, 400, bits)
        assert sum(found) == 400
        for count, chunk in zip(found, chunks, strict=True):
            assert abs(count - int((chunk >= exact).sum())) <= 20


def test_where_ranks_outnumber_the_elements_those_with_the_largest_ones_send() -> None:
    parts = [torch.full((10,), 0.01).index_fill_(0, torch.tensor([3]), value) for value in (1.0, 9.0, 2.0, 5.0)]
    points = [1, 1, 2]
    assert quotas([sketch(part, points).tolist() for part in parts], [points] * 4, [10] * 4, 2) == [0, 1, 0, 1]


def test_with_fewer_elements_than_ranks_each_rank_selects_in_each_partition_in_its_turn() -> None:
    P = 4
    # An element a step.
    steps = world.run([ExactExDyna(density=0.01).start() for _ in range(P)], world.integers(P, 100, P * P))
    turns = [[step.reports[rank].selected for step in steps] for rank in range(P)]
    assert turns == [[0] * P * rank + [1] * P + [0] * P * (P - 1 - rank) for rank in range(P)]


@given(n=st.integers(0, 400), density=st.floats(0.001, 1), step=st.integers(0, 10**6))
def test_budgets_average_the_density_and_hold_an_element_at_least(n: int, density: float, step: int) -> None:
    counts = [budget(density, n, step + i) for i in range(100)]
    assert all(min(n, 1) <= count <= n for count in counts)
    if density * n >= 1:
        assert abs(sum(counts) - 100 * density * n) <= 1 + 1e-6 * n
