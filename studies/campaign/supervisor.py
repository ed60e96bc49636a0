"""One trial: starts its ranks, lets the fault happen, and waits for what every surviving rank makes of it."""

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sparsync_lab.netlab import RunNetwork, network
from studies.campaign.rank import JOIN_S, RankOrder, run
from studies.campaign.trials import Trial

GRACE_S = 6.0  # after the timeout: exchanging causes takes up to 3 s, and the machine may be busy
TRAIN_S = 60.0  # for a training that nothing disturbs
END_S = 15.0  # for a process to end once it has its error
RATE_BITS_PER_S = 1e9  # of the links of a partition
STACKS = 6000  # characters: each thread's stack begins where it waits, and the main thread's comes last
MESSAGE = 1000
PRELOADED = [
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "studies.campaign.rank",
]


@dataclass
class RankEnd:
    """What became of one rank."""

    rank: int
    state: str = "hung"  # or "done", "error", "left", "crashed", "victim"
    said: str = ""  # its error, its digest, its exit status, or the stacks of a rank that hung
    ours: bool = True  # False: an error of a collective of torch's own
    after_s: float | None = None  # after the fault


@dataclass
class TrialSeen:
    """What became of all ranks, and where the fault struck; "" where it never did."""

    struck: str
    ranks: list[RankEnd]
    seconds: float

    def content(self) -> dict[str, Any]:  # Any: JSON
        return asdict(self)


@dataclass
class _RankProcess:
    end: RankEnd
    process: BaseProcess
    connection: Connection
    sent: set[str] = field(default_factory=set)
    settled: bool = False
    told_at: float = 0.0


def observe(trial: Trial, timeout_s: float, undisturbed: bool = False, grace_s: float = GRACE_S) -> TrialSeen:
    """Run the ranks of a trial, and return what each of them made of it; no process is left. `undisturbed`: without the fault.

    A rank that has neither raised nor finished `timeout_s` and `grace_s` seconds after the fault has hung.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sparsync-campaign-")))
        cut = trial.fault == "partition" and not undisturbed
        links = stack.enter_context(network(trial.ranks, RATE_BITS_PER_S)) if cut else None
        ranks = stack.enter_context(_started(trial, folder, timeout_s, links, undisturbed))
        struck, at = _watched(trial, ranks, links, timeout_s + grace_s)
        _read_stacks(ranks, folder)
    for rank in ranks:
        rank.end.after_s = round(max(0.0, rank.told_at - at), 2) if at and rank.told_at else None
    return TrialSeen(struck, [rank.end for rank in ranks], round(time.monotonic() - began, 2))


@contextmanager
def _started(
    trial: Trial, folder: Path, timeout_s: float, links: RunNetwork | None, undisturbed: bool
) -> Iterator[list[_RankProcess]]:
    ranks: list[_RankProcess] = []
    try:
        for number in range(trial.ranks):
            order = RankOrder(trial, number, folder, timeout_s, undisturbed=undisturbed)
            if links is not None:
                order = RankOrder(
                    trial, number, folder, timeout_s, links.interface, links.address(0), links.anchors[number]
                )
            ours, theirs = multiprocessing.Pipe()
            process = _context().Process(target=run, args=(order, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append(_RankProcess(RankEnd(number), process, ours))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
        for rank in ranks:
            rank.process.join()
            rank.connection.close()


@cache
def _context() -> Any:  # Any: multiprocessing's stubs give fork servers no type of their own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # so that a rank starts in milliseconds
    return context


def _watched(
    trial: Trial, ranks: Sequence[_RankProcess], links: RunNetwork | None, bound_s: float
) -> tuple[str, float]:
    """Return where the fault struck and when, once every rank is settled or its time is over."""
    struck, at, gone = "", 0.0, False
    strike_at = None  # of a fault at a random time
    deadline = time.monotonic() + JOIN_S + TRAIN_S
    while time.monotonic() < deadline and not all(rank.settled for rank in ranks):
        until = min(deadline, strike_at or deadline)
        for rank, kind, when, said in _heard(ranks, until):
            if kind == "joined" and all("joined" in each.sent for each in ranks):
                for each in ranks:
                    _send(each, "go")
            elif kind == "ready" and trial.when == "random" and all("ready" in each.sent for each in ranks):
                strike_at = time.monotonic() + trial.after_s
            elif kind == "strike":
                struck, at, gone = said, when, trial.fault in ("kill", "freeze")
                if trial.fault == "partition":
                    assert links is not None
                    links.cut(rank.end.rank)
                    _send(rank, "cut")
        if strike_at and time.monotonic() >= strike_at:
            struck, at, strike_at = f"after {trial.after_s:g} s", time.monotonic(), None
            gone = trial.fault != "partition"
            _strike(trial, ranks[trial.victim], links)
        if gone:
            ranks[trial.victim].settled, ranks[trial.victim].end.state, gone = True, "victim", False
        if at and not trial.survivable:
            deadline = min(deadline, at + bound_s)
    for rank in ranks:
        if rank.end.state == "done":
            _send(rank, "end")
    return struck, at


def _heard(
    ranks: Sequence[_RankProcess], until: float
) -> list[tuple[_RankProcess, str, float, Any]]:  # Any: text, or text and origin
    """Return what ranks say, and take note of how they end."""
    open_ones = {rank.connection: rank for rank in ranks if not rank.settled}
    found: list[tuple[_RankProcess, str, float, Any]] = []
    for connection in wait(list(open_ones), max(0.0, until - time.monotonic())):
        rank = open_ones[connection]  # pyright: ignore[reportArgumentType]  # wait returns what it was given
        try:
            kind, when, said = rank.connection.recv()
        except (EOFError, OSError):
            rank.process.join(END_S)
            rank.settled, rank.told_at = True, time.monotonic()
            rank.end.state, rank.end.said = "crashed", f"exit status {rank.process.exitcode} without an error"
            continue
        rank.sent.add(kind)
        if kind in ("done", "error", "left"):
            rank.settled, rank.told_at, rank.end.state = True, when, kind
            rank.end.said, rank.end.ours = (said[0][:MESSAGE], said[1]) if kind == "error" else (said, True)
        found.append((rank, kind, when, said))
    return found


def _strike(trial: Trial, victim: _RankProcess, links: RunNetwork | None) -> None:
    if trial.fault == "partition":
        assert links is not None
        links.cut(trial.victim)
    else:
        os.kill(victim.process.pid or 0, signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP)


def _send(rank: _RankProcess, said: str) -> None:
    with suppress(OSError):  # it has ended; what it said is read next
        rank.connection.send(said)


def _read_stacks(ranks: Sequence[_RankProcess], folder: Path) -> None:
    """Give every rank that has ended its training time to end its process, and take the stacks of those that hang."""
    deadline = time.monotonic() + END_S
    for rank in ranks:
        if rank.end.state in ("done", "error", "left"):
            rank.process.join(max(0.0, deadline - time.monotonic()))
            if rank.process.exitcode is None:
                rank.end.said, rank.end.state = f"its process does not end, after {rank.end.said}", "hung"
            elif rank.process.exitcode < 0:
                rank.end.said = f"its process ended by signal {-rank.process.exitcode}, after {rank.end.said}"
                rank.end.state = "crashed"
    late = [rank for rank in ranks if rank.end.state == "hung"]
    for rank in late:
        os.kill(rank.process.pid or 0, signal.SIGUSR1)
    time.sleep(0.3 if late else 0.0)
    for rank in late:
        stacks = (folder / f"stacks{rank.end.rank}").read_text()
        rank.end.said = f"{rank.end.said}\n{stacks[-STACKS:]}".strip()
