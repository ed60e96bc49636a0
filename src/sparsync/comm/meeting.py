"""How ranks meet on a store: before they connect, again after each failure, and to tell each other why they failed."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

from sparsync.comm.announcement import differences
from sparsync.core import digest

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
Result = TypeVar("Result")

POLL_S = 0.02  # between two looks at the other ranks' notes, at first
SLOWEST_POLL_S = 0.2
LINGER_S = 2.0  # how long ranks that differ wait for each other to find out
STAY_S = 0.5  # how long rank 0 waits for the other ranks to have read the reports of a failure
GRACE_S = 1.0  # how much longer than its timeout a call of the store may take before the store counts as silent


class RanksMissingError(RuntimeError):
    """Not all ranks of a group came to connect, or they cannot reach each other."""


class StoreSilentError(RuntimeError):
    """The store of a process group does not answer: its process hangs, has ended, or cannot be reached."""


def asked(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Return `call()`, which asks a store. Raises StoreSilentError if it takes longer than `seconds`, or the store is gone."""
    try:
        return within(seconds, call, doing)
    except StoreSilentError:
        raise
    except RuntimeError as error:
        raise StoreSilentError(
            f"{doing}: the store of the process group is gone, with its process, rank 0 or an agent such as torchrun's: {error}"
        ) from error


def within(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Return `call()`, made on a separate thread. Raises StoreSilentError if it takes longer than `seconds`.

    A TCPStore waits forever for a server that neither answers nor closes the connection, whatever timeout it was given.
    """
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="sparsync-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed.pop()
    if not found:
        raise StoreSilentError(
            f"{doing}: the store of the process group has not answered for {seconds:g} s; the process that hosts it, rank 0 or an agent "
            "such as torchrun's, hangs or cannot be reached"
        )
    return found.pop()


@dataclass(frozen=True)
class _Note:
    """What one rank has written: the meeting it has come to, how that went, and a digest of what must be the same on all ranks.

    A rank "waits" for the others until all are there. Then it has "met" them; or it has "left", because its time was over.
    """

    round: int
    status: Literal["waits", "met", "left"]
    digest: int

    def is_at(self, number: int) -> bool:
        """Return whether the rank is at this meeting, and has not left."""
        return self.round == number and self.status != "left"


@dataclass(frozen=True)
class Meeting:
    """The meetings of `size` ranks under one name on a store. Each rank writes its note and reads the others'.

    Ranks come to a meeting at different times, and may have tried a different number of times before. So a rank joins the newest meeting
    at which somebody waits, or opens the next one, and moves on when others are ahead.
    """

    store: Store
    name: str  # the same on all ranks; no other meetings have it
    rank: int
    size: int

    def meet(self, fingerprint: str, timeout_s: float, fix: str = "") -> str:
        """Wait until all ranks are here, and return a name that no meeting has returned before, the same on all ranks.

        Raises RuntimeError within `timeout_s` seconds and a little. It names the ranks that did not come, or the lines in which another
        rank's fingerprint differs; `fix` says what to do then.
        """
        deadline = time.monotonic() + timeout_s
        doing = f"rank {self.rank} of {self.size} waits for the other ranks"
        number, notes, differing = asked(timeout_s + GRACE_S, lambda: self._meet(fingerprint, deadline), doing)
        # A rank that has left again did come, and waited without success as this one has.
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
        """Return the number of a meeting, the notes of all ranks, and the difference to another rank's fingerprint as text.

        The notes of ranks that did not come have another number, or are None.
        """
        own = digest(fingerprint)
        self.store.set(self._text_key(own), fingerprint)
        number, pause = self._first(self._notes()), POLL_S
        self._write(_Note(number, "waits", own))
        while True:
            notes = self._notes()
            newest = max(note.round for note in notes if note is not None)
            if newest > number:
                if (met := self._all_met(number)) is None:
                    number = newest  # the earlier meeting was not complete without this rank
                    self._write(_Note(number, "waits", own))
                    continue
                notes = met
            if _all_at(notes, number):
                # Before the note that this rank has met: ranks that leave with an error wait for that note.
                digests = [note.digest for note in notes if note is not None]
                differing = self._differing(fingerprint, digests)
                self.store.set(self._complete_key(number), json.dumps(digests))
                self._write(_Note(number, "met", own))
                return number, notes, differing
            if time.monotonic() >= deadline:
                self._write(_Note(number, "left", own))
                return number, notes, ""
            time.sleep(pause)
            pause = min(1.5 * pause, SLOWEST_POLL_S)

    def _first(self, notes: Sequence[_Note | None]) -> int:
        """Return the meeting to come to: the newest one if another rank waits there and this one has not met the others there."""
        newest = max((note.round for note in notes if note is not None), default=0)
        at_newest = {rank: note.status for rank, note in enumerate(notes) if note is not None and note.round == newest}
        before = at_newest.pop(self.rank, None)
        return newest if "waits" in at_newest.values() and before != "met" else newest + 1

    def _all_met(self, number: int) -> list[_Note | None] | None:
        """Return the notes of a meeting that quicker ranks have left for the next one; None if not all had met there."""
        if not self.store.check([self._complete_key(number)]):
            return None
        return [_Note(number, "met", each) for each in json.loads(self.store.get(self._complete_key(number)))]

    def _differing(self, fingerprint: str, digests: Sequence[int]) -> str:
        """Return how the first rank with another fingerprint differs from this one; "" if there is none."""
        for other, theirs in enumerate(digests):
            if theirs != digests[self.rank]:
                text = self.store.get(self._text_key(theirs)).decode()
                return differences(fingerprint.split("\n"), text.split("\n"), self.rank, other)
        return ""

    def wait_for_all(self, point: str, timeout_s: float) -> None:
        """Return when all ranks have come to `point`, a name that is new to the store, or after `timeout_s` seconds."""
        everybody, deadline = f"{point}/all", time.monotonic() + timeout_s

        def wait() -> None:
            if self.store.add(point, 1) == self.size:
                self.store.set(everybody, "")
            pause = POLL_S / 4
            # Not `store.wait`, which other calls of this process would wait for.
            while not self.store.check([everybody]) and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(1.5 * pause, SLOWEST_POLL_S)

        with suppress(StoreSilentError):
            asked(timeout_s + GRACE_S, wait, "")

    def report(self, of: str, cause: str, timeout_s: float) -> list[str | None]:
        """Tell the other ranks why this one failed after the meeting `of`, and return what each rank reports within `timeout_s` seconds.

        None stands for a rank that reported nothing. Raises StoreSilentError.
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
        found = [self.store.get(key).decode() if self.store.check([key]) else None for key in keys]
        with suppress(RuntimeError):  # the reports matter more than that the store is gone by now
            self._stay_until_read(f"{prefix}/read", sum(each is not None for each in found))
        return found

    def _stay_until_read(self, key: str, reporting: int) -> None:
        """Wait on rank 0, whose process may host the store and end with its error, until all ranks that reported have read."""
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
    return all(note is not None and note.is_at(number) for note in notes)
