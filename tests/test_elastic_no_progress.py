"""Runs in which the same members would fail again and again: one of them is told why, and the others go on."""

import contextlib
import time
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsync
from helpers.distributed import run_fresh as run_on
from helpers.elastic_runs import patient_run
from sparsync_elastic import Epoch
from sparsync_elastic.board import TCPStore
from sparsync_elastic.epochs import LAST_TRIES, TRIES, Note, proposed
from sparsync_elastic.presence import Presence
from sparsync_elastic.world import brief, waited_for

STEPS = 24
SLOW_S = 15.0  # of a step, longer than the others wait; these may be stopped for 10 s
LAST = Epoch(4, ("a", "b", "c"), step=7)


def failed(*, waited_for: str = "", unreached: tuple[str, ...] = (), times: int = TRIES, position: int = 7) -> Note:
    note = Note([position], max(position, 0), False, failures=times, error="RuntimeError: Timed out")
    return replace(note, waited_for=waited_for, unreached=list(unreached))


def after(*notes: Note, least: int = 1, asking: dict[str, Note] | None = None) -> Epoch:
    asking = asking or {}
    return proposed(LAST, {**dict(zip("abc", notes, strict=True)), **asking}, list(asking), least)


def test_the_rank_that_the_others_wait_for_is_left_out_after_a_few_tries_and_not_before() -> None:
    awaited = [failed(waited_for="b"), failed(), failed(waited_for="b")]
    made = after(*awaited)
    assert (made.members, made.gone, list(made.refused)) == (("a", "c"), ("b",), ["b"])
    assert made.refused["b"] == (
        "the same members have failed 3 times to take a step after step 7, and the others waited for b (a says: RuntimeError: Timed out; "
        "b says: RuntimeError: Timed out); pass a timeout_s that is longer than the longest step of every rank, and call the same "
        "collectives on all ranks"
    )
    before = [replace(each, failures=TRIES - 1) for each in awaited]
    assert (after(*before).members, after(*before).refused) == (("a", "b", "c"), {})
    assert Epoch.read(made.text) == made


def test_of_ranks_that_cannot_connect_to_each_other_one_stays() -> None:
    made = after(failed(unreached=("b",)), failed(unreached=("a",)), failed())
    assert made.members == ("a", "c")
    assert made.refused["b"].startswith(
        "b and a could not connect to each other in 3 tries, so b is left out; let every"
    )
    # Of two, the one that has no weights yet; and the one that lacks several, where others lack only that one.
    assert after(failed(unreached=("b",), position=-1), failed(unreached=("a",)), failed()).members == ("b", "c")
    made = after(failed(unreached=("b",)), failed(unreached=("a", "c")), failed(unreached=("b",)))
    assert (made.members, list(made.refused)) == (("a", "c"), ["b"])
    # Both ask to be let in again.
    asking = {"x": failed(unreached=("y",)), "y": failed(unreached=("x",))}
    made = after(Note([9], 9, True), Note([9], 9, True), Note([9], 9, True), asking=asking)
    assert (made.members, list(made.refused)) == (("a", "b", "c", "x"), ["y"])


def test_one_that_never_takes_a_step_with_the_others_is_not_let_in_once_more() -> None:
    made = after(Note([9], 9, True), Note([9], 9, True), Note([9], 9, True), asking={"x": failed()})
    assert (made.members, list(made.refused)) == (("a", "b", "c"), ["x"])
    assert "the others went on without x (x says: RuntimeError: Timed out)" in made.refused["x"]


def test_where_nobody_is_known_to_be_the_cause_all_are_told_at_last() -> None:
    assert after(*[failed(times=LAST_TRIES - 1)] * 3).refused == {}
    made = after(*[failed(times=LAST_TRIES)] * 3)
    assert list(made.refused) == ["a", "b", "c"]
    assert "failed 6 times" in made.refused["a"] and "b says: RuntimeError: Timed out" in made.refused["a"]
    mutual = failed(waited_for="b"), failed(waited_for="a"), failed()
    assert after(*mutual).refused == {}


def test_all_are_told_where_fewer_than_the_least_would_be_left() -> None:
    made = after(failed(waited_for="b"), failed(), failed(waited_for="b"), least=3)
    assert list(made.refused) == ["a", "b", "c"]
    assert made.refused["a"].endswith("; 2 ranks would be left, and at least 3 are to go on (least=3)")


def test_a_member_that_cannot_be_connected_to_is_named_until_it_can() -> None:
    own, other = (Presence("127.0.0.1", 1) for _ in range(2))
    other.close()
    own.reach([other.member])
    own._asked[other.member].join()
    assert (own.unreached, own.ended) == ({other.member}, set())
    host, _, port = other.member.rpartition("@")[2].rpartition(":")
    other = Presence(host, int(port), other.member)
    own._asked.clear()
    again = other.member.replace(port, str(other._socket.getsockname()[1]))
    own.unreached.add(again)
    own.reach([again])
    own._asked[again].join()
    assert again not in own.unreached
    for each in (own, other):
        each.close()


