"""Run the processes of all ranks: one loop on one thread watches them, and they end together.

Callers decide how to treat the output of ranks and the way they end.
"""

import math
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

AT_ONCE = 1 << 16  # bytes read from a stream at a time
PATIENCE_S = 0.5  # for remaining output once all have ended: a process that they left may hold their streams open
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


@dataclass(eq=False)
class Rank:
    """The process of one rank, its remaining output, and how it ended."""

    number: int
    pid: int
    ended: int  # a file descriptor that becomes readable when the process ends
    poll: Callable[[], int | None]  # returns the exit status, negative for a signal; None while the process runs
    streams: dict[int, Callable[[], bool]]  # by file descriptor: reads available output, and returns False at the end
    status: int | None = None  # as of the last turn of the loop

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def killed(self) -> bool:
        return self.status is not None and self.status < 0

    @property
    def ending(self) -> str:
        if self.status is None:
            return "is running"
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"

    def send(self, number: int) -> None:
        """Send a signal to the rank if it runs: SIGTERM and SIGHUP to the rank alone, others to its process group."""
        if self.running:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                to_all = (signal.SIGINT, signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT)
                group = number in to_all and os.getpgid(self.pid) == self.pid
                (os.killpg if group else os.kill)(self.pid, number)


@dataclass
class Ranks:
    """All ranks of a run. At the end of its block, running ranks get SIGTERM, and SIGKILL after `grace_s`."""

    grace_s: float
    all: list[Rank] = field(default_factory=list)
    stopped: bool = False  # a signal was sent to all
    ended_at: float | None = None  # when all had ended, by time.monotonic
    _due: tuple[float, int] = (math.inf, 0)  # when all running ranks get a signal, and which
    _opened: ExitStack = field(default_factory=ExitStack)

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.all if rank.running]

    @property
    def busy(self) -> bool:
        """Whether a rank runs, or its output may not have been read."""
        return any(rank.running or rank.streams for rank in self.all)

    def start(
        self,
        command: Sequence[str],
        takers: Mapping[str, Callable[[bytes], None]],
        **options: Any,  # Any: those of Popen
    ) -> subprocess.Popen[bytes]:
        """Start the next rank. `takers`, by "stdout" or "stderr", receive its output there; b"" is the end.

        The rank leads a session, so that Ctrl-C reaches the program alone, which stops the ranks in order.
        """
        for name in takers:
            options[name] = subprocess.PIPE
        process = subprocess.Popen[bytes](command, bufsize=0, start_new_session=True, **options)
        self._opened.enter_context(process)
        ended = os.pidfd_open(process.pid)
        self._opened.callback(os.close, ended)
        streams: dict[int, Callable[[], bool]] = {}
        for name, take in takers.items():
            descriptor = getattr(process, name).fileno()
            streams[descriptor] = partial(_read, descriptor, take)
        self.all.append(Rank(len(self.all), process.pid, ended, process.poll, streams))
        return process

    def turn(self, until: float, others: Mapping[int, int] | None = None, reading: bool = True) -> set[int]:
        """Wait for an event or until a time, by time.monotonic; take output of ranks, and send a signal that is due.

        `others` are file descriptors to watch, with events of select.poll. Returns the ready ones among them.
        """
        watched = {**(others or {})}
        for rank in self.all:
            if rank.running:
                watched[rank.ended] = READABLE
            if reading:
                watched.update(dict.fromkeys(rank.streams, READABLE))
        until = min(until, self._due[0])
        if self.ended_at is not None and self.busy:
            until = min(until, self.ended_at + PATIENCE_S)
        ready = ready_of(watched, until)
        for rank in self.all:
            for descriptor in ready.intersection(rank.streams):
                if not rank.streams[descriptor]():
                    del rank.streams[descriptor]
            if rank.running:
                rank.status = rank.poll()
        self._keep_time(time.monotonic())
        return ready.intersection(others or {})

    def stop(self, number: int) -> None:
        """Send a signal to all running ranks, and SIGKILL to those that still run after the grace period."""
        self.stopped = True
        for rank in self.all:
            rank.send(number)
        self._due = (math.inf if number == signal.SIGKILL else time.monotonic() + self.grace_s, signal.SIGKILL)

    def stop_later(self) -> None:
        """Let the ranks end by themselves during the grace period; then stop them by SIGTERM."""
        self._due = (time.monotonic() + self.grace_s, signal.SIGTERM)

    def _keep_time(self, now: float) -> None:
        due, number = self._due
        if now >= due:
            self.stop(number)
        if self.ended_at is None:
            self.ended_at = None if self.running else now
        elif now >= self.ended_at + PATIENCE_S:
            for rank in self.all:
                rank.streams.clear()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        with self._opened:
            if not self.stopped:
                self.stop(signal.SIGTERM)
            while self.running:
                self.turn(math.inf, reading=False)


def ready_of(watched: Mapping[int, int], until: float = math.inf) -> set[int]:
    """Wait until a file descriptor is ready for its events, as of select.poll, or until a time; return the ready ones."""
    poll = select.poll()
    for descriptor, events in watched.items():
        poll.register(descriptor, events)
    limit_ms = None if math.isinf(until) else max(0.0, 1e3 * (until - time.monotonic()))
    return {descriptor for descriptor, _ in poll.poll(limit_ms)}


def _read(descriptor: int, take: Callable[[bytes], None]) -> bool:
    content = os.read(descriptor, AT_ONCE)
    take(content)
    return bool(content)
