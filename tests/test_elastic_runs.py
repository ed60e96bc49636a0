"""Runs that go on while ranks die, freeze, leave and join: replicas stay the same, and nothing is lost unsaid."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
import sparsync_elastic as elastic
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import LastStep, digest_of, network, patient_run
from sparsync.exchanges.local_steps import LocalTraining
from sparsync_elastic.__main__ import main
from sparsync_elastic.board import TCPStore
from sparsync_elastic.epochs import Factors
from sparsync_elastic.trained import Trained
from sparsync_elastic.world import receive, send


@pytest.mark.parametrize("address", ["host", "host:", ":29400", "host:0", "host:70000", "host:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"address must be host:port of the store, such as 10\.0\.0\.1:29400, got "):
        elastic.Run(address)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"least must be in \[1, ranks=2\], got 3"):
        elastic.Run("host:1", ranks=2, least=3)
    with pytest.raises(ValueError, match=r"timeout_s and wait_s must be above 0 seconds, got 0\.0 and 300\.0"):
        elastic.Run("host:1", timeout_s=0.0)


EXCHANGES = {
    "steps": sparsync.Steps(),
    "local": sparsync.LocalSteps(every=3),
    "gradients": sparsync.Gradients(),
}


@dataclass
class Told:
    """What a rank says of its training."""

    steps: int = 0
    left: bool = False
    digests: dict[tuple[int, int], str] = field(default_factory=dict)  # of the common weights, by epoch and step
    sizes: list[int] = field(default_factory=list)
    lost: list[elastic.Lost] = field(default_factory=list)
    rates: set[float] = field(default_factory=set)
    refused: str = ""


def trained(port: int, exchange: str, wrapped: bool, killed: int, leaves: int, joins: int) -> Told:
    """Train; rank `killed` dies in step 6, `leaves` goes after step 9, and `joins` comes when the others have done 12."""
    number = dist.get_rank()
    bare = network()
    dist.destroy_process_group()
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if number == joins:
        signals.wait(["twelve", "left"])
    run = patient_run(port, ranks=3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t))
    model = nn.parallel.DistributedDataParallel(bare) if wrapped else bare
    scheme = (
        sparsync.schemes.TwoShot(density=0.2, values="sign")
        if exchange != "gradients"
        else sparsync.schemes.ExactMiCRO(density=0.2)
    )
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=EXCHANGES[exchange])
    run.add(model, handle, optimizer, schedule)
    told, last = Told(), LastStep(run, number == joins)
    for step in run.steps(cast("int", last)):
        with run.attempt():
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + run.rank))
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :5].sin()).square().mean().backward()
            if step == 6 and number == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            if exchange == "gradients" and not wrapped:
                handle.reduce()
            optimizer.step()
            schedule.step()
            if step == 9 and number == leaves:
                run.leave()
            if exchange != "local" or handle.exchanged * 3 == run.step:
                told.digests[run.epoch.number, run.step] = digest_of(bare, handle)
            told.sizes.append(run.size)
            if run.step == 12:
                signals.set("twelve", "")
            if run.step >= 9 and not last.is_known:
                time.sleep(0.05)  # until the one that joins is there
    told.steps, told.left, told.lost = run.step, run.left, run.lost
    if told.left:
        signals.set("left", "")
    told.rates = {group["lr"] for group in optimizer.param_groups}
    run.close()
    return told


def check(found: list[Told], leaves: int) -> None:
    """All ranks have had the same weights after the same step, and those that stayed have taken every step."""
    seen: dict[tuple[int, int], str] = {}
    for number, told in enumerate(found):
        assert told.left == (number == leaves)
        assert told.steps == found[-1].steps or told.left
        for place, digest in told.digests.items():
            assert seen.setdefault(place, digest) == digest, place
    assert len({frozenset(each.rates) for each in found if not each.left}) == 1


CASES = [
    ("steps", False),
    ("steps", True),
    ("local", False),
    ("local", True),
    ("gradients", False),
    ("gradients", True),
]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("exchange", "wrapped"),
    [pytest.param(*case, marks=[] if case == ("steps", True) else pytest.mark.slow) for case in CASES],
)
def test_a_rank_dies_one_leaves_and_one_joins(exchange: str, wrapped: bool) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = run_on(
        trained,
        4,
        doomed=[1],
        port=store.port,
        exchange=exchange,
        wrapped=wrapped,
        killed=1,
        leaves=2,
        joins=3,
    )
    stayed = [each for number, each in enumerate(found) if number != 1]
    check(stayed, leaves=1)
    assert [each.sizes[-1] for each in stayed] == [2, 2, 2]
    assert {1, 2, 3} == set(stayed[0].sizes) | {1}
    assert [each.what for each in stayed[0].lost][:1] == ["what this rank had not sent, unless it comes back"]
    assert stayed[2].lost == []


def mass(port: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what this rank has not sent before and after another one has left, each as a sum over parameters by name."""
    number = dist.get_rank()
    bare = network()
    dist.destroy_process_group()
    run = patient_run(port, ranks=3)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    scheme = sparsync.schemes.TwoShot(density=0.1, values="int4")
    handle: Any = sparsync.attach(bare, scheme, optimizer=optimizer, exchange=sparsync.Steps())
    run.add(bare, handle, optimizer)
    before, after = {}, {}

    def changed(of: elastic.Run) -> None:
        if of.epoch.leaving:
            after.update(handle.state.state_dict()["residual"])

    run.on_change = changed
    for step in run.steps(60):  # more than it takes to leave where others hear late of it
        with run.attempt():
            inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + run.rank))
            optimizer.zero_grad()
            bare(inputs).square().mean().backward()
            optimizer.step()
            if step == 4 and number == 0:
                run.leave()
            if run.size == 3:
                time.sleep(0.02)
                before = handle.state.state_dict()["residual"]
    run.close()
    return before, after


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_leaving_rank_has_not_sent_is_handed_over_for_the_mean_over_those_that_stay() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (gone, nothing), *stayed = run_on(mass, 3, port=store.port)
    assert nothing == {}
    share = 2 / 3
    heirs = [
        all(torch.equal(after[name], share * (before[name] + gone[name])) for name in gone) for before, after in stayed
    ]
    others = [all(torch.equal(after[name], share * before[name]) for name in gone) for before, after in stayed]
    assert sorted(zip(heirs, others, strict=True)) == [(False, True), (True, False)]


