"""A rank that joins gets the state while the others train, and all of it later where that goes wrong."""

import contextlib
import hashlib
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import LastStep, patient_run
from sparsync_elastic.board import TCPStore
from sparsync_elastic.catching_up import Serving, Sources
from sparsync_elastic.trained import Trained

EXCHANGES = {
    "steps": sparsync.Steps(),
    "local": sparsync.LocalSteps(every=3, outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9)),
    "gradients": sparsync.Gradients(),
}


@dataclass
class Told:
    """What a rank says of its training."""

    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of the common weights, by epoch and step
    ahead: list[int] = field(default_factory=list)  # bytes that came before a meeting, of each
    received: list[int] = field(default_factory=list)  # and at it
    size: int = 0


def spoil(what: str) -> None:
    """Have this process go wrong in what it does for, or as, one that joins."""
    if what in ("the source dies", "the source breaks off"):

        def send_moves(self: Serving, counts: Any) -> None:
            if what == "the source dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("broken off")

        Serving._send_moves = send_moves
    if what == "other weights":
        own, left = Trained.load, [1]

        def load(self: Trained, state: Any, late: bool, moved: Any = None) -> None:
            wrong = {"digest": -1} if left and left.pop() and state["digest"] is not None else {}
            own(self, {**state, **wrong}, late)

        Trained.load = load


def trained(port: int, exchange: str, first: int, wrong: str = "", background: bool = True) -> Told:
    """Train; the last rank joins when the others have taken 6 steps."""
    joins = dist.get_rank() == first
    dist.destroy_process_group()
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if joins:
        signals.wait(["six"])
    spoil(wrong)
    torch.manual_seed(0)
    run = patient_run(port, ranks=first, background=background)
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    scheme: Any = (
        sparsync.schemes.ExactMiCRO(density=0.2)
        if exchange == "gradients"
        else sparsync.schemes.TwoShot(density=0.2, values="sign")
    )
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=EXCHANGES[exchange])
    model.load_state_dict({name: each.sign() / 16 for name, each in model.state_dict().items()})  # as from a checkpoint
    run.add(model, handle, optimizer, schedule)
    told, last = Told(), LastStep(run, joins)
    for step in run.steps(cast("int", last)):
        with run.attempt():
            inputs = torch.randn(8, 200, generator=torch.Generator().manual_seed(100 * step + run.rank))
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :20].sin()).square().mean().backward()
            if exchange == "gradients":
                handle.reduce()
            optimizer.step()
            schedule.step()
            if exchange != "local" or handle.exchanged * 3 == run.step:
                told.digests[run.epoch.number, run.step] = digest_of(model, handle)
            if run.step == 6:
                signals.set("six", "")
            if run.step >= 6 and not last.is_known:
                time.sleep(0.1)  # until the one that joins is there
        told.ahead = [each.ahead_nbytes for each in run.changes]
        told.received = [each.received_nbytes for each in run.changes]
    told.size = run.size
    run.close()
    return told


def digest_of(model: nn.Module, handle: Any) -> str:
    shown = handle.averaged() if hasattr(handle, "averaged") else contextlib.nullcontext()
    with shown:
        content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(content).hexdigest()


