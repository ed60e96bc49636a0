"""The process that builds the network, runs the ranks in it, shows what they write, and stops all of them.

One thread and one loop: it waits for what ranks write, for their ends, for signals, and for the end of its standard input, which says that
the process that started it is gone.
"""

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from sparsync.base.scheme_text import VARIABLE
from sparsync_lab.launch.faults import Injector
from sparsync_lab.launch.output import Output, prefix
from sparsync_lab.launch.settings import LaunchSettings, settings_of_json
from sparsync_lab.launch.traffic import Meter
from sparsync_lab.launch.variables import environment, variables
from sparsync_lab.netlab import RunNetwork, network
from sparsync_lab.workers.descendants import die_with_parent, subreaper
from sparsync_lab.workers.ranks import READABLE, Rank, Ranks, ready_of

LOOK_S = 0.25  # between two looks at the counters


@dataclass
class LaunchedRun:
    """All ranks, and why they are stopped."""

    settings: LaunchSettings
    ranks: Ranks
    output: Output
    signals: int  # a file descriptor from which the numbers of signals are read
    injector: Injector | None = None  # where there are faults
    first_failure: Rank | None = None
    stopped_by: int | None = None  # the signal that ended the run from outside
    store_lost: bool = False

    @property
    def ended(self) -> list[int]:
        """The ranks that have ended, where others may take their places."""
        return [rank.number for rank in self.ranks.all if not rank.running] if self.injector else []

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

    def stop(self, number: int) -> None:
        """Stop all ranks by this signal, which came from outside; a second one kills them."""
        if self.stopped_by is not None:
            self.ranks.stop(signal.SIGKILL)
            return
        self.stopped_by = number
        self.ranks.stop(signal.SIGTERM if number == signal.SIGPIPE else number)  # Python ignores SIGPIPE

    def note_failure(self) -> None:
        """Find the first rank that failed. It ends the others, after a grace period, unless a fault has hit it."""
        if self.first_failure is not None or self.stopped_by is not None:
            return
        # Of those seen at the same time a killed one comes first: the others' errors follow from it.
        hit = set() if self.injector is None else self.injector.hit
        failing = [rank for rank in self.ranks.all if rank.status and rank.number not in hit]
        failed = min(failing, key=lambda rank: rank.status or 0, default=None)
        self.first_failure = failed
        if failed is not None and self.ranks.running:
            rest = f"the others have {self.settings.grace_s:g} s to end by themselves"
            self.output.say(f"rank {failed.number} ended with {failed.ending}; {rest}")
            self.ranks.stop_later()


