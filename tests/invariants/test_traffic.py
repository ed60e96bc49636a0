"""Traffic: the counted bytes match the literature's formula; that reports state the same is an invariant."""

import pytest

from invariants.world import COUNT, integers, layout, reals, run, started
from sparsync.comm import Cost
from sparsync.schemes import AutoProtect, Dense, SkipReduce, TopK
from sparsync.schemes.skip_reduce import Form

FLOAT_NBYTES = 4
WORLDS = (1, 2, 3, 4, 5, 8)


@pytest.mark.parametrize("P", WORLDS)
def test_dense_sends_two_passes_less_one_chunk_each(P: int) -> None:
    """2 (P-1)/P of the bytes in 2 (P-1) messages, or half of the bytes in 16 bits; in two exchanges, or the steps of a ring."""
    n = 3 * P
    for scheme, element in ((Dense(), 4), (Dense(form="ring"), 4), (Dense.bf16(), 2), (Dense(wire="float16"), 2)):
        for step in run(started(scheme, P), reals(P, n, 1)):
            steps = 2 * (P - 1) if scheme.form == "ring" else 2 * min(1, P - 1)
            assert step.counted == [Cost(steps, 2 * (P - 1), 2 * (P - 1) * n * element // P)] * P


@pytest.mark.parametrize("P", WORLDS)
def test_top_k_sends_position_and_value_of_k_elements_to_each_other_rank(P: int) -> None:
    """Positions, a quarter of all, take one bit per element of the bucket."""
    n, k = 40, 10
    for step in run(started(TopK(density=k / n), P), reals(P, n, 2)):
        assert step.counted == [Cost(min(1, P - 1), P - 1, (P - 1) * (k * FLOAT_NBYTES + n // 8))] * P
        assert {report.selected for report in step.reports} == {k}


@pytest.mark.slow
@pytest.mark.parametrize("P", WORLDS)
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_skip_reduce_saves_s_chunks_at_every_shift(form: Form, P: int) -> None:
    """(2 (P-1) - s)/P of the bytes, in that many messages; the steps of a round take every shift."""
    n = 3 * P
    for skip in range(P):
        for step in run(started(SkipReduce(skip=skip, form=form), P), integers(P, n, P)):
            messages = 2 * (P - 1) - skip
            rounds = messages if form == "ring" else P - 1 + min(1, P - 1)
            assert step.counted == [Cost(rounds, messages, messages * n * FLOAT_NBYTES // P)] * P


def test_two_levels_skip_between_nodes_only() -> None:
    """G ranks per node send 2 (G-1)/G of the bytes inside it, and (2 (N-1) - s)/N of a G-th of them between N nodes."""
    G, N, skip, n = 2, 4, 3, 48
    for step in run(started(SkipReduce(skip=skip, node_size=G), G * N), integers(G * N, n, N)):
        inside, between = 2 * (G - 1), 2 * (N - 1) - skip
        nbytes = (inside * n // G + between * n // (G * N)) * FLOAT_NBYTES
        assert step.counted == [Cost(inside + between, inside + between, nbytes)] * (G * N)


@pytest.mark.parametrize("node_size", [1, 2])
@pytest.mark.parametrize("form", ["ring", "direct"])
def test_what_is_protected_rides_in_the_messages_of_the_rest(form: Form, node_size: int) -> None:
    """No more rounds than without skipping, also if the scheme chooses what to protect; s chunks of the rest are saved."""
    N, skip = 4, 2
    P = N * node_size
    protected = sum(len(each.span) for each in layout(COUNT) if each.name.endswith(".bias"))
    settings = {"form": form, "node_size": node_size}
    dense = run(started(SkipReduce(0, **settings), P), integers(P, COUNT, 1))[0].counted
    saved = skip * (COUNT - protected) * FLOAT_NBYTES
    for step in run(started(SkipReduce(skip, protect=["*.bias"], **settings), P), integers(P, COUNT, N)):
        assert [cost.steps for cost in step.counted] == [cost.steps for cost in dense]
        assert sum(cost.nbytes for cost in step.counted) == sum(cost.nbytes for cost in dense) - saved
        assert [report.cost for report in step.reports] == list(step.counted)
    auto = started(AutoProtect(SkipReduce(skip, **settings), share=0.5, observe_steps=1), P)
    last = run(auto, reals(P, COUNT, 3))[-1]
    assert any(auto[0].common("protected").values())
    assert [cost.steps for cost in last.counted] == [cost.steps for cost in dense]
    assert [report.cost for report in last.reports] == list(last.counted)


def test_choosing_what_to_protect_costs_one_number_a_parameter_while_observing() -> None:
    P, n = 4, 80
    steps = run(started(AutoProtect(SkipReduce(2), observe_steps=2), P), integers(P, n, 3))
    dense = 2 * (P - 1) * n * FLOAT_NBYTES // P
    numbers = 5 * 8  # float64, one per parameter; a rank sends 2 (P-1)/P of them on average
    for step in steps[:2]:
        assert sum(cost.nbytes for cost in step.counted) == P * dense + 2 * (P - 1) * numbers
    assert sum(cost.nbytes for cost in steps[2].counted) < P * dense