def test_an_error_says_for_whom_a_rank_waited_until_the_timeout() -> None:
    text = "rank 0 of 3: comparison, with all ranks, failed: waiting for rank 2: [/gloo/unbound_buffer.cc:78] Timed out waiting 1ms\nAt: x"
    assert waited_for(RuntimeError(text)) == 2
    assert waited_for(RuntimeError("waiting for rank 2: [/gloo/pair.cc:553] Connection closed by peer")) is None
    assert brief(RuntimeError(text)) == (
        "RuntimeError: rank 0 of 3: comparison, with all ranks, failed: waiting for rank 2: [/gloo/unbound_buffer.cc:78] Timed out waiting "
        "1ms"
    )


class Told(NamedTuple):
    """What a rank says of its training."""

    member: str
    error: str
    steps: int
    size: int


def trained(what: str, port: int, number: int) -> Told:
    """Train 3 ranks; from step 2 on, while all are there, the last one has a fault, or the first two never can connect."""
    run = patient_run(port, timeout_s=SLOW_S - 3.0, ranks=3, name=what)
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    signals.set(f"{what}/{number}", run.member)
    torch.manual_seed(0)
    bare = nn.Linear(20, 5)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-2)
    model = nn.parallel.DistributedDataParallel(bare) if what == "slow" else bare
    handle: Any = sparsync.attach(model, sparsync.TopK(0.2), optimizer=optimizer, exchange=sparsync.Gradients())
    run.add(model, handle, optimizer)
    error, first = "", dist.init_process_group

    def apart(*given: Any, **more: Any) -> None:
        pair = [signals.get(f"{what}/{each}").decode() for each in (0, 1)]
        if set(pair) <= set(run.epoch.members):
            if number < 2:
                run._members._presence.unreached.add(pair[1 - number])
            raise RuntimeError("Gloo connectFullMesh failed")  # on the third rank, too, which lacks them
        first(*given, **more)

    try:
        with pytest.MonkeyPatch.context() as patch:
            if what == "apart":
                patch.setattr(dist, "init_process_group", apart)
            for step in run.steps(STEPS):
                if run.size == 1:
                    time.sleep(1.0)  # the others ask to be let in again
                with run.attempt():
                    optimizer.zero_grad()
                    loss = model(torch.randn(8, 20)).square().mean()
                    if step >= 2 and number == 2 and run.size == 3:
                        if what == "barrier":
                            dist.barrier()
                        if what == "slow":
                            time.sleep(SLOW_S)
                    loss.backward()
                    if what != "slow":
                        handle.reduce()
                    optimizer.step()
    except RuntimeError as raised:
        error = str(raised)
    told = Told(run.member, error, run.step, run.size)
    signals.add(f"{what}/done", 1)
    while signals.add(f"{what}/done", 0) < 3:
        time.sleep(0.05)
    with contextlib.suppress(RuntimeError):
        run.close()
    return told


def faults(port: int, cases: list[str]) -> list[Told]:
    number = dist.get_rank()
    dist.destroy_process_group()
    return [trained(what, port, number) for what in cases]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("cases", [["barrier"], ["slow", "apart"]])
def test_one_that_is_too_slow_errs_or_cannot_connect_is_told_why_and_the_others_go_on(cases: list[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for what, *found in zip(cases, *run_on(faults, 3, port=store.port, cases=cases), strict=True):
        out = [each for each in found if each.error]
        stayed = [each for each in found if not each.error]
        assert [each.steps for each in stayed] == [STEPS, STEPS], (what, out)
        assert {each.size for each in stayed} == {2}
        assert out[0].error.startswith(f"this rank, {out[0].member}, is left out of the run: ")
        if what == "apart":
            assert out[0] in found[:2]
            assert all(each.member in out[0].error for each in found[:2])
            assert "could not connect to each other in 3 tries" in out[0].error
        else:
            assert out == [found[2]]
            assert f"the others waited for {out[0].member} (" in out[0].error


def wrapped_otherwise(port: int) -> str:
    """Return the error of the second rank, whose model is not under DistributedDataParallel as that of the first is."""
    number = dist.get_rank()
    dist.destroy_process_group()
    run = patient_run(port, ranks=2, wait_s=20.0)
    bare = nn.Linear(20, 5)
    model = bare if number else nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters())
    run.add(model, sparsync.attach(model, sparsync.TwoShot(), optimizer=optimizer), optimizer)  # pyright: ignore[reportArgumentType]
    if number:
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).wait(["sparsync/elastic/run/settings"])
    try:
        next(run.steps(1))
    except RuntimeError as error:
        return str(error)
    finally:
        run.close()
    return "nothing"


@pytest.mark.slow
@pytest.mark.distributed
def test_one_whose_model_is_wrapped_otherwise_is_refused_before_it_joins() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _, error = run_on(wrapped_otherwise, 2, port=store.port)
    assert error.startswith(
        "this run was begun with 'a model under DistributedDataParallel', and this process has 'a model without DistributedDataParallel'; "
    )
