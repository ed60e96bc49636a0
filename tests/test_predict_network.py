"""Seconds of exchanges in closed form."""

import time

import pytest

from sparsync_lab.predict.exchanges import Exchange
from sparsync_lab.predict.network import Link, Tier, Tiers, flat_switch, nodes

# Powers of two, so that sums of seconds are exact: 2^20 bytes a second, a latency of 2^-10 s, 2^-14 s for a message.
LINK = Link(8 * 2**20, latency_s=2**-10, per_message_s=2**-14)


def all_reduce(nbytes: int | float, P: int) -> Exchange:
    sent = 2 * (P - 1) / P * nbytes
    return Exchange("all_reduce", sent, 2 * (P - 1), 2 * (P - 1), sent, "ring")


def all_gather(nbytes: int | float, P: int) -> Exchange:
    return Exchange("all_gather", (P - 1) * nbytes, P - 1, 1, (P - 1) * nbytes)


def test_a_flat_switch_is_latency_messages_and_bytes():
    exchange = Exchange("all_to_all", nbytes=2**19, messages=4, rounds=2, received=2**18)
    assert flat_switch(LINK).seconds(exchange, 5) == 2 * 2**-10 + 4 * 2**-14 + 0.5


def test_what_the_busiest_rank_receives_counts_where_it_is_more():
    incast = Exchange("send_recv", nbytes=2**18, messages=1, rounds=1, received=7 * 2**18)
    assert flat_switch(Link(8 * 2**20)).seconds(incast, 8) == 7 / 4


def test_unequal_rates_up_and_down():
    link = Link(8 * 2**20, down_bits_per_s=8 * 2**22)
    assert flat_switch(link).seconds(all_gather(2**20, 5), 5) == 4.0
    assert flat_switch(Link(8 * 2**22, down_bits_per_s=8 * 2**20)).seconds(all_gather(2**20, 5), 5) == 4.0


def test_the_slowest_of_unequal_links_decides():
    fast, slow = Link(8 * 2**30), Link(8 * 2**20)
    assert flat_switch(fast, fast, slow, fast).seconds(all_reduce(2**20, 4), 4) == 1.5
    assert flat_switch(fast, fast, slow, fast).seconds(all_reduce(2**20, 2), 2) == 2**-10


def test_one_rank_takes_no_time():
    for network in (flat_switch(LINK), nodes(LINK, LINK, 4)):
        assert network.seconds(Exchange("all_reduce", 0, 0, 0, 0, "ring"), 1) == 0.0


def test_a_ring_crosses_the_link_of_a_node_once_and_an_all_gather_for_each_of_its_ranks():
    network = nodes(Link(8 * 2**40), Link(8 * 2**20), ranks_per_node=4)
    assert network.seconds(all_reduce(2**20, 8), 8) == 2 * 7 / 8
    # 4 ranks send to each of 4 ranks outside.
    assert network.seconds(all_gather(2**20, 8), 8) == 16.0
    # As NCCL does it, its ranks' parts cross it once.
    as_rings = nodes(Link(8 * 2**40), Link(8 * 2**20), ranks_per_node=4, rings=("all_gather",))
    assert as_rings.seconds(all_gather(2**20, 8), 8) == 7.0


def test_inside_a_node_only_its_own_links_count():
    network = nodes(Link(8 * 2**20), Link(8.0), ranks_per_node=4)
    assert network.seconds(all_gather(2**20, 4), 4) == 3.0


def test_several_links_of_a_node_add_up():
    assert nodes(Link(8 * 2**40), Link(8 * 2**20), 4, links_per_node=4).seconds(all_gather(2**20, 8), 8) == 4.0


def test_the_latencies_of_a_ring_over_nodes_are_those_of_its_edges():
    network = nodes(Link(8e30, latency_s=2**-10), Link(8e30, latency_s=2**-4), ranks_per_node=4)
    # 8 edges, of which 2 leave a node; 14 rounds.
    assert network.seconds(Exchange("all_reduce", 0, 0, 14, 0, "ring"), 8) == 14 * (6 * 2**-10 + 2 * 2**-4) / 8
    assert network.seconds(Exchange("all_gather", 0, 0, 1, 0), 8) == 2**-4


