"""GroupComm on real gloo processes: the same results as in a LocalWorld, and a failure on one rank ends the wait of the others."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from helpers.distributed import case, join_again, run
from helpers.known_gradients import whole_numbers
from sparsync.comm import GroupComm, LocalWorld, group, lane
from sparsync.comm.announcement import Announcement, RanksDifferError, Told
from sparsync.comm.lane import Lane
from sparsync.core import Comm
from sparsync.testing.world import same_bits

pytestmark = pytest.mark.distributed

ADDED = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
)
MOVED = (*ADDED, torch.bool, torch.complex64, torch.float8_e4m3fn)
LENGTHS = (0, 1, 5, 97)
TIMEOUT_S = 3.0  # for ranks that nobody joins; other ranks must meet within it, even on a busy machine


def values(dtype: torch.dtype, n: int, rank: int) -> Tensor:
    """Whole numbers that differ from rank to rank, [n]."""
    return whole_numbers(n, rank, n, "values").to(dtype)


def lengths(n: int, P: int) -> list[int]:
    """One length for each rank, uneven for P > 1, and zero on one."""
    return [n * rank for rank in range(P)]


def every_operation(comm: Comm) -> dict[str, list[Tensor]]:
    """Return what each operation returns for each type and length, by case; the same program for every communicator."""
    found: dict[str, list[Tensor]] = {}
    P, rank = comm.size, comm.rank
    for dtype in MOVED:
        for n in LENGTHS:
            x = values(dtype, n, rank)
            uneven = values(dtype, lengths(n, P)[rank], rank)
            parts = [values(dtype, (n * (rank + other)) % 7, rank) for other in range(P)]
            counts = [(n * (other + rank)) % 7 for other in range(P)]
            arrived = torch.zeros(lengths(n, P)[rank - 1], dtype=dtype)
            comm.send_recv(uneven, (rank + 1) % P, arrived, (rank - 1) % P)
            found |= {
                f"send_recv {dtype} {n}": [arrived],
                f"all_gather {dtype} {n}": comm.all_gather(x),
                f"all_gather with counts {dtype} {n}": comm.all_gather(x, [n] * P),
                f"all_gather uneven {dtype} {n}": comm.all_gather(uneven),
                f"all_gather uneven with counts {dtype} {n}": comm.all_gather(uneven, lengths(n, P)),
                f"all_to_all {dtype} {n}": comm.all_to_all(parts),
                f"all_to_all with counts {dtype} {n}": comm.all_to_all(parts, counts),
            }
            if dtype in ADDED:
                found[f"all_reduce {dtype} {n}"] = [comm.all_reduce(x)]
    return found


def differing(found: dict[str, list[Tensor]], wanted: dict[str, list[Tensor]]) -> list[str]:
    """Return the cases in which the two differ in any bit."""
    assert found.keys() == wanted.keys()
    return [
        name
        for name in wanted
        if len(found[name]) != len(wanted[name]) or not all(map(same_bits, found[name], wanted[name]))
    ]


def default_and_private() -> list[dict[str, list[Tensor]]]:
    return [every_operation(GroupComm()), every_operation(GroupComm.private(timeout_s=30))]


@pytest.mark.parametrize("P", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (3, 4))])
def test_every_operation_returns_what_it_returns_in_a_local_world(P: int) -> None:
    wanted = LocalWorld(P).run(every_operation)
    for rank, groups in enumerate(run(default_and_private, P)):
        for found in groups:
            assert differing(found, wanted[rank]) == []


def on_subgroups() -> tuple[int, dict[str, list[Tensor]]]:
    """Everything on {1, 3} or {0, 2}; rank 3 is in one group more than rank 1, so torch would name their next group differently."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() % 2]
    assert isinstance(mine, dist.ProcessGroup)
    comm = GroupComm.private(mine, timeout_s=120)
    assert comm.ranks == [dist.get_rank() % 2, dist.get_rank() % 2 + 2]
    return comm.rank, every_operation(comm)


@pytest.mark.slow
def test_a_private_group_of_a_subgroup_serves_its_members_alone() -> None:
    wanted = LocalWorld(2).run(every_operation)
    for number, (rank, found) in enumerate(run(on_subgroups, 4)):
        assert rank == number // 2
        assert differing(found, wanted[rank]) == []


