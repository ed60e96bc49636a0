"""Run one task in a worker process per rank: read their messages, and name the rank to blame for a failure."""

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

from sparsync_lab.netlab import Delay, RunNetwork, network
from sparsync_lab.workers.process import PREFIX, Emit, Message, Order
from sparsync_lab.workers.ranks import Rank, Ranks

GRACE_S = 3.0  # after a rank has failed: for the others to report errors, and to end
SHOWN_LINES = 15  # of a failed rank's standard error
PROCESS = "sparsync_lab.workers.process"


class RankFailedError(RuntimeError):
    """A rank ended early; the message says which one and why."""


@dataclass(eq=False)
class Worker:
    """One rank: its process, its messages and its error."""

    stderr: Path
    rank: Rank = field(init=False)
    messages: deque[Message] = field(default_factory=deque)  # not yet taken
    error: str | None = None  # as reported by the worker
    done: bool = False  # as reported by the worker
    heard_at: float = field(default_factory=time.monotonic)
    _rest: bytes = b""  # an incomplete line; a killed rank may leave one

    def take(self, content: bytes) -> None:
        """Parse the rank's output; errors and ends are noted, other messages are queued."""
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


@dataclass(frozen=True)
class Here:
    """Ranks that this program starts on this machine, with the interface of `hosts.Hosts`."""

    links: RunNetwork
    timeout_s: float
    leads: ClassVar[bool] = True
    network: ClassVar[str] = ""
    count: ClassVar[int] = 1
    device: ClassVar[str] = "cpu"

    def agree(self, texts: Mapping[str, str]) -> None:
        """Do nothing: all ranks come from this program."""

    def run(self, task: str, spec: Mapping[str, Any], take: Emit) -> None:  # Any: JSON
        """Run a task on all ranks, each a process at its link, and pass rank 0's messages to `take`; no process is left.

        Every rank calls `task`, "package.module:function", with `spec`, its Place and a function that sends messages. `timeout_s` limits
        one operation of a rank; if no rank sends a message for twice as long, they count as hung.
        Raises RankFailedError for the first failed rank, after a moment for the others to report their errors.
        """
        links = self.links
        with TemporaryDirectory(prefix=PREFIX) as made, Ranks(GRACE_S) as ranks:
            folder = Path(made)
            rendezvous = str(folder / "rendezvous")
            order = Order(task, dict(spec), links.interface, links.limited, rendezvous, self.timeout_s).encoded()
            workers = [_start(ranks, order, links, folder, place) for place in range(len(links.addresses))]
            first: Worker | None = None
            while ranks.busy and not ranks.stopped:
                ranks.turn(self._silence_ends(workers) if first is None else math.inf)
                if first is not None:
                    continue
                for worker in workers:
                    while worker.messages:
                        take(worker.messages.popleft())
                first = next((worker for worker in workers if worker.failed), None)
                if first is not None:
                    ranks.stop_later()
                elif ranks.busy and time.monotonic() >= self._silence_ends(workers):
                    raise RankFailedError(
                        f"no rank has sent a message for {2 * self.timeout_s:g} s; they hang, or steps are longer: raise --timeout"
                    )
            if first is not None:
                raise RankFailedError(diagnosis(workers, first))

    def _silence_ends(self, workers: Sequence[Worker]) -> float:
        return max(worker.heard_at for worker in workers) + 2 * self.timeout_s


@contextmanager
def here(
    ranks: int, up_bits_per_s: float | None, down_bits_per_s: float | None, delay: Delay, timeout_s: float
) -> Iterator[Here]:
    """Yield ranks of this machine, each at its link; rates and delay as in `netlab.network`."""
    with network(ranks, up_bits_per_s, down_bits_per_s=down_bits_per_s, delay=delay) as links:
        yield Here(links, timeout_s)


def _start(ranks: Ranks, order: str, links: RunNetwork, folder: Path, number: int) -> Worker:
    """Start a rank at its place in the network."""
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
    with suppress(BrokenPipeError):  # if it has ended already, `run` notices
        process.stdin.write(order.encode() + b"\n")  # kept open: the worker ends when it closes
    return worker


def diagnosis(workers: Sequence[Worker], first: Worker) -> str:
    """Explain which ranks failed first and why. Ranks that ended silently come before those that report errors, which follow from the loss.

    `first`: the first rank heard of; if all report errors, the others' follow from its error or equal it. If its wait timed out,
    the cause is the ranks that still run and have reported nothing.
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
    """Tell whether the worker's error is a timeout while waiting for another rank, as gloo and torch word it."""
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
