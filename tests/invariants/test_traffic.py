"""Traffic: the counted bytes match the literature's formula; that reports state the same is an invariant."""

from sparsync.comm import Cost
from sparsync.schemes import AutoProtect, SkipReduce
from sparsync.testing.world import integers, run, started

FLOAT_NBYTES = 4


def test_two_levels_skip_between_nodes_only() -> None:
    """G ranks per node send 2 (G-1)/G of the bytes inside it, and (2 (N-1) - s)/N of a G-th of them between N nodes."""
    G, N, skip, n = 2, 4, 3, 48
    for step in run(started(SkipReduce(skip=skip, node_size=G), G * N), integers(G * N, n, N)):
        inside, between = 2 * (G - 1), 2 * (N - 1) - skip
        nbytes = (inside * n // G + between * n // (G * N)) * FLOAT_NBYTES
        assert step.counted == [Cost(inside + between, inside + between, nbytes)] * (G * N)


def test_choosing_what_to_protect_costs_one_number_a_parameter_while_observing() -> None:
    P, n = 4, 80
    steps = run(started(AutoProtect(SkipReduce(2), observe_steps=2), P), integers(P, n, 3))
    dense = 2 * (P - 1) * n * FLOAT_NBYTES // P
    numbers = 5 * 8  # float64, one per parameter; a rank sends 2 (P-1)/P of them on average
    for step in steps[:2]:
        assert sum(cost.nbytes for cost in step.counted) == P * dense + 2 * (P - 1) * numbers
    assert sum(cost.nbytes for cost in steps[2].counted) < P * dense
