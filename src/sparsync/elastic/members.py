"""Who takes part in a run: the members agree on it over a store, in epochs.

An epoch has members, in the order of their ranks. Where one of them has lost the others, or somebody wants to join or to leave, all meet:
each writes a note, and the first that finds all notes there, or has waited long enough, proposes the next epoch. The store takes one
proposal, by compare-and-set, so there is one next epoch and no second half that goes on: whoever does not reach the store stays behind.
"""

import atexit
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

from sparsync.comm.meeting import StoreSilentError, asked
from sparsync.core import digest

Result = TypeVar("Result")
# Public, but missing from torch's __all__.
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

POLL_S = 0.02  # between two looks at the others' notes, at first
SLOWEST_POLL_S = 0.2
ANSWER_S = 2.0  # how long a process may take to say that it lives, whatever its main thread computes
FIRST_S = 1.0  # how long the first meeting waits for a run that a store, started again, has forgotten
CALL_S = 5.0  # how long a call of the store may take before another connection is tried
WATCH_S = 60.0  # how long a watcher waits before it asks again


@dataclass(frozen=True)
class Epoch:
    """The members of a run from one meeting to the next."""

    number: int = 0  # 0: nobody has met yet
    members: tuple[str, ...] = ()  # in the order of their ranks
    behind: Mapping[str, str] = field(default_factory=dict)  # members that lack the last step, and who sends it to them
    leaving: Mapping[str, str] = field(default_factory=dict)  # who goes, and the member that takes over what is unsent
    gone: tuple[str, ...] = ()  # members of the epoch before that did not come
    step: int = 0  # steps that are done

    def rank(self, member: str) -> int:
        """Return the rank of a member."""
        return self.members.index(member)

    @property
    def text(self) -> str:
        """The epoch as one line, the same on all members."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def read(text: str | bytes) -> "Epoch":
        """Return the epoch of a text."""
        found = json.loads(text)
        return Epoch(**{**found, "members": tuple(found["members"]), "gone": tuple(found["gone"])})


@dataclass(frozen=True)
class Note:
    """What a rank says when it comes to a meeting."""

    position: list[int]  # of each handle: how many common updates it has applied; -1: it has no state of the run yet
    step: int  # steps that it has done
    whole: bool  # it has lost nobody: the connections of the epoch before still serve
    leaves: bool = False

    @property
    def knows(self) -> bool:
        """Whether it has the state of the run, and not only asked for it."""
        return min(self.position) >= 0


@dataclass(frozen=True)
class _Line:
    """What a process says of a meeting. Without a note it says only that it lives."""

    member: str
    asks: bool = False  # to be let in
    note: Note | None = None

    @property
    def calls(self) -> bool:
        """Whether a member has come, which all others must follow."""
        return self.note is not None and not self.asks

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: bytes) -> "_Line":
        found = json.loads(text)
        return _Line(found["member"], found["asks"], found["note"] and Note(**found["note"]))


def proposed(last: Epoch, notes: Mapping[str, Note], asking: Sequence[str]) -> Epoch:
    """Return the epoch that follows `last` when these notes are there; `asking` want to join.

    Who has applied most sends the state to the others: there, what all ranks have sent in the last step is in the weights. Nobody leaves
    where connections have failed, because what a leaving rank holds back travels over them: it asks again.
    """
    present = [each for each in last.members if each in notes]
    joining = [each for each in dict.fromkeys(asking) if each in notes and each not in last.members]
    whole = len(present) == len(last.members) and all(notes[each].whole for each in present)
    staying = [each for each in present if not (whole and notes[each].leaves)]
    if present and not staying:
        staying = present[:1]  # the last one has nobody to leave to
    heads = staying or joining[:1]
    furthest = max(notes[each].position for each in heads)
    sources = [each for each in heads if notes[each].position == furthest]
    sources = sources if min(furthest) >= 0 else sources[:1]
    members = [*staying, *joining]
    late = [each for each in members if each not in sources]
    leaving = [each for each in present if each not in staying]
    return Epoch(
        last.number + 1,
        tuple(members),
        {each: sources[place % len(sources)] for place, each in enumerate(late)},
        {each: staying[place % len(staying)] for place, each in enumerate(leaving)},
        tuple(each for each in last.members if each not in notes),
        max(notes[each].step for each in sources),
    )


class Members:
    """The store of a run as member `own` sees it. Raises StoreSilentError when the store has not answered for `wait_s` seconds.

    A store that was started again is empty, and its members write down the epoch once more.
    """

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        own: str,
        *,
        ranks: int,
        least: int,
        wait_s: float,
        timeout_s: float = 30.0,
    ) -> None:
        self.own, self._ranks, self._least = own, ranks, least
        self._host, self._port, self._prefix = host, port, f"sparsync/elastic/{name}"
        self.timeout_s, self._wait_s = timeout_s, wait_s
        self._store: Any = None  # Any: torch's stubs have several stores and no common class
        self._of_groups: Any = None  # Any: see `_store`
        self.current = Epoch()
        # The epoch that was looked at, the step before which its members meet, and whether somebody wants to join.
        self._seen: tuple[int, int | None, bool] = (0, None, False)
        self._found_before = False  # the store has answered
        self._found_again = -math.inf  # when one has answered that may be another
        self._dropped_in = 0  # the epoch in which others have gone on without this process
        self._shut = threading.Event()
        self._watching: threading.Thread | None = None

    def round_trip_s(self) -> float:
        """Return the least of a few round trips to the store, in seconds."""
        found = list[float]()
        for _ in range(5):
            began = time.monotonic()
            self._do(lambda store: store.add(self._key("rings"), 0))
            found.append(time.monotonic() - began)
        return min(found)

    def store_of(self, epoch: Epoch) -> Any:  # Any: see there
        """Return a store for the process group of an epoch, over another connection than this object's own, the same for all epochs."""
        try:
            asked(CALL_S, lambda: self._of_groups.add(self._key("rings"), 0), "a rank asks the store of its run")
        except (AttributeError, StoreSilentError):  # there is none yet, or it is gone
            self._of_groups = self._connected()
        # A store that was started again may have taken two epochs of one number.
        return PrefixStore(f"{self._prefix}/groups/{epoch.number}/{digest(epoch.text)}", self._of_groups)

    def watch(self) -> None:
        """Answer others that ask whether this process lives, and learn of who wants to join, on a thread."""
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="sparsync-members", daemon=True)
            self._watching.start()
            atexit.register(self.close)  # a thread inside C++ when the interpreter ends is killed there, with SIGABRT

    def close(self) -> None:
        """End the thread."""
        atexit.unregister(self.close)
        self._shut.set()
        with suppress(RuntimeError):  # the store may be gone
            store = self._store or self._connected()
            asked(CALL_S, lambda: self._ring(store), "a rank ends")
        if self._watching is not None:
            self._watching.join(CALL_S)

    def meet(self, note: Note, give_up: Callable[[], None] = lambda: None) -> Epoch:
        """Meet the members of the present epoch and whoever wants to join, and return the next one. It may lack this process.

        Where another member does not know of the meeting and waits for this one, `give_up` is called, which ends that.
        Raises RuntimeError where fewer than the least number of ranks come within `wait_s` seconds.
        """
        last, number, began, pause = self.current, self.current.number + 1, time.monotonic(), POLL_S
        while True:
            if (text := self._read(self._key("decided", number))) is not None:
                return self._advanced(Epoch.read(text))
            if (now := self._elsewhere(last)) is not None:
                return self._advanced(now)
            lines = self._do(lambda store: self._lines(store, number))
            waited = time.monotonic() - max(began, self._found_again)
            notes = {each.member: each.note for each in lines if each.note is not None}
            if notes.get(self.own) != note:  # at first, and where a store that was started again has forgotten it
                line = _Line(self.own, self.own not in last.members, note)
                self._do(lambda store, line=line: self._add_line(store, number, line))
                self._do(self._ring)
                continue
            if self.own in last.members or not last.members:
                asking = [each.member for each in lines if each.asks]
                alive = {each.member for each in lines}
                if self._all_here(last, notes, alive, waited):
                    text = proposed(last, notes, asking).text
                    self._do(lambda store, text=text: store.compare_set(self._key("decided", number), "", text))
                    continue
                if note.whole and waited > self.timeout_s / 2:
                    give_up()
                    note = replace(note, whole=False)
            else:
                self._check_running()
                if waited > self._wait_s:
                    raise RuntimeError(
                        f"no member of epoch {last.number} of this run has answered for {self._wait_s:g} s; {self._found()}"
                    )
            time.sleep(pause)
            pause = min(1.5 * pause, SLOWEST_POLL_S)

    def join(self, note: Note) -> Epoch:
        """Return the first epoch that this process belongs to. Raises RuntimeError where the run has ended, or does not answer."""
        while True:
            self._check_running()
            text = self._read(self._key("epoch"))
            self.current = Epoch() if text is None else Epoch.read(text)
            epoch = self.meet(note)
            if self.own in epoch.members:
                return epoch

    def agree(self, own: str) -> None:
        """Raise RuntimeError where the run was begun with other settings than `own`, which would end it on all ranks."""
        first = self._do(lambda store: store.compare_set(self._key("settings"), "", own)).decode()
        if first != own:
            theirs, ours = next(
                (a, b) for a, b in zip_longest(first.split("\n"), own.split("\n"), fillvalue="") if a != b
            )
            raise RuntimeError(
                f"this run was begun with {theirs!r}, and this process has {ours!r}; give all ranks the same settings and the same model"
            )

    def stop_before(self, step: int) -> None:
        """Have all members meet before this step, or the one that another member has named."""
        key = self._key("order", self.current.number)
        self._do(lambda store: store.compare_set(key, "", str(step)))
        self._do(self._ring)
        self._look(self._do)

    def wait_for(self, what: str, of: Sequence[str]) -> bool:
        """Wait until all of these have said `what` in this epoch, and return True.

        False where somebody has called a meeting before, or where nothing was said, nor `moved` told, for the timeout.
        """
        number, pause, deadline, moved = self.current.number, POLL_S, time.monotonic() + self.timeout_s, 0
        keys = [self._key(what, number, each) for each in of]
        while not self._do(lambda store: store.check(keys)):
            now = self._do(lambda store: store.add(self._key("moved", number), 0))
            if now != moved:
                moved, deadline = now, time.monotonic() + self.timeout_s
            if self.called or time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, SLOWEST_POLL_S)
        return True

    def say(self, what: str) -> None:
        """Tell the other members `what` in this epoch."""
        self._do(lambda store: store.set(self._key(what, self.current.number, self.own), "1"))

    def moved(self) -> None:
        """Tell those that wait for this member that it is not stuck."""
        self._do(lambda store: store.add(self._key("moved", self.current.number), 1))

    def end(self) -> None:
        """Note that all have taken the last step."""
        self._do(lambda store: store.set(self._key("ended"), "1"))

    def go_on(self) -> None:
        """Note that there are more steps."""
        self._do(lambda store: store.delete_key(self._key("ended")))

    @property
    def called(self) -> bool:
        """Whether a member has come to the next meeting."""
        number = self.current.number + 1
        return any(each.calls for each in self._do(lambda store: self._lines(store, number)))

    @property
    def stop_at(self) -> int | None:
        """The step before which all members meet, if one was named."""
        number, step, _ = self._seen
        return step if number == self.current.number else None

    @property
    def asked_for(self) -> bool:
        """Whether somebody wants to join."""
        number, _, asked = self._seen
        return asked and number == self.current.number

    @property
    def dropped(self) -> bool:
        """Whether others have gone on without this process, as far as its watcher has seen."""
        return self._dropped_in == self.current.number > 0

    def look(self) -> None:
        """Look for who wants to join, and whether a step to meet before was named."""
        self._look(self._do)

    def _check_running(self) -> None:
        if self._read(self._key("ended")) is not None:
            raise RuntimeError("this run has ended: all its ranks have taken their last step; give another name")

    def _all_here(self, last: Epoch, notes: Mapping[str, Note], alive: Collection[str], waited: float) -> bool:
        """Return whether the next epoch can be proposed now. A process that is `alive` may still be busy with its step."""
        if not last.members:  # the first meeting of all
            if len(notes) < self._ranks and waited > self._wait_s:
                raise RuntimeError(
                    f"{len(notes)} of {self._ranks} ranks have come within {self._wait_s:g} s; start the others, or pass ranks={len(notes)}"
                )
            return len(notes) >= self._ranks and waited > FIRST_S
        missing = [each for each in last.members if each not in notes]
        # Others may not have found a store yet that was started again.
        sure = any(each in alive for each in missing) or time.monotonic() < self._found_again + 2 * self.timeout_s
        patience_s = self.timeout_s if sure else min(self.timeout_s, ANSWER_S)
        if missing and waited < patience_s:
            return False
        # Those that have not got the state yet do not begin anew while others may come back with it.
        trained = not last.step or any(each.knows for member, each in notes.items() if member in last.members)
        if len(notes) >= self._least and trained:
            return True
        if waited > self._wait_s and not trained:
            raise RuntimeError(
                f"no rank that has the weights of step {last.step} has come within {self._wait_s:g} s; start from a checkpoint"
            )
        if waited > self._wait_s:
            raise RuntimeError(
                f"{len(notes)} ranks are left after {self._wait_s:g} s, and at least {self._least} are to go on (least={self._least})"
            )
        return False

    def _elsewhere(self, last: Epoch) -> Epoch | None:
        """Return the epoch that is written down, where it does not follow from `last`: others have gone on, or the store has forgotten."""
        text = self._read(self._key("epoch"))
        found = None if text is None else Epoch.read(text)
        if found is None or found.number < max(1, last.number) or found.text == last.text:
            return None
        return found

    def _advanced(self, epoch: Epoch) -> Epoch:
        self.current = epoch
        self._do(self._write_epoch)
        return epoch

    def _write_epoch(self, store: Any) -> None:  # Any: see `_store`
        """Write down the present epoch, unless a later one is."""
        key, epoch = self._key("epoch"), self.current
        if not epoch.members:
            return
        while True:
            found = store.get(key) if store.check([key]) else b""
            if found and Epoch.read(found).number >= epoch.number:
                return
            if store.compare_set(key, found.decode(), epoch.text) == epoch.text.encode():
                return

    def _lines(self, store: Any, number: int) -> "list[_Line]":  # Any: see `_store`
        """Return what was said of a meeting, in order."""
        key = self._key("meeting", number)
        return [_Line.read(each) for each in store.get(key).splitlines()] if store.check([key]) else []

    def _add_line(self, store: Any, number: int, line: "_Line") -> None:  # Any: see `_store`
        store.append(self._key("meeting", number), f"{line.text}\n")

    def _ring(self, store: Any) -> None:  # Any: see `_store`
        """Wake the watchers of all members."""
        store.set(self._key("bell", str(store.add(self._key("rings"), 1))), "1")

    def _watch(self) -> None:
        heard, store = -1, None
        while not self._shut.is_set():
            try:
                if store is None:
                    store = self._connected()
                    self._write_epoch(store)
                    if heard >= 0:  # the store may have been started again, and others have begun anew in it
                        self._ring(store)
                    heard = store.add(self._key("rings"), 0)
                    self._look(lambda call, store=store: call(store))
                    continue  # it may have been told to end before it began to listen
                store.wait([self._key("bell", str(heard + 1))], timedelta(seconds=WATCH_S))
                heard += 1
                self._look(lambda call, store=store: call(store))
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) or "timeout" not in str(error).lower():
                    store = None
                    self._shut.wait(0.5)

    def _look(self, do: Callable[[Callable[[Any], Any]], Any]) -> None:
        """Say that this process lives, if a member has called a meeting, and look for what is wanted of it."""
        number = self.current.number
        if not self.current.members:
            return
        lines = do(lambda store: self._lines(store, number + 1))
        if any(each.calls for each in lines) and self.own not in {each.member for each in lines}:
            do(lambda store: self._add_line(store, number + 1, _Line(self.own)))
        text = do(lambda store: store.get(self._key("epoch")) if store.check([self._key("epoch")]) else None)
        if text is not None and (found := Epoch.read(text)).number >= number and self.own not in found.members:
            self._dropped_in = number
        order = self._key("order", number)
        step = int(do(lambda store: store.get(order))) if do(lambda store: store.check([order])) else None
        if number >= self._seen[0]:  # the other thread may have seen a later epoch meanwhile
            self._seen = number, step, any(each.asks for each in lines)

    def _read(self, key: str) -> bytes | None:
        return self._do(lambda store: store.get(key) if store.check([key]) else None)

    def _key(self, *parts: object) -> str:
        return "/".join([self._prefix, *map(str, parts)])

    def _do(self, call: Callable[[Any], Result]) -> Result:  # Any: see `_store`
        """Return `call` of the store, over another connection where one fails."""
        deadline = time.monotonic() + self._wait_s
        while True:
            try:
                if self._store is None:
                    self._store = self._connected()
                    self._found_again = time.monotonic() if self._found_before else self._found_again
                    self._found_before = True
                    if self.current.members:
                        self._write_epoch(self._store)
                return asked(CALL_S, partial(call, self._store), "a rank asks the store of its run")
            except StoreSilentError as error:
                self._store = None
                if time.monotonic() > deadline:
                    raise StoreSilentError(
                        f"the store of this run at {self._host}:{self._port} has not answered for {self._wait_s:g} s, and without it "
                        "nobody can tell which ranks go on; start it again, or start from a checkpoint"
                    ) from error
                time.sleep(0.2)

    def _connected(self) -> Any:  # Any: see `_store`
        def connect() -> Any:
            return TCPStore(self._host, self._port, None, False, timedelta(seconds=CALL_S), wait_for_workers=False)

        return asked(CALL_S + 1, connect, "a rank connects to the store of its run")

    def _found(self) -> str:
        return (
            f"its store at {self._host}:{self._port} remembers the members {', '.join(self.current.members)}; if these have ended, start "
            "a store anew, or give this run another name"
        )
