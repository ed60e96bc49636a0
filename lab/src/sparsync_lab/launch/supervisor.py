"""The process that builds the network, runs the ranks in it, shows what they write, and stops all of them.

One thread and one loop: it waits for what ranks write, for their ends, for signals, and for the end of its standard input, which says that
the process that started it is gone.
"""

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from sparsync.base.scheme_text import VARIABLE
from sparsync_lab.launch.descendants import die_with_parent, end_descendants, subreaper
from sparsync_lab.launch.output import Lines, Output, prefix
from sparsync_lab.launch.settings import LaunchSettings, settings_of_json
from sparsync_lab.launch.traffic import Meter
from sparsync_lab.launch.variables import environment, variables
from sparsync_lab.netlab import RunNetwork, network
from sparsync_lab.temporary import temporary_folder

PORT = 29500  # torchrun's default; in a network namespace of one rank it is free
LOOK_S = 0.25  # between two looks at the counters
AT_ONCE = 1 << 16  # bytes read from a stream at a time
OUTPUT_PATIENCE_S = (
    0.5  # for what ranks have written, once they have ended: a process they left may hold their streams open
)
READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


@dataclass
class Rank:
    """The process of one rank, what it has yet to say, and how it ended."""

    number: int
    process: subprocess.Popen[bytes]
    ended: int  # a file descriptor that is readable when it has ended
    streams: dict[int, tuple[int, Lines]]  # by its file descriptor here: 1 or 2, where its lines go
    status: int | None = None

    @property
    def ending(self) -> str:
        """How it ended, in words."""
        if self.status is None:
            return "is running"
        return f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"

    def send(self, number: int) -> None:
        """Send a signal to the rank if it runs: Ctrl-C and SIGKILL to its whole process group, as a terminal does, others to it alone."""
        if self.status is None:
            with suppress(ProcessLookupError):
                if number in (signal.SIGINT, signal.SIGKILL):
                    os.killpg(self.process.pid, number)
                else:
                    self.process.send_signal(number)


@dataclass
class LaunchedRun:
    """All ranks, and why and when they are stopped. Times are those of time.monotonic."""

    settings: LaunchSettings
    ranks: list[Rank]
    output: Output
    signals: int  # a file descriptor from which the numbers of signals are read
    notes: Path  # a folder with a file for each rank, which is empty until the rank reads SPARSYNC_SCHEME
    readers: list[int] = field(default_factory=list)  # the ranks that have read it
    first_failure: Rank | None = None
    stopped_by: int | None = None  # the signal that ended the run from outside
    stop_at: float | None = None  # SIGTERM to all
    kill_at: float | None = None  # SIGKILL to all

    @property
    def running(self) -> list[Rank]:
        return [rank for rank in self.ranks if rank.status is None]

    @property
    def exit_status(self) -> int:
        if self.first_failure is None:
            return 0 if self.stopped_by is None else 128 + self.stopped_by
        status = self.first_failure.status
        assert status is not None
        return 128 - status if status < 0 else status

    def stop(self, number: int) -> None:
        """Stop all ranks by this signal, which came from outside; a second one kills them."""
        if self.stopped_by is not None:
            self._stop(signal.SIGKILL)
            return
        self.stopped_by = number
        self._stop(signal.SIGTERM if number == signal.SIGPIPE else number)  # Python ignores SIGPIPE

    def note_ends(self) -> None:
        """Find the ranks that have ended. The first one that failed ends the others, after a grace period."""
        new = [rank for rank in self.running if rank.process.poll() is not None]
        for rank in new:
            rank.status = rank.process.returncode
        # Of those seen at the same time a killed one comes first: the others' errors follow from it.
        failed = sorted((rank for rank in new if rank.status), key=lambda rank: rank.status or 0)
        if failed and self.first_failure is None and self.stopped_by is None:
            self.first_failure = failed[0]
            if self.running:
                rest = f"the others have {self.settings.grace_s:g} s to end by themselves"
                self.output.say(f"rank {failed[0].number} ended with {failed[0].ending}; {rest}")
                self.stop_at = time.monotonic() + self.settings.grace_s

    def keep_time(self, now: float) -> None:
        """Send the signals whose time has come."""
        if self.stop_at is not None and now >= self.stop_at:
            self.stop_at = None
            self._stop(signal.SIGTERM)
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self._stop(signal.SIGKILL)

    def _stop(self, number: int) -> None:
        for rank in self.running:
            rank.send(number)
        self.stop_at = None
        self.kill_at = None if number == signal.SIGKILL else time.monotonic() + self.settings.grace_s


