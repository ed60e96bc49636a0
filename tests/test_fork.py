"""A process that forks while it trains: the child may collect, close or call anything, and the parent's connections stay."""

import gc
import multiprocessing
import os
import signal
import time
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import sparsync
from helpers import distributed
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.handle import Handle

ENDS_S = 60.0  # in which a child ends that does not hang

Step = Callable[[], object]


class Collecting(Dataset[int]):
    """Data whose worker collects garbage, and says how many of `watched` are left then."""

    def __init__(self, watched: list[weakref.ref[object]]) -> None:
        self.watched = watched

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        gc.collect()
        return sum(each() is not None for each in self.watched)


def under_ddp() -> tuple[Handle, Step]:
    model = DistributedDataParallel(nn.Linear(4, 2))
    handle = sparsync.attach(model, sparsync.schemes.TopK(0.5))
    return handle, lambda: model(torch.ones(1, 4)).sum().backward()


def by_local_steps() -> tuple[Handle, Step]:
    """Make local steps whose exchange is on its way, on another thread, between two steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handle = LocalTraining(model, optimizer, sparsync.schemes.TopK(0.5), every=1, delay=1)

    def step() -> object:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return handle.step()

    return handle, step


def workers_collect_handles() -> tuple[set[int], int]:
    """Train beside workers that collect two handles in cycles; return how many each worker saw left, and the steps that were made."""
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]  # it has children
    gc.disable()
    watched: list[weakref.ref[object]] = []
    for make in (under_ddp, by_local_steps):
        handle, step = make()
        step()
        cycle: list[object] = [handle, step]
        cycle.append(cycle)
        watched.append(weakref.ref(handle))
        del handle, step, cycle
    kept = [make() for make in (under_ddp, by_local_steps)]
    seen: set[int] = set()
    for _ in range(2):
        for left in DataLoader(Collecting(watched), num_workers=2, multiprocessing_context="fork"):
            seen.add(int(left))
            for _, step in kept:
                step()
    assert all(each() is not None for each in watched)
    gc.enable()
    gc.collect()
    assert all(each() is None for each in watched)
    for _, step in kept:
        step()
    return seen, len(kept[0][0].reports())


@pytest.mark.slow
@pytest.mark.distributed
def test_workers_that_collect_a_handle_leave_the_training_as_it_is() -> None:
    assert distributed.run_fresh(workers_collect_handles, 2, within_s=180.0) == [({0}, 9)] * 2


def ended(child: int) -> int:
    """Return the status of a child; ends one that hangs."""
    deadline = time.monotonic() + ENDS_S
    while time.monotonic() < deadline:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def said_in_a_child(calls: dict[str, Step], at_the_end: Callable[[], object]) -> dict[str, str]:
    """Return what each call said in a forked child: its error, or "done"."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            for name, call in calls.items():
                try:
                    call()
                    said = "done"
                except Exception as error:
                    said = f"{type(error).__name__}: {error}"
                os.write(writer, f"{name}: {said}\n".encode())
            at_the_end()
        finally:
            os._exit(1)
    os.close(writer)
    assert ended(child) == 0
    with os.fdopen(reader) as lines:
        return dict(line.rstrip("\n").split(": ", 1) for line in lines)


def children_call_handles() -> list[str]:
    """Call everything that waits in a forked child, and go on; return what the child said."""
    found: list[str] = []
    for make in (under_ddp, by_local_steps):
        handle, step = make()
        step()
        bare = nn.Linear(2, 2)
        bare(torch.ones(1, 2)).sum().backward()
        reducer = sparsync.GradientReducer(bare, sparsync.schemes.TopK(0.5))
        comm = sparsync.comm.GroupComm.private(None)
        calls: dict[str, Step] = {
            "state_dict": handle.state_dict,
            "reduce": reducer.reduce,
            "all_reduce": lambda comm=comm: comm.all_reduce(torch.ones(1)),
            "reports": handle.reports,
            "close": handle.close,
        }
        if make is by_local_steps:
            calls = {"step": step} | calls

        def collect(kept: list[object] = [handle, step, reducer, comm]) -> None:  # noqa: B006  # the only references
            kept.clear()
            gc.collect()
            os._exit(0)

        said = said_in_a_child(calls, collect)
        found += [f"{name}: {said[name].partition(',')[0].rstrip('0123456789')}" for name in calls]
        step()
        assert comm.all_reduce(torch.ones(1)).item() == dist.get_world_size()
        handle.close()
    return found


@pytest.mark.distributed
def test_a_handle_in_a_forked_child_raises_what_it_is_and_the_parent_goes_on() -> None:
    forked, plain = "RuntimeError: this is process ", "done"
    calls = [f"{name}: {forked}" for name in ("reduce", "all_reduce")]
    rest = [f"{name}: {plain}" for name in ("reports", "close")]
    assert (
        distributed.run_fresh(children_call_handles, 2, within_s=180.0)
        == [[f"state_dict: {plain}", *calls, *rest, f"step: {forked}", f"state_dict: {forked}", *calls, *rest]] * 2
    )
