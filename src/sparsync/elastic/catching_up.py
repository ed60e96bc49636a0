"""How a rank that joins gets the state of a run while the others train.

One of them, its source, copies its state between two steps, sends the copy on a thread, and keeps a journal of what moves the weights from
there on. The one that joins replays it, and is a few steps behind when it asks to be let in: then only these are missing. Both are at
these weights to the bit, which a digest shows.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from sparsync.comm.interrupts import abort
from sparsync.elastic.trained import Trained
from sparsync.elastic.world import Group, receive, send

_LOG = logging.getLogger("sparsync")
_END_S = 5.0  # how long a thread may take to end whose connections are closed


class Serving:
    """What a source does for one that joins. `member` is that one; the store serves a process group of the two."""

    def __init__(self, trained: Sequence[Trained], member: str, store: Any, timeout_s: float) -> None:  # Any: a store
        self._trained, self.member = trained, member
        recorded = [each.recorded() for each in trained]
        self._journals = [journal for _, journal in recorded]
        self._sent = [0] * len(trained)  # moves of each journal
        self._near = False  # all is sent but the moves that are still to come
        self._stopped = False
        self._group: Group | None = None
        states = [state for state, _ in recorded]
        self._thread = threading.Thread(
            target=self._send, args=(states, store, timeout_s), name="sparsync-serving", daemon=True
        )
        self._thread.start()

    def _send(self, states: list[dict[str, Any]], store: Any, timeout_s: float) -> None:  # Any: as Trained.state
        try:
            self._group = group = pair(store, 0, timeout_s)
            send(states, group, 1)
            states.clear()
            before = None
            while True:
                moves = self._take()
                send(moves, group, 1)
                if _is_near(moves, before):
                    break
                before = moves
            self._near = True
        except RuntimeError as error:
            if not self._stopped:
                _LOG.warning("the weights that a rank sends ahead to %s did not arrive: %s", self.member, error)
        finally:
            self._group = None
            if not self._near:
                self._stop_journals()

    def _take(self) -> list[list[Any]]:  # Any: as Journal.moves
        """Return the moves of each journal that were not sent."""
        taken = [journal.moves[sent:] for journal, sent in zip(self._journals, self._sent, strict=True)]
        self._sent = [sent + len(each) for sent, each in zip(self._sent, taken, strict=True)]
        return taken

    def rest(self) -> list[dict[str, Any]] | None:  # Any: as Trained.rest
        """Return what the one that joins lacks still; None where it needs all."""
        if not self._near or any(each.broken for each in self._journals):
            return None
        return [each.rest(moves) for each, moves in zip(self._trained, self._take(), strict=True)]

    def stop(self) -> None:
        """End what is under way."""
        self._stopped = True
        for each, journal in zip(self._trained, self._journals, strict=True):
            each.forget_journal(journal)
        self._stop_journals()
        if (group := self._group) is not None:
            with suppress(RuntimeError):
                abort(group)
        self._thread.join(_END_S)

    def _stop_journals(self) -> None:
        for each in self._journals:
            each.stop()


def fetch(trained: Sequence[Trained], store: Any, timeout_s: float) -> tuple[int, float]:  # Any: a store
    """Get near the state of a source, whose `Serving` has the same store; return the bytes and the seconds of it.

    Raises RuntimeError where the source is lost meanwhile.
    """
    began = time.monotonic()
    group = pair(store, 1, timeout_s)
    states, nbytes = receive(group, 0)
    for each, state in zip(trained, states, strict=True):
        each.start_from(state)
    del states
    before = None
    while True:
        moves, more = receive(group, 0)
        nbytes += more
        for each, its_moves in zip(trained, moves, strict=True):
            each.replay(its_moves)
        if _is_near(moves, before):
            return nbytes, time.monotonic() - began
        before = moves


def pair(store: Any, rank: int, timeout_s: float) -> Group:  # Any: a store
    """Return a process group of two, beside the default one."""
    return dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))


def _is_near(moves: Sequence[Sequence[Any]], before: Sequence[Sequence[Any]] | None) -> bool:  # Any: as Journal.moves
    """Return whether hardly any moves are left; or as many as before, where the link takes no more than training makes."""
    count = sum(map(len, moves))
    return not count or (before is not None and count >= sum(map(len, before)))