def test_oversubscription_slows_what_crosses_leaves_and_a_ring_not():
    exchange = all_gather(2**20, 16)
    link = Link(8 * 2**20)
    thin, full = (Tiers((Tier(1, (link,)), Tier(8, (Link(rate * 8 * 2**20),)))) for rate in (2, 8))
    assert full.seconds(exchange, 16) == 15.0
    # 8 ranks to 8 others: 64 MiB through an uplink of 2 MiB/s.
    assert thin.seconds(exchange, 16) == 32.0
    assert thin.seconds(all_reduce(2**20, 16), 16) == full.seconds(all_reduce(2**20, 16), 16)


def test_regions_have_their_own_rates_up_and_down():
    wan = [Link(8 * 2**18, latency_s=2**-4, down_bits_per_s=8 * 2**20), Link(8 * 2**20, latency_s=2**-4)]
    regions = Tiers((Tier(1, (Link(8 * 2**40),)), Tier(2, tuple(wan))))
    assert regions.seconds(all_reduce(2**20, 4), 4) == 1.5 * 4 + 6 * 2 * 2**-4 / 4


def test_a_tree_has_fewer_rounds_and_the_best_is_the_quicker():
    small, big = all_reduce(2**4, 1024), all_reduce(2**30, 1024)
    ring, tree, best = (
        flat_switch(Link(8 * 2**30, latency_s=2**-10), all_reduce=kind) for kind in ("ring", "tree", "best")
    )
    assert tree.seconds(small, 1024) == 20 * 2**-10 + 2 * 2**4 / 2**30
    assert ring.seconds(big, 1024) == 2046 * 2**-10 + 2046 / 1024
    assert best.seconds(small, 1024) == tree.seconds(small, 1024)
    assert best.seconds(big, 1024) == min(ring.seconds(big, 1024), tree.seconds(big, 1024))


def test_a_tree_over_two_nodes_sends_a_tensor_once_each_way_and_over_more_nodes_twice():
    """A ring of 8 ranks sends 7/4 of the tensor over the links of its nodes, whether they are two or four."""
    exchange = all_reduce(2**20, 8)
    ring, tree = (
        [nodes(Link(8 * 2**40), Link(8 * 2**20), ranks, all_reduce=kind).seconds(exchange, 8) for ranks in (4, 2)]
        for kind in ("ring", "tree")
    )
    assert (ring, tree) == ([1.75, 1.75], [1.0, 2.0])
    # Inside a node each rank passes the tensor on both ways.
    assert nodes(Link(8 * 2**20), Link(8 * 2**40), 4, all_reduce="tree").seconds(exchange, 8) == 2.0
    assert flat_switch(Link(8 * 2**20), all_reduce="tree").seconds(all_reduce(2**20, 2), 2) == 1.0


def test_the_closed_form_does_not_grow_with_the_number_of_ranks():
    network, began = nodes(LINK, LINK, 8), time.process_time()
    for _ in range(100):
        assert network.seconds(all_gather(8, 100_000), 100_000) > 0
    assert time.process_time() - began < 1  # a bound on work, far above it


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0), "must be above 0, got 0"),
        (lambda: Link(1, latency_s=-1), "at least 0 and finite, got -1"),
        (lambda: Link(1).derated(1.5), r"in \(0, 1\], got 1.5"),
        (lambda: nodes(LINK, LINK, 4, 0), "at least 1 link, got 0"),
        (lambda: Tiers((Tier(4, (LINK,)),)), r"from single ranks on, got \[4\]"),
        (flat_switch, "need a link, got none"),
    ],
)
def test_networks_that_cannot_be_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_round_takes_as_many_delays_as_its_messages_wait_for() -> None:
    link = Link(8 * 2**20, latency_s=2**-5)
    for exchange in (all_gather(2**20, 4), all_reduce(2**20, 4)):
        ahead, behind = (flat_switch(link, delays_per_round=each).seconds(exchange, 4) for each in (1.0, 2.0))
        assert behind - ahead == exchange.rounds * 2**-5
    with pytest.raises(ValueError, match=r"delays_per_round must be at least 1 and finite, got 0\.5"):
        flat_switch(link, delays_per_round=0.5)
