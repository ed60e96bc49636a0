"""Schemes with a momentum of their own in the lab: each trains every job with the optimizer that it was made for."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from helpers.third_party import LineFit
from sparsync import Scheme
from sparsync.schemes import Dense, TopK
from sparsync.schemes.per_parameter import PerParameter
from sparsync_lab.rivals.demo import DeMo
from sparsync_lab.rivals.dgc import DGC
from sparsync_lab.rivals.laprop import LaProp
from sparsync_lab.rivals.onebit_adam import OneBitAdam
from sparsync_lab.workloads.one_process import train_with_scheme
from sparsync_lab.workloads.own_momentum import PlainSGD, made_for, optimizer_for


def job(kind: type[Optimizer], **settings: Any) -> LineFit:  # Any: of the optimizer
    """A job that this optimizer trains, at a rate that falls."""

    class OptimizedFit(LineFit):
        def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
            made: Optimizer = kind(model.parameters(), **settings)
            return made, ExponentialLR(made, 0.9)

    return OptimizedFit()


def trained(workload: LineFit, make: Callable[[], Scheme], ranks: int = 2) -> float:
    return train_with_scheme(workload, make, 0, 8, ranks, {8}).quality[-1][1]


@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_one_bit_adam_in_its_warm_up_trains_as_the_jobs_adamw(decay: float) -> None:
    workload = job(AdamW, lr=0.05, weight_decay=decay)
    assert trained(workload, lambda: OneBitAdam(warmup_steps=8)) == pytest.approx(trained(workload, Dense), rel=1e-4)
    assert trained(workload, Dense) != pytest.approx(LineFit().quality(*LineFit().evaluate(LineFit().model(0), 0, 1)))


def test_dgc_that_sends_everything_trains_as_the_jobs_sgd_with_momentum() -> None:
    workload = job(SGD, lr=0.02, momentum=0.9)
    everything = trained(workload, lambda: DGC(1.0, momentum=0.9, masking=False))
    # The momentum is multiplied by the rate of the step that applies it, as by SGD.
    assert everything == pytest.approx(trained(workload, Dense), rel=1e-4)


def test_each_rank_clips_its_own_gradient_to_the_root_of_their_number_and_nothing_clips_the_step() -> None:
    factors: list[float] = []

    class Clipped(LineFit):
        def clip(self, model: nn.Module, factor: float = 1.0) -> None:
            factors.append(factor)

    train_with_scheme(Clipped(), OneBitAdam, 0, 2, 4, {2})
    assert factors == [2.0] * 4 * 2
    factors.clear()
    train_with_scheme(Clipped(), lambda: TopK(0.5), 0, 2, 4, {2})
    assert factors == [1.0] * 2


@pytest.mark.parametrize(
    ("optimizer", "settings", "scheme", "told"),
    [
        (AdamW, {"lr": 0.1}, OneBitAdam(), "SGD"),
        (AdamW, {"lr": 0.1}, DeMo(), "SGD"),
        (AdamW, {"lr": 0.1}, DeMo(sign=False), "SGD, 100 x the rate"),
        (AdamW, {"lr": 0.1}, DGC(), "SGD, 100 x the rate"),
        (AdamW, {"lr": 0.1}, TopK(), "AdamW"),
        (AdamW, {"lr": 0.1}, DGC(momentum=0.0), "AdamW"),
        (AdamW, {"lr": 0.1}, PerParameter(DeMo(), {"bias": Dense()}), "SGD"),
        (SGD, {"lr": 0.1, "momentum": 0.9}, DGC(), "SGD"),
        (SGD, {"lr": 0.1, "momentum": 0.9}, OneBitAdam(), "SGD, 0.01 x the rate"),
    ],
)
def test_a_scheme_gets_the_optimizer_it_was_made_for_and_a_rate_of_its_kind(
    optimizer: type[Optimizer], settings: dict[str, Any], scheme: Scheme, told: str
) -> None:
    assert made_for(scheme, job(optimizer, **settings)) == told


@pytest.mark.parametrize(
    ("optimizer", "decayed"),
    [
        (lambda parameters: AdamW(parameters, lr=0.5, weight_decay=0.25), 1 - 0.5 * 0.25),
        (lambda parameters: Adam(parameters, lr=0.5), 1.0),
        # A constant pull of SGD with momentum 0.5 acts twice.
        (lambda parameters: SGD(parameters, lr=0.5, weight_decay=0.25, momentum=0.5), 1 - 0.5 * 0.25 * 2),
    ],
)
def test_weights_decay_as_much_as_by_the_jobs_optimizer_whatever_the_factor(optimizer: Any, decayed: float) -> None:
    weight, still = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    plain = PlainSGD(optimizer([weight, still]), factor=4.0)
    weight.grad = torch.tensor([0.0, 0.125])
    plain.step()
    assert weight.tolist() == [decayed, decayed - 4.0 * 0.5 * 0.125]
    assert still.item() == 1.0  # without a gradient, as by torch's


def test_the_momentum_of_demo_follows_the_rate_as_its_authors_do_and_that_of_others_does_not() -> None:
    followed: list[float] = []

    class Followed(DeMo):
        def rescaled(self, state: object, factors: Mapping[str, float]) -> None:
            followed.extend(factors.values())

    class Left(DGC):
        def rescaled(self, state: object, factors: Mapping[str, float]) -> None:
            raise AssertionError(factors)

    workload = job(SGD, lr=0.5)
    train_with_scheme(workload, Followed, 0, 2, 1, {2})
    assert followed == [pytest.approx(1 / 0.9)] * 2  # weight and bias
    train_with_scheme(workload, Left, 0, 2, 1, {2})


@pytest.mark.parametrize("scheme", [DGC(density=0.5), LaProp()])
def test_the_jobs_schedule_sets_the_rate_after_a_state_was_loaded_too(scheme: Scheme) -> None:
    workload = job(AdamW, lr=0.5)
    first, _ = optimizer_for(scheme, workload, nn.Linear(2, 1), 8)
    second, schedule = optimizer_for(scheme, workload, nn.Linear(2, 1), 8)
    first.param_groups[0]["lr"] = 4.0
    second.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == 4.0
    second.step()
    schedule.step()
    assert second.param_groups[0]["lr"] == 3.6