def staged() -> tuple[int, dict[str, list[Tensor]]]:
    """Everything with copies in this machine's memory, as of CUDA tensors; a call asks once, and so does the one it makes with them."""
    asked = cycle((True, False))
    Lane._is_staged = lambda self, x: self.size > 1 and next(asked)  # pyright: ignore[reportPrivateUsage]
    comm = GroupComm.private(timeout_s=120)
    return comm.rank, every_operation(comm)


def collected() -> tuple[int, dict[str, list[Tensor]]]:
    """Everything by collectives, as of CUDA tensors over NCCL; gloo has none that adds int16."""
    GroupComm.collective = lambda self, x: x.dtype != torch.int16
    comm = GroupComm.private(timeout_s=120)
    return comm.rank, every_operation(comm)


@pytest.mark.slow
@pytest.mark.parametrize("travel", [staged, collected])
def test_tensors_that_travel_as_those_of_a_gpu_arrive_as_others_do(
    travel: Callable[[], tuple[int, dict[str, list[Tensor]]]],
) -> None:
    wanted = LocalWorld(2).run(every_operation)
    for rank, found in run(travel, 2, fresh=True):
        assert differing(found, wanted[rank]) == []


def beside_other_traffic() -> None:
    """One rank starts with its own all-reduce, the other with ours: on one group they would be added to each other."""
    comm = GroupComm.private(timeout_s=120)
    for _ in range(20):
        mine, other = torch.full((50_000,), 1.0), torch.full((50_000,), 10.0)
        if comm.rank == 1:
            assert torch.equal(comm.all_reduce(mine), 2 * mine)
        work = dist.all_reduce(other, async_op=True)
        if comm.rank == 0:
            assert torch.equal(comm.all_reduce(mine), 2 * mine)
        assert work is not None
        work.wait()
        assert torch.equal(other, torch.full((50_000,), 20.0))


def test_traffic_of_the_user_on_the_group_itself_does_not_mix_with_a_private_one() -> None:
    run(beside_other_traffic, 2)


def call(comm: Comm, operation: str) -> None:
    """Call the operation with 1000 numbers, in a ring or with all ranks."""
    x, P = torch.ones(1000), comm.size
    if operation == "send_recv":
        comm.send_recv(x, (comm.rank + 1) % P, torch.empty(1000), (comm.rank - 1) % P)
    else:
        comm.all_reduce(x)


OPERATIONS = ("send_recv", "all_reduce")


def error_of(comm: Comm, operation: str) -> str:
    """Return the message of the error that the call raises."""
    with pytest.raises(RuntimeError) as caught:
        call(comm, operation)
    message = str(caught.value)
    del caught  # its traceback refers to the group, which would keep connections open until garbage is collected
    return message


def waiting_for_nobody() -> None:
    for operation in OPERATIONS:
        comm = GroupComm.private(timeout_s=TIMEOUT_S)
        with case(operation):
            if comm.rank != 1:
                message = error_of(comm, operation)
                assert f"rank {comm.rank} of 3: " in message
                assert "rank 1" in message if operation == "send_recv" else "with all ranks" in message
        dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"rank 1 of 3: ranks 0, 2 did not come .* within 1 s"):
            GroupComm.private(timeout_s=1.0)
    dist.barrier()


def test_a_peer_that_never_comes_is_an_error_that_names_ranks() -> None:
    run(waiting_for_nobody, 3)


def ranks_disagree() -> None:
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="timeout_s must be above 0 seconds, got 0"):
        GroupComm.private(timeout_s=0)
    with pytest.raises(RuntimeError, match=f"ranks must agree, but rank {rank} has setting {rank}, rank {1 - rank}"):
        GroupComm.private(timeout_s=120, fingerprint=f"setting {rank}")
    call(GroupComm.private(timeout_s=120, fingerprint="the same"), "all_reduce")


def test_ranks_that_disagree_raise_on_all_ranks() -> None:
    run(ranks_disagree, 2)


def error_is_kept() -> None:
    comm = GroupComm.private(timeout_s=1000)
    comm.announce(Announcement((0, 0, 0, 0), lambda: [Told(["the same"], "")]))
    comm.settle()
    dist.barrier()
    if comm.rank == 1:
        comm.close()
    dist.barrier()
    if comm.rank == 0:
        time.sleep(0.3)  # rank 2 waits by now
    if comm.rank != 1:
        other = {0: 1, 2: 0}[comm.rank]
        with pytest.raises(RuntimeError, match=f"rank {comm.rank} of 3: send_recv, sending to rank {other}") as kept:
            comm.send_recv(torch.ones(9), other, torch.empty(9), other)
        comm.close()
        dist.barrier()
        assert kept.tb is not None
    else:
        dist.barrier()


