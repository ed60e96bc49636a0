"""Runs that continue while ranks die, freeze, leave and join: replicas stay the same, and nothing is lost unsaid."""

import contextlib
import os
import pickle
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
import sparsync_elastic as elastic
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import (
    LastStep,
    Training,
    assert_equal,
    assert_same_weights,
    network,
    patient_run,
    served,
    signals_at,
)
from sparsync.exchanges.local_steps import LocalTraining
from sparsync_elastic.__main__ import main
from sparsync_elastic.epochs import Factors
from sparsync_elastic.trained import Trained
from sparsync_elastic.world import receive, send


@dataclass
class Told:
    """What a rank tells of its training."""

    steps: int = 0
    left: bool = False
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of the common weights, by epoch and step
    sizes: list[int] = field(default_factory=list)
    lost: list[elastic.Lost] = field(default_factory=list)
    rate: float = 0.0


def trained(port: int, exchange: str, wrapped: bool) -> Told:
    """Train 3 ranks; rank 1 dies in step 6, rank 2 leaves after step 9, and rank 3 joins when the others have done 12."""
    number, bare, signals = dist.get_rank(), network(), signals_at(port)
    if number == 3:
        signals.wait(["twelve", "left"])
    run = patient_run(port, ranks=3)
    scheme = sparsync.schemes.ExactMiCRO(density=0.2) if exchange == "gradients" else None
    training = Training(run, exchange, wrapped, scheme, bare)

    def dies() -> None:
        if step == 6 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    told, last = Told(), LastStep(run, number == 3)
    for step in run.steps(cast("int", last)):
        with run.attempt():
            training.step(100 * step + run.rank, dies)
            if step == 9 and number == 2:
                run.leave()
            if training.is_common:
                told.digests[run.epoch.number, run.step] = training.digest()
            told.sizes.append(run.size)
            if run.step == 12:
                signals.set("twelve", "")
            if run.step >= 9 and not last.is_known:
                time.sleep(0.05)  # until the one that joins is there
    told.steps, told.left, told.lost, told.rate = (
        run.step,
        run.left,
        run.lost,
        float(training.schedule.get_last_lr()[0]),
    )
    if told.left:
        signals.set("left", "")
    run.close()
    return told


CASES = [(exchange, wrapped) for exchange in ("steps", "local", "gradients") for wrapped in (False, True)]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("exchange", "wrapped"),
    [pytest.param(*case, marks=[] if case == ("steps", True) else pytest.mark.slow) for case in CASES],
)
def test_a_rank_dies_one_leaves_and_one_joins(exchange: str, wrapped: bool) -> None:
    store = served()
    first, _, left, joined = run_on(trained, 4, doomed=[1], port=store.port, exchange=exchange, wrapped=wrapped)
    assert_same_weights([each.digests for each in (first, left, joined)])
    assert [each.left for each in (first, left, joined)] == [False, True, False]
    assert (first.steps, first.rate, first.sizes[-1]) == (joined.steps, joined.rate, joined.sizes[-1])
    assert {2, 3} <= set(first.sizes) and (left.sizes[-1], joined.sizes[-1]) == (2, 2)
    assert [each.what for each in first.lost][:1] == ["what this rank had not sent, unless it comes back"]
    assert joined.lost == []


