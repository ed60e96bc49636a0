"""Messages whose receives are posted a step ahead: whatever lengths they have from step to step, all of them arrive."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from helpers.distributed import run, run_fresh
from sparsync.comm import GroupComm, channels
from sparsync.comm.announcement import Announcement, RanksDifferError, Told
from sparsync.comm.channels import MOST_AHEAD
from sparsync.comm.lane import Lane
from sparsync.core import sum_in_rank_order

pytestmark = pytest.mark.distributed

# As they grow, shrink, vanish, and pass what is posted ahead at most.
LENGTHS = (5, 5, 9, 3, 0, 3, 20_000, 1, MOST_AHEAD // 4 + 3, MOST_AHEAD, 7, 0, 0, 2)


def announced(comm: GroupComm, step: int, number: int = 0, what: str = "the same") -> Lane:
    """A lane for the bucket of this number."""
    told = [Told([what], "announce the same")]
    return comm.announce(Announcement((step, step - 1, number, len(what)), lambda: told), number)


def message(source: int, to: int, step: int, n: int) -> Tensor:
    """Return the message from one rank to another in a step, [n]."""
    return torch.arange(n, dtype=torch.float32) + 1000 * source + 100 * to + step


def of_lengths_that_change() -> None:
    comm = GroupComm.private(timeout_s=120)
    P, rank = comm.size, comm.rank
    for step in range(len(LENGTHS)):
        lane = announced(comm, step)

        def length(source: int, to: int, step: int = step) -> int:
            return LENGTHS[(step + source * 3 + to) % len(LENGTHS)]

        parts = [message(rank, to, step, length(rank, to)) for to in range(P)]
        counts = [length(source, rank) for source in range(P)]
        for received in (lane.all_to_all(parts, counts), lane.all_to_all(parts)):
            for source, part in enumerate(received):
                assert torch.equal(part, message(source, rank, step, counts[source]))
        own = [message(source, 0, step, length(source, 0)) for source in range(P)]
        for received in (lane.all_gather(own[rank]), lane.all_gather(own[rank], [len(each) for each in own])):
            assert all(map(torch.equal, received, own))
        n = LENGTHS[step]
        addends = [message(source, 0, step, n) / 3 for source in range(P)]
        assert torch.equal(lane.all_reduce(addends[rank]), sum_in_rank_order(addends))
        into = torch.empty(LENGTHS[step])
        lane.send_recv(message(rank, 1, step, n), (rank + 1) % P, into, (rank - 1) % P)
        assert torch.equal(into, message((rank - 1) % P, 1, step, n))
        wide = lane.all_gather(torch.full((step,), complex(rank, step), dtype=torch.complex128))
        assert [each.tolist() for each in wide] == [[complex(source, step)] * step for source in range(P)]


@pytest.mark.parametrize("P", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_messages_arrive_whatever_lengths_they_had_before(P: int) -> None:
    run(of_lengths_that_change, P)


def posted_ahead() -> None:
    """In a settled step a rank's first message is there although the other one never says that it is ready."""
    comm = GroupComm.private(timeout_s=120)
    for step in range(3):
        lane = announced(comm, step)
        lane.all_gather(torch.ones(10), [10, 10])
    ((posted, _),) = comm.channels()._posted.values()
    if comm.rank == 1:
        announced(comm, 3)
        comm.channels().send(torch.full((40,), 7, dtype=torch.uint8), 0, next(iter(comm.channels()._posted))[0]).wait()
    else:
        posted.work.wait()
        assert posted.room.tolist() == [7] * 40
    dist.barrier()


def test_what_was_posted_a_step_ahead_takes_a_message_before_the_exchange_begins() -> None:
    run(posted_ahead, 2)


def several_at_once() -> None:
    """Buckets that were announced together, before the first exchange of any of them."""
    comm = GroupComm.private(timeout_s=120)
    for step in range(4):
        lanes = [announced(comm, step, number) for number in range(3)]
        for lane in lanes:
            lane.settle()
        for number, lane in enumerate(lanes):
            first = lane.all_gather(torch.tensor([float(10 * number + comm.rank)]), [1, 1])
            assert torch.cat(first).tolist() == [10.0 * number, 10.0 * number + 1]


def test_buckets_announced_together_have_separate_channels() -> None:
    run(several_at_once, 2)


