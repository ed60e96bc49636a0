"""Worker processes, one per rank, that run one task: their messages, and which rank to blame where one fails."""

import json
import math
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from sparsync_lab.netlab import Delay, Forwarded, RunNetwork, network
from sparsync_lab.workers.process import PREFIX, Emit, Message, Order
from sparsync_lab.workers.ranks import Rank, Ranks

GRACE_S = 3.0  # after one rank has failed: how long the others may take to report their errors, and to end
SHOWN_LINES = 15  # of a failed rank's standard error
PROCESS = "sparsync_lab.workers.process"


class RankFailedError(RuntimeError):
    """A rank ended early; the message says which one and why."""


@dataclass(eq=False)
class Worker:
    """One rank: its process, what it has told, and its error."""

    stderr: Path
    rank: Rank = field(init=False)
    messages: deque[Message] = field(default_factory=deque)  # not yet taken
    error: str | None = None  # as the worker reported it
    done: bool = False  # as the worker reported it
    heard_at: float = field(default_factory=time.monotonic)
    _rest: bytes = b""  # of a line; a rank that is killed may leave half a line

    def take(self, content: bytes) -> None:
        """Keep the messages in what the rank has written; those that say something of the rank itself apart."""
        self.heard_at = time.monotonic()
        *lines, self._rest = (self._rest + content).split(b"\n")
        for message in map(json.loads, lines):
            if message["kind"] == "error":
                self.error = message["message"]
            elif message["kind"] == "done":
                self.done = True
            else:
                self.messages.append(message)

    @property
    def failed(self) -> bool:
        ended = not self.rank.running and not self.rank.streams
        return self.error is not None or bool(self.rank.status) or (ended and not self.done)


@dataclass
class WorkerGroup:
    """The running ranks. `messages` yields what rank 0 sends until all have ended."""

    ranks: Ranks
    workers: Sequence[Worker]
    silence_s: float  # without a message from any rank for this long, the ranks count as hung

    def messages(self) -> Iterator[Message]:
        """Yield every message of rank 0 as it comes.

        Raises RankFailedError for the rank that failed first, after a moment in which the others may report their errors.
        """
        first: Worker | None = None
        while self.ranks.busy and not self.ranks.stopped:
            self.ranks.turn(self._silence_ends() if first is None else math.inf)
            if first is not None:
                continue
            for worker in self.workers:
                while worker.messages:
                    yield worker.messages.popleft()
            first = next((worker for worker in self.workers if worker.failed), None)
            if first is not None:
                self.ranks.stop_later()
            elif self.ranks.busy and time.monotonic() >= self._silence_ends():
                raise RankFailedError(
                    f"no rank has sent a message for {self.silence_s:g} s; they hang, or steps are longer: raise --timeout"
                )
        if first is not None:
            raise RankFailedError(diagnosis(self.workers, first))

    def _silence_ends(self) -> float:
        return max(worker.heard_at for worker in self.workers) + self.silence_s


@contextmanager
def worker_group(
    task: str,
    spec: Mapping[str, Any],  # Any: JSON
    links: RunNetwork,
    timeout_s: float,
) -> Iterator[WorkerGroup]:
    """Start one worker process for each rank of `links`, each at its own link; none is left when the block ends.

    Every worker calls `task`, "package.module:function", with `spec`, its Place and a function that sends messages.
    `timeout_s` is for one operation of a rank; a group that sends no message for twice as long counts as hung.
    """
    with TemporaryDirectory(prefix=PREFIX) as made, Ranks(GRACE_S) as ranks:
        folder = Path(made)
        rendezvous = str(folder / "rendezvous")
        order = Order(task, dict(spec), links.interface, links.limited, rendezvous, timeout_s).encoded()
        count = len(links.addresses)
        workers = [_start(ranks, order, links, folder, place) for place in range(count)]
        yield WorkerGroup(ranks, workers, silence_s=2 * timeout_s)


