"""MeteredComm: the closed forms are what the messages of an algorithm that is really run add up to."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsync.comm import Cost, LocalWorld, MeteredComm
from sparsync.comm.local import LocalComm
from sparsync.comm.metered import all_gather_cost, all_reduce_cost, all_to_all_cost, send_cost
from sparsync.core import spans

WORLDS = [1, 2, 5]
COUNTS = [0, 1, 97]
FLOAT_NBYTES = 4


def pass_round(comm: MeteredComm, parts: list[Tensor], first: int, steps: int) -> None:
    """Each rank sends part first, first - 1, ... to its right neighbour and gets what its left neighbour sends."""
    P = comm.size
    for step in range(steps):
        into = torch.empty_like(parts[(first - step - 1) % P])
        comm.send_recv(parts[(first - step) % P], (comm.rank + 1) % P, into, (comm.rank - 1) % P)


def measured(P: int, body: Callable[[MeteredComm], object]) -> list[Cost]:
    """Return the cost of `body(comm)` on each rank."""

    def run(comm: LocalComm) -> Cost:
        meter = MeteredComm(comm)
        body(meter)
        return meter.take()[0]

    return LocalWorld(P).run(run)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("P", WORLDS)
def test_all_reduce_costs_what_chunks_to_their_owners_and_sums_to_all_do(P: int, n: int) -> None:
    def by_exchanges(comm: MeteredComm) -> None:
        parts = [span.of(torch.zeros(n)) for span in spans(n, P)]
        own = parts[comm.rank]
        comm.all_to_all(parts, [own.numel()] * P)
        comm.all_gather(own, [part.numel() for part in parts])

    counted = measured(P, lambda comm: comm.all_reduce(torch.zeros(n)))
    assert counted == measured(P, by_exchanges)
    assert counted == [all_reduce_cost(n, FLOAT_NBYTES, P, rank) for rank in range(P)]
    assert sum(cost.nbytes for cost in counted) == 2 * (P - 1) * n * FLOAT_NBYTES


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize("P", WORLDS)
def test_all_gather_costs_what_a_ring_that_forwards_sends_but_at_once(P: int, n: int) -> None:
    """As many messages and bytes in one step, where a ring's P-1 wait for each other."""

    counted = measured(P, lambda comm: comm.all_gather(torch.zeros(n), [n] * P))
    ring = measured(P, lambda comm: pass_round(comm, [torch.zeros(n)] * P, comm.rank, P - 1))
    assert [replace(cost, steps=P - 1) for cost in counted] == ring
    assert {cost.steps for cost in counted} == {min(1, P - 1)}
    assert counted == [all_gather_cost(n * FLOAT_NBYTES, P)] * P


@pytest.mark.parametrize("P", WORLDS)
def test_all_to_all_costs_one_message_to_each_other_rank_that_gets_anything(P: int) -> None:
    def lengths(rank: int) -> list[int]:
        return [(rank + to) % 3 for to in range(P)]

    def body(comm: MeteredComm) -> None:
        counts = [(source + comm.rank) % 3 for source in range(P)]
        comm.all_to_all([torch.zeros(length) for length in lengths(comm.rank)], counts)

    for rank, cost in enumerate(measured(P, body)):
        sent = [length for to, length in enumerate(lengths(rank)) if to != rank and length]
        assert (cost.messages, cost.nbytes) == (len(sent), FLOAT_NBYTES * sum(sent))
        assert cost == all_to_all_cost([FLOAT_NBYTES * length for length in lengths(rank)], rank)


@pytest.mark.parametrize("P", WORLDS)
def test_lengths_that_are_not_known_cost_8_bytes_a_rank_pair(P: int) -> None:
    x = torch.zeros(3)
    unknown = measured(P, lambda comm: comm.all_gather(x))
    known = measured(P, lambda comm: comm.all_gather(x, [3] * P))
    lengths = Cost(0, 0, 8 * (P - 1))  # in the same messages
    assert unknown == [cost + lengths for cost in known]
    unknown = measured(P, lambda comm: comm.all_to_all([x] * P))
    known = measured(P, lambda comm: comm.all_to_all([x] * P, [3] * P))
    assert unknown == [cost + lengths for cost in known]
    nothing = measured(P, lambda comm: comm.all_gather(x[:0]))
    assert nothing == [Cost(min(1, P - 1), P - 1, 8 * (P - 1))] * P


def test_every_call_is_passed_on_with_its_result_and_take_returns_what_was_counted_and_starts_again() -> None:
    def body(comm: LocalComm) -> tuple[list[float], Cost, float, tuple[Cost, float]]:
        meter, into = MeteredComm(comm), torch.empty(1)
        mine = torch.tensor([float(meter.rank)])
        meter.send_recv(mine, 1 - comm.rank, into, 1 - comm.rank)
        total = meter.all_reduce(mine)
        gathered, exchanged = meter.all_gather(mine), meter.all_to_all([mine, mine + 10])
        found = torch.cat([into, total, *gathered, *exchanged]).tolist()
        return found, *meter.take(), meter.take()

    for rank, (found, sent, wait_s, again) in enumerate(LocalWorld(2).run(body)):
        assert found == [1 - rank, 1, 0, 1, 10 * rank, 10 * rank + 1]
        assert sent == send_cost(4) + all_reduce_cost(1, 4, 2, rank) + Cost(2, 2, 2 * 12)
        assert wait_s > 0.0
        assert again == (Cost(), 0.0)
