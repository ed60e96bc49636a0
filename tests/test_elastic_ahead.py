"""A rank that joins gets the state while the others train, or all of it at the meeting if that goes wrong."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch import nn

import sparsync
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import LastStep, Training, assert_same_weights, patient_run, served, signals_at
from sparsync_elastic import catching_up
from sparsync_elastic.catching_up import Serving, Sources
from sparsync_elastic.trained import Trained

STATE = 4 * 3 * (200 * 300 + 300 * 20)  # bytes: weights and two moments


@dataclass
class Told:
    """What a rank tells of its training."""

    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of the common weights, by epoch and step
    ahead: int = 0  # bytes that came before its first meeting
    received: int = 0  # and at it
    size: int = 0


def spoil(what: str) -> None:
    """Have this process go wrong as a source, or as a rank that joins."""
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
    joins, signals = dist.get_rank() == first, signals_at(port)
    if joins:
        signals.wait(["six"])
    spoil(wrong)
    run = patient_run(port, ranks=first, background=background)
    bare = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 20))
    scheme = sparsync.schemes.ExactMiCRO(density=0.2) if exchange == "gradients" else None
    training = Training(run, exchange, scheme=scheme, bare=bare)
    bare.load_state_dict({name: each.sign() / 16 for name, each in bare.state_dict().items()})  # as from a checkpoint
    told, last = Told(), LastStep(run, joins)
    for step in run.steps(cast("int", last)):
        with run.attempt():
            training.step(100 * step + run.rank)
            if training.is_common:
                told.digests[run.epoch.number, run.step] = training.digest()
            if run.step == 6:
                signals.set("six", "")
            if run.step >= 6 and not last.is_known:
                time.sleep(0.1)  # until the one that joins is there
    told.ahead, told.received, told.size = run.changes[0].ahead_nbytes, run.changes[0].received_nbytes, run.size
    run.close()
    return told


CASES = {
    "steps": ("steps", "", True),
    "local steps": ("local", "", True),
    "not in the background": ("steps", "", False),
    "gradients": ("gradients", "", True),
    "the source dies": ("steps", "the source dies", True),
    "the source breaks off": ("steps", "the source breaks off", True),
    "other weights": ("steps", "other weights", True),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_joins_gets_nearly_all_while_the_others_train_and_else_all_when_it_joins(case: str) -> None:
    (exchange, wrong, background), store = CASES[case], served()
    first = 3 if wrong == "the source dies" else 2
    doomed = range(first) if wrong == "the source dies" else []
    given = {"exchange": exchange, "first": first, "wrong": wrong, "background": background}
    found = [each for each in run_on(trained, first + 1, doomed=doomed, port=store.port, **given) if each is not None]
    assert {told.size for told in found} == {first + (not doomed)}
    assert_same_weights([told.digests for told in found])
    joined = found[-1]
    if wrong or not background or exchange == "gradients":
        assert joined.received > STATE and (wrong or joined.ahead == 0)
    else:
        assert joined.ahead > STATE and 0 < joined.received < STATE / 4


def test_a_source_serves_ranks_that_join_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {each: threading.Event() for each in "xy"}

    def serving(_: object, member: str, *__: object) -> SimpleNamespace:
        thread = threading.Thread(target=ends[member].wait)
        thread.start()
        return SimpleNamespace(thread=thread)

    monkeypatch.setattr(catching_up, "Serving", serving)
    answered: list[tuple[str, bool]] = []
    members: Any = SimpleNamespace(fetching=["x", "y"], current=SimpleNamespace(number=1), timeout_s=1.0)
    members.answer = lambda member, serves: answered.append((member, serves)) or object()
    sources = Sources(members, ())
    for each in "xy":
        for _ in range(2):
            sources.answer(willing=True)
        assert answered[-1] == (each, True) and len(answered) == "xy".index(each) + 1
        ends[each].set()
        sources._servings[each].thread.join()


def comes_back(port: int) -> str:
    """Return the error of a rank that is stopped after 10 steps, and whose source dies before it has the whole state."""
    number = dist.get_rank()
    signals, run = signals_at(port), patient_run(port, timeout_s=15.0, wait_s=20.0, ranks=2)
    training = Training(run)
    if number == 0:
        first = Sources.state_for

        def state_for(self: Sources, receiver: str, is_ahead: bool) -> Any:
            if len(run.changes) > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return first(self, receiver, is_ahead)

        Sources.state_for = state_for
    taken = 0
    try:
        for step in run.steps(10**6):
            with run.attempt():
                training.step(step)
                taken += 1
                if number == 1 and taken == 10:
                    signals.set("stopped", str(os.getpid()))
                    os.kill(os.getpid(), signal.SIGSTOP)
                if number == 0 and run.size == 1:
                    time.sleep(0.1)
                if number == 0 and run.step == 25:
                    os.kill(int(signals.get("stopped")), signal.SIGCONT)
    except RuntimeError as error:
        return f"after {taken} steps: {error}"
    return "nothing"


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_with_half_of_a_state_does_not_continue_if_its_source_dies() -> None:
    store = served()
    _, error = run_on(comes_back, 2, doomed=[0], port=store.port)
    assert error.startswith("after 10 steps: no rank that has the weights of step ")
    assert error.endswith(" has come within 20 s; start from a checkpoint")
