"""Steps of AdamW between processes: the bits of a LocalWorld, also when resumed, failures and what is refused."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
from helpers.distributed import case, run
from sparsync import AdamWSteps, Bucket, Dense, LocalWorld, Report, TopK, TwoShot
from sparsync.base.scheme import Scheme
from sparsync.comm.lane import Lane
from sparsync.comm.local import LocalComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Comm
from sparsync.exchanges.block_ratios import MeanOfSketches

pytestmark = pytest.mark.distributed
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "sign": lambda: TwoShot(1.0, values="sign"),
    "topk": lambda: TopK(0.25),
    "dense": Dense,
}


def made(rank: int, scheme: Scheme, comm: Comm | None = None) -> AdamWSteps:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return AdamWSteps(model, optimizer, scheme, comm=comm, timeout_s=120.0, bucket_mb=2e-4, block=16, measure_every=3)


def fit(steps: AdamWSteps, span: range) -> list[Tensor]:
    """Train, and return own weights and buffers, then the common weights."""
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.optimizers[0].zero_grad()
        loss = steps.model(torch.randn(8, 6, generator=generator)).square().sum()
        (loss * (torch.nan if step == 10 and steps.place[0] == 1 else 1.0)).backward()
        steps.clip_grad_norm_(1.0)
        steps.step()
    own = [each.clone() for each in steps.model.state_dict().values()]
    with steps.averaged():
        return own + [each.detach().clone() for each in steps.model.parameters()]


def refused() -> None:
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"wrapped by DistributedDataParallel.*pass the bare module"):
        AdamWSteps(wrapped, torch.optim.AdamW(wrapped.parameters()), Dense())
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"ranks must agree.*keep=0\.0"):
        AdamWSteps(model, torch.optim.AdamW(model.parameters()), Dense(), keep=0.5 * dist.get_rank(), timeout_s=120.0)


def in_processes(folder: Path) -> dict[str, list[Tensor]]:
    """Train with all schemes, with each also through a checkpoint; then try what is refused."""
    found = {}
    for name, make in SCHEMES.items():
        with case(name):
            whole, before, after = (made(dist.get_rank(), make()) for _ in range(3))
            found[name] = fit(whole, range(13))
            fit(before, range(7))
            sparsync.checkpoint.save(before, folder / name)
            dist.barrier()
            sparsync.checkpoint.load(after, folder / name)
            assert all(map(torch.equal, fit(after, range(7, 13)), found[name]))
            assert all(report.sent == report.cost for report in whole.reports())
            assert whole.stats()["skipped"] == 1
    refused()
    return found


@pytest.mark.slow
def test_processes_give_the_bits_of_a_local_world_also_when_resumed(tmp_path: Path) -> None:
    ranks = run(in_processes, 2, folder=tmp_path)
    for name, make in SCHEMES.items():

        def body(comm: LocalComm, make: Callable[[], Scheme] = make) -> list[Tensor]:
            return fit(made(comm.rank, make(), comm), range(13))

        for ours, theirs in zip(ranks, LocalWorld(2).run(body), strict=True):
            assert all(map(torch.equal, ours[name], theirs)), name


class FailsAtStep3(TopK):
    """Rank 0 fails before its first message of the second bucket of step 3."""

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        if bucket.step == 3 and bucket.key.endswith("/1") and comm.rank == 0:
            raise MemoryError("no memory")
        return super().reduce(bucket, comm)


def failing() -> tuple[list[str], list[Tensor]]:
    steps, seen = made(dist.get_rank(), FailsAtStep3(0.25)), []
    for step in range(9):
        try:
            fit(steps, range(step, step + 1))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}")
            assert "no memory" in str(error)
    measured = [report.step for report in steps.reports() if report.key == "ratio"]
    assert measured == [0, 1, 2, 4, 5, 6, 7]  # in the failed step too, of which there are no reports
    return seen, fit(steps, range(0))


def test_when_a_step_fails_it_does_on_all_ranks_and_the_next_ones_agree_again() -> None:
    first, second = run(failing, 2)
    assert (first[0], second[0]) == (["3 MemoryError"], ["3 ConnectionLostError"])
    assert all(map(torch.equal, first[1][-6:], second[1][-6:]))


def apart() -> None:
    """Have an error on rank 0 while it applies the mean of the third of five steps."""

    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    rank = dist.get_rank()
    whole, steps, seen = made(rank, TopK(0.25)), made(rank, TopK(0.25)), []
    wanted = fit(whole, range(5))
    fit(steps, range(2))
    saved = deepcopy(steps.state_dict())
    for step in (2, 3) if rank == 0 else (2, 3, 4):
        if rank == 0 and step == 2:
            vars(steps)["_move"] = fail
        try:
            fit(steps, range(step, step + 1))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}: {error}")
        vars(steps).pop("_move", None)
    kinds = ["2 MemoryError", "3 RuntimeError"] if rank == 0 else ["3 ConnectionLostError", "4 RuntimeError"]
    assert [each.split(":")[0] for each in seen] == kinds
    assert "rank 0 has applied only a part of one" in seen[-1]
    if rank == 0:
        with pytest.raises(RuntimeError, match="applied in part on this rank"):
            steps.state_dict()
    steps.load_state_dict(saved)
    assert all(map(torch.equal, fit(steps, range(2, 5)), wanted))


def test_after_an_error_while_one_rank_applies_the_mean_all_raise_until_a_checkpoint_is_loaded() -> None:
    run(apart, 2)


def with_parameters_that_some_ranks_use() -> Tensor:
    """Train where some ranks lack gradients that others have, in steps that measure the ratio. Return the common weights."""
    rank, P = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = nn.ParameterList([nn.Parameter(torch.randn(50)) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    steps = AdamWSteps(model, optimizer, TwoShot(0.2), timeout_s=30.0, bucket_mb=3e-4, measure_every=1)
    for step in range(12):
        optimizer.zero_grad()
        used = [each for number, each in enumerate(model) if number != 1 or (step + rank) % P == 0]
        torch.cat([each * torch.randn(50) for each in used]).sum().backward()
        steps.step()
    with steps.averaged():
        return torch.cat([each.detach().clone() for each in model])


@pytest.mark.parametrize("P", [2, 3])
def test_steps_that_measure_the_ratio_where_some_ranks_do_not_use_a_parameter(P: int) -> None:
    first, *others = run(with_parameters_that_some_ranks_use, P, within_s=60)
    assert all(torch.equal(first, other) for other in others)


def with_a_measurement_that_comes_to_nothing(how: str) -> Tensor:
    """All is sent, so that a residual holds what was taken back of a step, and nothing else. Return it."""
    torch.manual_seed(3)
    model = nn.ParameterList([nn.Parameter(torch.randn(50)) for _ in range(4)])
    optimizer, scheme = torch.optim.AdamW(model.parameters()), TopK(1.0)
    steps = AdamWSteps(model, optimizer, scheme, timeout_s=30.0, bucket_mb=3e-4, measure_every=1)
    reduce, taken_back = MeanOfSketches.reduce, torch.empty(0)

    def fails(self: MeanOfSketches, bucket: Bucket, comm: Comm) -> Report:
        report = reduce(self, bucket, comm)
        if bucket.step == 2:
            if how == "fails":
                assert isinstance(comm, MeteredComm) and isinstance(comm.inner, Lane)
                with comm.inner._waits():  # lets the steps be reduced
                    time.sleep(0.5)
                raise ValueError("no luck today")
            bucket.grad.fill_(torch.inf if how == "overflows" else 1e30)  # of which the square overflows
        return report

    MeanOfSketches.reduce = fails  # pyright: ignore[reportAttributeAccessIssue]
    for step in range(4):
        optimizer.zero_grad()
        torch.cat([each * torch.randn(50) for each in model]).sum().backward()
        with pytest.raises(ValueError, match="no luck") if (step, how) == (2, "fails") else nullcontext():
            steps.step()
        held = torch.cat(list(scheme.feedback.by_name.values()))
        assert bool(held.any()) == (step == 2)
        taken_back = held.clone() if step == 2 else taken_back
    return taken_back


@pytest.mark.filterwarnings("ignore:.*skipped")
def test_what_was_sent_of_steps_beside_a_measurement_that_comes_to_nothing_is_in_the_residual_again() -> None:
    found = [
        run(with_a_measurement_that_comes_to_nothing, 2, how=how, within_s=60)
        for how in ("fails", "overflows", "squares")
    ]
    assert all(torch.equal(each, found[0][0]) for ranks in found for each in ranks)
