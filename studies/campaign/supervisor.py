"""One trial: starts its ranks, lets the fault happen, and waits for what every surviving rank makes of it."""

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from sparsync_lab.netlab import NO_DELAY, Delay, RunNetwork, network
from sparsync_lab.workers.ranks import Rank, Ranks
from studies.campaign.rank import JOIN_S, RankOrder, run
from studies.campaign.trials import Trial

GRACE_S = 6.0  # after the timeout: exchanging causes takes up to 3 s, and the machine may be busy
TRAIN_S = 60.0  # for a training that nothing disturbs
END_S = 15.0  # for a process to end once it has its error
RATE_BITS_PER_S = 1e9  # of links that are cut, or have a delay
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


@dataclass(eq=False)
class _TrialRank:
    """The process of one rank, and what it says."""

    end: RankEnd
    connection: Connection
    process: Rank = field(init=False)
    heard: list[tuple[str, float, Any]] = field(default_factory=list)  # Any: text, or text and origin
    sent: set[str] = field(default_factory=set)
    settled: bool = False
    told_at: float = 0.0

    def receive(self) -> bool:
        """Keep what the rank says now; return False where its end of the connection is closed."""
        try:
            self.heard.append(self.connection.recv())
        except (EOFError, OSError):
            return False
        return True

    def settle(self, state: str, said: str = "", at: float = 0.0) -> None:
        self.settled, self.end.state, self.end.said, self.told_at = True, state, said, at

    def send(self, said: str) -> None:
        with suppress(OSError):  # it has ended; what it said is read next
            self.connection.send(said)


def observe(
    trial: Trial, timeout_s: float, undisturbed: bool = False, grace_s: float = GRACE_S, delay: Delay = NO_DELAY
) -> TrialSeen:
    """Run the ranks of a trial, and return what each of them made of it; no process is left. `undisturbed`: without the fault.

    A rank that has neither raised nor finished `timeout_s` and `grace_s` seconds after the fault has hung.
    """
    began = time.monotonic()
    cut = trial.fault == "partition" and not undisturbed
    with (
        tempfile.TemporaryDirectory(prefix="sparsync-campaign-") as folder,
        network(trial.ranks, RATE_BITS_PER_S if cut or delay else None, delay=delay) as links,
        ExitStack() as connections,
        Ranks(grace_s=0.0) as processes,
    ):
        ranks: list[_TrialRank] = []
        for number in range(trial.ranks):
            # The program that delays packets is this process's.
            order = RankOrder(trial, number, Path(folder), timeout_s, replace(links, forwarder=None), undisturbed)
            ours, theirs = multiprocessing.Pipe()
            connections.enter_context(ours)
            with theirs:
                ranks.append(_started(order, ours, theirs))
            processes.all.append(ranks[number].process)
        struck, at = _watched(trial, processes, ranks, links, timeout_s + grace_s)
        _read_stacks(processes, ranks, Path(folder))
    for rank in ranks:
        rank.end.after_s = round(max(0.0, rank.told_at - at), 2) if at and rank.told_at else None
    return TrialSeen(struck, [rank.end for rank in ranks], round(time.monotonic() - began, 2))


def _started(order: RankOrder, ours: Connection, theirs: Connection) -> _TrialRank:
    process = _context().Process(target=run, args=(order, theirs), daemon=True)
    process.start()
    made = _TrialRank(RankEnd(order.rank), ours)
    streams = {ours.fileno(): made.receive}
    made.process = Rank(order.rank, process.pid, process.sentinel, lambda: process.exitcode, streams)
    return made


@cache
def _context() -> Any:  # Any: multiprocessing's stubs give fork servers no type of their own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # so that a rank starts in milliseconds
    return context


def _watched(
    trial: Trial, processes: Ranks, ranks: Sequence[_TrialRank], links: RunNetwork, bound_s: float
) -> tuple[str, float]:
    """Return where the fault struck and when, once every rank is settled or its time is over."""
    struck, at, victim = "", 0.0, ranks[trial.victim]
    strike_at = None  # of a fault at a random time
    deadline = time.monotonic() + JOIN_S + TRAIN_S
    while time.monotonic() < deadline and not all(rank.settled for rank in ranks):
        processes.turn(min(deadline, strike_at or deadline))
        for rank, kind, when, said in _heard(ranks):
            if kind == "joined" and all("joined" in each.sent for each in ranks):
                for each in ranks:
                    each.send("go")
            elif kind == "ready" and trial.when == "random" and all("ready" in each.sent for each in ranks):
                strike_at = time.monotonic() + trial.after_s
            elif kind == "strike":
                struck, at = said, when
                if trial.fault == "partition":
                    links.cut(rank.end.rank)
                    rank.send("cut")
                elif trial.fault in ("kill", "freeze"):
                    victim.settle("victim")
        if strike_at and time.monotonic() >= strike_at:
            struck, at, strike_at = f"after {trial.after_s:g} s", time.monotonic(), None
            if trial.fault == "partition":
                links.cut(trial.victim)
            else:
                victim.process.send(signal.SIGKILL if trial.fault == "kill" else signal.SIGSTOP)
                victim.settle("victim")
        if at and not trial.survivable:
            deadline = min(deadline, at + bound_s)
    for rank in ranks:
        if rank.end.state == "done":
            rank.send("end")
    return struck, at


def _heard(ranks: Sequence[_TrialRank]) -> Iterator[tuple[_TrialRank, str, float, Any]]:  # Any: as in _TrialRank
    """Yield what ranks that are not settled say, and take note of how they end."""
    for rank in ranks:
        heard, rank.heard = rank.heard, []
        for kind, when, said in heard:
            if rank.settled:
                break
            rank.sent.add(kind)
            if kind == "error":
                rank.settle(kind, said[0][:MESSAGE], when)
                rank.end.ours = said[1]
            elif kind in ("done", "left"):
                rank.settle(kind, said, when)
            yield rank, kind, when, said
        if not (rank.settled or rank.process.running or rank.process.streams):
            rank.settle("crashed", f"{rank.process.ending} without an error", time.monotonic())


def _read_stacks(processes: Ranks, ranks: Sequence[_TrialRank], folder: Path) -> None:
    """Give every rank that has ended its training time to end its process, and take the stacks of those that hang."""
    deadline = time.monotonic() + END_S
    trained = [rank for rank in ranks if rank.end.state in ("done", "error", "left")]
    while time.monotonic() < deadline and any(rank.process.running for rank in trained):
        processes.turn(deadline, reading=False)
    for rank in trained:
        if rank.process.running:
            rank.end.said, rank.end.state = f"its process does not end, after {rank.end.said}", "hung"
        elif rank.process.killed:
            rank.end.said = f"its process ended by {rank.process.ending}, after {rank.end.said}"
            rank.end.state = "crashed"
    late = [rank for rank in ranks if rank.end.state == "hung"]
    for rank in late:
        rank.process.send(signal.SIGUSR1)
    time.sleep(0.3 if late else 0.0)
    for rank in late:
        stacks = (folder / f"stacks{rank.end.rank}").read_text()
        rank.end.said = f"{rank.end.said}\n{stacks[-STACKS:]}".strip()
