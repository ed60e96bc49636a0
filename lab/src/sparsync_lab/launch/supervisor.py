"""Build the network, run the ranks in it, show their output, and stop them all, in one thread with one loop."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync.base.scheme_text import VARIABLE
from sparsync_lab.launch.faults import Injector
from sparsync_lab.launch.settings import LaunchSettings, environment
from sparsync_lab.launch.traffic import Meter
from sparsync_lab.netlab import RunNetwork, network
from sparsync_lab.terminal import WIDTH, wrapped
from sparsync_lab.workers.descendants import die_with_parent, subreaper
from sparsync_lab.workers.ranks import Rank, Ranks

LOOK_S = 0.1  # between two looks at faults and the store
LONGEST_LINE = 1 << 16  # bytes; longer ones are cut
# torch writes this once per rank, because the addresses of limited links have no names.
_NOISE = b"[c10d] The hostname of the client socket cannot be retrieved"


@dataclass
class Lines:
    """Cuts a rank's output stream into prefixed lines. For a line overwritten with "\\r" the last state is shown."""

    prefix: bytes
    _rest: bytes = b""

    def cut(self, content: bytes) -> bytes:
        """Return the lines that `content` completes. Empty content is the end of the stream and completes the last line."""
        *lines, self._rest = (self._rest + content).split(b"\n")
        if self._rest and (not content or len(self._rest) > LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        shown = (line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines if _NOISE not in line)
        return b"".join(self.prefix + line + b"\n" for line in shown)


@dataclass
class Output:
    """Standard output and error of this process. If nobody reads them, this process blocks, and so do ranks that write more."""

    closed: set[int] = field(default_factory=set)  # descriptors without a reader

    @property
    def width(self) -> int:
        """The width of standard error in columns."""
        return os.get_terminal_size(2).columns if os.isatty(2) else WIDTH

    def lines(self, descriptor: int, rank: int, ranks: int) -> Callable[[bytes], None]:
        """Make a function that takes the content of one stream of a rank and writes its prefixed lines."""
        lines = Lines(f"[rank {rank:>{len(str(ranks - 1))}}] ".encode())
        return lambda content: self.write(descriptor, lines.cut(content))

    def say(self, text: str) -> None:
        """Write lines of this program to standard error."""
        self.write(2, f"{wrapped(f'sparsync launch: {text}', error=True)}\n".encode())

    def write(self, descriptor: int, content: bytes) -> None:
        while content and descriptor not in self.closed:
            try:
                content = content[os.write(descriptor, content) :]
            except OSError:  # a closed pipe or terminal, or a full disk
                self.closed.add(descriptor)


@dataclass
class LaunchedRun:
    """All ranks, and the reason why they are stopped."""

    settings: LaunchSettings
    ranks: Ranks
    output: Output = field(default_factory=Output)
    injector: Injector | None = None  # with faults
    first_failure: Rank | None = None
    stopped_by: int | None = None  # the signal that ended the run from outside
    store_lost: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the ranks started."""
        return time.monotonic() - self.began

    @property
    def ending(self) -> bool:
        return self.first_failure is not None or self.stopped_by is not None

    @property
    def exit_status(self) -> int:
        decides = self.first_failure
        if decides is None and self.stopped_by is not None:
            return 128 + self.stopped_by
        if decides is None and all(rank.status for rank in self.ranks.all):
            decides = self.ranks.all[-1]  # faults have hit all of them
        status = 0 if decides is None else decides.status
        assert status is not None
        return 128 - status if status < 0 else status

    def stop(self, number: int, *_: object) -> None:
        """Pass a signal from outside on to all ranks; a second signal kills them."""
        if self.stopped_by is not None:
            self.ranks.stop(signal.SIGKILL)
            return
        self.stopped_by = number
        self.ranks.stop(signal.SIGTERM if number == signal.SIGPIPE else number)  # Python ignores SIGPIPE

    @contextmanager
    def stopped_by_signals(self) -> Iterator[None]:
        """Redirect the signals that end a program to the ranks for the block."""
        before = {each: signal.signal(each, self.stop) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def note_failure(self) -> None:
        """Note the first failed rank. Unless a fault hit it, the others are stopped after a grace period."""
        if self.ending:
            return
        # Among simultaneous failures, prefer a killed rank: its death causes the others' errors.
        hit = set() if self.injector is None else self.injector.hit
        failing = [rank for rank in self.ranks.all if rank.status and rank.number not in hit]
        failed = min(failing, key=lambda rank: rank.status or 0, default=None)
        self.first_failure = failed
        if failed is not None and self.ranks.running:
            rest = f"the others have {self.settings.grace_s:g} s to end by themselves"
            self.output.say(f"rank {failed.number} ended with {failed.ending}; {rest}")
            self.ranks.stop_later()

    def give_faults(self, injector: Injector) -> None:
        """Begin the faults that are due, and print them."""
        for each in injector.turn(self.seconds, self.ending):
            self.output.say(each)
        if injector.store_ended and not self.ending and not self.store_lost:
            self.store_lost = True
            self.output.say(
                "the store has ended by itself, and without it no rank can join or be lost; the ranks are stopped"
            )
            self.ranks.stop_later()


def launch(settings: LaunchSettings) -> int:
    """Run the command on every rank, print the summary, and return the exit status of the first failed rank, or 0.

    A signal counts as 128 + its number, for ranks and for this program. No process, namespace or interface is left on return. If this
    program is killed, the kernel ends ranks and namespaces, but processes started by a rank may stay.
    """
    up, down = settings.up_bits_per_s, settings.down_bits_per_s
    with (
        TemporaryDirectory(prefix="sparsync-lab-") as folder,  # a file per rank, empty until it reads the scheme
        network(settings.places, up, settings.exact_framing, down, settings.delay) as links,
        subreaper(),
        Ranks(settings.grace_s) as ranks,
        ExitStack() as stack,
    ):
        run, notes, meter = LaunchedRun(settings, ranks), Path(folder), Meter(settings, links)
        stack.enter_context(run.stopped_by_signals())
        port = links.free_port()
        start = _starter(run, links, meter, notes, port)
        if settings.faults:
            injector = Injector(settings.faults, settings.ranks, links, port, ranks, start)
            run.injector = stack.enter_context(injector)
            injector.begin()
        else:
            for number in range(settings.ranks):
                start(number, number)
        _watch(run, meter)
        ended_s = run.seconds
        meter.look()
        readers = [rank.number for rank in ranks.all if (notes / str(rank.number)).stat().st_size]
    _summarise(run, meter, ended_s, readers)
    return run.exit_status


def _starter(run: LaunchedRun, links: RunNetwork, meter: Meter, notes: Path, port: int) -> Callable[[int, int], None]:
    """Return a function that starts a rank, given its number and its place in the network."""
    run_id = str(uuid.uuid4())
    address = links.addresses[run.settings.places - 1 if run.settings.faults else 0]

    def start(number: int, place: int) -> None:
        note = notes / str(number)
        note.touch()
        meter.join(place)
        run.ranks.start(
            links.command(place, run.settings.command),
            {
                name: run.output.lines(descriptor, number, run.settings.ranks)
                for name, descriptor in (("stdout", 1), ("stderr", 2))
            },
            stdin=subprocess.DEVNULL,
            env=environment(run.settings, number, links.interface, address, port, run_id, note),
            preexec_fn=die_with_parent,  # if this program is killed; safe, as it has no other threads
        )

    return start


def _watch(run: LaunchedRun, meter: Meter) -> None:
    """Wait until all ranks have ended and their output is written."""
    ranks = run.ranks
    while ranks.busy:
        ranks.turn(time.monotonic() + LOOK_S)
        run.note_failure()
        if run.output.closed and run.stopped_by is None and ranks.running:
            run.stop(signal.SIGPIPE)
        if run.injector is not None:
            meter.look([rank.number for rank in ranks.all if not rank.running])  # new ranks may take their places
            run.give_faults(run.injector)


def _summarise(run: LaunchedRun, meter: Meter, ended_s: float, readers: list[int]) -> None:
    output, scheme = run.output, run.settings.scheme
    if run.first_failure is not None:
        output.say(f"rank {run.first_failure.number} failed first, with {run.first_failure.ending}")
    if run.stopped_by is not None:
        output.say(f"stopped by {signal.Signals(run.stopped_by).name}; nothing is left running")
    if scheme is not None and not readers:
        output.say(
            f"no rank read {VARIABLE}, so nothing was reduced with {scheme}; call sparsync.attach(model, optimizer=optimizer) in "
            "the script, without a scheme"
        )
    output.say(meter.table(ended_s, [rank.ending for rank in run.ranks.all], readers, output.width))
    if run.injector is not None:
        output.say("\n".join(["faults", *run.injector.begun, *run.injector.not_given()]))
