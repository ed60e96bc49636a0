"""The members of a run, who agree over a store, in epochs, who takes part.

An epoch has members, in the order of their ranks. They meet when one has lost others, or a process wants to join or leave. Every member
writes a note; the first one that sees all notes, or has waited long enough, proposes the next epoch. The first proposal in the list of the
present epoch is the next one, so two halves of a run never both continue: a member that cannot reach the store stays behind. A restarted
store is empty, so a member that lacks others waits there, because they may have gone on without it.
"""

import atexit
import json
import math
import random
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch.distributed as dist

from sparsync_elastic.board import CALL_S, Board, Said, value
from sparsync_elastic.epochs import Epoch, Note, proposed
from sparsync_elastic.presence import Presence
from sparsync_elastic.world import StoreSilentError, asked

PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

POLL_S = 0.02  # first interval of polling the notes
SLOWEST_POLL_S = 0.1
ANSWER_S = 2.0  # longest wait for a process to write that it lives; a busy main thread does not delay this
FIRST_S = 1.0  # shortest first meeting: members of an older run may write their epoch into a restarted store meanwhile
LOOK_S = 1.0  # interval of reading more than the lines of the present epoch
# A meeting that lacks members waits this long: others that have gone on without this process may write their epoch into a restarted store.
# They reach it within CONNECT_S and a pause of torch's.
AGAIN_S = 4.0
WATCH_S = 60.0  # longest single wait of the watcher for the bell