def test_a_failure_ends_the_wait_of_others_though_its_error_refers_to_the_connections() -> None:
    run(error_is_kept, 3)


def closed_by_one() -> None:
    comm = GroupComm.private(timeout_s=1000)
    for round_number, operation in enumerate(OPERATIONS):
        with case(operation):
            call(comm, operation)
            dist.barrier()  # what a rank has sent may be lost with its connections while the others have not read it
            if comm.rank == 1:
                comm.close()
                comm.close()
                with pytest.raises(RuntimeError, match=r"rank 1 of 3: this communicator is closed; use reconnect\(\)"):
                    call(comm, operation)
            else:
                message = error_of(comm, operation)
                assert f"rank {comm.rank} of 3: " in message
                comm.close()
            comm = comm.reconnect(fingerprint=f"round {round_number}")
            call(comm, operation)


@pytest.mark.slow
def test_closing_ends_the_wait_of_the_others_and_reconnect_works() -> None:
    run(closed_by_one, 3)


def one_connects_late() -> None:
    rank, make, store = dist.get_rank(), c10d._new_process_group_helper, c10d._get_default_store()

    def connect(*args: Any, **named: Any) -> Any:
        made = make(*args, **named)
        time.sleep(0.3 * rank)
        store.set(f"{rank} is connected", "")
        return made

    with (
        mock.patch.object(c10d, "_new_process_group_helper", connect),
        mock.patch.object(group, "REPORTS_S", TIMEOUT_S * 10),
    ):
        comm = GroupComm.private()
    assert store.check(["0 is connected", "1 is connected"])
    comm.close()


def test_no_rank_goes_on_and_may_close_while_others_still_connect() -> None:
    run(one_connects_late, 2)


GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
COLLECTIVES = (GATHER, "all_to_all_single", "all_reduce", "batch_isend_irecv", "send", "recv")


def issued() -> tuple[dict[str, list[str]], dict[str, int]]:
    """The functions of torch.distributed that each operation calls, and how many copies one makes in this machine's memory."""
    comm = GroupComm.private(timeout_s=120)
    P, rank = comm.size, comm.rank
    x, uneven, alone = torch.arange(4 * P).float() + rank, torch.ones(5 + rank), torch.ones(3 * (rank == 1))
    operations: dict[str, Callable[[Lane], list[Tensor]]] = {
        "all_gather": lambda lane: lane.all_gather(x, [4 * P] * P),
        "all_gather of chunks": lambda lane: lane.all_gather(uneven, [5 + other for other in range(P)]),
        "all_gather of one rank's": lambda lane: lane.all_gather(alone, [0, 3, 0]),
        "all_gather of nothing": lambda lane: lane.all_gather(x[:0], [0] * P),
        "all_to_all": lambda lane: lane.all_to_all(x.split(4), [4] * P),
        "all_to_all of unknown lengths": lambda lane: lane.all_to_all([x[:other] for other in range(P)]),
        "all_reduce": lambda lane: [lane.all_reduce(x)],
    }
    called, copies = dict[str, list[str]](), dict[str, int]()
    announced = Announcement((0, 0, 0, 0), lambda: [Told(["the same"], "")])
    for name, operation in operations.items():
        wanted = operation(comm.announce(announced))
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(GroupComm, "collective", lambda self, x: True))
            watched = {each: mock.Mock(wraps=getattr(dist, each)) for each in COLLECTIVES}
            for each, function in watched.items():
                patches.enter_context(mock.patch.object(dist, each, function))
            found = operation(comm.announce(announced))
        called[name] = [each for each, function in watched.items() for _ in range(function.call_count)]
        rooms = mock.Mock(wraps=lane._on_host)
        once = mock.Mock(side_effect=[True, False])
        with mock.patch.object(Lane, "_is_staged", once), mock.patch.object(lane, "_on_host", rooms):
            copied = operation(comm.announce(announced))
        copies[name] = rooms.call_count
        with case(name):
            assert all(map(same_bits, found, wanted))
            assert all(map(same_bits, copied, wanted))
            assert len({part.untyped_storage().data_ptr() for part in found if part.numel()}) <= 1
    return called, copies


