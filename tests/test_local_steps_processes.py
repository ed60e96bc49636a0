"""Local steps between processes: the bits of a LocalWorld, exchanges in the background, failures and what is refused."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
from helpers.distributed import HANG_S, case, run
from sparsync import Bucket, OuterSGD, Report
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import Dense, State, TopK
from test_local_steps import adam, fit

pytestmark = pytest.mark.distributed
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"every": 4},
    "delayed": {"every": 4, "fragments": 2, "delay": 3},
    "at every step": {"every": 4, "fragments": 4, "delay": 4, "mixing": 0.5, "outer": OuterSGD()},
}


def in_processes(folder: Path) -> dict[str, list[Tensor]]:
    """Train with all settings; with each also through a checkpoint, with exchanges on their way."""
    found = {}
    for name, settings in SETTINGS.items():
        with case(name):
            rank = dist.get_rank()
            whole, before, after = (adam(rank, **settings) for _ in range(3))
            found[name] = fit(whole, range(13))
            fit(before, range(7))
            sparsync.checkpoint.save(before, folder / name)
            dist.barrier()
            sparsync.checkpoint.load(after, folder / name)
            assert all(map(torch.equal, fit(after, range(7, 13)), found[name]))
            states = sparsync.checkpoint.gathered(whole)
            assert (states is None) == (rank > 0)
            assert all(report.sent == report.cost for report in whole.reports())
            before.flush()
            whole.flush()
    return found


@pytest.mark.slow
def test_processes_and_exchanges_in_the_background_give_the_bits_of_a_local_world_also_when_resumed(
    tmp_path: Path,
) -> None:
    ranks = run(in_processes, 2, folder=tmp_path)
    for name, settings in SETTINGS.items():

        def body(comm: LocalComm, settings: dict[str, Any] = settings) -> list[Tensor]:
            return fit(adam(comm.rank, comm, **settings), range(13))

        for ours, theirs in zip(ranks, LocalWorld(2).run(body), strict=True):
            assert all(map(torch.equal, ours[name], theirs)), name


class FailsAtSecondExchange(TopK):
    """One rank fails before its first message of the second bucket of the second exchange."""

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if bucket.step == 1 and bucket.key.endswith("/1") and comm.rank == 0 and not _FAILED:
            _FAILED.append(True)
            raise MemoryError("no memory")
        return super().reduce(state, bucket, comm)


_FAILED: list[bool] = []


@contextmanager
def without_memory(owner: object, name: str, where: bool = True) -> Iterator[None]:
    """A method that raises, where `where`."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    if where:
        setattr(owner, name, fail)
    try:
        yield
    finally:
        if where:
            delattr(owner, name)


def failing(delay: int, before: bool) -> list[str]:
    """Four exchanges of two buckets, of which one fails; check that what all have learnt is in the common weights or in a residual.

    It fails on rank 0, `before` it has sent anything or after the first bucket.
    """
    model = nn.ParameterDict({"a": torch.zeros(8), "b": torch.zeros(8)})
    scheme, rank, seen = TopK(0.25) if before else FailsAtSecondExchange(0.25), dist.get_rank(), []
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    steps = LocalTraining(
        model, optimizer, scheme, every=2, keep=0.0, delay=delay, bucket_mb=32 / 2**20, timeout_s=120.0
    )
    learnt = torch.zeros(16)
    for step in range(8):
        for each in model.values():
            each.grad = 8.0 * torch.arange(8) * (rank + 1) + step
        optimizer.step()
        learnt += torch.cat([each.grad for each in model.values() if each.grad is not None])
        try:
            with without_memory(steps._weights.fragments[0][1], "own", where=before and rank == 0 and step == 3):
                steps.step()
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}")
            assert "no memory" in str(error)
    steps.flush()
    with steps.averaged():
        common = torch.cat([each.detach().clone() for each in model.values()])
    total = learnt - torch.cat([steps.state.state_dict()["residual"][name] for name in "ab"])
    dist.all_reduce(total)
    assert torch.equal(total, -2 * common)
    assert steps.stats()["exchanges"] == 4
    _FAILED.clear()  # for the next test in this process
    return seen


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("delay", "step", "kinds"), [(0, 3, ("MemoryError", "ConnectionLostError")), (1, 4, ("RuntimeError",) * 2)]
)
def test_when_an_exchange_fails_it_does_on_all_ranks_and_the_next_one_makes_good_for_it(
    delay: int, step: int, kinds: tuple[str, str], before: bool
) -> None:
    assert run(failing, 2, delay=delay, before=before) == [[f"{step} {kind}"] for kind in kinds]


