"""Members of a run agree over a store while some of them, or the store, are away."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from sparsync_elastic import Epoch, board, members
from sparsync_elastic.board import TCPStore
from sparsync_elastic.epochs import Note
from sparsync_elastic.members import Members
from sparsync_elastic.presence import Presence
from sparsync_elastic.world import StoreSilentError

PREFIX = "sparsync/elastic/run"
PATIENT_S = 60.0  # longer than a thread stands still


def note(position: int = 3, whole: bool = True) -> Note:
    return Note([position], position, whole)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(members, "ANSWER_S", PATIENT_S)
    monkeypatch.setattr(members, "FIRST_S", 0.1)
    monkeypatch.setattr(members, "AGAIN_S", 0.5)
    monkeypatch.setattr(members, "CALL_S", 1.0)
    yield TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def member_of(
    store: Any, own: str | None, *, ranks: int = 2, wait_s: float = 4 * PATIENT_S, name: str = "run"
) -> Members:
    presence = Presence("127.0.0.1", store.port, own)
    return Members("127.0.0.1", store.port, name, presence, ranks=ranks, least=1, timeout_s=PATIENT_S, wait_s=wait_s)


def wait_for_line(store: Any, meeting: int, name: str = "run") -> None:
    """Wait until somebody has come to a meeting, or has asked to join there."""
    key = f"sparsync/elastic/{name}/said/{meeting - 1}"
    while not (store.check([key]) and b'"position": ' in store.get(key)):
        time.sleep(0.01)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result() for each in [threads.submit(call) for call in calls]]


@contextlib.contextmanager
def met(store: Any, *names: str, name: str = "run") -> Iterator[list[Members]]:
    found = [member_of(store, each, ranks=len(names), name=name) for each in names]
    epochs = together(*(partial(each.join, note(0)) for each in found))
    assert all(each == epochs[0] for each in epochs)
    assert set(epochs[0].members) == set(names)
    for each in found:
        each.watch()
    store.wait([f"sparsync/elastic/{name}/epoch"])  # which a watcher writes
    yield found
    for each in found:
        each.close()


def moves(store: Any, *found: Members) -> None:
    """Have members find another store at their address, as one that was started again."""
    for each in found:
        each._port, each._store = store.port, None


class Clock:
    """A time that passes only in `sleep`, and calls `each` after every tenth of a second."""

    def __init__(self, each: Callable[[int], None] = lambda _: None) -> None:
        self.each, self.ticks, self.now_s = each, 0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > (self.ticks + 1) / 10:
            self.ticks += 1
            self.each(self.ticks)


def test_whoever_gets_the_weights_part_by_part_is_waited_for_and_whoever_gets_none_is_not(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with met(store, "a", "b") as (a, b):
        a.timeout_s = 3.0
        monkeypatch.setattr(members, "time", Clock(lambda tick: b.say("ready") if tick == 40 else b.moved()))
        assert a.wait_for("ready", ["b"])
        monkeypatch.setattr(members, "time", Clock())
        assert not a.wait_for("done/9", ["b"])


def test_one_that_was_left_out_finds_out_when_it_wakes_and_joins_again(store: Any) -> None:
    with met(store, "a", "b", "c") as (a, b, c), ThreadPoolExecutor(1) as threads:
        c._shut.set()  # as a frozen process, it answers nothing
        c._do(c._ring)
        assert c._watching is not None
        c._watching.join()
        for each in (a, b):
            each._presence.ended.add("c")
        epochs = together(*(partial(each.meet, note(1, False)) for each in (a, b)))
        assert set(epochs[0].members) == {"a", "b"} and epochs[0].gone == ("c",)
        assert "c" not in c.meet(note(1, False)).members
        asks = threads.submit(c.join, note(1, False))
        wait_for_line(store, 3)
        together(*(partial(each.meet, note(5)) for each in (a, b)))
        assert set(asks.result().members) == {"a", "b", "c"}
        assert list(asks.result().behind) == ["c"]


def test_a_member_whose_process_has_ended_is_not_waited_for_unless_it_was_never_reached(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "ANSWER_S", 1000.0)
    a, b, unknown = member_of(store, None), member_of(store, None), Presence("127.0.0.1", store.port)
    together(*(partial(each.join, note(0)) for each in (a, b)))
    while b.own not in a._presence._reached:
        time.sleep(0.01)
    unknown.close()
    for each in (unknown.member, "no address"):
        for call in (a._presence.reach, a._presence.ask):
            call([each])
            a._presence._asked[each].join()
    assert a._presence.ended == set()
    a.timeout_s = 1000.0
    b._presence.close()
    assert a.meet(note(1, False)).gone == (b.own,)


def test_one_that_does_not_reach_the_store_does_not_go_on(store: Any) -> None:
    with met(store, "a", "b") as (a, b):
        a.timeout_s = 0.5
        b._port, b._store, b._wait_s = 1, None, 0.5  # nothing listens there
        with pytest.raises(StoreSilentError, match=r"127\.0\.0\.1:1 has not answered for 0\.5 s.*start it again"):
            b.meet(note(1, False))
        b._port = store.port
        assert a.meet(note(1, False)).members == ("a",)


def test_a_store_that_was_started_again_is_told_the_epoch(store: Any) -> None:
    with met(store, "a", "b") as (a, b), ThreadPoolExecutor(1) as threads:
        again = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for each in (a, b):
            each.close()  # their threads wait at the old store
            moves(again, each)
            each.look()
        asks = threads.submit(member_of(again, "x", ranks=1).join, note(0))
        wait_for_line(again, 2)
        joined = together(*(partial(each.meet, note(1)) for each in (a, b)))
        assert [each.number for each in (*joined, asks.result())] == [2, 2, 2]


def test_a_store_that_is_started_again_during_a_meeting_is_told_who_came(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with met(store, "a", "b") as (a, b):
        again, before = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), a.current
        say, a.timeout_s = a.say, 2.0

        def said_and_restarted(*what: Any) -> None:
            say(*what)
            if a._port != again.port:
                moves(again, a, b)

        monkeypatch.setattr(a, "say", said_and_restarted)
        epoch = a.meet(note(1, False))
        assert epoch.members == ("a",)
        assert again.check([f"{PREFIX}/epoch", f"{PREFIX}/said/1"])
        assert Epoch.read(again.get(f"{PREFIX}/epoch")) == before
        assert '["a", "comes", {' in again.get(f"{PREFIX}/said/1").decode()


@pytest.mark.parametrize(
    ("look_s", "again_s"), [(0.2, 1000.0), (1000.0, 0.0)], ids=["while it waits", "before it goes on"]
)
def test_one_that_was_frozen_waits_in_an_empty_store_for_those_that_have_gone_on_without_it(
    look_s: float, again_s: float, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "LOOK_S", look_s)
    monkeypatch.setattr(members, "AGAIN_S", again_s)
    with met(store, "a", "b") as (frozen, other):
        again = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        other.close()
        other.current = Epoch(2, ("x",))  # x has come, and b has ended: all that `frozen` knows of are gone
        frozen._presence.ended.add("b")
        frozen.close()
        moves(again, frozen)

        def finds_the_store() -> None:
            time.sleep(0.3)
            moves(again, other)
            other.look()

        if again_s:
            epoch, _ = together(partial(frozen.meet, note(1, False)), finds_the_store)
        else:  # the others find it at the last moment
            monkeypatch.setattr(frozen, "_all_here", lambda *_: finds_the_store() is None)
            epoch = frozen.meet(note(1, False))
        assert epoch == other.current
        frozen.current = Epoch(1, ("a",))  # had it gone on, it would hear of it
        frozen.look()
        frozen._look(again)
        assert frozen.dropped


def test_one_that_began_anew_in_an_empty_store_finds_the_others(store: Any) -> None:
    with met(store, "a", "b") as (a, b):
        for each in (a, b):
            each.current = Epoch(7, each.current.members)
        again = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (alone,) = found = [member_of(again, "x", ranks=1)]
        assert together(*(partial(each.join, note(0)) for each in found))[0].members == ("x",)
        alone.watch()
        assert not alone.dropped
        a._do(a._ring)  # the watcher of a finds another store at its address
        moves(again, a, b)
        a._do(a._ring)
        for _ in range(1200):
            if alone.dropped:
                break
            time.sleep(0.05)
        assert alone.dropped and not a.dropped
        alone.close()


def test_one_with_other_settings_is_refused_before_it_joins(store: Any) -> None:
    a, b = member_of(store, "a"), member_of(store, "b")
    a.agree("TopK(density=0.1)\nGradients()")
    b.agree("TopK(density=0.1)\nGradients()")
    with pytest.raises(RuntimeError, match=r"begun with 'Gradients\(\)', and this process has 'Steps\(\)'; give all"):
        b.agree("TopK(density=0.1)\nSteps()")


def test_a_step_to_stop_before_is_the_first_that_was_named_and_of_its_epoch(store: Any) -> None:
    with met(store, "a", "b") as (a, b):
        a.stop_before(7)
        b.stop_before(9)
        assert (a.stop_at, b.stop_at) == (7, 7)
        together(partial(a.meet, note(7)), partial(b.meet, note(7)))
        assert (a.stop_at, b.stop_at) == (None, None)


def test_whoever_asks_to_be_let_in_or_begins_to_hears_that_the_run_has_ended(store: Any) -> None:
    with met(store, "a") as (a,), ThreadPoolExecutor(1) as threads:
        late = member_of(store, "x")
        asks = threads.submit(late.join, note(-1))
        wait_for_line(store, 2)
        a.end()
        for begins in (asks.result, partial(late.join, note(-1))):
            with pytest.raises(RuntimeError, match="this run has ended"):
                begins()
        late.close()


def test_an_end_waits_for_tries_to_connect_which_the_end_of_the_interpreter_would_abort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def slow(*_: object, **__: object) -> None:
        time.sleep(2.5)  # longer than its caller waits
        ended.set()
        raise RuntimeError("nobody listens")

    monkeypatch.setattr(board, "CONNECT_S", 1.0)
    monkeypatch.setattr(board, "TCPStore", slow)
    Members("127.0.0.1", 1, "run", Presence("127.0.0.1", 1), ranks=1, least=1, wait_s=1.0).close()
    assert ended.is_set()


def test_a_meeting_waits_for_members_that_may_come(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "ANSWER_S", 2.0)
    own, last = member_of(store, "x", wait_s=65.0), Epoch(3, ("a", "x"), step=9)
    assert own._all_here(last, {"x": note(-1), "a": note(9)}, (), 64.0)
    assert not own._all_here(last, {"x": note(-1)}, (), 64.0)  # "a" has the weights
    with pytest.raises(RuntimeError, match="no rank that has the weights of step 9 has come within 65 s"):
        own._all_here(last, {"x": note(-1)}, (), 66.0)
    here = {"x": note(9, False)}
    assert [own._all_here(last, here, ["x"], waited) for waited in (1.9, 2.1)] == [False, True]
    assert [own._all_here(last, here, ["a", "x"], waited) for waited in (2.1, PATIENT_S + 1)] == [False, True]
    with met(store, "a", "b") as (a, b):
        a.say("comes", asdict(note(1, False)))
        b._do(b._look)  # as its watcher does when the bell rings
        assert "b" in a._said().alive


def test_a_process_asks_a_training_member_for_the_state_again_after_a_meeting(store: Any) -> None:
    assert member_of(store, "x").source() is None  # nobody is there
    with met(store, "a") as (a,), ThreadPoolExecutor(1) as threads:

        def asks(name: str) -> Any:
            found = threads.submit(member_of(store, name).source)
            is_asked(found, name)
            return found

        def is_asked(found: Any, name: str) -> None:
            while name not in a.fetching:
                assert not found.done(), found.result()
                a.look()
                time.sleep(0.01)

        found = asks("x")
        a.meet(note(1))
        a.store_of(a.current)  # writes the epoch
        is_asked(found, "x")
        own = a.answer("x", True)
        source, theirs = found.result() or ("", own)
        own.set("key", "value")
        assert (source, theirs.get("key")) == ("a", b"value")
        found = asks("y")
        assert (a.answer("y", False), found.result()) == (None, None)
    with met(store, "c", "d", name="other") as (c, d), ThreadPoolExecutor(1) as threads:
        meets = threads.submit(c.meet, note(1))
        wait_for_line(store, 2, "other")
        assert member_of(store, "x", name="other").source() is None  # nobody trains
        d.meet(note(1))
        meets.result()
