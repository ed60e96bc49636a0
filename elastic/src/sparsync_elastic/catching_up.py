"""How a rank that joins gets the state of a run while the others train.

One of them, its source, copies its state between two steps, sends the copy on a thread, and keeps a journal of what moves the weights from
there on. The one that joins replays it, and is a few steps behind when it asks to be let in: then only these are missing. Both are at
these weights to the bit, which a digest shows.
"""

import atexit
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from sparsync import Snapshot
from sparsync_elastic.journal import Journal, nbytes_of
from sparsync_elastic.members import Members
from sparsync_elastic.trained import Trained
from sparsync_elastic.world import Group, StoreSilentError, abort, forget_frames, is_loss, receive, send

_LOG = logging.getLogger("sparsync")
_END_S = 5.0  # how long a thread may take to end whose connections are closed


class Sources:
    """What this rank does for those that join: one after the other, because each takes a copy of the state."""

    def __init__(self, members: Members, trained: Sequence[Trained]) -> None:
        self._members, self._trained = members, trained
        self._servings: dict[str, Serving] = {}  # by the member that is to join
        self._answered: set[tuple[int, str]] = set()  # in which epoch, and to whom

    def answer(self, willing: bool) -> None:
        """Answer those that ask for the state, unless that was done; with the state if this rank is `willing`."""
        for each in self._members.fetching:
            asked = self._members.current.number, each
            if asked in self._answered or any(one.sends for one in self._servings.values()):
                continue  # one that has to wait is looked at before the next step again
            self._answered.add(asked)
            try:
                self._serve(each, willing and all(one.done for one in self._trained))
            except StoreSilentError as error:
                _LOG.warning("the store does not answer, and a rank that is to join waits: %s", error)

    def _serve(self, member: str, serves: bool) -> None:
        store = self._members.answer(member, serves)
        if serves:
            if member in self._servings:
                self._servings[member].stop()
            self._servings[member] = Serving(self._trained, member, store, self._members.timeout_s)

    def state_for(self, receiver: str, is_ahead: bool) -> list[dict[str, Any]]:  # Any: as Trained.state
        """Return what a rank lacks that is behind; `is_ahead`: it has got most of it from here before."""
        serving = self._servings.pop(receiver, None)
        rest = serving.rest() if serving is not None and is_ahead else None
        if serving is not None:
            serving.stop()
        return [each.state() for each in self._trained] if rest is None else rest

    def end(self) -> None:
        """Stop, and wait for the threads."""
        for each in self._servings.values():
            each.end()