@dataclass(frozen=True)
class Here:
    """Ranks that this program starts on this machine, behind the same calls as `hosts.Hosts`."""

    links: RunNetwork
    timeout_s: float
    leads: ClassVar[bool] = True
    network: ClassVar[str] = ""
    count: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"

    def agree(self, texts: Mapping[str, str]) -> None:
        """Do nothing: all ranks come from this program."""

    def run(self, task: str, spec: Mapping[str, Any], take: Emit) -> None:  # Any: JSON
        """Run `task` on all ranks, and give each message of rank 0 to `take`. Raises RankFailedError."""
        with worker_group(task, spec, self.links, self.timeout_s) as workers:
            for message in workers.messages():
                take(message)

    def forwarded(self) -> Forwarded | None:
        """Return the traffic and the cost of the program that delays packets."""
        return self.links.forwarded()


@contextmanager
def here(
    ranks: int, up_bits_per_s: float | None, down_bits_per_s: float | None, delay: Delay, timeout_s: float
) -> Iterator[Here]:
    """Yield ranks of this machine, each at its own link; rates and delay as in `netlab.network`."""
    with network(ranks, up_bits_per_s, down_bits_per_s=down_bits_per_s, delay=delay) as links:
        yield Here(links, timeout_s)


def _start(ranks: Ranks, order: str, links: RunNetwork, folder: Path, number: int) -> Worker:
    """Start the next rank, at its place of the network."""
    worker = Worker(folder / f"rank{number}.err")
    environment = {**os.environ, "RANK": str(number), "WORLD_SIZE": str(len(links.addresses)), "OMP_NUM_THREADS": "1"}
    with worker.stderr.open("w") as file:
        process = ranks.start(
            links.command(number, [sys.executable, "-m", PROCESS]),
            {"stdout": worker.take},
            stdin=subprocess.PIPE,
            stderr=file,
            env=environment,
        )
    worker.rank = ranks.all[number]
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # one that has ended already is found by `messages`
        process.stdin.write(order.encode() + b"\n")  # left open: the worker ends when it closes
    return worker


def diagnosis(workers: Sequence[Worker], first: Worker) -> str:
    """Return which ranks failed first and why: those that ended without a word before those that report errors, which follow from the loss.

    `first`: the one that was heard of first; where all report errors, the others' follow from its error, or are the same. Where it has
    waited without success, those that still run and have reported nothing are what it has waited for.
    """
    silent = [worker for worker in workers if worker.error is None and not worker.done]
    ended = [worker for worker in silent if not worker.rank.running]
    killed = [worker for worker in ended if worker.rank.killed]
    hanging = [] if ended or not _waited(first) else silent
    culprits = [*hanging, *(killed or ended or [first])]
    outcomes = [f"rank {worker.rank.number} {_outcome(worker)}" for worker in culprits]
    others = [
        f"rank {worker.rank.number}: {worker.error}"
        for worker in workers
        if worker.error is not None and worker not in culprits
    ]
    tails = [_tail(worker) for worker in culprits if worker.error is None]
    return "\n".join(["; ".join(outcomes), *others, *filter(None, tails)])


def _waited(worker: Worker) -> bool:
    """Return whether the worker's error is that another rank did not come in time, as gloo and torch word it."""
    return worker.error is not None and ("timed out" in worker.error.lower() or "timeout" in worker.error.lower())


def _outcome(worker: Worker) -> str:
    if worker.error is not None:
        return f"failed: {worker.error}"
    if worker.rank.running:
        return "hangs, or its step takes longer than --timeout: it still runs, and has reported no error"
    if worker.rank.status == 0:
        return "ended with exit status 0 before its task was done: something in it has ended the process"
    return f"{'was killed by' if worker.rank.killed else 'ended with'} {worker.rank.ending}"


def _tail(worker: Worker) -> str:
    lines = worker.stderr.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join([f"last lines of rank {worker.rank.number}:", *lines]) if lines else ""
