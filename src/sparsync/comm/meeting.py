"""Meetings of ranks on a store: before they connect, after every failure, and to tell each other why they failed."""

import json
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from sparsync.comm.announcement import differences
from sparsync.comm.worker import Result, Worker
from sparsync.core import digest

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__

POLL_S = 0.02  # the first interval between reads of the other ranks' notes
SLOWEST_POLL_S = 0.2
LINGER_S = 2.0  # how long ranks that differ wait until all have noticed
STAY_S = 0.5  # how long rank 0 waits until the other ranks have read the reports of a failure
GRACE_S = 1.0  # how much longer than its timeout a store call may take before the store counts as silent


class RanksMissingError(RuntimeError):
    """Some ranks of a group did not connect, or cannot reach each other."""


class StoreSilentError(RuntimeError):
    """The store of a process group does not answer: its process hangs, has ended, or cannot be reached."""


def asked(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Run `call`, which uses a store. Raises StoreSilentError if it takes longer than `seconds`, or the store is gone."""
    try:
        return within(seconds, call, doing)
    except StoreSilentError:
        raise
    except RuntimeError as error:
        raise StoreSilentError(
            f"{doing}: the store of the process group is gone, with its process, rank 0 or an agent such as torchrun's: {error}"
        ) from error


def within(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Run `call` on a separate thread. Raises StoreSilentError if it takes longer than `seconds`.

    A TCPStore ignores its timeout if the server neither answers nor closes the connection.
    """
    returned = Worker(joined=False).submit(call)
    if not futures.wait([returned], seconds).done:
        raise StoreSilentError(
            f"{doing}: the store of the process group has not answered for {seconds:g} s; the process that hosts it, rank 0 or an agent "
            "such as torchrun's, hangs or cannot be reached"
        )
    try:
        return returned.result()
    finally:
        del returned  # its error refers to this frame


@dataclass(frozen=True)
class _Note:
    """One rank's entry in the store: the number of its meeting, its status there, and the digest of its fingerprint.

    A rank "waits" until all ranks are there. Then it has "met" them, or it has "left" after its timeout.
    """

    round: int
    status: Literal["waits", "met", "left"]
    digest: int


@dataclass(frozen=True)
class Meeting:
    """The meetings of `size` ranks under one name on a store. Every rank writes its note and reads the others'.

    Ranks arrive at different times, and may have tried different numbers of times before. So a rank joins the newest meeting
    at which another rank waits, or opens the next one, and moves on when others are ahead.
    """

    store: Store
    name: str  # the same on all ranks, and unique
    rank: int
    size: int

    def meet(self, fingerprint: str, timeout_s: float, fix: str = "") -> str:
        """Wait until all ranks are here, and return a new name, the same on all ranks.

        Raises RuntimeError after about `timeout_s` seconds, naming the ranks that did not come, or if another rank's fingerprint
        differs, naming the lines that differ and the `fix`.
        """
        deadline = time.monotonic() + timeout_s
        doing = f"rank {self.rank} of {self.size} waits for the other ranks"
        number, notes, differing = asked(timeout_s + GRACE_S, lambda: self._meet(fingerprint, deadline), doing)
        # A rank that has left did come, and waited without success as this one has.
        missing = [str(other) for other, note in enumerate(notes) if note is None or note.round != number]
        if missing or not _all_at(notes, number):
            absent = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "all ranks at once"
            raise RanksMissingError(
                f"rank {self.rank} of {self.size}: {absent} did not come to make a private group within {timeout_s:g} s; "
                "all ranks of the group must take part, e.g. call attach"
            )
        if differing:
            # The store may live in a process that this error ends.
            self.wait_for_all(f"{self.name}/{number}/read", LINGER_S)
            raise RuntimeError(
                f"ranks must agree, but {differing}; {fix or 'give all ranks the same settings and the same checkpoint'}"
            )
        return f"{self.name}/{number}"

    def _meet(self, fingerprint: str, deadline: float) -> tuple[int, list[_Note | None], str]:
        """Meet, and return the number of the meeting, the notes of all ranks, and a text on fingerprints that differ.

        The notes of ranks that did not come have another number, or are None.
        """
        key = digest(fingerprint)
        self.store.set(self._text_key(key), fingerprint)
        number, pause = self._first(self._notes()), POLL_S
        self._write(_Note(number, "waits", key))
        while True:
            notes = self._notes()
            newest = max(note.round for note in notes if note is not None)
            if newest > number:
                if (met := self._all_met(number)) is None:
                    number = newest  # the earlier meeting never became complete
                    self._write(_Note(number, "waits", key))
                    continue
                notes = met
            if _all_at(notes, number):
                # Before the note "met", for which ranks wait before they leave with an error.
                digests = [note.digest for note in notes if note is not None]
                differing = self._differing(fingerprint, digests)
                self.store.set(self._complete_key(number), json.dumps(digests))
                self._write(_Note(number, "met", key))
                return number, notes, differing
            if time.monotonic() >= deadline:
                self._write(_Note(number, "left", key))
                return number, notes, ""
            time.sleep(pause)
            pause = min(1.5 * pause, SLOWEST_POLL_S)

    def _first(self, notes: Sequence[_Note | None]) -> int:
        """Choose the meeting to join: the newest if another rank waits there and this one has not met the others there, else the next."""
        newest = max((note.round for note in notes if note is not None), default=0)
        at_newest = {rank: note.status for rank, note in enumerate(notes) if note is not None and note.round == newest}
        before = at_newest.pop(self.rank, None)
        return newest if "waits" in at_newest.values() and before != "met" else newest + 1

    def _all_met(self, number: int) -> list[_Note | None] | None:
        """Return the notes of a complete meeting that faster ranks have left for the next one; None if it is not complete."""
        if not self.store.check([self._complete_key(number)]):
            return None
        return [_Note(number, "met", key) for key in json.loads(self.store.get(self._complete_key(number)))]

    def _differing(self, fingerprint: str, digests: Sequence[int]) -> str:
        """Describe how the first rank with another fingerprint differs from this one; "" if there is none."""
        for other, theirs in enumerate(digests):
            if theirs != digests[self.rank]:
                text = self.store.get(self._text_key(theirs)).decode()
                return differences(fingerprint.split("\n"), text.split("\n"), self.rank, other)
        return ""

    def wait_for_all(self, point: str, timeout_s: float) -> None:
        """Wait until all ranks have come to `point`, a name that is new to the store, at most `timeout_s` seconds."""
        everybody, deadline = f"{point}/all", time.monotonic() + timeout_s

        def wait() -> None:
            if self.store.add(point, 1) == self.size:
                self.store.set(everybody, "")
            pause = POLL_S / 4
            # Not `store.wait`, which would block other calls of this process.
            while not self.store.check([everybody]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL_S)

        with suppress(StoreSilentError):
            asked(timeout_s + GRACE_S, wait, "")

    def report(self, of: str, cause: str, timeout_s: float) -> list[str | None]:
        """Tell the other ranks why this one failed after the meeting `of`. Return all ranks' reports within `timeout_s` seconds.

        The report of a rank that did not answer is None. Raises StoreSilentError.
        """
        deadline = time.monotonic() + timeout_s
        doing = f"rank {self.rank} of {self.size} reports a failure"
        return asked(timeout_s + GRACE_S, lambda: self._report(f"{of}/failed", cause, deadline), doing)

    def _report(self, prefix: str, cause: str, deadline: float) -> list[str | None]:
        keys, pause = [f"{prefix}/{rank}" for rank in range(self.size)], POLL_S
        self.store.set(keys[self.rank], cause)
        while not self.store.check(keys) and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, SLOWEST_POLL_S)
        reports = [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]
        with suppress(RuntimeError):  # the store may be gone by now; the reports matter more
            self._stay_until_read(f"{prefix}/read", sum(text is not None for text in reports))
        return reports

    def _stay_until_read(self, key: str, reporting: int) -> None:
        """Make rank 0, whose process may host the store, wait until all ranks that reported have read the reports."""
        read, deadline = self.store.add(key, 1), time.monotonic() + STAY_S
        while self.rank == 0 and read < reporting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            read = self.store.add(key, 0)

    def _text_key(self, of: int) -> str:
        return f"{self.name}/text/{of}"

    def _complete_key(self, number: int) -> str:
        return f"{self.name}/{number}/complete"

    def _write(self, note: _Note) -> None:
        self.store.set(f"{self.name}/at/{self.rank}", json.dumps([note.round, note.status, note.digest]))

    def _notes(self) -> list[_Note | None]:
        keys = [f"{self.name}/at/{rank}" for rank in range(self.size)]
        if self.store.check(keys):
            values = self.store.multi_get(keys)  # one message for all ranks
        else:
            values = [self.store.get(key) if self.store.check([key]) else None for key in keys]
        return [None if value is None else _Note(*json.loads(value)) for value in values]


def _all_at(notes: Sequence[_Note | None], number: int) -> bool:
    return all(note is not None and note.round == number and note.status != "left" for note in notes)