def raised(steps: LocalTraining, step: int) -> str:
    try:
        fit(steps, range(step, step + 1))
    except (MemoryError, RuntimeError) as error:
        return f"{step} {type(error).__name__}: {error}"
    return ""


def apart(name: str) -> None:
    """Have an error on rank 0 only, in the third of five exchanges: after it was reduced, or while it is applied."""
    rank = dist.get_rank()
    whole, steps = (adam(rank, every=1) for _ in range(2))
    wanted = fit(whole, range(5))
    fit(steps, range(2))
    saved = deepcopy(steps.state_dict())
    with without_memory(steps._exchanger, name, where=rank == 0):
        seen = [raised(steps, 2)]
    # The error is all that rank 0 sees of the third exchange, and rank 1 sees none of it.
    seen += [raised(steps, step) for step in ((3,) if rank == 0 else (3, 4))]
    assert [each.split(":")[0] for each in seen] == (
        ["2 MemoryError", "3 RuntimeError"] if rank == 0 else ["", "3 ConnectionLostError", "4 RuntimeError"]
    )
    assert "load a checkpoint on all ranks, handle and model, or start again" in seen[-1]
    if name == "apply_to_common" and rank == 0:
        with pytest.raises(RuntimeError, match="half applied on this rank"):
            steps.state_dict()
    steps.load_state_dict(saved)
    assert all(map(torch.equal, fit(steps, range(2, 5)), wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["apply_to_common", "held"])
def test_after_an_error_on_one_rank_in_what_all_have_exchanged_all_raise_until_a_checkpoint_is_loaded(
    name: str,
) -> None:
    run(apart, 2, name=name)


def pending_failure() -> None:
    rank = dist.get_rank()
    whole, steps, other = (adam(rank, every=2, delay=1) for _ in range(3))
    wanted = fit(whole, range(7))
    fit(steps, range(3))
    saved = deepcopy(steps.state_dict())
    with without_memory(steps._weights.fragments[0][0], "own", where=rank == 0):
        fit(steps, range(3, 4))
    other.load_state_dict(steps.state_dict())  # without the exchange that failed
    assert not other._exchanger.pending
    steps.load_state_dict(saved)
    assert all(map(torch.equal, fit(steps, range(3, 7)), wanted))
    fit(steps, range(7, 8))
    steps.close()
    assert steps.state_dict()["step"] == 7
    assert "closed" in raised(steps, 8) + raised(steps, 9) + raised(steps, 10)


def test_a_failed_exchange_on_its_way_keeps_nobody_from_loading_or_saving_nor_does_closing() -> None:
    run(pending_failure, 2)


WAITING = """
import threading
import torch
import torch.distributed as dist
from torch import nn
from sparsync.schemes import Dense
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.comm import worker

class Waits(Dense):
    def reduce(self, state, bucket, comm):
        print("waits", flush=True)
        threading.Event().wait()

worker.EXIT_S = 0.1
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 1.0)
steps = LocalTraining(model, optimizer, Waits(), every=1, delay=1)
model(torch.ones(1, 4)).sum().backward()  # what has changed on no rank is not exchanged
optimizer.step()
steps.step()
"""


@pytest.mark.slow
def test_a_process_ends_while_an_exchange_is_on_its_way() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "waits\n", done.stderr


def uneven() -> str:
    model = nn.Linear(2, 2)
    steps = LocalTraining(model, torch.optim.SGD(model.parameters(), 1.0), Dense(), every=1, timeout_s=5.0)
    try:
        for _ in range(2 + dist.get_rank()):
            steps.step()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_a_rank_whose_exchange_the_others_do_not_join_gets_an_error_and_does_not_hang() -> None:
    first, second = run(uneven, 2)
    assert first == ""
    assert "rank 1 of 2" in second