def joined(exchange: str, first: int = 2, **more: Any) -> Told:
    """Return what the one that has joined says; all have had the same weights after the same step."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    doomed = range(first) if more.get("wrong") == "the source dies" else []
    found = run_on(trained, first + 1, doomed=doomed, port=store.port, exchange=exchange, first=first, **more)
    seen: dict[tuple[int, int], str] = {}
    stayed = [each for each in found if each is not None]
    for told in stayed:
        assert told.size == first + (not doomed)
        for place, digest in told.digests.items():
            assert seen.setdefault(place, digest) == digest, place
    return found[-1]


STATE = 4 * 3 * (200 * 300 + 300 * 20)  # bytes: weights and two moments


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["steps", "local"])
def test_one_that_joins_gets_nearly_all_while_the_others_train(exchange: str) -> None:
    told = joined(exchange)
    assert told.ahead[0] > STATE
    assert 0 < told.received[0] < STATE / 4


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "background"), [("steps", False), ("gradients", True)])
def test_it_gets_all_when_it_is_let_in_where_asked_for_and_with_gradients(exchange: str, background: bool) -> None:
    told = joined(exchange, background=background)
    assert told.ahead[0] == 0
    assert told.received[0] > STATE


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["the source dies", "the source breaks off", "other weights"])
def test_it_gets_all_when_it_is_let_in_where_that_goes_wrong(wrong: str) -> None:
    told = joined("steps", first=3 if wrong == "the source dies" else 2, wrong=wrong)
    assert told.received[0] > STATE


def several_join(port: int) -> tuple[int, int, int]:
    """Return how many the first rank served at once at most, the bytes that came ahead to this rank, and how many ranks there are."""
    number, ranks = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if number:
        signals.wait(["begun"])
    begins, send, begun, most = Serving._send, Serving._send_moves, list[Serving](), [0]

    def begin(self: Serving, states: list[dict[str, Any]], store: Any) -> None:
        begun.append(self)
        most.append(sum(each._thread.is_alive() for each in begun))
        begins(self, states, store)

    def send_moves(self: Serving, counts: Any) -> None:
        time.sleep(0.3)  # the others ask meanwhile
        send(self, counts)

    Serving._send, Serving._send_moves = begin, send_moves
    run = patient_run(port)
    torch.manual_seed(0)
    model = nn.Linear(200, 300)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run.add(model, sparsync.attach(model, sparsync.schemes.TwoShot(), optimizer=optimizer), optimizer)  # pyright: ignore[reportArgumentType]
    whole = list[int]()
    run.on_change = lambda of: whole.append(of.step) if of.size == ranks else None

    class Last:  # 20 steps after the last has joined
        def __gt__(self, step: int) -> bool:
            return not whole or step < whole[0] + 20

    for step in run.steps(cast("int", Last())):
        with run.attempt():
            optimizer.zero_grad()
            model(torch.randn(8, 200)).square().mean().backward()
            optimizer.step()
        if run.size < ranks:
            time.sleep(0.1)
        if step == 2:
            signals.set("begun", "")
    told = max(most), run.changes[0].ahead_nbytes, run.size
    run.close()
    return told


@pytest.mark.distributed
@pytest.mark.slow
def test_of_several_that_join_at_once_a_rank_serves_one_after_the_other() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, *others = run_on(several_join, 3, port=store.port)
    assert first == (1, 0, 3)
    assert all(size == 3 and ahead > 3 * 4 * 200 * 300 for _, ahead, size in others)


def comes_back(port: int) -> list[tuple[int, int]]:
    """Return the steps of the run and of its schedule after each step of a rank that is stopped after 10 steps.

    The other one has it go on after 20, and dies when it should send it the rest of the state.
    """
    number = dist.get_rank()
    dist.destroy_process_group()
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    run = patient_run(port, timeout_s=15.0, ranks=2)  # which the other one waits when this one is stopped
    torch.manual_seed(0)
    model = nn.Linear(20, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    handle = sparsync.attach(model, sparsync.schemes.TwoShot(density=0.2, values="sign"), optimizer=optimizer)
    run.add(model, handle, optimizer, schedule)
    if number == 0:
        first = Sources.state_for

        def state_for(self: Sources, receiver: str, is_ahead: bool) -> Any:
            if len(run.changes) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return first(self, receiver, is_ahead)

        Sources.state_for = state_for
    told = []
    for step in run.steps(20 if number else 10**6):
        with run.attempt():
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            schedule.step()
            told.append((run.step, schedule.last_epoch))
            if number == 1 and run.step == 10 and len(told) == 10:
                signals.set("stopped", str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if number == 0 and run.size == 1:
                time.sleep(0.1)
            if number == 0 and run.step == 25:
                os.kill(int(signals.get("stopped")), signal.SIGCONT)
    run.close()
    return told


@pytest.mark.distributed
@pytest.mark.slow
def test_one_that_comes_back_goes_on_from_where_it_was_if_the_others_die_before_it_has_all() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, told = run_on(comes_back, 2, doomed=[0], port=store.port)
    assert told == [(step, step) for step in range(1, 21)]