def local(seed: int, comm: sparsync.Comm) -> tuple[nn.Module, LocalTraining]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return model, LocalTraining(
        model, torch.optim.SGD(model.parameters(), lr=0.5), sparsync.schemes.Dense(), every=4, comm=comm
    )


def test_what_a_late_rank_has_learnt_by_local_steps_waits_for_the_next_exchange() -> None:
    (_, ahead), (model, late) = (sparsync.comm.LocalWorld(1).run(partial(local, seed))[0] for seed in (0, 1))
    start = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        late._before_optimizer()
        for each in model.parameters():
            each.sub_(0.25)
    late.step()
    learnt = [each.detach() - before for each, before in zip(model.parameters(), start, strict=True)]
    common = [each.detach().clone() for each in ahead.model.parameters()]
    late.restore(ahead.snapshot()._replace(own=None))
    for each, theirs, change in zip(model.parameters(), common, learnt, strict=True):
        assert torch.equal(each, theirs + change)
    late.flush()
    with late.averaged():
        assert all(torch.equal(a, b + c) for a, b, c in zip(model.parameters(), common, learnt, strict=True))


def test_what_local_steps_have_learnt_is_multiplied_with_what_waits() -> None:
    ((model, handle),) = sparsync.comm.LocalWorld(1).run(partial(local, 0))
    start = [each.detach().clone() for each in model.parameters()]
    with torch.no_grad():
        handle._before_optimizer()
        for each in model.parameters():
            each.sub_(0.25)
    handle.step()
    learnt = [each.detach() - before for each, before in zip(model.parameters(), start, strict=True)]
    run = Trained(model, handle, handle.optimizers, ())
    assert run.multiply(lambda _: Factors(held=9.0, still=9.0, learnt=0.5)) == 9.0
    assert all(torch.equal(a.detach(), b + c) for a, b, c in zip(model.parameters(), start, learnt, strict=True))
    handle.flush()
    assert all(torch.allclose(a, b + 0.5 * c) for a, b, c in zip(model.parameters(), start, learnt, strict=True))


