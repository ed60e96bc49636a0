"""Sends the state of a run to a rank that joins, while the others train.

A member, the source, copies its state between two steps, sends the copy on a thread, and keeps a journal of the weights' moves from then
on. The joining rank replays them, and lacks only the last few when it asks to join. A digest shows that both then have the same bits.
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
_END_S = 5.0  # longest wait for a thread to end once its connections are closed


class Sources:
    """Sends the state to joining ranks, one after the other, because each transfer needs a copy of the state."""

    def __init__(self, members: Members, trained: Sequence[Trained]) -> None:
        self._members, self._trained = members, trained
        self._servings: dict[str, Serving] = {}  # by the process that will join
        self._answered: set[tuple[int, str]] = set()  # epoch and process

    def answer(self, willing: bool) -> None:
        """Answer processes that ask for the state; a `willing` rank serves them."""
        for each in self._members.fetching:
            asked = self._members.current.number, each
            if asked in self._answered or any(one.thread.is_alive() for one in self._servings.values()):
                continue  # answered before a later step
            self._answered.add(asked)
            try:
                store = self._members.answer(each, willing and all(one.done for one in self._trained))
            except StoreSilentError as error:
                _LOG.warning("the store does not answer, and a rank that will join waits: %s", error)
                continue
            if store is not None:
                if each in self._servings:
                    self._servings[each].stop()
                self._servings[each] = Serving(self._trained, each, store, self._members.timeout_s)

    def state_for(self, receiver: str, is_ahead: bool) -> list[dict[str, Any]]:  # Any: as Trained.state
        """Return the state for a rank that is behind; only the rest if `is_ahead`: it has most of the state from this rank."""
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
    """Sends the state to `member`, which will join, over a process group of two that meets at the store."""

    def __init__(self, trained: Sequence[Trained], member: str, store: Any, timeout_s: float) -> None:  # Any: a store
        self._trained, self.member, self._timeout_s = trained, member, timeout_s
        self._journals = list[Journal]()
        states = list[Any]()
        for each in trained:
            states.append(on_processor(each.handle.snapshot().moved))
            self._journals.append(Journal(each.handle, nbytes_of(states[-1])))
        self._near = False  # the copy and the moves so far are sent
        self._group: Group | None = None
        self.thread = threading.Thread(target=self._send, args=(states, store), name="sparsync-serving", daemon=True)
        atexit.register(self.end)  # a thread in C++ at the end of the interpreter kills the process with SIGABRT
        self.thread.start()

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
        except (RuntimeError, IndexError) as error:  # IndexError: the journal was ended
            if not self._is_broken():
                _LOG.warning("the weights that a rank sends ahead to %s did not arrive: %s", self.member, error)
        finally:
            self._group = None
            atexit.unregister(self.end)
            if not self._near:
                for each in self._journals:
                    each.stop()

    def _send_moves(self, counts: Sequence[int]) -> None:
        """Send this many moves of each journal, one by one, because the receiver needs time for every move."""
        self._send_one(counts)
        for journal, count in zip(self._journals, counts, strict=True):
            for _ in range(count):
                self._send_one(journal.moves.popleft())

    def _send_one(self, what: object) -> None:
        def check() -> None:
            if self._is_broken():
                raise RuntimeError("the journal has ended")

        check()
        send(what, self._group, 1, check)

    def rest(self) -> list[dict[str, Any]] | None:  # Any: as Trained.state
        """Return the rest of the state for the joining rank; None if it needs all."""
        if not self._near or self._is_broken():
            return None
        return [each.state(journal.moves) for each, journal in zip(self._trained, self._journals, strict=True)]

    def stop(self) -> None:
        """End the journals and the connection, so that the thread ends."""
        for each in self._journals:
            each.end()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                abort(group)

    def end(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self.thread.join(_END_S)

    def _is_broken(self) -> bool:
        return any(each.broken for each in self._journals)


class Joiner:
    """Gets most of the state from a member while the others train."""

    def __init__(self, members: Members, trained: Sequence[Trained]) -> None:
        self._members, self._trained = members, trained
        self.source = ""  # the member from which this rank has most of the state
        self._ahead = 0, 0.0  # its bytes and seconds

    def get_ahead(self) -> bool:
        """Get most of the state if anybody trains; return True if this rank's weights were overwritten."""
        self.source, self._ahead, begun = "", (0, 0.0), False
        try:
            if (served := self._members.source()) is not None:
                source, store = served
                group, begun = pair(store, 1, self._members.timeout_s), True
                self._ahead = self._fetch(group)
                self.source = source
        except RuntimeError as error:
            if not (is_loss(error) or isinstance(error, StoreSilentError)):
                raise
            _LOG.warning(
                "the weights did not come while the others train; all of them will come at the meeting: %s", error
            )
            forget_frames(error)
        return begun

    def _fetch(self, group: Group) -> tuple[int, float]:
        """Catch up with a source, except for the last moves; return bytes and seconds. Raises RuntimeError if the source is lost."""
        began, nbytes = time.monotonic(), 0

        def next_one() -> Any:  # Any: as sent
            nonlocal nbytes
            part, more = receive(group, 0)
            nbytes += more
            return part

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
        """Load the rest of the state; `late` as in `Trained.load`."""
        self.source = ""
        for each, state in zip(self._trained, states, strict=True):
            each.load(state, late, self._members.moved)

    def take(self) -> tuple[int, float]:
        """Take the bytes and seconds of the transfer before the meeting."""
        ahead, self._ahead = self._ahead, (0, 0.0)
        return ahead


def pair(store: Any, rank: int, timeout_s: float) -> Group:  # Any: a store
    """Make a process group of two, beside the default one."""
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))


def on_processor(state: Any) -> Any:  # Any: as a part of a Snapshot
    """Copy the tensors of a state to the CPU."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_processor(each) for key, each in state.items()}
    return [on_processor(each) for each in state] if isinstance(state, list) else state


def _is_near(counts: Sequence[int], before: Sequence[int] | None) -> bool:
    """Tell whether no moves are left, or as many as `before`: then the link is not faster than the training."""
    return not sum(counts) or (before is not None and sum(counts) >= sum(before))
