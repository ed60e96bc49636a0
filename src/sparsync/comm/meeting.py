"""Where ranks find each other on a store: before they connect, again after each failure, and to tell each other why they failed."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch.distributed as dist

Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]  # public, but missing from torch's __all__
Result = TypeVar("Result")

POLL_S = 0.02  # between two looks at the other ranks' notes, at first
SLOWEST_POLL_S = 0.2
EXCERPT = 400  # characters of a fingerprint that an error shows
LINGER_S = 2.0  # how long a rank that differs from others waits for them to find out
STAY_S = 0.5  # how long rank 0 waits for the other ranks to have read the reports of a failure
GRACE_S = 1.0  # how much longer than its timeout a call of the store may take before the store counts as silent


class StoreSilentError(RuntimeError):
    """The store of a process group does not answer: its process hangs, is gone, or cannot be reached."""


def asked(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Return `call()`, which asks a store. Raises StoreSilentError when that takes longer than `seconds`, or the store is gone."""
    try:
        return within(seconds, call, doing)
    except StoreSilentError:
        raise
    except RuntimeError as error:
        raise StoreSilentError(
            f"{doing}: the store of the process group is gone, and with it the process that hosts it, which is rank 0 unless it is an "
            f"agent such as torchrun's: {error}"
        ) from error