def differing() -> list[str]:
    comm, rank = GroupComm.private(timeout_s=120), dist.get_rank()
    for step in range(2):
        announced(comm, step).all_gather(torch.ones(8), [8, 8])
    lane = announced(comm, 2, what="the same" if rank == 0 else "something else")
    n = 8 if rank == 0 else 5000
    with pytest.raises(RanksDifferError) as caught:
        lane.all_gather(torch.ones(n), [n, n])
    return [str(caught.value)]


def test_ranks_that_differ_hear_of_it_though_a_message_of_known_length_was_posted_ahead() -> None:
    for told in run(differing, 2):
        assert "rank 0 has the same, rank 1 has something else" in told[0]


def of_some_ranks_only() -> None:
    """Rounds in which some ranks send, receive or do neither, before exchanges of all ranks."""
    comm = GroupComm.private(timeout_s=20)
    P, rank, nothing = comm.size, comm.rank, torch.empty(0)
    for step in range(4):
        lane = announced(comm, step)
        for source in range(P - 1):  # a chain, then a message around the ring that some ranks leave out in some steps
            out = message(rank, rank + 1, step, 5) if rank == source else nothing
            into = torch.zeros(5) if rank == source + 1 else nothing
            lane.send_recv(out, (rank + 1) % P, into, (rank - 1) % P)
            assert not into.numel() or torch.equal(into, message(source, rank, step, 5))
        lengths = [(other + step) % 2 for other in range(P)]
        into = torch.zeros(lengths[(rank - 1) % P])
        lane.send_recv(message(rank, 0, step, lengths[rank]), (rank + 1) % P, into, (rank - 1) % P)
        assert torch.equal(into, message((rank - 1) % P, 0, step, len(into)))
        assert torch.cat(lane.all_gather(torch.tensor([rank]), [1] * P)).tolist() == list(range(P))


@pytest.mark.parametrize("P", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_take_part_in_other_numbers_of_exchanges_find_each_others_messages(P: int) -> None:
    run(of_some_ranks_only, P, within_s=60)


def large() -> None:
    """All-reduces that go in pieces, one after the other on the same tag."""
    comm = GroupComm.private(timeout_s=120)
    P = comm.size
    for step, n in enumerate((P * MOST_AHEAD // 4 + 5, 2 * P * MOST_AHEAD // 4 + 1, P * MOST_AHEAD // 4 + 5)):
        addends = [message(source, 0, step, n) / 3 for source in range(P)]
        wanted = sum_in_rank_order(addends)
        lane = announced(comm, step)
        assert torch.equal(lane.all_reduce(addends[comm.rank]), wanted)
        assert torch.equal(lane.all_reduce(addends[comm.rank] + 1), sum_in_rank_order([each + 1 for each in addends]))
    n = P * MOST_AHEAD // 4 + 5
    addends = [message(source, 0, 9, n) / 3 for source in range(P)]
    assert torch.equal(GroupComm.private(timeout_s=120).all_reduce(addends[comm.rank]), sum_in_rank_order(addends))


def test_large_tensors_are_added_in_rank_order_too() -> None:
    run(large, 3)


def cut_off() -> None:
    """Rank 1 takes its message and closes its connections; rank 2 does so while rank 0 sends to it."""
    comm, store = GroupComm.private(timeout_s=120), dist.distributed_c10d._get_default_store()
    through, short, long = comm.channels(), torch.empty(1, dtype=torch.uint8), torch.empty(2**26, dtype=torch.uint8)
    if comm.rank == 0:
        channels.LOOK_S = 0.01
        with through.sent([(through.send(short, to, 0), to) for to in (1, 2)]):
            pass
        sent = through.send(long, 2, 0)
        dist.barrier()
        with pytest.raises(RuntimeError, match="waiting for rank 2"), through.sent([(sent, 2)]):
            pass
        return
    if comm.rank == 2:
        store.wait(["rank 1 has gone"])
        time.sleep(0.1)
    through.receive(short, 0, 0).wait()
    if comm.rank == 1:
        comm.close()
        store.set("rank 1 has gone", "")
    dist.barrier()
    if comm.rank == 2:
        through.receive(long, 0, 0)  # not referred to, so that gloo reads none of it
        comm.close()


def test_a_rank_whose_message_is_cut_off_does_not_wait_for_the_timeout_and_one_that_was_heard_may_go() -> None:
    run_fresh(cut_off, 3, within_s=60)
