"""Ranks that differ in what they reduce get an error, all of them, that names both: no wrong result, no wait, no abort."""

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, run
from helpers.known_gradients import row, schemes
from sparsync import (
    Bucket,
    Dense,
    ExDyna,
    GradientReducer,
    GroupComm,
    MiCRO,
    OkTopk,
    PowerSGD,
    SkipReduce,
    TopK,
    TwoShot,
)
from sparsync.base.scheme import Scheme
from sparsync.core import generator, laid_out
from sparsync.integrations.connection import Connection

pytestmark = pytest.mark.distributed

SCHEMES = (
    Dense,
    lambda: TopK(0.1),
    lambda: TwoShot(0.1),
    lambda: MiCRO(0.1),
    lambda: ExDyna(0.1),
    lambda: OkTopk(0.1),
    lambda: SkipReduce(1),
)


def model(*sizes: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = nn.Sequential(*(nn.Linear(size, size, bias=False, dtype=dtype) for size in sizes))
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    return layers


def error_of(reducer: GradientReducer, step: int | None = None) -> str:
    try:
        reducer.reduce(step)
    except sparsync.RanksDifferError as error:
        return str(error)
    return "no error"


def different_steps() -> list[str]:
    found = []
    for make in SCHEMES:
        reducer = GradientReducer(model(20, 20), make(), timeout_s=20)
        assert error_of(reducer) == "no error"
        found.append(error_of(reducer, step=5 + dist.get_rank()))
    return found


def test_ranks_at_different_steps_get_an_error_on_all_of_them_with_every_scheme() -> None:
    for found in run(different_steps, 2):
        assert all("rank 0 has step 5, rank 1 has step 6; all ranks must reduce" in each for each in found), found


def loaded_on_one() -> list[str]:
    found = []
    for make in SCHEMES:
        reducer = GradientReducer(model(20, 20), make(), timeout_s=20)
        reducer.reduce()
        state = reducer.state_dict()
        reducer.reduce()
        if dist.get_rank() == 0:
            reducer.load_state_dict(state)
        found.append(error_of(reducer))
    return found


def test_a_state_that_only_rank_0_has_loaded_is_an_error_on_all_ranks_with_every_scheme() -> None:
    for found in run(loaded_on_one, 2):
        assert all("rank 0 has step 1, rank 1 has step 2" in each for each in found), found


def changed_state() -> str:
    scheme = MiCRO.published(0.1)
    reducer = GradientReducer(model(20, 20), scheme, timeout_s=20)
    reducer.reduce()
    if dist.get_rank() == 1:
        scheme.load_state_dict({**scheme.state_dict(), "scaling": {}})
    return error_of(reducer)


def test_a_shared_state_that_differs_is_an_error_that_names_it() -> None:
    for found in run(changed_state, 2):
        assert "rank 0 has state of micro: scaling: ThresholdScaling(" in found
        assert "rank 1 has state of micro: scaling: None" in found


def every_scheme() -> list[str]:
    comm, found = GroupComm.private(timeout_s=20), []
    for name in schemes(comm.size):
        scheme = row(name).make()
        connection = Connection(scheme, comm)
        try:
            for step in range(3):
                grad = torch.randn(300, generator=generator(comm.rank, name, step))
                connection.reduce(Bucket("bucket", grad, step, laid_out([("a", (10, 20)), ("b", (100,))])), scheme)
        except RuntimeError as error:
            found.append(f"{name}: {error}")
    return found


def test_no_scheme_is_taken_for_one_that_differs_where_gradients_do() -> None:
    for found in run(every_scheme, 2):
        assert found == []


def threads() -> str:
    torch.set_num_threads(1 + dist.get_rank())
    reducer = GradientReducer(nn.Linear(4, 20_000), PowerSGD(), timeout_s=20)
    for _ in range(3):
        for parameter in reducer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        reducer.reduce()
    return "no error"


def test_ranks_with_different_numbers_of_threads_do_not_differ() -> None:
    assert run(threads, 2) == ["no error"] * 2


def different_models() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    named = model(20, 30)
    if rank == 1:
        named = nn.Sequential(named[1], named[0])  # pyright: ignore[reportIndexIssue]  # a Sequential
    for name, mine in {
        "another size": model(20, 30) if rank == 0 else model(20, 31),
        "longer": model(20, 30) if rank == 0 else model(20, 30, 10),
        "another order": named,
        "another type": model(20, dtype=torch.float32 if rank == 0 else torch.float64),
    }.items():
        for make in SCHEMES:
            with case(name):
                found[f"{name}, {make().name}"] = error_of(GradientReducer(mine, make(), timeout_s=5))
    return found


def test_different_models_are_an_error_that_names_the_first_parameter_that_differs() -> None:
    for found in run(different_models, 2):
        for name, error in found.items():
            wanted = {
                "another size": "1300 elements of torch.float32 in 2 parameters, rank 1 has bucket",
                "longer": "in 2 parameters, rank 1 has bucket 'float32/cpu'",
                "another order": "rank 0 has parameter '0.weight' of [20, 20], rank 1 has parameter '0.weight' of [30, 30]",
                "another type": "rank 0 has bucket 'float32/cpu'",
            }[name.split(", ")[0]]
            assert wanted in error, (name, error)


def wrong_lengths() -> list[str]:
    found = []
    for call in (
        lambda comm, x: comm.all_reduce(x[: 3 + comm.rank]),
        lambda comm, x: comm.all_gather(x[: 3 + comm.rank], [3 + comm.rank] * 2),
        lambda comm, x: comm.all_gather(x) if comm.rank else comm.all_reduce(x),
        lambda comm, x: comm.all_to_all(
            [x[:2], x[: 3 + comm.rank]] if comm.rank else [x[:2], x[:2]], [2, 3 + comm.rank] if comm.rank else [2, 3]
        ),
        lambda comm, x: comm.all_gather(x.double() if comm.rank else x, [9, 9]),
    ):
        comm = GroupComm.private(timeout_s=5)
        try:
            call(comm, torch.ones(9))
            found.append("no error")
        except sparsync.RanksDifferError as error:
            found.append(str(error))
    return found


def test_lengths_that_differ_between_the_ranks_are_an_error_before_anything_is_sent() -> None:
    for found in run(wrong_lengths, 2):
        assert "rank 0 has all_reduce of 3 elements of torch.float32, rank 1 has all_reduce of 4 elements" in found[0]
        assert "rank 0 has all_gather of [3, 3] elements" in found[1]
        assert "rank 0 has all_reduce of 9 elements of torch.float32, rank 1 has all_gather" in found[2]
        assert "rank 0 has lengths [2, 2] where [2, 3] are expected, rank 1 has lengths as expected" in found[3]
        assert "torch.float32, rank 1 has all_gather of [9, 9] elements of torch.float64" in found[4]


def wrong_neighbour() -> str:
    comm = GroupComm.private(timeout_s=5)
    try:
        comm.send_recv(torch.ones(3 + comm.rank), 1 - comm.rank, torch.ones(4), 1 - comm.rank)
    except ValueError as error:
        return str(error)
    except RuntimeError:
        return ""
    return "no error"


@pytest.mark.slow
def test_a_message_of_another_length_than_expected_is_an_error_and_never_ends_the_process() -> None:
    first, second = run(wrong_neighbour, 2)
    assert second.startswith("rank 1 expects 16 bytes from rank 0, which sends 12")
    assert first == ""


def opened(times: int, how: str) -> tuple[int, int]:
    """The open files of this process before and after attaching to so many models."""

    def attached() -> None:
        scheme: Scheme = TopK(0.1)
        if how == "ddp":
            ddp = DistributedDataParallel(model(8))
            handle = sparsync.attach(ddp, scheme)
            ddp(torch.ones(1, 8)).sum().backward()
            if times % 2:
                handle.close()
        elif how == "with":
            with GradientReducer(model(8), scheme) as reducer:
                reducer.reduce()
        else:
            sparsync.reduce_gradients(model(8), scheme)
        gc.collect()

    attached()
    dist.barrier()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(times):
        attached()
    dist.barrier()
    return before, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", *(pytest.param(how, marks=pytest.mark.slow) for how in ("with", "function"))])
def test_models_that_are_gone_leave_no_connections_behind(how: str) -> None:
    for before, after in run(opened, 2, times=6, how=how):
        assert after <= before + 2


@pytest.mark.slow
def test_500_models_leave_no_connections_behind() -> None:
    for before, after in run(opened, 2, within_s=300, times=500, how="ddp"):
        assert after <= before + 5


def closed_handle() -> str:
    ddp = DistributedDataParallel(model(8))
    with sparsync.attach(ddp, TopK(0.1)) as handle:
        ddp(torch.ones(1, 8)).sum().backward()
    assert len(handle.reports()) == 1
    handle.close()
    try:
        ddp(torch.ones(1, 8)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_closed_handle_says_so_and_keeps_its_reports() -> None:
    for found in run(closed_handle, 2):
        assert "this handle is closed; wrap the model again, and make a new one" in found