def within(seconds: float, call: Callable[[], Result], doing: str) -> Result:
    """Return `call()`, made on a thread of its own. Raises StoreSilentError when it takes longer than `seconds`.

    A TCPStore waits without a bound for a server that neither answers nor closes the connection, whatever timeout it was given.
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
            f"{doing}: the store of the process group has not answered for {seconds:g} s; the process that hosts it, which is rank 0 "
            "unless it is an agent such as torchrun's, hangs or cannot be reached"
        )
    return found.pop()


@dataclass(frozen=True)
class _Note:
    """What one rank has written: which meeting it has come to, how that went, and what it must have in common with the others."""

    round: int
    status: Literal["waits", "met", "left"]
    fingerprint: str = ""


@dataclass(frozen=True)
class Meeting:
    """The meetings of `size` ranks under one name on a store. Each rank writes a note of its own and reads the others'.

    Ranks come to a meeting at different times, and may have tried a different number of times before. So a rank joins the newest meeting
    at which somebody waits, or opens the next one, and moves on when others are ahead.
    """

    store: Store
    name: str  # the same on all ranks, and of no other meeting
    rank: int
    size: int

    def meet(self, fingerprint: str, timeout_s: float, cure: str = "") -> str:
        """Wait until all ranks are here, and return a name that no meeting has returned before, the same on all ranks.

        Raises RuntimeError, within `timeout_s` seconds and a little, that names ranks that did not come or have another fingerprint, for
        which `cure` says what to do.
        """
        deadline = time.monotonic() + timeout_s
        doing = f"rank {self.rank} of {self.size} waits for the other ranks"
        round_number, notes = asked(timeout_s + GRACE_S, lambda: self._meet(fingerprint, deadline), doing)
        # One that has left again had come, and waited in vain as this rank has.
        missing = [str(other) for other, note in enumerate(notes) if note is None or note.round != round_number]
        if missing or not all(_is_at(note, round_number) for note in notes):
            absent = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "all ranks at once"
            raise RuntimeError(
                f"rank {self.rank} of {self.size}: {absent} did not come to make a private group within {timeout_s:g} s; "
                "all ranks of the group must take part, e.g. call attach"
            )
        for other, note in enumerate(notes):
            if note is not None and note.fingerprint != fingerprint:
                self._linger(round_number)
                mine, theirs = _where_they_differ(fingerprint, note.fingerprint)
                raise RuntimeError(
                    f"ranks must agree, but rank {self.rank} has {mine} and rank {other} has {theirs}; "
                    f"{cure or 'give all ranks the same settings and the same checkpoint'}"
                )
        return f"{self.name}/{round_number}"

    def _meet(self, fingerprint: str, deadline: float) -> tuple[int, list[_Note | None]]:
        """Return the number of a meeting and the notes of all ranks, in which those that did not come are not at that meeting."""
        notes = self._notes()
        newest = max((note.round for note in notes if note is not None), default=0)
        others = [note for rank, note in enumerate(notes) if rank != self.rank]
        own = notes[self.rank]
        open_now = any(note is not None and note.round == newest and note.status == "waits" for note in others)
        joins = open_now and not (own is not None and own.round == newest and own.status == "met")
        mine = newest if joins else newest + 1
        pause = POLL_S
        while True:
            if own is None or own.round != mine or own.status != "waits":
                own = _Note(mine, "waits", fingerprint)
                self._write(own)
            notes = self._notes()
            newest, complete = max(note.round for note in notes if note is not None), f"{self.name}/{mine}/complete"
            if newest > mine and self.store.check([complete]):
                # Some rank was quicker, and is at the next meeting already; this one ended for all in the same way.
                notes = list[_Note | None](_Note(mine, "met", each) for each in json.loads(self.store.get(complete)))
                newest = mine
            if newest > mine:
                mine = newest
                continue
            if all(_is_at(note, mine) for note in notes):
                self.store.set(complete, json.dumps([note.fingerprint for note in notes if note is not None]))
                self._write(_Note(mine, "met", fingerprint))
                return mine, notes
            if time.monotonic() >= deadline:
                self._write(_Note(mine, "left", fingerprint))
                return mine, notes
            time.sleep(pause)
            pause = min(1.5 * pause, SLOWEST_POLL_S)

    def _linger(self, round_number: int) -> None:
        """Stay until all ranks have seen how a meeting ended: the store may live in this process, which an error may end."""
        deadline = time.monotonic() + LINGER_S

        def linger() -> None:
            while time.monotonic() < deadline and not all(
                note is not None and (note.round > round_number or note.status == "met") for note in self._notes()
            ):
                time.sleep(POLL_S)

        with suppress(StoreSilentError):
            asked(LINGER_S + GRACE_S, linger, "")

    def report(self, of: str, cause: str, timeout_s: float) -> list[str | None]:
        """Tell the other ranks why this one failed after the meeting `of`, and return what each has told within `timeout_s` seconds.

        None stands for a rank that has told nothing. Raises StoreSilentError.
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
        with suppress(RuntimeError):  # what was found is more than that the store is gone by now
            self._stay_until_read(f"{prefix}/read", sum(each is not None for each in found))
        return found

    def _stay_until_read(self, key: str, reporting: int) -> None:
        """On rank 0, whose process may host the store and end with its error, wait until all that have reported have read."""
        read, deadline = self.store.add(key, 1), time.monotonic() + STAY_S
        while self.rank == 0 and read < reporting and time.monotonic() < deadline:
            time.sleep(POLL_S)
            read = self.store.add(key, 0)

    def _key(self, rank: int) -> str:
        return f"{self.name}/at/{rank}"

    def _write(self, note: _Note) -> None:
        self.store.set(self._key(self.rank), json.dumps([note.round, note.status, note.fingerprint]))

    def _notes(self) -> list[_Note | None]:
        keys = [self._key(rank) for rank in range(self.size)]
        if self.store.check(keys):
            values = self.store.multi_get(keys)  # one message for all ranks
        else:
            values = [self.store.get(key) if self.store.check([key]) else None for key in keys]
        return [None if value is None else _Note(*json.loads(value)) for value in values]


def _where_they_differ(mine: str, theirs: str) -> tuple[str, str]:
    """Return two texts, long ones only from a little before they differ, at a word, to a little after."""
    common = next((place for place, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, common - EXCERPT // 3)
    start = mine.find(" ", start) + 1 if start else 0

    def excerpt(text: str) -> str:
        return (
            f"{'... ' if start else ''}{text[start : start + EXCERPT]}{' ...' if len(text) > start + EXCERPT else ''}"
        )

    return (mine, theirs) if max(len(mine), len(theirs)) <= EXCERPT else (excerpt(mine), excerpt(theirs))


def _is_at(note: _Note | None, round_number: int) -> bool:
    return note is not None and note.round == round_number and note.status != "left"
