"""How a rank that joins gets the state of a run while the others train.

One of them, its source, copies its state between two steps, sends the copy on a thread, and keeps a journal of what moves the weights from
there on. The one that joins replays it, and is a few steps behind when it asks to be let in: then only these are missing. Both are at
these weights to the bit, which a digest shows.
"""

import atexit
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparsync.comm.interrupts import abort
from sparsync.exchanges.step_method import StepMethod
from sparsync_elastic.trained import Trained
from sparsync_elastic.world import Group, receive, send

_LOG = logging.getLogger("sparsync")
_END_S = 5.0  # how long a thread may take to end whose connections are closed


class Serving:
    """What a source does for one that joins. `member` is that one; the store serves a process group of the two."""

    def __init__(
        self, methods: Sequence[StepMethod], member: str, store: Any, timeout_s: float
    ) -> None:  # Any: a store
        self._methods, self.member, self._timeout_s = methods, member, timeout_s
        recorded = [each.recorded() for each in methods]
        self._journals = [journal for _, journal in recorded]
        self._near = False  # all is sent but the moves that are still to come
        self._group: Group | None = None
        states = [state for state, _ in recorded]
        self._thread = threading.Thread(target=self._send, args=(states, store), name="sparsync-serving", daemon=True)
        atexit.register(self.end)  # a thread inside C++ when the interpreter ends is killed there, with SIGABRT
        self._thread.start()

    def _send(self, states: list[dict[str, Any]], store: Any) -> None:  # Any: as StepMethod.recorded; a store
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
                self._stop_journals()

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

    def rest(self, trained: Sequence[Trained]) -> list[dict[str, Any]] | None:  # Any: as Trained.rest
        """Return what the one that joins lacks still; None where it needs all."""
        if not self._near or self._is_broken():
            return None
        return [each.rest(journal.take_all()) for each, journal in zip(trained, self._journals, strict=True)]

    def stop(self) -> None:
        """End the journals, and have the thread end soon."""
        for each, journal in zip(self._methods, self._journals, strict=True):
            each.forget(journal)
        self._stop_journals()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                abort(group)

    def end(self) -> None:
        """Stop, and wait for the thread."""
        self.stop()
        self._thread.join(_END_S)

    def _is_broken(self) -> bool:
        return any(each.broken for each in self._journals)

    def _stop_journals(self) -> None:
        for each in self._journals:
            each.stop()


def fetch(methods: Sequence[StepMethod], store: Any, timeout_s: float) -> tuple[int, float]:  # Any: a store
    """Get near the state of a source, whose `Serving` has the same store; return the bytes and the seconds of it.

    Raises RuntimeError where the source is lost meanwhile, or cannot go on.
    """
    began, nbytes = time.monotonic(), 0
    group = pair(store, 1, timeout_s)

    def next_one() -> Any:  # Any: as it was sent
        nonlocal nbytes
        found, more = receive(group, 0)
        nbytes += more
        return found

    for each in methods:
        each.start_from(next_one())
    before = counts = None
    while counts is None or not _is_near(counts, before):
        before, counts = counts, next_one()
        for each, count in zip(methods, counts, strict=True):
            for _ in range(count):
                each.replay([next_one()])
    return nbytes, time.monotonic() - began


def pair(store: Any, rank: int, timeout_s: float) -> Group:  # Any: a store
    """Return a process group of two, beside the default one."""
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))


def _is_near(counts: Sequence[int], before: Sequence[int] | None) -> bool:
    """Return whether hardly any moves are left; or as many as before, where the link takes no more than training makes."""
    return not sum(counts) or (before is not None and sum(counts) >= sum(before))
