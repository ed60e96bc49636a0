"""The training of several ranks in one process: what dense gives is plain training, and what is counted is what schemes say they send."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from helpers.third_party import LineFit
from sparsync import Report
from sparsync.core import Bucket, Comm
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import Dense, State, TopK
from sparsync_lab.workloads.one_process import train_locally, train_with_scheme

STEPS = 6
# Of local steps on 4 ranks: 9 elements, and 4 numbers of 8 bytes to agree on the exchange.
EXCHANGE = 2 * 3 / 4 * 4 * 9 + 4 * 24


def plain(steps: int = STEPS) -> float:
    """The quality of one process with the whole batch."""
    workload = LineFit()
    model = workload.model(0)
    optimizer, schedule = workload.optimizer(model, steps)
    for step in range(steps):
        model.zero_grad()
        workload.loss(model, workload.batch(0, step, 0, 1)).backward()
        optimizer.step()
        schedule.step()
    return workload.quality(*workload.evaluate(model, 0, 1))


def averaging(every: int) -> Callable[[nn.Module, Optimizer, Comm], LocalTraining]:
    def make(model: nn.Module, optimizer: Optimizer, comm: Comm) -> LocalTraining:
        return LocalTraining(model, optimizer, Dense(), every=every, keep=0.0, clip_factor=2.0, comm=comm)

    return make


@pytest.mark.parametrize("ranks", [1, 4])
def test_dense_in_one_process_is_training_with_the_whole_batch(ranks: int) -> None:
    trained = train_with_scheme(LineFit(), Dense, 0, STEPS, ranks, {2, STEPS})
    assert [step for step, _ in trained.quality] == [2, STEPS]
    assert trained.quality[-1][1] == pytest.approx(plain(), rel=1e-4)
    assert trained.nbytes == pytest.approx(2 * (ranks - 1) / ranks * 4 * 9)
    assert (trained.rounds, trained.union) == (2 * min(1, ranks - 1), 1.0)


def test_what_a_sparse_scheme_sends_is_counted_as_it_reports_it() -> None:
    trained = train_with_scheme(LineFit(), lambda: TopK(density=0.2), 0, STEPS, 4, {STEPS})
    reports: list[Report] = []

    class ReportsKept(TopK):
        def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
            reports.append(super().reduce(state, bucket, comm))
            return reports[-1]

    train_with_scheme(LineFit(), lambda: ReportsKept(density=0.2), 0, STEPS, 4, {STEPS})
    assert len(reports) == STEPS * 4
    assert trained.nbytes == sum(report.cost.nbytes for report in reports) / len(reports)
    assert trained.union == pytest.approx(sum(report.union for report in reports) / len(reports) / 9)


def test_local_steps_are_evaluated_at_the_common_weights_and_cost_what_their_exchanges_cost() -> None:
    trained = train_locally(LineFit(), averaging(2), 0, 7, 4, {6, 7})
    (_, after_exchange), (_, later) = trained.quality
    assert later == after_exchange
    assert trained.nbytes == pytest.approx(3 / 7 * EXCHANGE)
    finished = train_locally(LineFit(), averaging(2), 0, 7, 4, {6, 7}, exchange_last=True)
    assert finished.quality[0] == trained.quality[0]
    assert finished.quality[1] != trained.quality[1]
    assert finished.nbytes == pytest.approx(4 / 7 * EXCHANGE)


@pytest.mark.parametrize("device", ["cpu", "cpu-bfloat16"])
def test_only_training_passes_are_in_bfloat16(device: str) -> None:
    seen: set[tuple[bool, torch.dtype]] = set()

    class Seen(LineFit):
        def model(self, seed: int) -> nn.Module:
            model = super().model(seed)
            model.register_forward_hook(lambda *about: seen.add((torch.is_grad_enabled(), about[2].dtype)))
            return model

    train_with_scheme(Seen(), Dense, 0, 1, 2, {1}, device=device)
    train_locally(Seen(), averaging(1), 0, 1, 2, {1}, device=device)
    assert seen == {(True, torch.float32 if device == "cpu" else torch.bfloat16), (False, torch.float32)}


class ClipFactors(LineFit):
    """A job that AdamW trains, and that keeps the factors of its clips."""

    def __init__(self) -> None:
        super().__init__()
        self.factors: list[float] = []

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        return adamw, torch.optim.lr_scheduler.ConstantLR(adamw)

    def clip(self, model: nn.Module, factor: float = 1.0) -> None:
        self.factors.append(factor)


class LongerSteps(AdamWSteps):
    @property
    def clip_factor(self) -> float:
        return 2.0


def test_a_rank_clips_its_own_gradient_at_the_factor_of_local_steps_and_steps_have_divided_theirs() -> None:
    job = ClipFactors()
    train_locally(job, averaging(2), 0, 2, 2, {2})
    assert job.factors == [2.0] * 4
    for train in (
        lambda job: train_with_scheme(job, Dense, 0, 2, 1, {2}),
        lambda job: train_locally(
            job, lambda model, adamw, comm: LongerSteps(model, adamw, Dense(), comm=comm), 0, 1, 2, {1}
        ),
    ):
        job = ClipFactors()
        train(job)
        assert job.factors == [1.0, 1.0]


def test_residuals_follow_the_rate_where_the_scheme_wants_it() -> None:
    seen: list[float] = []

    class Rescaled(TopK):
        def rescaled(self, state: State, factors: object) -> None:
            assert isinstance(factors, dict)
            seen.extend(factors.values())

    class Halving(LineFit):
        def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, torch.optim.lr_scheduler.LRScheduler]:
            optimizer, _ = super().optimizer(model, steps)
            return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    class FollowsRates(Rescaled):
        @property
        def follows_rate(self) -> bool:
            return True

    train_with_scheme(Halving(), lambda: Rescaled(0.2), 0, 2, 1, {2})
    assert seen == []
    train_with_scheme(Halving(), lambda: FollowsRates(0.2), 0, 2, 1, {2})
    assert seen == [2.0, 2.0]
