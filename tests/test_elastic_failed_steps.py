"""Failed steps of a run: nothing of them remains if they are taken again, and nothing is sent twice."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import sparsync
import sparsync_elastic as elastic
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import Training, assert_equal, digest_of, network, patient_run, served, signals_at
from sparsync.comm.group import ConnectionLostError


def retaken(port: int, fails: bool) -> tuple[str, list[int]]:
    """Take steps with a loss scaler, of which one `fails` at first; return a digest of the weights and the numbers of the steps."""
    run = elastic.Run(f"127.0.0.1:{port}", name=f"fails-{fails}")
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    handle: Any = sparsync.attach(model, sparsync.schemes.TwoShot(density=0.2), optimizer=optimizer, scaler=scaler)
    run.add(model, handle, optimizer)
    reached = handle._connection.any_of
    numbers = []

    def lost(*_: object) -> set[str]:
        handle._connection.any_of = reached
        raise ConnectionLostError("a rank is gone")

    for step in run.steps(4):
        numbers.append(step)
        if fails and step == 2 and numbers.count(2) == 1:
            handle._connection.any_of = lost
        with run.attempt():
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    found = digest_of(model, handle)
    assert run._members._read(run._members._key("ended"))
    numbers.append(next(run.steps(5)))  # a run that had ended continues
    assert not run._members._read(run._members._key("ended"))
    run.close()
    return found, numbers


Reduce = Callable[[sparsync.schemes.State, sparsync.Bucket, sparsync.Comm], Any]


def failing(training: Training, found: list[dict[str, Tensor]], then: Callable[[], object] = lambda: None) -> Reduce:
    """Return a reduction that notes what is held back after it, and fails."""
    whole = training.scheme.reduce

    def fails(state: sparsync.schemes.State, bucket: sparsync.Bucket, comm: sparsync.Comm) -> Any:
        whole(state, bucket, comm)
        found.append(training.residual)
        then()
        raise ConnectionLostError("a rank is gone")

    return fails


def taken_back(port: int, exchange: str, wrapped: bool) -> None:
    """Have a step fail after its buckets were reduced: what is held back is then as before it."""
    run = elastic.Run(f"127.0.0.1:{port}", name=f"{exchange}-{wrapped}")
    options: dict[str, Any] = {"dense_below": 0} if wrapped and exchange == "gradients" else {}
    # A constant rate, because residuals of gradients are scaled to the rate.
    training = Training(run, exchange, wrapped, sparsync.schemes.TopK(density=0.2), decay=1.0, **options)
    found: list[dict[str, Tensor]] = []
    run.on_change = lambda _: found.append(training.residual)
    whole, fails, numbers = training.scheme.reduce, failing(training, found), list[int]()
    for step in run.steps(6):
        numbers.append(step)
        with run.attempt():
            if numbers.count(3) == 1:
                found.append(training.residual)
            vars(training.scheme)["reduce"] = fails if numbers.count(3) == 1 else whole
            training.step(step)
    assert (numbers, run.lost) == ([0, 1, 2, 3, 3, 4, 5], [])
    run.close()
    begun, before, failed, after = found
    assert not any(each.any() for each in begun.values())
    assert any(not torch.equal(before[name], failed[name]) for name in before)
    assert_equal(before, after)


def alone(port: int) -> None:
    dist.destroy_process_group()
    (weights, numbers), (again, retried) = (retaken(port, fails) for fails in (False, True))
    assert (numbers, retried) == ([0, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4])
    assert weights == again
    for exchange in ("steps", "gradients"):
        for wrapped in (False, True):
            taken_back(port, exchange, wrapped)


@pytest.mark.distributed
def test_a_step_that_failed_leaves_nothing_behind_and_gives_the_same_weights_when_it_is_taken_again() -> None:
    store = served()
    run_on(alone, 1, port=store.port)


def applied_by_another(port: int, exchange: str) -> list[dict[str, Tensor]]:
    """Return what rank 0 holds back after the buckets of a step, which it then fails and the other applies, and after the meeting."""
    number, signals, run = dist.get_rank(), signals_at(port), patient_run(port, ranks=2)
    training = Training(run, exchange, scheme=sparsync.schemes.TopK(density=0.2), decay=1.0)
    found: list[dict[str, Tensor]] = []
    run.on_change = lambda of: found.append(training.residual) if of.epoch.number == 2 else None
    whole, fails = training.scheme.reduce, failing(training, found, lambda: signals.wait(["applied"]))
    for step in run.steps(14):
        with run.attempt():
            is_failed = step == 10 and number == 0 and run.epoch.number == 1
            vars(training.scheme)["reduce"] = fails if is_failed else whole
            training.step(10 * step + number)
            if step == 10 and number == 1:
                signals.set("applied", "")
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["steps", "gradients"])
def test_what_a_rank_sent_in_a_step_that_others_applied_is_not_sent_again(exchange: str) -> None:
    store = served()
    (failed, after), (_,) = run_on(applied_by_another, 2, port=store.port, exchange=exchange)
    assert_equal(failed, after)