def clipped(moved: bool) -> dict[str, torch.Tensor]:
    """Return the residual after steps of which one was clipped, where the handle is `moved` to a group of the same ranks then."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scheme = sparsync.schemes.TopK(density=0.1)
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=sparsync.Gradients())
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(8, 20, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        handle.reduce()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3 if step in (2, 4) else 1e3)
        optimizer.step()
        if moved and step == 4:
            handle.regroup(sparsync.comm.GroupComm.private())
    return handle.state_dict()["scheme"]["residual"]


@pytest.mark.distributed
def test_a_move_to_another_group_keeps_the_residual_of_a_clipped_step() -> None:
    (stayed,), (moved,) = run_on(clipped, 1, moved=False), run_on(clipped, 1, moved=True)
    assert stayed.keys() == moved.keys() and any(each.any() for each in stayed.values())
    assert all(torch.equal(stayed[name], moved[name]) for name in stayed)


def slowed() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the residual of a rank before and after the first step with one whose rate is half of its last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    handle: Any = sparsync.attach(
        model, sparsync.schemes.TopK(density=0.1), optimizer=optimizer, exchange=sparsync.Gradients()
    )
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
    return before, handle.state_dict()["scheme"]["residual"]


@pytest.mark.distributed
def test_the_residual_of_a_rank_that_is_behind_follows_the_rate_of_the_others() -> None:
    ((before, after),) = run_on(slowed, 1)
    assert any(each.any() for each in before.values())
    assert all(torch.equal(after[name], 2 * before[name]) for name in before)


class Sends:
    """Makes a pickle that calls a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ran.append, (1,)


ran: list[int] = []


class Mailbox:
    """A process group of one, which receives what it has sent."""

    def __init__(self) -> None:
        self._sent: list[torch.Tensor] = []

    def send(self, parts: list[torch.Tensor], to: int, tag: int) -> "Mailbox":
        self._sent.append(parts[0].clone())
        return self

    def recv(self, parts: list[torch.Tensor], source: int, tag: int) -> "Mailbox":
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


def refusals(port: int) -> list[str]:
    """Return what a run says of what it cannot train."""
    told = []

    def tell(call: Callable[[], Any]) -> None:
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")

    tell(lambda: elastic.Run(f"127.0.0.1:{port}"))
    dist.destroy_process_group()
    run = elastic.Run(f"127.0.0.1:{port}")
    tell(lambda: next(run.steps(1)))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = sparsync.LocalSteps(every=4, delay=2)
    handle: Any = sparsync.attach(model, sparsync.schemes.Dense(), optimizer=optimizer, exchange=exchange)
    tell(lambda: run.add(model, handle, optimizer))
    other = nn.Linear(2, 2)
    unknown: Any = sparsync.attach(other, sparsync.schemes.Dense(), exchange=sparsync.Gradients())
    tell(lambda: run.add(other, unknown, torch.optim.SGD(other.parameters(), lr=0.1)))
    unknown.close()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    own: Any = sparsync.attach(other, sparsync.schemes.Dense(), optimizer=optimizer, exchange=sparsync.Gradients())
    run.add(other, own, optimizer)

    def errs() -> None:
        next(run.steps(1))
        with run.attempt():
            raise ValueError("of the program itself")

    tell(errs)
    run.close()
    return told


@pytest.mark.distributed
def test_what_a_run_cannot_train_and_errors_of_the_program_itself_are_raised() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    initialised, nothing, delayed, uncounted, own = run_on(refusals, 1, port=store.port)[0]
    assert initialised.startswith("RuntimeError: torch.distributed is initialised already")
    assert (
        nothing == "RuntimeError: there is nothing to train; call run.add(model, handle, optimizer) before run.steps()"
    )
    assert delayed.startswith("ValueError: a run takes local steps without a delay, got delay=2")
    assert uncounted.endswith("which this handle does not know; pass optimizer= to sparsync.attach")
    assert own == "ValueError: of the program itself"


def test_a_store_serves_until_it_is_told_to_end(capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_store_at_a_port_that_is_taken_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(SystemExit):
        main(["--port", str(taken.port)])
    assert f"cannot listen on port {taken.port}: " in capsys.readouterr().err
