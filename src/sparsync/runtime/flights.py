"""Several buckets on their way at once: while one waits for other ranks, the next one is computed.

A bucket's exchanges are straight text on a thread of its own. One of the threads runs at a time, that of the earliest bucket that can, and
it lets the next one run where it waits. So what a scheme does between two exchanges is not interrupted by another bucket.
"""

import heapq
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST = 8  # buckets on their way at once


class Baton:
    """Held by one thread at a time: of those that want it, by the one with the least number."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held = False
        self._wanted: list[int] = []  # a heap

    def want(self, number: int) -> None:
        """Note that a thread will take it, which those with larger numbers wait for."""
        with self._changed:
            heapq.heappush(self._wanted, number)

    def take(self, number: int) -> None:
        """Wait until no other thread holds it and none with a smaller number wants it, after `want`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held and self._wanted[0] == number)
            heapq.heappop(self._wanted)
            self._held = True

    def give(self) -> None:
        """Let another thread have it."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Hold it inside, after `want`."""
        self.take(number)
        try:
            yield
        finally:
            self.give()

    @contextmanager
    def lent(self, number: int) -> Iterator[None]:
        """Let others have it inside, of a thread that holds it."""
        self.give()
        try:
            yield
        finally:
            self.want(number)
            self.take(number)


@dataclass(eq=False)
class Flight:
    """A bucket on its way: `landed` once its exchanges have ended, `ended` once it was reported, in the order of submission."""

    number: int
    before: "Flight | None" = None  # until that has ended
    landed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def wait_for_turn(self) -> None:
        """Wait until the bucket before has ended."""
        if self.before is not None:
            self.before.ended.wait()
            self.before = None
