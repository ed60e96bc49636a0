"""Steps of AdamW between processes: the bits of a LocalWorld, also when resumed, failures and what is refused."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
from helpers.distributed import case, run
from helpers.sketches import too_long_to_measure
from sparsync import AdamWSteps, Report
from sparsync.base.scheme import Scheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Comm
from sparsync.exchanges.measured import MeanOfSketches
from sparsync.schemes import Dense, TopK, TwoShot

pytestmark = pytest.mark.distributed
BLOCK = 16
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "sign": lambda: TwoShot(1.0, values="sign"),
    "topk": lambda: TopK(0.25),
    "dense": Dense,
}


def made(rank: int, scheme: Scheme, comm: Comm | None = None) -> AdamWSteps:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    return AdamWSteps(
        model, optimizer, scheme, comm=comm, timeout_s=120.0, bucket_mb=2e-4, block=BLOCK, measure_every=3
    )


def fit(steps: AdamWSteps, span: range) -> list[Tensor]:
    """Train, and return own weights and buffers, then the common weights.

    The ratio is measured at steps 0 to 7, 9 and 12. Skipped are step 5, whose sketch overflows, and 9 and 10, in which rank 1 has NaN.
    """
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.optimizers[0].zero_grad()
        loss = steps.model(torch.randn(8, 6, generator=generator)).square().sum()
        (loss * (torch.nan if step in (9, 10) and steps.place[0] == 1 else 1.0)).backward()
        steps.clip_grad_norm_(1.0)
        if step == 5:
            gradient = next(steps.model.parameters()).grad
            assert gradient is not None
            gradient.zero_().view(-1)[:BLOCK].copy_(too_long_to_measure(step, BLOCK))
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
            reports = whole.reports()
            assert all(report.sent == report.cost for report in reports)
            assert [report.step for report in reports if report.key == "ratio"] == [*range(8), 9, 12]
            skipped = {(report.step, report.key == "ratio") for report in reports if report.details["overflow"]}
            assert skipped == {(5, True), (9, True), (9, False), (10, False)}
            assert whole.stats()["skipped"] == 3
    refused()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("P", [2, 3])
def test_processes_give_the_bits_of_a_local_world_also_when_resumed(P: int, tmp_path: Path) -> None:
    """In processes the sketch of the ratio travels beside the steps, in a LocalWorld before them."""
    ranks = run(in_processes, P, folder=tmp_path)
    for name, make in SCHEMES.items():

        def body(comm: LocalComm, make: Callable[[], Scheme] = make) -> list[Tensor]:
            return fit(made(comm.rank, make(), comm), range(13))

        for ours, theirs in zip(ranks, LocalWorld(P).run(body), strict=True):
            assert all(map(torch.equal, ours[name], theirs)), name


def fails_at_step_3(kind: type[Scheme] | type[MeanOfSketches], key: str) -> None:
    """Have rank 0 fail, from here on in this process, before its first message of the bucket whose key ends with `key`."""
    reduce = kind.reduce

    def failing(self: Any, *given: Any) -> Report:  # Any: of either kind; the first of them also gets a state
        bucket, comm = given[-2:]
        if bucket.step == 3 and bucket.key.endswith(key) and comm.rank == 0:
            raise MemoryError("no memory")
        return reduce(self, *given)

    kind.reduce = failing  # pyright: ignore[reportAttributeAccessIssue]  # of both kinds


def failing(sketch: bool) -> tuple[list[str], list[Tensor]]:
    fails_at_step_3(*((MeanOfSketches, "ratio") if sketch else (TopK, "/1")))
    steps, seen = made(dist.get_rank(), TopK(0.25)), []
    for step in range(9):
        try:
            fit(steps, range(step, step + 1))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}")
            assert "no memory" in str(error)
    measured = [report.step for report in steps.reports() if report.key == "ratio"]
    assert measured == [0, 1, 2, 4, 5, 6, 7]  # in the failed step too, of which there are no reports
    return seen, fit(steps, range(0))


@pytest.mark.parametrize(
    "sketch", [pytest.param(False, id="bucket", marks=pytest.mark.slow), pytest.param(True, id="sketch")]
)
def test_when_a_step_fails_it_does_on_all_ranks_and_the_next_ones_agree_again(sketch: bool) -> None:
    first, second = run(failing, 2, sketch=sketch, fresh=True)
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
            vars(steps._sender)["move"] = fail
        try:
            fit(steps, range(step, step + 1))
        except (MemoryError, RuntimeError) as error:
            seen.append(f"{step} {type(error).__name__}: {error}")
        vars(steps._sender).pop("move", None)
    kinds = ["2 MemoryError", "3 RuntimeError"] if rank == 0 else ["3 ConnectionLostError", "4 RuntimeError"]
    assert [each.split(":")[0] for each in seen] == kinds
    assert "rank 0 has applied only a part of one" in seen[-1]
    if rank == 0:
        with pytest.raises(RuntimeError, match="half applied on this rank"):
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
        torch.stack([(each * torch.randn(50)).sum() for each in used]).sum().backward()
        steps.step()
    with steps.averaged():
        return torch.cat([each.detach().clone() for each in model])


@pytest.mark.parametrize("P", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_steps_that_measure_the_ratio_where_some_ranks_do_not_use_a_parameter(P: int) -> None:
    first, *others = run(with_parameters_that_some_ranks_use, P, within_s=60)
    assert all(torch.equal(first, other) for other in others)