def main() -> None:
    """Run what the first line of standard input says, and exit with the status of `command.launch`."""
    wakeup, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)  # read from `wakeup`, in the loop
    order = sys.stdin.readline()
    if not order:
        raise SystemExit(1)  # whoever started this has ended
    settings = settings_of_json(json.loads(order))
    try:
        raise SystemExit(supervise(settings, wakeup))
    except (ValueError, RuntimeError) as error:
        with suppress(OSError):
            print(f"sparsync: error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None


def supervise(settings: LaunchSettings, signals: int) -> int:
    """Run the ranks to their end, print the summary, and return the exit status. No process is left, and no network."""
    with (
        TemporaryDirectory(
            prefix="sparsync-lab-"
        ) as folder,  # a file for each rank, which is empty until the rank reads SPARSYNC_SCHEME
        network(
            settings.places, settings.up_bits_per_s, settings.exact_framing, settings.down_bits_per_s, settings.delay
        ) as links,
        subreaper(),
        Ranks(settings.grace_s) as ranks,
        ExitStack() as stack,
    ):
        run = LaunchedRun(settings, ranks, Output(terminal=os.isatty(2)), signals)
        notes, meter = Path(folder), Meter(settings, links)
        port = links.free_port()
        began = time.monotonic()
        start = _starter(run, links, meter, notes, port, began)
        if settings.faults:
            run.injector = injector = stack.enter_context(
                Injector(settings.faults, settings.ranks, links, port, ranks, start)
            )
            injector.begin()
        else:
            for number in range(settings.ranks):
                start(number, number)
        _watch(run, meter, began)
        ended_s = time.monotonic() - began
        meter.look(ended_s)
        meter.carried = links.forwarded()
        readers = [rank.number for rank in ranks.all if (notes / str(rank.number)).stat().st_size]
    _summarise(run, meter, ended_s, readers)
    return run.exit_status


def _starter(
    run: LaunchedRun, links: RunNetwork, meter: Meter, notes: Path, port: int, began: float
) -> Callable[[int, int], None]:
    """Return the function that starts the rank with a number at one of the places of the network."""
    run_id = str(uuid.uuid4())
    address = links.address(run.settings.places - 1 if run.settings.faults else 0)

    def start(number: int, place: int) -> None:
        note = notes / str(number)
        note.touch()
        here = variables(run.settings, number, links.interface, address, port, run_id, note)
        shown = prefix(number, run.settings.ranks)
        if run.settings.faults:
            meter.join(place, time.monotonic() - began)
        run.ranks.start(
            links.command(place, run.settings.command),
            {"stdout": run.output.lines(1, shown), "stderr": run.output.lines(2, shown)},
            stdin=subprocess.DEVNULL,
            env=environment(here, links.limited),
            preexec_fn=die_with_parent,  # for both programs being killed at once; this one has no threads
        )

    return start


def _watch(run: LaunchedRun, meter: Meter, began: float) -> None:
    """Wait until all ranks have ended and what they wrote is written."""
    ranks, output = run.ranks, run.output
    watched = {run.signals: select.POLLIN, 0: READABLE}  # standard input ends with the process that started this one
    looked = 0.0
    while ranks.busy or output.waits_for is not None:
        waits = {} if output.waits_for is None else {output.waits_for: select.POLLOUT}
        due = math.inf if run.injector is None else began + run.injector.due_s
        ready = ranks.turn(min(due, time.monotonic() + LOOK_S), watched | waits, reading=not output.full)
        if run.signals in ready:
            for number in os.read(run.signals, 100):
                run.stop(number)
        if 0 in ready and not os.read(0, 1):
            del watched[0]
            output.closed |= {1, 2}
            run.stop(signal.SIGTERM)
        run.note_failure()
        output.flush()
        if output.closed and run.stopped_by is None and ranks.running:
            run.stop(signal.SIGPIPE)
        now = time.monotonic()
        if run.injector is not None:
            _give_faults(run, run.injector, now - began)
        if now - looked >= LOOK_S:
            looked = now
            meter.look(now - began, run.ended)
        if run.stopped_by is not None and ranks.ended_at is not None and now - ranks.ended_at >= ranks.grace_s:
            return  # somebody stopped it, and nobody takes its output


def _give_faults(run: LaunchedRun, injector: Injector, now_s: float) -> None:
    """Begin the faults that are due, and say so."""
    for each in injector.turn(now_s, run.first_failure is not None or run.stopped_by is not None):
        run.output.say(str(each))
    if injector.store_ended and run.first_failure is None and run.stopped_by is None and not run.store_lost:
        run.store_lost = True
        run.output.say(
            "the store has ended by itself, and without it no rank can join or be lost; the ranks are stopped"
        )
        run.ranks.stop_later()


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
        output.say("\n".join(["faults", *map(str, run.injector.begun + run.injector.not_given())]))
    while output.waits_for is not None:
        output.flush()
        if output.waits_for is not None:
            ready = ready_of({run.signals: select.POLLIN, 0: READABLE, output.waits_for: select.POLLOUT})
            if ready & {0, run.signals}:
                return  # whoever would read it has gone, or wants the end


if __name__ == "__main__":
    main()