def mass(port: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return what this rank holds back before and after another one has left."""
    number, bare, run = dist.get_rank(), network(), patient_run(port, ranks=3)
    training = Training(run, scheme=sparsync.schemes.TwoShot(density=0.1, values="int4"), bare=bare)
    before, after = {}, {}
    run.on_change = lambda of: after.update(training.residual) if of.epoch.leaving else None
    for step in run.steps(60):  # more than it takes to leave even if others hear late of it
        with run.attempt():
            training.step(100 * step + run.rank)
            if step == 4 and number == 0:
                run.leave()
            if run.size == 3:
                time.sleep(0.02)
                before = training.residual
    run.close()
    return before, after


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_leaving_rank_has_not_sent_is_handed_over_for_the_mean_over_those_that_stay() -> None:
    store = served()
    (gone, nothing), *stayed = run_on(mass, 3, port=store.port)
    assert nothing == {}
    share, heirs = 2 / 3, list[bool]()
    for before, after in stayed:
        heirs.append(not all(torch.equal(after[name], share * before[name]) for name in gone))
        handed = gone if heirs[-1] else dict.fromkeys(gone, 0.0)
        assert all(torch.equal(after[name], share * (before[name] + handed[name])) for name in gone)
    assert sorted(heirs) == [False, True]


class Fault(NamedTuple):
    """What a rank tells of a run in which the last rank has a fault."""

    member: str
    error: str
    steps: int
    size: int


def fault(port: int, what: str) -> Fault:
    """Train 3 ranks; from step 2 on, while all are there, the last one is too slow, or calls another collective."""
    number, signals, run = dist.get_rank(), signals_at(port), patient_run(port, timeout_s=12.0, ranks=3)
    training = Training(run, "gradients", wrapped=what == "slow", scheme=sparsync.schemes.TopK(0.2))

    def errs() -> None:
        if step >= 2 and number == 2 and run.size == 3:
            time.sleep(15.0) if what == "slow" else dist.barrier()

    error = ""
    try:
        for step in run.steps(24):
            if run.size == 1:
                time.sleep(1.0)  # the others ask to join again
            with run.attempt():
                errs()
                training.step(step)
    except RuntimeError as raised:
        error = str(raised)
    told = Fault(run.member, error, run.step, run.size)
    signals.add("done", 1)
    while signals.add("done", 0) < 3:
        time.sleep(0.05)
    with contextlib.suppress(RuntimeError):
        run.close()
    return told


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("what", ["barrier", "slow"])
def test_a_rank_that_is_too_slow_or_errs_is_told_why_and_the_others_continue(what: str) -> None:
    store = served()
    *others, out = run_on(fault, 3, port=store.port, what=what)
    assert [(each.error, each.steps, each.size) for each in others] == [("", 24, 2)] * 2
    assert out.error.startswith(f"this rank, {out.member}, is left out of the run: ")
    assert f"the others waited for {out.member} (" in out.error


def learnt(seed: int, comm: sparsync.Comm) -> tuple[LocalTraining, list[Tensor], list[Tensor]]:
    """Return local steps after one that has learnt, the weights before it, and what it has learnt."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    local = LocalTraining(model, optimizer, sparsync.schemes.Dense(), every=4, comm=comm)
    start = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        local._before_optimizer()
        for each in model.parameters():
            each.sub_(0.25)
    local.step()
    return local, start, [each.detach() - before for each, before in zip(model.parameters(), start, strict=True)]


def test_what_a_late_rank_has_learnt_by_local_steps_waits_for_the_next_exchange() -> None:
    ((ahead, _, _),) = sparsync.comm.LocalWorld(1).run(lambda comm: learnt(0, comm))
    ((late, _, own),) = sparsync.comm.LocalWorld(1).run(lambda comm: learnt(1, comm))
    ahead.flush()
    common = [each.detach().clone() for each in ahead.model.parameters()]
    late.restore(ahead.snapshot()._replace(own=None))
    due = [a + b for a, b in zip(common, own, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(late.model.parameters(), due, strict=True))
    late.flush()
    with late.averaged():
        assert all(torch.equal(a, b) for a, b in zip(late.model.parameters(), due, strict=True))


def test_what_local_steps_have_learnt_is_multiplied_with_what_waits() -> None:
    ((local, start, own),) = sparsync.comm.LocalWorld(1).run(lambda comm: learnt(0, comm))
    run = Trained(local.model, local, local.optimizers, ())
    assert run.multiply(lambda _: Factors(held=9.0, still=9.0, learnt=0.5)) == 9.0
    weights = list(local.model.parameters())
    assert all(torch.equal(a.detach(), b + c) for a, b, c in zip(weights, start, own, strict=True))
    local.flush()
    assert all(torch.allclose(a, b + 0.5 * c) for a, b, c in zip(weights, start, own, strict=True))


def moved() -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return pairs of residuals that are to be equal."""

    def attached(density: float) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scheme = sparsync.schemes.TopK(density)
        return model, optimizer, sparsync.attach(model, scheme, optimizer=optimizer, exchange=sparsync.Gradients())

    def clipped(regroups: bool) -> dict[str, Tensor]:
        model, optimizer, handle = attached(0.1)
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            handle.reduce()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step in (2, 4) else 1e3)
            optimizer.step()
            if regroups and step == 4:
                handle.regroup(sparsync.comm.GroupComm.private())
        return handle.state_dict()["scheme"]["residual"]

    model, optimizer, handle = attached(0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        handle.reduce()
        optimizer.step()
    before, others = handle.state_dict()["scheme"]["residual"], handle.snapshot()
    optimizer.param_groups[0]["lr"] = 5e-3
    shared = {**others.shared, "rates": dict.fromkeys(others.shared["rates"], 5e-3)}
    handle.restore(others._replace(shared=shared, own=None))
    handle._rescaler.rescale()
    after = handle.state_dict()["scheme"]["residual"]
    return [(clipped(False), clipped(True)), ({name: 2 * each for name, each in before.items()}, after)]


@pytest.mark.distributed
def test_residuals_survive_a_new_group_after_a_clipped_step_and_follow_the_rate_of_the_others() -> None:
    ((new_group, half_rate),) = run_on(moved, 1)
    assert_equal(*new_group)
    assert_equal(*half_rate)


class Sends:
    """Makes a pickle that calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, (1,)


ran: list[int] = []


class Mailbox:
    """A process group of one, which receives what it has sent."""

    def __init__(self) -> None:
        self._sent: list[Tensor] = []

    def send(self, parts: list[Tensor], to: int, tag: int) -> "Mailbox":
        self._sent.append(parts[0].clone())
        return self

    def recv(self, parts: list[Tensor], source: int, tag: int) -> "Mailbox":
        parts[0].copy_(self._sent.pop(0))
        return self

    def wait(self) -> None:
        return


def test_what_a_member_sends_makes_tensors_and_calls_nothing() -> None:
    group, state = Mailbox(), {"model": {"w": torch.arange(3.0)}, "steps": 7}
    send(state, group, 0)
    found, _ = receive(group, 0)
    assert torch.equal(found["model"]["w"], state["model"]["w"]) and found["steps"] == 7
    send({**state, "steps": Sends()}, group, 0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        receive(group, 0)
    assert ran == []


def refusals(port: int) -> None:
    """Add what a run cannot train, and fail in a step by the program itself."""
    dist.destroy_process_group()
    run, model = elastic.Run(f"127.0.0.1:{port}"), nn.Linear(2, 2)
    for counted, exchange, message in (
        (True, sparsync.LocalSteps(every=4, delay=2), "a run takes local steps without a delay, got delay=2"),
        (False, sparsync.Gradients(), "a run counts optimizer steps, but this handle has no optimizer"),
        (True, sparsync.Gradients(), ""),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {"optimizer": optimizer} if counted else {}
        handle: Any = sparsync.attach(model, sparsync.schemes.Dense(), exchange=exchange, **given)
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            run.add(model, handle, optimizer)
        if message:
            handle.close()
    assert run._trained[0].settings_text().startswith("a model without DistributedDataParallel\n")  # compared by ranks
    next(run.steps(1))
    with pytest.raises(ValueError, match="of the program itself"), run.attempt():
        raise ValueError("of the program itself")
    run.close()


@pytest.mark.distributed
def test_what_a_run_cannot_train_and_errors_of_the_program_itself_are_raised() -> None:
    store = served()
    run_on(refusals, 1, port=store.port)


def test_a_store_serves_until_it_is_told_to_end_and_names_a_port_that_is_taken(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]

    def end() -> None:
        while signal.getsignal(signal.SIGINT) == before[1]:  # the last that it takes
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    try:
        threading.Thread(target=end).start()
        main(["--port", "0"])
    finally:
        for each, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(each, handler)
    assert capfd.readouterr().out.startswith("serving on port ")
    taken = served()
    with pytest.raises(SystemExit):
        main(["--port", str(taken.port)])
    assert f"cannot listen on port {taken.port}: " in capfd.readouterr().err
