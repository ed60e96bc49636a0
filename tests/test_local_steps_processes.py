"""Local steps between processes: the bits of a LocalWorld, exchanges in the background, failures and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import sparsync
from helpers.distributed import case, run
from sparsync import Bucket, Dense, LocalSteps, LocalWorld, OuterSGD, Report, TopK
from sparsync.comm.local import LocalComm
from sparsync.core import Comm

pytestmark = pytest.mark.distributed
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "delayed": {"fragments": 2, "delay": 3},
    "at every step": {"fragments": 4, "delay": 4, "mixing": 0.5, "outer": OuterSGD(), "buffers": "mean"},
}


def made(rank: int, settings: dict[str, Any], comm: Comm | None = None) -> LocalSteps:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return LocalSteps(model, optimizer, TopK(0.25), every=4, comm=comm, timeout_s=20.0, **settings)


def fit(steps: LocalSteps, span: range) -> list[Tensor]:
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.model(torch.randn(8, 6, generator=generator)).square().sum().backward()
        steps.optimizers[0].step()
        steps.optimizers[0].zero_grad()
        steps.step()
    return [each.clone() for each in steps.model.state_dict().values()]


def in_processes(folder: Path) -> dict[str, list[Tensor]]:
    """Train with all settings; with each also through a checkpoint, with exchanges on their way."""
    found = {}
    for name, settings in SETTINGS.items():
        with case(name):
            rank = dist.get_rank()
            whole, before, after = (made(rank, settings) for _ in range(3))
            found[name] = fit(whole, range(13))
            fit(before, range(7))
            sparsync.checkpoint.save(before, folder / name)
            dist.barrier()
            sparsync.checkpoint.load(after, folder / name)
            assert all(map(torch.equal, fit(after, range(7, 13)), found[name]))
            states = sparsync.checkpoint.gathered(whole)
            assert (states is None) == (rank > 0)
            assert all(report.sent == report.cost for report in whole.reports())
            before.exchange()
            whole.exchange()
    return found


def test_processes_and_exchanges_in_the_background_give_the_bits_of_a_local_world_also_when_resumed(
    tmp_path: Path,
) -> None:
    ranks = run(in_processes, 2, folder=tmp_path)
    for name, settings in SETTINGS.items():

        def body(comm: LocalComm, settings: dict[str, Any] = settings) -> list[Tensor]:
            return fit(made(comm.rank, settings, comm), range(13))

        for ours, theirs in zip(ranks, LocalWorld(2).run(body), strict=True):
            assert all(map(torch.equal, ours[name], theirs)), name


class FailsOnce(TopK):
    """One rank fails before its first message of the second bucket of the second exchange."""

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        if bucket.step == 1 and bucket.key.endswith("/1") and comm.rank == 0 and not _FAILED:
            _FAILED.append(True)
            raise MemoryError("no memory")
        return super().reduce(bucket, comm)


_FAILED: list[bool] = []


def failing(delay: int) -> list[str]:
    """Four exchanges of two buckets, of which one fails; check that what all have learnt is in the common weights or in a residual."""
    model = nn.ParameterDict({"a": torch.zeros(8), "b": torch.zeros(8)})
    scheme, rank, seen = FailsOnce(0.25), dist.get_rank(), []
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    steps = LocalSteps(model, optimizer, scheme, every=2, keep=0.0, delay=delay, bucket_mb=32 / 2**20, timeout_s=20.0)
    learnt = torch.zeros(16)
    for step in range(8):
        for each in model.values():
            each.grad = 8.0 * torch.arange(8) * (rank + 1) + step
        optimizer.step()
        learnt += torch.cat([each.grad for each in model.values() if each.grad is not None])
        try:
            steps.step()
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}")
            assert "no memory" in str(error)
    steps.exchange()
    with steps.averaged():
        common = torch.cat([each.detach().clone() for each in model.values()])
    total = learnt - torch.cat([scheme.state_dict()["residual"][name] for name in "ab"])
    dist.all_reduce(total)
    assert torch.equal(total, -2 * common)
    assert steps.stats()["exchanges"] == 4
    return seen


@pytest.mark.parametrize(
    ("delay", "step", "kinds"), [(0, 3, ("MemoryError", "ConnectionLostError")), (1, 4, ("RuntimeError",) * 2)]
)
def test_when_an_exchange_fails_it_does_on_all_ranks_and_the_next_one_makes_good_for_it(
    delay: int, step: int, kinds: tuple[str, str]
) -> None:
    assert run(failing, 2, delay=delay) == [[f"{step} {kind}"] for kind in kinds]


def refusals() -> None:
    def make(model: nn.Module, scheme: Any = None, **settings: Any) -> LocalSteps:
        optimizer = settings.pop("optimizer", None) or torch.optim.SGD(nn.Linear(2, 2).parameters(), 1.0)
        return LocalSteps(model, optimizer, scheme or Dense(), timeout_s=20.0, **{"every": 4, **settings})

    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    cases: list[tuple[Any, str]] = [
        (wrapped, "DistributedDataParallel"),
        (nn.Sequential(wrapped), "DistributedDataParallel"),
        (fully_shard(nn.Linear(2, 2)), "FSDPLinear"),
    ]
    for model, kind in cases:
        with pytest.raises(TypeError, match=f"wrapped by {kind}.*pass the bare module"):
            make(model)
    with pytest.raises(TypeError, match="scheme must be an instance"):
        make(nn.Linear(2, 2), "topk")
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer"):
        make(nn.Linear(2, 2), optimizer="adam")
    with pytest.raises(TypeError, match="it made a int"):
        make(nn.Linear(2, 2), outer=len)
    with pytest.raises(ValueError, match="buffers must be one of broadcast, mean, own"):
        make(nn.Linear(2, 2), buffers="sum")
    with pytest.raises(RuntimeError, match=r"ranks must agree.*keep=0\.0"):
        make(nn.Linear(2, 2), keep=0.5 * dist.get_rank())
    with pytest.raises(RuntimeError, match=r"ranks must agree.*layout"):
        make(nn.Linear(2, 2 + dist.get_rank()))


def test_what_cannot_be_trained_by_local_steps_is_refused_on_all_ranks() -> None:
    run(refusals, 2)


def uneven() -> str:
    model = nn.Linear(2, 2)
    steps = LocalSteps(model, torch.optim.SGD(model.parameters(), 1.0), Dense(), every=1, timeout_s=2.0)
    try:
        for _ in range(2 + dist.get_rank()):
            steps.step()
    except RuntimeError as error:
        return str(error)
    dist.get_world_size()
    return ""


def test_a_rank_whose_exchange_the_others_do_not_join_gets_an_error_and_does_not_hang() -> None:
    first, second = run(uneven, 2, within_s=30)
    assert first == ""
    assert "rank 1 of 2" in second
