"""The state of attach: residuals through new buckets, restarts and learning rates; reports; and its thread."""

import gc
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.ddp_training import COUNT, NAMES, TIMEOUT_S, AttachedTraining, N, known, total
from helpers.distributed import case, run
from helpers.known_gradients import KnownGradients, row
from sparsync import Report
from sparsync.comm import LocalWorld
from sparsync.runtime import summary
from sparsync.runtime.comparison import Comparison
from sparsync.runtime.handle import Handle
from sparsync.runtime.rescaling import ResidualRescaler
from sparsync.schemes import TopK
from sparsync.testing.world import same_bits

pytestmark = pytest.mark.distributed


# DDP keeps the same buckets from the first step on, also after a restart.
STABLE: dict[str, Any] = {"find_unused_parameters": True}
# Powers of two, for two groups of parameters.
RATES = [(1.0, 0.5), (0.5, 0.5), (0.25, 0.5), (0.25, 2.0), (8.0, 1.0), (4.0, 1.0)]


def rated(rates: list[tuple[float, float]], first: int, state: dict[str, Any] | None) -> tuple[Tensor, Handle]:
    """The gradients of as many steps, from step `first` on, with residuals that follow the learning rate."""
    model = KnownGradients(COUNT, N)
    ddp = DistributedDataParallel(model, bucket_cap_mb=4 * N * 4 / 2**20, **STABLE)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[::2]}, {"params": parameters[1::2]}], lr=1.0)
    handle = sparsync.attach(
        ddp,
        row("topk-0.1").make(),
        optimizer=optimizer,
        options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0, dense_below=0),
    )
    if state is not None:
        handle.load_state_dict(state)
    rows = []
    for number, pair in enumerate(rates):
        for group, rate in zip(optimizer.param_groups, pair, strict=True):
            group["lr"] = rate
        ddp.zero_grad()
        ddp(model.inputs(dist.get_rank(), first + number)).backward()
        rows.append(model.gradients().clone())
    return torch.stack(rows), handle


def train_with_rates() -> tuple[Tensor, dict[str, Tensor]]:
    whole, handle = rated(RATES, 0, None)
    first, stopped = rated(RATES[:3], 0, None)
    rest, resumed = rated(RATES[3:], 3, stopped.state_dict())
    residual = handle.state_dict()["scheme"]["residual"]
    assert same_bits(torch.cat([first, rest]), whole)
    assert all(same_bits(resumed.state_dict()["scheme"]["residual"][name], residual[name]) for name in NAMES)
    return whole, residual


def test_with_an_optimizer_every_gradient_is_applied_at_its_own_learning_rate_and_none_is_lost() -> None:
    """Sum over steps of rate * gradient == sum over steps of rate * 2 * written + rate * residual, exactly."""
    ranks = run(train_with_rates, 2)
    for number, name in enumerate(NAMES):
        with case(name):
            rates = [pair[number % 2] for pair in RATES]
            came_in = total(rate * known(r, step, name) for step, rate in enumerate(rates) for r in (0, 1))
            written = total(
                rate * 2 * grads.view(COUNT, N)[number] for rate, grads in zip(rates, ranks[0][0], strict=True)
            )
            assert torch.equal(written + rates[-1] * (ranks[0][1][name] + ranks[1][1][name]), came_in)


def test_residuals_follow_the_rate_until_it_is_a_tenth_of_the_highest_so_far() -> None:
    """Down to the tenth rate * residual stays the same; below, the residual does. Rates are such that quotients are exact."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    rates = ResidualRescaler({id(parameter): "weight"}, optimizer)

    def factors(*rates_of_steps: float) -> list[float]:
        found = []
        for rate in rates_of_steps:
            optimizer.param_groups[0]["lr"] = rate
            found.append(rates.factors().get("weight", 1.0))
        return found

    assert factors(1.0, 2.0, 1.0, 0.0, 0.25) == [1.0, 0.5, 2.0, 1.0, 4.0]
    assert factors(0.1, 1e-9, 0.0, 1e-12) == [0.25 / 0.2, 1.0, 1.0, 1.0]  # the tenth is 0.2
    assert factors(0.4) == [0.5]
    assert factors(8.0, 1.0, 0.5) == [0.05, 8.0, 1.0 / 0.8]  # a higher rate lifts the tenth
    resumed = ResidualRescaler({id(parameter): "weight"}, optimizer)
    compared = Comparison([], {}, None, every=0)
    LocalWorld(1).run(
        lambda comm: Handle(TopK(), comm, resumed, compared).load_state_dict(
            Handle(TopK(), comm, rates, compared).state_dict()
        )
    )
    rates = resumed
    assert factors(0.1, 0.8, 1.6) == [1.0, 1.0, 0.5]


def train_and_report() -> tuple[list[Report], list[Report], list[Report], list[Report]]:
    summary.MAX_REPORTS = 12
    training = AttachedTraining("skip-default", buckets=8)
    training.step()
    training.step()
    first = training.handle.reports()
    taken = training.handle.take_reports()
    nothing = training.handle.take_reports()
    for _ in range(3):
        training.step()
    return first, taken, nothing, training.handle.reports()


def test_there_is_one_report_for_each_bucket_and_step_and_their_number_is_bounded() -> None:
    for first, taken, nothing, last in run(train_and_report, 2, fresh=True):
        assert [(report.step, report.key) for report in first] == [
            (0, "bucket0"),
            *((1, f"bucket{number}") for number in range(8)),
        ]
        assert taken == first
        assert nothing == []
        assert [(report.step, report.key) for report in last] == [
            *((3, f"bucket{number}") for number in range(4, 8)),
            *((4, f"bucket{number}") for number in range(8)),
        ]
        for report in first + last:
            assert report.scheme == "skip_reduce"
            assert report.elements == COUNT * N // (8 if report.step else 1)
            assert report.sent == report.cost
            assert report.cost.nbytes > 0
            assert report.seconds is not None and report.wait_s is not None
            assert report.seconds >= report.wait_s > 0


def attach_and_drop() -> None:
    training = AttachedTraining("dense")
    training.step()
    assert "sparsync-worker" in [thread.name for thread in threading.enumerate()]
    del training
    gc.collect()
    deadline = time.monotonic() + TIMEOUT_S
    while "sparsync-worker" in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline, "the thread outlives its model"
        time.sleep(0.01)


def test_the_thread_ends_with_the_model() -> None:
    run(attach_and_drop, 1)
