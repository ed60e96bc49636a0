"""LocalWorld: the four operations, the order of the ranks, and what is said when a program is wrong."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsync.comm import LocalWorld
from sparsync.comm.local import DeadlockError, LocalComm
from sparsync.comm.subset import SubsetComm
from sparsync.core import sum_in_rank_order

WORLDS = [1, 3, 8]


def filled(value: float, count: int = 2) -> Tensor:
    return torch.full((count,), float(value))


@pytest.mark.parametrize("P", WORLDS)
def test_all_gather_and_all_to_all_return_every_rank_in_order_with_its_own_length(P: int) -> None:
    """To others rank r sends r elements to rank 0, r + 1 to rank 1 and so on, modulo 3, so that some are empty."""

    def body(comm: LocalComm) -> tuple[list[Tensor], list[Tensor]]:
        parts = [filled(10 * comm.rank + to, (comm.rank + to) % 3) for to in range(P)]
        return comm.all_gather(filled(comm.rank, comm.rank)), comm.all_to_all(parts)

    for rank, (gathered, received) in enumerate(LocalWorld(P).run(body)):
        assert [part.tolist() for part in gathered] == [[float(r)] * r for r in range(P)]
        assert [part.tolist() for part in received] == [[10.0 * r + rank] * ((r + rank) % 3) for r in range(P)]


@pytest.mark.parametrize("P", WORLDS)
def test_all_reduce_adds_in_rank_order_and_what_a_rank_writes_to_the_sum_no_other_sees(P: int) -> None:
    parts = [torch.randn(7, generator=torch.Generator().manual_seed(r)) for r in range(P)]

    def body(comm: LocalComm) -> Tensor:
        total = comm.all_reduce(parts[comm.rank])
        total.add_(comm.rank)
        comm.all_gather(total)  # by now all ranks have written
        return total

    for rank, found in enumerate(LocalWorld(P).run(body)):
        assert torch.equal(found, sum_in_rank_order(parts) + rank)


@pytest.mark.parametrize("P", WORLDS)
def test_send_recv_passes_round_a_ring_to_any_distance(P: int) -> None:
    def body(comm: LocalComm) -> list[float]:
        received = []
        for distance in range(P):
            into = torch.empty(1)
            comm.send_recv(filled(comm.rank, 1), (comm.rank + distance) % P, into, (comm.rank - distance) % P)
            received.append(float(into))
        return received

    for rank, received in enumerate(LocalWorld(P).run(body)):
        assert received == [(rank - distance) % P for distance in range(P)]


def wait_in_a_ring(comm: LocalComm) -> None:
    comm.send_recv(torch.empty(0), comm.rank, torch.empty(1), (comm.rank + 1) % comm.size)


def return_early(comm: LocalComm) -> None:
    if comm.rank != 1:
        comm.all_reduce(filled(0))


def give_up(comm: LocalComm) -> None:
    try:
        wait_in_a_ring(comm)
    except DeadlockError:
        return


@pytest.mark.parametrize(
    ("P", "body", "wanted"),
    [
        (3, wait_in_a_ring, "rank 0 in send_recv waits for rank 1; rank 1 in send_recv waits for rank 2; rank 2 in"),
        (3, return_early, "rank 2 in all_reduce waits for rank 1 (which has returned)"),
        (2, give_up, "deadlock: rank 0 in send_recv waits for rank 1 (which has returned)"),
    ],
)
def test_a_deadlock_names_who_waits_for_whom(P: int, body: Callable[[LocalComm], None], wanted: str) -> None:
    with pytest.raises(DeadlockError, match=re.escape(wanted)):
        LocalWorld(P).run(body)


@pytest.mark.parametrize("culprit", [0, 3])
def test_an_error_on_one_rank_ends_all_which_cannot_catch_it_and_is_noted_with_the_rank(culprit: int) -> None:
    ended: list[int] = []

    def body(comm: LocalComm) -> None:
        try:
            comm.all_gather(filled(0))
            if comm.rank == culprit:
                raise KeyError("what went wrong")
            comm.all_gather(filled(0))
        except Exception:
            assert comm.rank == culprit
            raise
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyError, match="what went wrong") as caught:
        LocalWorld(4).run(body)
    assert getattr(caught.value, "__notes__", []) == [f"(on rank {culprit} of 4)"]
    assert sorted(ended) == [0, 1, 2, 3]


def test_a_subset_has_the_four_operations_among_its_members() -> None:
    """Two subsets at once, one of them not in rank order, and rank 4 in none of them."""
    members = {0: [3, 0], 3: [3, 0], 1: [1, 2, 5], 2: [1, 2, 5], 5: [1, 2, 5]}

    def body(comm: LocalComm) -> tuple[list[float], list[float], list[float], float] | None:
        if comm.rank not in members:
            return None
        part = SubsetComm(comm, members[comm.rank])
        into = torch.empty(1)
        part.send_recv(filled(comm.rank, 1), (part.rank + 1) % part.size, into, (part.rank - 1) % part.size)
        gathered = torch.cat(part.all_gather(filled(comm.rank, part.rank)))
        exchanged = torch.cat(part.all_to_all([filled(10 * comm.rank + to, to) for to in range(part.size)]))
        return gathered.tolist(), exchanged.tolist(), part.all_reduce(filled(comm.rank, 1)).tolist(), float(into)

    seen = LocalWorld(6).run(body)
    assert seen[3] == ([0.0], [], [3.0], 0.0)
    assert seen[0] == ([0.0], [31.0, 1.0], [3.0], 3.0)
    assert seen[5] == ([2.0, 5.0, 5.0], [12.0, 12.0, 22.0, 22.0, 52.0, 52.0], [8.0], 2.0)
    assert seen[4] is None
