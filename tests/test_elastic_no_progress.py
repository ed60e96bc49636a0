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
from sparsync_elastic.world import brief, waited_for

STEPS = 24
SLOW_S = 15.0  # of a step, longer than the others wait; these may be stopped for 10 s
LAST = Epoch(4, ("a", "b", "c"), step=7)


def failed(*, waited_for: str = "", times: int = TRIES, position: int = 7) -> Note:
    note = Note([position], max(position, 0), False, failures=times, error="RuntimeError: Timed out")
    return replace(note, waited_for=waited_for)


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


def test_one_that_cannot_connect_to_the_others_and_so_never_gets_the_weights_is_left_out() -> None:
    made = after(failed(), failed(), failed(position=-1))
    assert (made.members, list(made.refused)) == (("a", "b"), ["c"])
    assert after(*[failed(position=-1)] * 3).refused == {}  # all began at once


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
    """Train 3 ranks; from step 2 on, while all are there, the last one has a fault."""
    run = patient_run(port, timeout_s=SLOW_S - 3.0, ranks=3, name=what)
    signals = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.manual_seed(0)
    bare = nn.Linear(20, 5)
    optimizer = torch.optim.SGD(bare.parameters(), lr=1e-2)
    model = nn.parallel.DistributedDataParallel(bare) if what == "slow" else bare
    handle: Any = sparsync.attach(model, sparsync.schemes.TopK(0.2), optimizer=optimizer, exchange=sparsync.Gradients())
    run.add(model, handle, optimizer)
    error = ""
    try:
        for step in run.steps(STEPS):
            if run.size == 1:
                time.sleep(1.0)  # the others ask to be let in again
            with run.attempt():
                optimizer.zero_grad()
                loss = model(torch.randn(8, 20)).square().mean()
                if step >= 2 and number == 2 and run.size == 3:
                    if what == "barrier":
                        dist.barrier()
                    else:
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


def fault(port: int, what: str) -> Told:
    number = dist.get_rank()
    dist.destroy_process_group()
    return trained(what, port, number)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("what", ["barrier", "slow"])
def test_one_that_is_too_slow_or_errs_is_told_why_and_the_others_go_on(what: str) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    *others, out = run_on(fault, 3, port=store.port, what=what)
    assert [(each.error, each.steps, each.size) for each in others] == [("", STEPS, 2)] * 2
    assert out.error.startswith(f"this rank, {out.member}, is left out of the run: ")
    assert f"the others waited for {out.member} (" in out.error


def wrapped_otherwise(port: int) -> str:
    """Return the error of the second rank, whose model is not under DistributedDataParallel as that of the first is."""
    number = dist.get_rank()
    dist.destroy_process_group()
    run = patient_run(port, ranks=2, wait_s=20.0)
    bare = nn.Linear(20, 5)
    model = bare if number else nn.parallel.DistributedDataParallel(bare)
    optimizer = torch.optim.AdamW(bare.parameters())
    run.add(model, sparsync.attach(model, sparsync.schemes.TwoShot(), optimizer=optimizer), optimizer)  # pyright: ignore[reportArgumentType]
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