def main() -> None:
    """Run what the first line of standard input says, and exit with the status of `command.launch`."""
    wakeup, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # read from `wakeup`, in the loop
    settings = settings_of_json(json.loads(_first_line()))
    try:
        raise SystemExit(supervise(settings, wakeup))
    except (ValueError, RuntimeError) as error:
        with suppress(OSError):
            print(f"sparsync: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def supervise(settings: LaunchSettings, signals: int) -> int:
    """Run the ranks to their end, print the summary, and return the exit status. No process is left, and no network."""
    output = Output(terminal=os.isatty(2))
    with (
        temporary_folder() as notes,
        subreaper(),
        network(
            settings.ranks, settings.up_bits_per_s, settings.exact_framing, down_bits_per_s=settings.down_bits_per_s
        ) as links,
    ):
        meter = Meter(settings, links)
        run = LaunchedRun(settings, [], output, signals, notes)
        began = time.monotonic()
        try:
            _start(run, links)
            _watch(run, meter, began)
            ended_s = time.monotonic() - began
            meter.look(ended_s)
            run.readers = [rank.number for rank in run.ranks if (notes / str(rank.number)).stat().st_size]
        finally:
            for rank in run.running:
                rank.send(signal.SIGKILL)
            for rank in run.ranks:
                rank.process.wait()
            spared = {each for each in (*links.anchors, links.switch) if each is not None}
            end_descendants(spared)
    _summarise(run, meter, ended_s)
    return run.exit_status


def _start(run: LaunchedRun, links: RunNetwork) -> None:
    run_id = str(uuid.uuid4())
    port = PORT if links.limited else _free_port()
    for number in range(run.settings.ranks):
        note = run.notes / str(number)
        note.touch()
        here = variables(run.settings, number, links.interface, links.address(0), port, run_id, note)
        process = subprocess.Popen(
            links.command(number, run.settings.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=environment(here, links.limited),
            start_new_session=True,  # Ctrl-C reaches the program that started this one, and from there the ranks in order
            preexec_fn=die_with_parent,  # noqa: PLW1509  # for both programs being killed at once; this one has no threads
        )
        assert process.stdout is not None and process.stderr is not None
        streams = {}
        for stream, to in ((process.stdout, 1), (process.stderr, 2)):
            fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, fcntl.fcntl(stream.fileno(), fcntl.F_GETFL) | os.O_NONBLOCK)
            streams[stream.fileno()] = to, Lines(prefix(number, run.settings.ranks))
        run.ranks.append(Rank(number, process, os.pidfd_open(process.pid), streams))


def _watch(run: LaunchedRun, meter: Meter, began: float) -> None:
    """Wait until all ranks have ended and what they wrote is written."""
    owned = True  # by the process that started this one
    looked = done_at = 0.0
    while run.running or run.output.waits_for is not None or any(rank.streams for rank in run.ranks):
        ready = _ready(run, owned)
        now = time.monotonic()
        if run.signals in ready:
            for number in os.read(run.signals, 100):
                run.stop(number)
        if 0 in ready and owned and not os.read(0, 1):
            owned = False
            run.output.closed |= {1, 2}
            run.stop(signal.SIGTERM)
        _read(run, ready)
        run.note_ends()
        run.keep_time(now)
        run.output.flush()
        if run.output.closed and run.stopped_by is None and run.running:
            run.stop(signal.SIGPIPE)
        if now - looked >= LOOK_S:
            looked = now
            meter.look(now - began)
            run.output.status(*meter.status(now - began))
        if not run.running:
            done_at = done_at or now
            if now - done_at >= OUTPUT_PATIENCE_S:
                for rank in run.ranks:
                    rank.streams.clear()
            if run.stopped_by is not None and now - done_at >= run.settings.grace_s:
                return  # somebody stopped it, and nobody takes its output
    run.output.status()


def _ready(run: LaunchedRun, owned: bool) -> set[int]:
    """Return the file descriptors at which something has happened, after at most LOOK_S."""
    poll = select.poll()
    poll.register(run.signals, select.POLLIN)
    if owned:
        poll.register(0, READABLE)
    for rank in run.ranks:
        if rank.status is None:
            poll.register(rank.ended, select.POLLIN)
        for stream in rank.streams if not run.output.full else ():
            poll.register(stream, READABLE)
    if run.output.waits_for is not None:
        poll.register(run.output.waits_for, select.POLLOUT)
    times = [at - time.monotonic() for at in (run.stop_at, run.kill_at) if at is not None]
    return {descriptor for descriptor, _ in poll.poll(max(0.0, 1e3 * min([LOOK_S, *times])))}


def _read(run: LaunchedRun, ready: set[int]) -> None:
    for rank in run.ranks:
        for stream in [each for each in rank.streams if each in ready]:
            to, lines = rank.streams[stream]
            with suppress(BlockingIOError):
                content = os.read(stream, AT_ONCE)
                run.output.write(to, lines.cut(content))
                if not content:
                    del rank.streams[stream]


def _summarise(run: LaunchedRun, meter: Meter, ended_s: float) -> None:
    output = run.output
    if run.first_failure is not None:
        output.say(f"rank {run.first_failure.number} failed first, with {run.first_failure.ending}")
    if run.stopped_by is not None:
        output.say(f"stopped by {signal.Signals(run.stopped_by).name}; nothing is left running")
    if run.settings.scheme is not None and not run.readers:
        output.say(
            f"no rank read {VARIABLE}, so nothing was reduced with {run.settings.scheme}; call sparsync.attach(model) in the script, "
            "without a scheme"
        )
    output.say(meter.table(ended_s, [rank.ending for rank in run.ranks], run.readers))
    while output.waits_for is not None:
        output.flush()
        poll = select.poll()
        poll.register(run.signals, select.POLLIN)
        poll.register(0, READABLE)
        if output.waits_for is not None:
            poll.register(output.waits_for, select.POLLOUT)
            if any(descriptor in (0, run.signals) for descriptor, _ in poll.poll()):
                return  # whoever would read it has gone, or wants the end


def _first_line() -> bytes:
    """Read standard input up to its first line's end, and no byte more."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(1)  # whoever started this has ended
        line += byte
    return line


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


if __name__ == "__main__":
    main()
