"""Steps of a run in which a rank was lost: they leave nothing behind where they are taken again, and nothing is sent twice."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
import sparsync_elastic as elastic
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import digest_of, network, patient_run
from sparsync.comm.group import ConnectionLostError
from sparsync_elastic.board import TCPStore

EXCHANGES = {"steps": sparsync.Steps(), "gradients": sparsync.Gradients()}


def retaken(port: int, fails: bool) -> tuple[str, list[int]]:
    """Return a digest of the weights after steps with a loss scaler, of which one `fails` at first, and the numbers of the steps."""
    dist.destroy_process_group()
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
    numbers.append(next(run.steps(5)))  # more steps of a run that had ended: it goes on
    assert not run._members._read(run._members._key("ended"))
    run.close()
    return found, numbers


@pytest.mark.slow
@pytest.mark.distributed
def test_a_step_that_is_taken_again_gives_the_same_weights() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ((weights, numbers),) = run_on(retaken, 1, port=store.port, fails=False)
    ((again, retried),) = run_on(retaken, 1, port=store.port, fails=True)
    assert (numbers, retried) == ([0, 1, 2, 3, 4], [0, 1, 2, 2, 3, 4])
    assert weights == again


def taken_back(port: int, exchange: str, wrapped: bool) -> tuple[dict[str, torch.Tensor], ...]:
    """Return what is held back before a step, and after it has failed when its buckets were reduced: what a meeting then finds."""
    dist.destroy_process_group()
    run = elastic.Run(f"127.0.0.1:{port}", name=f"{exchange}-{wrapped}")
    bare = network()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    model = nn.parallel.DistributedDataParallel(bare) if wrapped else bare
    scheme = sparsync.schemes.TopK(density=0.2)
    options = sparsync.Options(dense_below=0) if wrapped and exchange == "gradients" else sparsync.Options()
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=EXCHANGES[exchange], options=options)
    run.add(model, handle, optimizer)
    found: list[dict[str, torch.Tensor]] = []
    run.on_change = lambda _: found.append(handle.state.state_dict()["residual"])
    whole, numbers = scheme.reduce, list[int]()

    def fails(state: sparsync.schemes.State, bucket: sparsync.Bucket, comm: sparsync.Comm) -> Any:
        whole(state, bucket, comm)
        found.append(handle.state.state_dict()["residual"])
        raise ConnectionLostError("a rank is gone")

    for step in run.steps(6):
        numbers.append(step)
        with run.attempt():
            if numbers.count(3) == 1:
                found.append(handle.state.state_dict()["residual"])
            vars(scheme).update({"reduce": fails} if numbers.count(3) == 1 else {"reduce": whole})
            optimizer.zero_grad()
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
            (model(inputs) - inputs[:, :5].sin()).square().mean().backward()
            if exchange == "gradients" and not wrapped:
                handle.reduce()
            optimizer.step()
    assert (numbers, run.lost) == ([0, 1, 2, 3, 3, 4, 5], [])
    run.close()
    return tuple(found)


@pytest.mark.distributed
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("exchange", ["steps", "gradients"])
def test_a_step_that_failed_when_its_buckets_were_reduced_leaves_nothing_behind(exchange: str, wrapped: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ((begun, before, failed, after),) = run_on(taken_back, 1, port=store.port, exchange=exchange, wrapped=wrapped)
    assert not any(each.any() for each in begun.values()) and any(each.any() for each in before.values())
    assert any(not torch.equal(before[name], failed[name]) for name in before)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def applied_by_another(port: int, exchange: str) -> list[dict[str, torch.Tensor]]:
    """Return what rank 0 holds back after the buckets of a step, which it then fails and the other applies, and after the meeting."""
    number = dist.get_rank()
    dist.destroy_process_group()
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    run = patient_run(port, ranks=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheme = sparsync.schemes.TopK(density=0.2)
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=EXCHANGES[exchange])
    run.add(model, handle, optimizer)
    found: list[dict[str, torch.Tensor]] = []
    run.on_change = lambda of: found.append(handle.state.state_dict()["residual"]) if of.epoch.number == 2 else None
    whole = scheme.reduce

    def fails(state: sparsync.schemes.State, bucket: sparsync.Bucket, comm: sparsync.Comm) -> Any:
        whole(state, bucket, comm)
        found.append(handle.state.state_dict()["residual"])
        signals.wait(["applied"])
        raise ConnectionLostError("a rank is gone")

    for step in run.steps(14):
        with run.attempt():
            vars(scheme)["reduce"] = fails if step == 10 and number == 0 and run.epoch.number == 1 else whole
            optimizer.zero_grad()
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(10 * step + number))
            (model(inputs) - inputs[:, :5].sin()).square().mean().backward()
            if exchange == "gradients":
                handle.reduce()
            optimizer.step()
            if step == 10 and number == 1:
                signals.set("applied", "")
    run.close()
    return found


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("exchange", ["steps", "gradients"])
def test_what_a_rank_sent_in_a_step_that_others_applied_is_not_sent_again(exchange: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (failed, after), (_,) = run_on(applied_by_another, 2, port=store.port, exchange=exchange)
    assert any(each.any() for each in failed.values())
    assert failed.keys() == after.keys() and all(torch.equal(failed[name], after[name]) for name in failed)
