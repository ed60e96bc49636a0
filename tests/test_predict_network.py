"""Seconds of exchanges in closed form, and by a virtual clock that runs the schemes."""

import time

import pytest
import torch

from sparsync.base import registry
from sparsync.comm.local import LocalWorld
from sparsync.comm.plan import Exchange
from sparsync.core import Bucket, generator, spans
from sparsync.predict import clock
from sparsync.predict.network import Link, Tier, Tiers, fat_tree, flat_switch, nodes, regions
from sparsync.predict.plans import plan

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
    for network in (flat_switch(LINK), nodes(LINK, LINK, 4), regions(LINK, [LINK], 4)):
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
    thin, full = fat_tree(Link(8 * 2**20), 8, oversubscription=4), fat_tree(Link(8 * 2**20), 8)
    assert full.seconds(exchange, 16) == 15.0
    # 8 ranks to 8 others: 64 MiB through an uplink of 2 MiB/s.
    assert thin.seconds(exchange, 16) == 32.0
    assert thin.seconds(all_reduce(2**20, 16), 16) == full.seconds(all_reduce(2**20, 16), 16)


def test_regions_have_their_own_rates_up_and_down():
    wan = [Link(8 * 2**18, latency_s=2**-4, down_bits_per_s=8 * 2**20), Link(8 * 2**20, latency_s=2**-4)]
    assert regions(Link(8 * 2**40), wan, 2).seconds(all_reduce(2**20, 4), 4) == 1.5 * 4 + 6 * 2 * 2**-4 / 4


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
        (lambda: fat_tree(LINK, 8, 0.5), "at least 1 .*got 0.5"),
        (lambda: nodes(LINK, LINK, 4, 0), "at least 1 link, got 0"),
        (lambda: Tiers((Tier(4, (LINK,)),)), r"from single ranks on, got \[4\]"),
        (flat_switch, "need a link, got none"),
    ],
)
def test_networks_that_cannot_be_say_so(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The clock.


def elapsed(network: Tiers, P: int, scheme: str, n: int, **settings: object) -> list[float]:
    def body(comm: clock.ClockedComm) -> None:
        grad = torch.arange(n, dtype=torch.float32) + 1
        registry.get(scheme, **settings).reduce(Bucket("b", grad, 0), comm)

    return clock.run(network, P, body)[1].now_s


@pytest.mark.parametrize("P", [2, 3, 8])
def test_the_clock_agrees_with_the_closed_form_of_dense(P):
    n = 64 * P
    assert elapsed(flat_switch(LINK), P, "dense", n) == [flat_switch(LINK).seconds(all_reduce(4 * n, P), P)] * P


@pytest.mark.parametrize("P", [2, 3, 8])
def test_the_clock_agrees_with_the_closed_form_of_a_ring_of_messages(P):
    """SkipReduce sends its ring message by message; with s steps left out, 2 (P-1) - s of n/P elements remain."""
    n, steps = 64 * P, 2 * (P - 1) - 1
    ring = Exchange("send_recv", steps * 4 * 64, steps, steps, steps * 4 * 64, "ring")
    network = flat_switch(LINK)
    assert elapsed(network, P, "skip_reduce", n, skip=1, protect=()) == [network.seconds(ring, P)] * P


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        ("bf16", {}),
        ("topk", {"density": 0.0625}),
        ("two_shot", {"density": 0.0625, "values": "int4"}),
        ("int4", {}),
        ("random_k", {"density": 0.0625}),
        ("gtopk", {"density": 0.0625}),
        ("spardl", {"density": 0.0625}),
        ("cltk", {"density": 0.0625}),
        ("sparse_loco", {}),
        ("demo", {}),
    ],
)
def test_the_clock_agrees_with_the_plan_of_each_scheme_whose_traffic_is_fixed(scheme, settings):
    """The closed form of every exchange, added up, is what the ranks' clocks show after the last of a few steps."""
    P, n, network = 4, 2**12, flat_switch(LINK)
    schemes = [registry.get(scheme, **settings) for _ in range(P)]

    def body(comm: clock.ClockedComm) -> float:
        began = 0.0
        for step in range(2):
            began = comm.now_s
            grad = torch.randn(n, generator=generator(comm.rank, "b", step))
            schemes[comm.rank].reduce(Bucket("b", grad, step), comm)
        return comm.now_s - began

    planned = plan(registry.get(scheme, **settings), n, P)
    seconds = sum(network.seconds(exchange, P) for exchange in planned.exchanges)
    assert clock.run(network, P, body)[0] == [pytest.approx(seconds, rel=1e-12)] * P


