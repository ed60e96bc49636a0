"""Seconds of exchanges in closed form. Links are powers of two, so that sums of seconds are exact."""

import pytest

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.network import Link, Nodes

MB = Link(8 * 2**20)  # 2^20 bytes a second
FAST = Link(8 * 2**40)


def all_reduce(nbytes: int | float, P: int) -> Exchange:
    sent = 2 * (P - 1) / P * nbytes
    return Exchange("all_reduce", sent, 2 * (P - 1), 2 * (P - 1), sent, "ring")


def all_gather(nbytes: int | float, P: int) -> Exchange:
    return Exchange("all_gather", (P - 1) * nbytes, P - 1, 1, (P - 1) * nbytes)


@pytest.mark.parametrize(
    ("network", "exchange", "P", "seconds"),
    [
        pytest.param(
            Nodes(Link(8 * 2**20, 2**-10)),
            Exchange("all_to_all", 2**19, 4, 2, 2**18),
            5,
            2 * 2**-10 + 0.5,
            id="latency",
        ),
        pytest.param(
            Nodes(MB), Exchange("send_recv", 2**18, 1, 1, 7 * 2**18), 8, 7 / 4, id="the busiest rank receives"
        ),
        pytest.param(Nodes(MB), Exchange("all_reduce", 0, 0, 0, 0, "ring"), 1, 0.0, id="one rank"),
        pytest.param(Nodes(MB, 4, MB), Exchange("all_reduce", 0, 0, 0, 0, "ring"), 1, 0.0, id="one rank of a node"),
        pytest.param(Nodes(MB, 4, FAST), all_reduce(2**20, 8), 8, 2 * 7 / 8, id="a ring leaves each node once"),
        # 4 ranks send to each of 4 ranks outside.
        pytest.param(Nodes(MB, 4, FAST), all_gather(2**20, 8), 8, 16.0, id="an all-gather leaves for each rank"),
        pytest.param(
            Nodes(MB, 4, FAST, rings=("all_gather",)), all_gather(2**20, 8), 8, 7.0, id="an all-gather as a ring"
        ),
        pytest.param(Nodes(Link(8.0), 4, MB), all_gather(2**20, 4), 4, 3.0, id="inside a node"),
        pytest.param(Nodes(MB.times(4), 4, FAST), all_gather(2**20, 8), 8, 4.0, id="several links"),
        pytest.param(Nodes(MB, all_reduce="direct"), Exchange("all_reduce", 2**20, 6, 2, 2**20), 4, 1.0, id="direct"),
        # Two groups of a tree send half of the tensor each way, more groups the whole.
        pytest.param(Nodes(MB, 4, FAST, "tree"), all_reduce(2**20, 8), 8, 1.0, id="a tree over two nodes"),
        pytest.param(Nodes(MB, 2, FAST, "tree"), all_reduce(2**20, 8), 8, 2.0, id="a tree over four nodes"),
        pytest.param(Nodes(FAST, 4, MB, "tree"), all_reduce(2**20, 8), 8, 2.0, id="a tree inside nodes"),
    ],
)
def test_seconds_of_exchanges_worked_out_by_hand(network: Nodes, exchange: Exchange, P: int, seconds: float) -> None:
    assert network.seconds(exchange, P) == seconds


def test_the_latencies_of_a_ring_over_nodes_are_those_of_its_edges() -> None:
    network = Nodes(Link(8e30, 2**-4), 4, Link(8e30, 2**-10))
    # 8 edges, of which 2 leave a node; 14 rounds.
    assert network.seconds(Exchange("all_reduce", 0, 0, 14, 0, "ring"), 8) == 14 * (6 * 2**-10 + 2 * 2**-4) / 8
    assert network.seconds(Exchange("all_gather", 0, 0, 1, 0), 8) == 2**-4


def test_a_tree_has_fewer_rounds_and_the_best_is_the_quicker() -> None:
    small, big = all_reduce(2**4, 1024), all_reduce(2**30, 1024)
    ring, tree, best = (Nodes(Link(8 * 2**30, 2**-10), all_reduce=kind) for kind in ("ring", "tree", "best"))
    assert tree.seconds(small, 1024) == 20 * 2**-10 + 2 * 2**4 / 2**30
    assert ring.seconds(big, 1024) == 2046 * 2**-10 + 2046 / 1024
    assert best.seconds(small, 1024) == tree.seconds(small, 1024)
    assert best.seconds(big, 1024) == min(ring.seconds(big, 1024), tree.seconds(big, 1024))