def test_an_exchange_of_a_gpu_is_one_collective_or_one_copy_each_way() -> None:
    for called, copies in run(issued, 3):
        assert called == {
            "all_gather": [GATHER],
            "all_gather of chunks": [GATHER],
            "all_gather of one rank's": ["all_to_all_single"],
            "all_gather of nothing": [],
            "all_to_all": ["all_to_all_single"],
            "all_to_all of unknown lengths": ["all_to_all_single"],
            "all_reduce": ["all_reduce"],
        }
        assert set(copies.values()) == {2}


def test_parts_that_follow_each_other_in_memory_are_sent_from_there() -> None:
    x = torch.arange(10.0)
    flat = lane._flat(x.split([3, 0, 5, 2]))
    assert flat.data_ptr() == x.data_ptr()
    assert torch.equal(flat.view(torch.float32), x)
    for parts in ([x[:3], x[4:]], [x[5:], x[:5]], [x, x], [x[:5], x.clone()[5:]]):
        assert torch.equal(lane._flat(parts).view(torch.float32), torch.cat(parts))


def beside_a_backend_for_gpus_alone() -> tuple[set[str], str]:
    """On a group that sends no CPU tensors."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    rank = dist.get_rank()
    join_again("cuda:fake")
    with pytest.raises(ValueError, match=r"its backends are cuda:fake; use GroupComm\.private\(\)"):
        GroupComm()
    comm = GroupComm.private(timeout_s=120)
    found = comm.any_of([str(rank)], ["0", "1", "2"], 0, -1)
    comm.announce(Announcement((0, rank, 0, 0), lambda: [Told([f"rank {rank}"], "do the same")]))
    with pytest.raises(RanksDifferError) as caught:
        comm.settle()
    return found, str(caught.value)


def test_what_ranks_compare_travels_over_gloo_though_their_group_is_for_gpus_alone() -> None:
    for found, told in run(beside_a_backend_for_gpus_alone, 2, fresh=True):
        assert found == {"0", "1"}
        assert told == "ranks differ: rank 0 has rank 0, rank 1 has rank 1; do the same"


def agreeing() -> tuple[list[set[str]], list[int]]:
    """Ask which names any rank has, then announce, for each case; also return how many announcements that took."""
    comm, rank = GroupComm.private(timeout_s=120.0), dist.get_rank()
    names = ["a", "b", "c"]
    cases = [
        [names, names, names],
        [names, ["a"], []],
        [["a"], ["a"], ["a"]],
        [["a"], ["b"], []],
        [[], [], []],
        [["b"], ["a", "c"], names],
    ]
    found, made = [], []
    for step, owns in enumerate(cases):
        found.append(comm.any_of(owns[rank], names, step, step - 1))
        lane = comm.announce(Announcement((step, step - 1, 7, 0), lambda: [Told(["one line"], "")]))
        lane.all_gather(torch.tensor([float(rank)]), [1, 1, 1])
        made.append(lane.announcements)
    return found, made


def test_ranks_agree_on_what_any_of_them_has_and_where_one_has_all_nobody_else_is_waited_for() -> None:
    ranks = run(agreeing, 3)
    for found, made in ranks:
        assert found == [{"a", "b", "c"}, {"a", "b", "c"}, {"a"}, {"a", "b"}, set(), {"a", "b", "c"}]
        assert made == [1, 1, 2, 2, 2, 1]


def differs_beside(lacks: bool) -> str:
    """Rank 1 lacks something that rank 0 has and is about to reduce something else; or both lack something, at different steps."""
    comm, rank = GroupComm.private(timeout_s=120.0), dist.get_rank()
    step, own = (0, ["a", "b"][: 2 - rank]) if lacks else (3 + rank, ["a"])
    try:
        comm.any_of(own, ["a", "b"], step, -1)
        comm.announce(Announcement((step, -1, rank * lacks, 0), lambda: [Told([f"step {step}"], "do the same")]))
        comm.all_gather(torch.tensor([1.0]), [1, 1])
    except RuntimeError as error:
        return f"{error}; {comm.close_and_report(str(error) * rank)}"
    return "no error"


def test_ranks_that_lack_something_and_differ_say_so_and_the_others_hear_of_it() -> None:
    first, second = run(differs_beside, 2, lacks=True)
    told = "rank 1 of 2 differs from the other ranks in what it reduces; do the same"
    assert second.startswith(told) and f"rank 1 reports {told}" in first
    for each in run(differs_beside, 2, lacks=False):
        assert "rank 0 has step 3, rank 1 has step 4" in each