def test_a_straggler_makes_all_wait_at_a_collective_and_only_its_neighbours_at_a_message():
    def body(comm: clock.ClockedComm) -> tuple[float, float]:
        comm.work(1.0 if comm.rank == 0 else 0.0)
        into = torch.zeros(1)
        comm.send_recv(torch.zeros(1), (comm.rank + 1) % 4, into, (comm.rank - 1) % 4)
        after_message = comm.now_s
        comm.all_reduce(torch.zeros(4))
        return after_message, comm.now_s

    seen, world = clock.run(flat_switch(Link(8e9)), 4, body)
    assert [round(message, 6) for message, _ in seen] == [1.0, 1.0, 0.0, 0.0]
    assert len({end for _, end in seen}) == 1
    assert world.wait_s[2] > 1.0 > world.wait_s[0]


def test_two_messages_on_one_link_of_a_node_take_turns():
    """Ranks 0 and 1 of a node send to 2 and 3 of another at the same time, and come back: 1 MiB each, 1 MiB/s."""

    def body(comm: clock.ClockedComm) -> float:
        peer = (comm.rank + 2) % 4
        comm.send_recv(torch.zeros(2**18), peer, torch.zeros(2**18), peer)
        return comm.now_s

    shared, _ = clock.run(nodes(Link(8 * 2**40), Link(8 * 2**20), 2), 4, body)
    assert sorted(shared) == [1.0, 1.0, 2.0, 2.0]
    alone, _ = clock.run(flat_switch(Link(8 * 2**20)), 4, body)
    assert alone == [1.0] * 4


def test_a_link_takes_the_first_gap_that_is_long_enough():
    busy = clock._Busy()
    assert [busy.take(0, 1), busy.take(3, 1), busy.take(0, 3), busy.take(0, 2)] == [1, 4, 7, 3]
    assert busy.intervals == [(0, 1), (1, 3), (3, 4), (4, 7)]


def test_uneven_selections_cost_what_the_busiest_rank_sends_and_receives():
    sizes = [2**18, 0, 0, 2**16]

    def body(comm: clock.ClockedComm) -> None:
        comm.all_gather(torch.zeros(sizes[comm.rank]), sizes)

    _, world = clock.run(flat_switch(Link(8 * 2**20, latency_s=2**-10)), 4, body)
    assert world.now_s == [2**-10 + 3.0] * 4


def test_unknown_lengths_cost_an_exchange_more():
    network = flat_switch(LINK)
    _, known = clock.run(network, 4, lambda comm: comm.all_gather(torch.zeros(4), [4] * 4))
    _, unknown = clock.run(network, 4, lambda comm: comm.all_gather(torch.zeros(4)))
    assert unknown.now_s[0] - known.now_s[0] == network.seconds(all_gather(8, 4), 4)


def test_the_clock_agrees_with_the_closed_form_on_nodes_where_ranks_send_alike():
    network = nodes(Link(8 * 2**24, latency_s=2**-12), Link(8 * 2**20, latency_s=2**-8), 4)
    _, gathered = clock.run(network, 8, lambda comm: comm.all_gather(torch.zeros(64), [64] * 8))
    assert gathered.now_s == [network.seconds(all_gather(256, 8), 8)] * 8
    parts = [torch.zeros(64)] * 8
    _, exchanged = clock.run(network, 8, lambda comm: comm.all_to_all(parts, [64] * 8))
    assert exchanged.now_s == gathered.now_s


def test_the_clock_changes_no_result():
    def body(comm) -> torch.Tensor:
        grad = torch.arange(96.0) * (comm.rank + 1)
        bucket = Bucket("b", grad, 0)
        registry.get("oktopk", density=0.25).reduce(bucket, comm)
        return bucket.grad

    plain = LocalWorld(4).run(body)
    clocked, world = clock.run(flat_switch(LINK), 4, body)
    assert all(torch.equal(a, b) for a, b in zip(plain, clocked, strict=True))
    assert world.now_s[0] > 0
    assert len(spans(96, 4)) == 4


@pytest.mark.slow
def test_a_clock_for_256_ranks():
    network = flat_switch(LINK)
    n = 64 * 256
    steps = 2 * 255 - 128
    ring = Exchange("send_recv", steps * 4 * 64, steps, steps, steps * 4 * 64, "ring")
    assert elapsed(network, 256, "skip_reduce", n, skip=128, protect=()) == [network.seconds(ring, 256)] * 256