class Serving:
    """What a source does for one that joins. `member` is that one; the store serves a process group of the two."""

    def __init__(self, trained: Sequence[Trained], member: str, store: Any, timeout_s: float) -> None:  # Any: a store
        self._trained, self.member, self._timeout_s = trained, member, timeout_s
        self._journals = list[Journal]()
        states = list[Any]()
        for each in trained:
            states.append(on_processor(each.handle.snapshot().moved))
            self._journals.append(Journal(each.handle, nbytes_of(states[-1])))
        self._near = False  # all is sent but the moves that are still to come
        self._group: Group | None = None
        self._thread = threading.Thread(target=self._send, args=(states, store), name="sparsync-serving", daemon=True)
        atexit.register(self.end)  # a thread inside C++ when the interpreter ends is killed there, with SIGABRT
        self._thread.start()

    def _send(self, states: list[Any], store: Any) -> None:  # Any: as Snapshot.moved; a store
        try:
            self._group = pair(store, 0, self._timeout_s)
            while states:
                self._send_one(states.pop(0))
            before = None
            while not _is_near(counts := [len(each.moves) for each in self._journals], before):
                self._send_moves(counts)
                before = counts
            self._send_moves(counts)
            self._near = True
        except RuntimeError as error:
            if not self._is_broken():
                _LOG.warning("the weights that a rank sends ahead to %s did not arrive: %s", self.member, error)
        finally:
            self._group = None
            atexit.unregister(self.end)
            if not self._near:
                for each in self._journals:
                    each.stop()

    def _send_moves(self, counts: Sequence[int]) -> None:
        """Send so many moves of each journal, one by one, because the one that joins takes time for each."""
        self._send_one(counts)
        for journal, count in zip(self._journals, counts, strict=True):
            for _ in range(count):
                self._send_one(journal.take())

    def _send_one(self, what: object) -> None:
        def check() -> None:
            if self._is_broken():
                raise RuntimeError("there is no catching up by moves any more")

        check()
        send(what, self._group, 1, check)

    @property
    def sends(self) -> bool:
        """Whether it may still have a copy of the state."""
        return self._thread.is_alive()

    def rest(self) -> list[dict[str, Any]] | None:  # Any: as Trained.state
        """Return what the one that joins lacks still; None where it needs all."""
        if not self._near or self._is_broken():
            return None
        return [each.state(journal.moves) for each, journal in zip(self._trained, self._journals, strict=True)]

    def stop(self) -> None:
        """End the journals, and have the thread end soon."""
        for each in self._journals:
            each.end()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                abort(group)

    def end(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join(_END_S)

    def _is_broken(self) -> bool:
        return any(each.broken for each in self._journals)


class Joiner:
    """What this rank does to get most of the state while the others train."""

    def __init__(self, members: Members, trained: Sequence[Trained]) -> None:
        self._members, self._trained = members, trained
        self.source = ""  # the member from which this rank has got most of the state
        self._before: list[dict[str, Any]] | None = None  # this rank's state before that; Any: as Trained.state
        self._ahead = 0, 0.0  # bytes and seconds of that

    def get_ahead(self, knows: bool) -> None:
        """Get most of the state if anybody trains; a rank that `knows` the run has a state to go back to."""
        self.source, self._ahead = "", (0, 0.0)
        try:
            if (found := self._members.source()) is not None:
                source, store = found
                # One that comes back may still be the last that is left, and goes on then from where it was.
                self._before = [each.state() for each in self._trained] if knows else None
                self._ahead = self._fetch(pair(store, 1, self._members.timeout_s))
                self.source = source
        except RuntimeError as error:
            if not (is_loss(error) or isinstance(error, StoreSilentError)):
                raise
            _LOG.warning("the weights did not come while the others train, all of them are to come later: %s", error)
            forget_frames(error)
            self.go_back()

    def _fetch(self, group: Group) -> tuple[int, float]:
        """Get near the state of a source; return the bytes and the seconds of it. Raises RuntimeError where the source is lost."""
        began, nbytes = time.monotonic(), 0

        def next_one() -> Any:  # Any: as it was sent
            nonlocal nbytes
            found, more = receive(group, 0)
            nbytes += more
            return found

        for each in self._trained:
            each.handle.restore(Snapshot(next_one()))
        before = counts = None
        while counts is None or not _is_near(counts, before):
            before, counts = counts, next_one()
            for each, count in zip(self._trained, counts, strict=True):
                for _ in range(count):
                    each.replay(next_one())
        return nbytes, time.monotonic() - began

    def arrive(self, states: Sequence[Mapping[str, Any]], late: bool) -> None:  # Any: as Trained.load
        """Take what this rank lacks still; `late`: see there."""
        self.source = ""
        for each, state in zip(self._trained, states, strict=True):
            each.load(state, late, self._members.moved)
        self._before = None

    def go_back(self) -> None:
        """Take the state from before `get_ahead`, if there is any, where the rest did not come."""
        if self._before is not None:
            for each, state in zip(self._trained, self._before, strict=True):
                each.load(state, late=True)
            self.source = ""
        self._before = None

    def take(self) -> tuple[int, float]:
        """Return the bytes and the seconds of what came ahead, and forget them."""
        found, self._ahead = self._ahead, (0, 0.0)
        return found


def pair(store: Any, rank: int, timeout_s: float) -> Group:  # Any: a store
    """Return a process group of two, beside the default one."""
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))


def on_processor(state: Any) -> Any:  # Any: as a part of a Snapshot
    """Return a state with its tensors in this machine's memory."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_processor(each) for key, each in state.items()}
    return [on_processor(each) for each in state] if isinstance(state, list) else state


def _is_near(counts: Sequence[int], before: Sequence[int] | None) -> bool:
    """Return whether hardly any moves are left; or as many as before, where the link takes no more than training makes."""
    return not sum(counts) or (before is not None and sum(counts) >= sum(before))
