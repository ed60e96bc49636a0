"""LocalWorld: the four operations, the order of the ranks, and what is said when a program is wrong."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparsync import LocalWorld
from sparsync.comm.local import DeadlockError, LocalComm
from sparsync.comm.subset import SubsetComm

WORLDS = [1, 2, 3, 4, 5, 8, 13, 16]


def filled(value: float, count: int = 2) -> Tensor:
    return torch.full((count,), float(value))


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize("P", WORLDS)
def test_all_gather_returns_every_rank_in_order_with_its_own_length(P: int) -> None:
    for gathered in LocalWorld(P).run(lambda comm: comm.all_gather(filled(comm.rank, comm.rank))):
        assert [part.tolist() for part in gathered] == [[float(r)] * r for r in range(P)]


@pytest.mark.parametrize("P", WORLDS)
def test_all_to_all_transposes(P: int) -> None:
    """Rank r sends r elements to rank 0, r + 1 to rank 1 and so on, modulo 3, so that some are empty."""

    def body(comm: LocalComm) -> list[Tensor]:
        return comm.all_to_all([filled(10 * comm.rank + to, (comm.rank + to) % 3) for to in range(P)])

    for rank, received in enumerate(LocalWorld(P).run(body)):
        assert [part.tolist() for part in received] == [[10.0 * r + rank] * ((r + rank) % 3) for r in range(P)]


@pytest.mark.parametrize("P", WORLDS)
def test_all_reduce_adds_in_rank_order_on_every_rank(P: int) -> None:
    parts = [torch.randn(7, generator=torch.Generator().manual_seed(r)) for r in range(P)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    assert all(
        torch.equal(total, expected) for total in LocalWorld(P).run(lambda comm: comm.all_reduce(parts[comm.rank]))
    )


@pytest.mark.parametrize("P", WORLDS)
def test_what_a_rank_writes_to_the_sum_of_an_all_reduce_no_other_rank_sees(P: int) -> None:
    def body(comm: LocalComm) -> list[float]:
        total = comm.all_reduce(filled(1.0, 1))
        total.add_(comm.rank)
        comm.all_gather(total)  # by now all ranks have written
        return total.tolist()

    assert LocalWorld(P).run(body) == [[float(P + rank)] for rank in range(P)]


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


def test_messages_of_one_pair_arrive_in_the_order_they_were_sent() -> None:
    def body(comm: LocalComm) -> list[float]:
        other, nothing = 1 - comm.rank, torch.empty(0)
        for value in range(3):
            comm.send_recv(filled(10 * comm.rank + value, 1), other, nothing, other)
        received = torch.empty(3)
        for i in range(3):
            comm.send_recv(nothing, other, received[i : i + 1], other)
        return received.tolist()

    assert LocalWorld(2).run(body) == [[10, 11, 12], [0, 1, 2]]


def test_a_message_is_what_it_was_when_sent() -> None:
    def body(comm: LocalComm) -> float:
        x, into = filled(comm.rank, 1), torch.empty(1)
        comm.send_recv(x, 1 - comm.rank, torch.empty(0), 1 - comm.rank)
        x.fill_(-1.0)
        comm.send_recv(torch.empty(0), 1 - comm.rank, into, 1 - comm.rank)
        return float(into)

    assert LocalWorld(2).run(body) == [1.0, 0.0]


def test_nothing_is_sent_or_awaited_for_an_empty_tensor() -> None:
    def body(comm: LocalComm) -> None:
        comm.send_recv(torch.empty(0), 0, torch.empty(0), comm.size - 1)

    LocalWorld(3).run(body)


def test_ranks_run_one_at_a_time_in_the_same_order_each_time() -> None:
    def order() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def body(comm: LocalComm) -> None:
            for turn in range(3):
                seen.append((turn, comm.rank))
                comm.all_gather(filled(0))
                into = torch.empty(2)
                comm.send_recv(filled(1), (comm.rank + 1) % comm.size, into, (comm.rank - 1) % comm.size)

        LocalWorld(5).run(body)
        return seen

    first = order()
    assert sorted(first) == [(turn, rank) for turn in range(3) for rank in range(5)]
    assert all(order() == first for _ in range(3))


def test_a_world_can_run_again() -> None:
    world = LocalWorld(3)
    assert world.run(lambda comm: comm.rank) == world.run(lambda comm: comm.rank) == [0, 1, 2]


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_needs_a_rank(size: int) -> None:
    with pytest.raises(ValueError, match=f"a world in one process has 1 to 4,096 ranks, each a thread, got {size}"):
        LocalWorld(size)


@pytest.mark.timeout(60)
def test_256_ranks_work_in_seconds() -> None:
    P = 256

    def body(comm: LocalComm) -> float:
        token, into = filled(comm.rank, 1), torch.empty(1)
        for _ in range(10):
            comm.send_recv(token, (comm.rank + 1) % P, into, (comm.rank - 1) % P)
            token = into.clone()
        return float(token) + float(comm.all_reduce(filled(1.0, 1))) + len(comm.all_gather(filled(0.0, 1)))

    assert LocalWorld(P).run(body) == [(rank - 10) % P + 2.0 * P for rank in range(P)]


def test_the_gradient_mode_of_a_rank_stays_with_it() -> None:
    def body(comm: LocalComm) -> bool:
        comm.all_gather(filled(0))
        torch.set_grad_enabled(comm.rank != 1)
        comm.all_gather(filled(0))
        return torch.is_grad_enabled()

    assert LocalWorld(3).run(body) == [True, False, True]
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert LocalWorld(3).run(body) == [True, False, True]
        assert not torch.is_grad_enabled()


def deadlock(P: int, body: Callable[[LocalComm], object]) -> DeadlockError:
    with pytest.raises(DeadlockError) as caught:
        LocalWorld(P).run(body)
    return caught.value


def test_a_deadlock_names_who_waits_for_whom() -> None:
    def body(comm: LocalComm) -> None:
        comm.send_recv(torch.empty(0), comm.rank, torch.empty(1), (comm.rank + 1) % comm.size)

    message = str(deadlock(3, body))
    assert message == (
        "deadlock: rank 0 in send_recv waits for rank 1; rank 1 in send_recv waits for rank 2; "
        "rank 2 in send_recv waits for rank 0"
    )


def test_a_deadlock_between_a_collective_and_a_message_names_both() -> None:
    def body(comm: LocalComm) -> None:
        if comm.rank == 2:
            comm.send_recv(torch.empty(0), 0, torch.empty(1), 0)
        comm.all_gather(filled(0))

    message = str(deadlock(3, body))
    assert message == (
        "deadlock: rank 0 in all_gather waits for rank 2; rank 1 in all_gather waits for rank 2; "
        "rank 2 in send_recv waits for rank 0"
    )


@pytest.mark.parametrize("early", [0, 1, 2])
def test_a_rank_that_returns_early_is_named(early: int) -> None:
    def body(comm: LocalComm) -> None:
        if comm.rank != early:
            comm.all_reduce(filled(0))

    message = str(deadlock(3, body))
    assert message.startswith("deadlock: ")
    for rank in {0, 1, 2} - {early}:
        assert f"rank {rank} in all_reduce waits for rank {early} (which has returned)" in message


def test_a_rank_that_catches_the_deadlock_is_not_said_to_wait() -> None:
    def body(comm: LocalComm) -> str:
        try:
            comm.send_recv(torch.empty(0), 0, torch.empty(1), (comm.rank + 1) % comm.size)
        except DeadlockError:
            return "gave up"
        return "received"

    assert str(deadlock(2, body)) == "deadlock: rank 0 in send_recv waits for rank 1 (which has returned)"


def test_mismatched_collectives_name_both_ranks_and_both_calls() -> None:
    def body(comm: LocalComm) -> None:
        comm.all_reduce(filled(0))
        if comm.rank == 0:
            comm.all_gather(filled(0))
        else:
            comm.all_reduce(filled(0))

    message = r"collective number 1: rank \d called all_\w+, rank \d called all_\w+; all ranks must make the same calls"
    with pytest.raises(RuntimeError, match=message) as caught:
        LocalWorld(3).run(body)
    assert "rank 0 called all_gather" in str(caught.value)


def test_a_message_of_another_length_names_both_ranks() -> None:
    def body(comm: LocalComm) -> None:
        comm.send_recv(filled(0, 3), 1 - comm.rank, torch.empty(4), 1 - comm.rank)

    message = "rank 1 expected 4 x torch.float32 from rank 0, which sent 3 x torch.float32"
    with pytest.raises(RuntimeError, match=message) as caught:
        LocalWorld(2).run(body)
    assert notes(caught.value) == ["(on rank 1 of 2)"]


def test_a_message_of_another_type_names_both_ranks() -> None:
    def body(comm: LocalComm) -> None:
        out = filled(0).double() if comm.rank == 0 else filled(0)
        comm.send_recv(out, 1 - comm.rank, torch.empty(2), 1 - comm.rank)

    with pytest.raises(
        RuntimeError, match=r"rank 1 expected 2 x torch.float32 from rank 0, which sent 2 x torch.float64"
    ):
        LocalWorld(2).run(body)


@pytest.mark.parametrize("odd", [0, 2], ids=["first-rank", "last-rank"])
def test_an_all_reduce_of_other_lengths_or_types_names_both_ranks(odd: int) -> None:
    for strange, brought in ((filled(0, 5), "5 x torch.float32"), (filled(0).double(), "2 x torch.float64")):

        def body(comm: LocalComm, strange: Tensor = strange) -> None:
            comm.all_reduce(strange if comm.rank == odd else filled(0))

        with pytest.raises(RuntimeError, match=r"all_reduce: rank \d expected .* from rank \d, which sent") as caught:
            LocalWorld(3).run(body)
        assert f"rank {odd}" in str(caught.value)
        assert brought in str(caught.value)


def test_wrong_counts_name_both_ranks() -> None:
    def gather(comm: LocalComm) -> None:
        comm.all_gather(filled(0, comm.rank), [0, 1, 3])

    def exchange(comm: LocalComm) -> None:
        comm.all_to_all([filled(0, 1)] * 3, [1, 1, 1] if comm.rank != 1 else [1, 1, 2])

    with pytest.raises(
        RuntimeError, match=r"all_gather: rank \d expected 3 x torch.float32 from rank 2, which sent 2 x"
    ):
        LocalWorld(3).run(gather)
    with pytest.raises(
        RuntimeError, match=r"all_to_all: rank 1 expected 2 x torch.float32 from rank 2, which sent 1 x"
    ):
        LocalWorld(3).run(exchange)
    with pytest.raises(ValueError, match=r"counts of all_gather must have one length for each of 2 ranks, got \[2\]"):
        LocalWorld(2).run(lambda comm: comm.all_gather(filled(0), [2]))


def test_parts_for_another_number_of_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="all_to_all takes one tensor for each of 3 ranks, got 2"):
        LocalWorld(3).run(lambda comm: comm.all_to_all([filled(0)] * 2))


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a rank must be in \[0, 1\], got 2"):
        LocalWorld(2).run(lambda comm: comm.send_recv(filled(0), 2, torch.empty(0), 0))
    with pytest.raises(ValueError, match=r"a rank must be in \[0, 1\], got -1"):
        LocalWorld(2).run(lambda comm: comm.send_recv(filled(0), 0, torch.empty(0), -1))


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_an_error_on_one_rank_ends_all_and_is_noted_with_the_rank(culprit: int) -> None:
    ended: list[int] = []

    def body(comm: LocalComm) -> None:
        try:
            comm.all_gather(filled(0))
            if comm.rank == culprit:
                raise KeyError("what went wrong")
            comm.all_gather(filled(0))
        finally:
            ended.append(comm.rank)

    with pytest.raises(KeyError, match="what went wrong") as caught:
        LocalWorld(4).run(body)
    assert notes(caught.value) == [f"(on rank {culprit} of 4)"]
    assert sorted(ended) == [0, 1, 2, 3]


def test_an_error_cannot_be_caught_by_the_other_ranks() -> None:
    """A scheme that catches Exception must not hold up the end of the world."""

    def body(comm: LocalComm) -> None:
        if comm.rank == 2:
            raise ValueError("the first error")
        try:
            comm.all_gather(filled(0))
        except Exception as error:
            raise AssertionError("another rank's error got here") from error

    with pytest.raises(ValueError, match="the first error"):
        LocalWorld(3).run(body)


def test_an_unread_message_is_an_error() -> None:
    def body(comm: LocalComm) -> None:
        if comm.rank == 1:
            for _ in range(2):
                comm.send_recv(filled(0), 2, torch.empty(0), 2)

    with pytest.raises(RuntimeError, match="messages were sent that no rank received: 2 from rank 1 to rank 2"):
        LocalWorld(3).run(body)


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


def test_a_rank_outside_a_subset_cannot_use_it() -> None:
    with pytest.raises(ValueError, match=r"rank 0 is not among the members \[1, 2\]"):
        LocalWorld(1).run(lambda comm: SubsetComm(comm, [1, 2]))