class Members(Board):
    """The members of a run, from the view of one. A member may be busy for `timeout_s`."""

    def __init__(
        self,
        host: str,
        port: int,
        name: str,
        presence: Presence,
        *,
        ranks: int,
        least: int,
        wait_s: float,
        timeout_s: float = 30.0,
    ) -> None:
        super().__init__(host, port, name, wait_s)
        self.own, self._presence, self._ranks, self._least = presence.member, presence, ranks, least
        self.timeout_s = timeout_s
        self._of_groups: Any = None  # Any: see `_store`
        self._seen = 0, Said()  # the lines of the epoch with this number
        self._dropped_in = 0  # the epoch in which others have gone on without this process
        self._shut = threading.Event()
        self._watching: threading.Thread | None = None

    def store_of(self, epoch: Epoch) -> Any:  # Any: see there
        """Write an epoch to the store, and return a store for its process group, over a connection that all epochs share."""
        for tries_again in (True, False):
            try:
                self._of_groups = self._of_groups or self._connected()
                asked(CALL_S, lambda: self._write_epoch(self._of_groups))
                break
            except StoreSilentError:
                self._of_groups = None
                if not tries_again:
                    raise
        # A restarted store may have had another epoch with this number.
        prefix = f"{self._prefix}/groups/{epoch.number}/{zlib.crc32(epoch.text.encode())}"
        return PrefixStore(prefix, self._of_groups)

    def watch(self) -> None:
        """On a thread, tell others that this process lives, and learn who wants to join."""
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="sparsync-members", daemon=True)
            self._watching.start()
            atexit.register(self.close)  # a thread in C++ at the end of the interpreter kills the process with SIGABRT

    def close(self) -> None:
        """End the threads."""
        atexit.unregister(self.close)
        self._shut.set()
        self._presence.close()
        with suppress(RuntimeError):  # the store may be gone
            store = self._store or self._connected()
            asked(CALL_S, lambda: self._ring(store))
        if self._watching is not None:
            self._watching.join(CALL_S)
        self._wait_for_threads()

    def meet(self, note: Note, give_up: Callable[[], None] = lambda: None) -> Epoch:
        """Meet the members of the present epoch and processes that want to join; return the next epoch, which may lack this process.

        Calls `give_up`, which ends the step, if another member does not know of the meeting and waits in a step for this process.
        Raises RuntimeError if fewer than the least number of ranks come within `wait_s` seconds.
        """
        last, began, pause, looked, rang = self.current, time.monotonic(), POLL_S, -math.inf, False
        kind = "comes" if self.own in last.members else "asks"
        self.say(kind, asdict(note))
        if not note.whole:
            self._presence.ask(last.members)
        while True:
            elsewhere = None
            if not last.members or time.monotonic() > looked + LOOK_S:
                looked, elsewhere = time.monotonic(), self._elsewhere(last)
                if last.members and kind == "asks":
                    self._check_running()
            found_again, said = self._found_again, self._said()
            if (found := said.next or elsewhere) is not None:
                return self._advanced(found)
            waited = time.monotonic() - max(began, self._found_again)
            notes = said.notes
            if notes.get(self.own) != note:  # it has changed, or the store was restarted
                self.say(kind, asdict(note))
                continue
            if kind == "comes" or not last.members:
                if self._all_here(last, notes, said.alive, waited):
                    if (elsewhere := self._elsewhere(last)) is not None:
                        return self._advanced(elsewhere)
                    self.say("next", proposed(last, notes, list(said.of("asks")), self._least).text, found_again)
                    continue
                if note.whole and waited > self.timeout_s / 2:
                    give_up()
                    note = replace(note, whole=False)
                self._presence.ask([each for each in last.members if each not in notes])
            elif waited > self._wait_s:
                raise RuntimeError(
                    f"no member of epoch {last.number} of this run has answered for {self._wait_s:g} s; its store "
                    f"at {self._host}:{self._port} remembers the members {', '.join(last.members)}; if these have ended, start a new "
                    "store, or give this run another name"
                )
            if not rang:  # for members that have noticed nothing
                self._do(self._ring)
                rang = True
                continue
            time.sleep(pause)
            under_way = kind == "asks" and said.of("comes")
            pause = POLL_S if under_way else min(1.5 * pause, SLOWEST_POLL_S)

    def join(self, note: Note) -> Epoch:
        """Join, and return the first epoch with this process. Raises RuntimeError if the run has ended or does not answer."""
        with suppress(StoreSilentError):  # `store_of` tries again
            self._of_groups = self._of_groups or self._connected()  # now, because others will wait for `store_of`
        while True:
            self._find()
            epoch = self.meet(note)
            if self.own in epoch.members:
                return epoch

    def _find(self) -> None:
        """Take the written epoch for the present one, unless it is older: a new epoch is written shortly after the decision."""
        self._check_running()
        if (written := self._written_epoch()) is not None and written.number >= self.current.number:
            self.current = written

    def source(self) -> tuple[str, Any] | None:  # Any: a store
        """Ask a training member for the state, before `join`; return the member, and a store for it and this process.

        None if no member trains. A member that serves another process answers later. After a meeting this asks again.
        """
        asked_at, pause = time.monotonic(), POLL_S
        self._find()
        others = [each for each in self.current.members if each != self.own]
        if not others or self._said().of("comes"):
            return None
        while others and time.monotonic() < asked_at + self._wait_s:
            source = random.SystemRandom().choice(others)
            self.say("fetches", source)
            self._do(self._ring)
            while not (said := self._said()).of("comes") and time.monotonic() < asked_at + self._wait_s:
                if said.has(source, "serves", self.own):
                    return source, self.store_of_pair(source, self.own)
                if said.has(source, "declines", self.own):
                    return None
                self._check_running()
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL_S)
            while self._said().of("comes") and time.monotonic() < asked_at + self._wait_s:
                time.sleep(SLOWEST_POLL_S)
                self._find()
            others = [each for each in self.current.members if each != self.own]
        return None

    def answer(self, member: str, serves: bool) -> Any:  # Any: a store
        """Answer a process that asks for the state; return a store for both if this member serves it."""
        store = self.store_of_pair(self.own, member) if serves else None
        self.say("serves" if serves else "declines", member)
        return store

    def store_of_pair(self, source: str, member: str) -> Any:  # Any: see `_store`
        """Make a store for a process group of these two, over another connection."""
        return PrefixStore(f"{self._prefix}/pairs/{self.current.number}/{source}/{member}", self._connected())

    def agree(self, own: str) -> None:
        """Raise RuntimeError if the run was begun with other settings than `own`: a step with both would fail on all ranks."""
        first = self._do(lambda store: store.compare_set(self._key("settings"), "", own)).decode()
        if first != own:
            theirs, ours = next(
                (a, b) for a, b in zip_longest(first.split("\n"), own.split("\n"), fillvalue="") if a != b
            )
            raise RuntimeError(
                f"this run was begun with {theirs!r}, and this process has {ours!r}; give all ranks the same settings and the same model"
            )

    def stop_before(self, step: int) -> None:
        """Call a meeting of all members before this step, or before the step that another member named first."""
        self.say("stop", step)
        self._note(self._said(), self.current.number)
        self._do(self._ring)

    def wait_for(self, what: str, of: Sequence[str]) -> bool:
        """Wait until all of these have written `what` in this epoch, and return True.

        Return False if a member calls a meeting first, or if nobody has called `moved` for the timeout.
        """
        looked = moved_at = time.monotonic()
        moved, key = 0, self._key("moved", self.current.number)
        while True:
            said, now = self._said(), time.monotonic()
            if said.of(what).keys() >= set(of):
                self._note(said, self.current.number)
                return True
            if now > looked + min(LOOK_S, self.timeout_s / 4):
                looked, before = now, moved
                moved = self._do(lambda store: store.add(key, 0))
                moved_at = moved_at if moved == before else now
            if said.of("comes") or now > moved_at + self.timeout_s:
                return False
            time.sleep(POLL_S)

    def say(self, kind: str, what: Any = None, found_again: float | None = None) -> None:  # Any: see `Said`
        """Write a line in the present epoch; with `found_again`, only to the store that answered at that time."""
        line, key = json.dumps([self.own, kind, what]), self._key("said", self.current.number)
        self._do(lambda store: found_again in (None, self._found_again) and store.append(key, f"{line}\n"))

    def moved(self) -> None:
        """Tell members in `wait_for` that this one is not stuck. Called for every part of a transfer, so it writes no line."""
        key = self._key("moved", self.current.number)
        self._do(lambda store: store.add(key, 1))

    def end(self) -> None:
        """Write that all have taken the last step."""
        self._do(lambda store: store.set(self._key("ended"), "1"))

    def go_on(self) -> None:
        """Write that there are more steps."""
        self._do(lambda store: store.delete_key(self._key("ended")))

    @property
    def stop_at(self) -> int | None:
        """The step before which all members meet; None if no meeting was called."""
        return self._present.stop

    @property
    def asked_for(self) -> bool:
        """True if a process wants to join."""
        return bool(self._present.of("asks"))

    @property
    def fetching(self) -> Sequence[str]:
        """The processes that ask this member for the state."""
        return [each for each, source in self._present.of("fetches").items() if source == self.own]

    @property
    def _present(self) -> Said:
        """The lines of the present epoch that were read so far."""
        number, said = self._seen
        return said if number == self.current.number else Said()

    @property
    def dropped(self) -> bool:
        """True if the watcher has seen that others have gone on without this process."""
        return self._dropped_in >= self.current.number > 0

    def look(self) -> None:
        """Read the lines of the present epoch."""
        self._note(self._said(), self.current.number)

    def _check_running(self) -> None:
        if self._read(self._key("ended")) is not None:
            raise RuntimeError("this run has ended: all its ranks have taken their last step; give another name")

    def _all_here(self, last: Epoch, notes: Mapping[str, Note], alive: Collection[str], waited: float) -> bool:
        """Tell whether the next epoch can be proposed now. Processes that are `alive` may still be busy with a step."""
        if not last.members:  # the first meeting of the run
            if len(notes) < self._ranks and waited > self._wait_s:
                raise RuntimeError(
                    f"{len(notes)} of {self._ranks} ranks have come within {self._wait_s:g} s; start the others, or pass ranks={len(notes)}"
                )
            return len(notes) >= self._ranks and waited > FIRST_S
        if any(each not in notes for each in last.members) and time.monotonic() < self._found_again + AGAIN_S:
            return False
        ended = self._presence.ended.difference(alive)
        missing = [each for each in last.members if each not in notes and each not in ended]
        # After a restart of the store, others may not have reached it yet.
        sure = any(each in alive for each in missing) or time.monotonic() < self._found_again + 2 * self.timeout_s
        patience_s = self.timeout_s if sure else min(self.timeout_s, ANSWER_S)
        if missing and waited < patience_s:
            return False
        # Ranks without the state wait for ranks that have it.
        trained = not last.step or any(each.knows for member, each in notes.items() if member in last.members)
        if len(notes) >= self._least and trained:
            return True
        if waited <= self._wait_s:
            return False
        if not trained:
            raise RuntimeError(
                f"no rank that has the weights of step {last.step} has come within {self._wait_s:g} s; start from a checkpoint"
            )
        raise RuntimeError(
            f"{len(notes)} ranks are left after {self._wait_s:g} s, and at least {self._least} are to go on (least={self._least})"
        )

    def _elsewhere(self, last: Epoch) -> Epoch | None:
        """Read the written epoch; None if it is `last` or older. A newer one means that others have gone on without this process."""
        written = self._written_epoch()
        newer = written is not None and written.number >= max(1, last.number) and written.text != last.text
        return written if newer else None

    def _advanced(self, epoch: Epoch) -> Epoch:
        self.current = epoch
        if self.own in epoch.refused:
            raise RuntimeError(f"this rank, {self.own}, is left out of the run: {epoch.refused[self.own]}")
        self._presence.reach([each for each in epoch.members if each != self.own])
        return epoch

    def _watch(self) -> None:
        heard, store = -1, None
        while not self._shut.is_set():
            try:
                if store is None:
                    store = self._connected()
                    self._write_epoch(store)
                    if heard >= 0:  # others may have begun a new run in a restarted store
                        self._ring(store)
                    heard = store.add(self._key("rings"), 0)
                    self._look(store)
                    continue  # `close` may have been called before this thread listened
                store.wait([self._key("bell", str(heard + 1))], timedelta(seconds=WATCH_S))
                heard += 1
                self._look(store)
            except RuntimeError as error:
                if not isinstance(error, dist.DistStoreError) or "timeout" not in str(error).lower():
                    store = None
                    self._shut.wait(0.5)

    def _look(self, store: Any) -> None:  # Any: see `_store`
        """Read the lines of the present epoch. If a member has called a meeting, write that this process lives."""
        number = self.current.number
        if not self.current.members:
            return
        key = self._key("said", number)
        said = Said(value(store, key))
        if said.of("comes") and self.own not in said.alive:
            store.append(key, f"{json.dumps([self.own, 'lives', None])}\n")
        self._note(said, number)
        text = value(store, self._key("epoch"))
        if text is not None and (written := Epoch.read(text)).number >= number and self.own not in written.members:
            self._dropped_in = written.number

    def _note(self, said: Said, number: int) -> None:
        if number >= self._seen[0]:  # another thread may have seen a later epoch
            self._seen = number, said
