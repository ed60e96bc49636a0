"""The processes of all ranks: started together, read, and stopped together whatever happens to one of them."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsync_lab.netlab import RunNetwork
from sparsync_lab.temporary import temporary_folder
from sparsync_lab.workers.process import Message, Order

GRACE_S = 3.0  # after one rank has failed: how long the others may take to report their errors, and to end
SHOWN_LINES = 15  # of a failed rank's standard error
PROCESS = "sparsync_lab.workers.process"


class RankFailedError(RuntimeError):
    """A rank ended early; the message says which one and why."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[str]
    stderr: Path
    error: str | None = None  # as the worker reported it
    done: bool = False  # as the worker reported it
    closed: bool = False  # there is nothing more to read

    def take(self, message: Message | None) -> None:
        """Keep what a message says of the rank itself; None is the end of all."""
        if message is None:
            self.closed = True
        elif message["kind"] == "error":
            self.error = message["message"]
        elif message["kind"] == "done":
            self.done = True

    @property
    def running(self) -> bool:
        return self.process.poll() is None


@dataclass
class WorkerGroup:
    """The running ranks. `messages` yields what rank 0 sends until all have ended."""

    workers: list[_Worker]
    silence_s: float  # without a message from any rank for this long, the ranks count as hung
    _inbox: queue.SimpleQueue[tuple[_Worker, Message | None]] = field(default_factory=queue.SimpleQueue)

    def messages(self) -> Iterator[Message]:
        """Yield every message of rank 0 as it comes. Raises RankFailedError as soon as any rank fails."""
        for worker in self.workers:
            threading.Thread(target=self._read, args=(worker,), daemon=True).start()
        while not all(worker.closed for worker in self.workers):
            worker, message = self._next()
            worker.take(message)
            if worker.error is not None or (message is None and (worker.process.wait() != 0 or not worker.done)):
                self._fail(worker)
            if message is not None and message["kind"] != "done":
                yield message

    def _next(self) -> tuple[_Worker, Message | None]:
        try:
            return self._inbox.get(timeout=self.silence_s)
        except queue.Empty:
            raise RankFailedError(
                f"no rank has sent a message for {self.silence_s:g} s; they hang, or steps are longer: raise --timeout"
            ) from None

    def _read(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            if line.endswith("\n"):  # a rank that is killed may leave half a line
                self._inbox.put((worker, json.loads(line)))
        self._inbox.put((worker, None))

    def _fail(self, first: _Worker) -> None:
        """Give the other ranks a moment to report their errors, then raise for the rank that failed first."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(worker.running or not worker.closed for worker in self.workers):
            with suppress(queue.Empty):
                worker, message = self._inbox.get(timeout=0.1)
                worker.take(message)
        raise RankFailedError(_diagnosis(self.workers, first))


@contextmanager
def worker_group(
    task: str,
    spec: Mapping[str, Any],  # Any: JSON
    network: RunNetwork,
    timeout_s: float,
) -> Iterator[WorkerGroup]:
    """Start one worker process for each rank of `network`, each at its own link; none is left when the block ends.

    Every worker calls `task`, "package.module:function", with `spec`, its Place and a function that sends messages.
    `timeout_s` is for one operation of a rank; a group that sends no message for twice as long counts as hung.
    """
    ranks = len(network.addresses)
    with temporary_folder() as folder:
        rendezvous = str(folder / "rendezvous")
        order = Order(task, dict(spec), network.interface, network.limited, rendezvous, timeout_s)
        workers: list[_Worker] = []
        try:
            for rank in range(ranks):
                workers.append(_start(rank, ranks, network, folder))
            for worker in workers:
                assert worker.process.stdin is not None
                with suppress(BrokenPipeError):  # one that has ended already is found by `messages`
                    worker.process.stdin.write(order.encoded() + "\n")
                    worker.process.stdin.flush()  # left open: the worker ends when it closes
            yield WorkerGroup(workers, silence_s=2 * timeout_s)
        finally:
            _stop(workers)


def _start(rank: int, ranks: int, network: RunNetwork, folder: Path) -> _Worker:
    stderr = folder / f"rank{rank}.err"
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    with stderr.open("w") as file:
        process = subprocess.Popen(
            network.command(rank, [sys.executable, "-m", PROCESS]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program that started the ranks; it stops them in order
        )
    return _Worker(rank, process, stderr)


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        if worker.process.poll() is None:
            worker.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        try:
            worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
    for worker in workers:
        assert worker.process.stdin is not None
        with suppress(BrokenPipeError):
            worker.process.stdin.close()


def _diagnosis(workers: Sequence[_Worker], first: _Worker) -> str:
    """Return which ranks failed first and why: those that ended without a word before those that report errors, which follow from the loss.

    `first`: the one that was heard of first; where all report errors, the others' follow from its error, or are the same. Where it has
    waited without success, those that still run and have reported nothing are what it has waited for.
    """
    silent = [worker for worker in workers if worker.error is None and not worker.done]
    ended = [worker for worker in silent if not worker.running]
    killed = [worker for worker in ended if worker.process.returncode < 0]
    hanging = [] if ended or not _waited(first) else silent
    culprits = [*hanging, *(killed or ended or [first])]
    outcomes = [f"rank {worker.rank} {_outcome(worker)}" for worker in culprits]
    others = [
        f"rank {worker.rank}: {worker.error}"
        for worker in workers
        if worker.error is not None and worker not in culprits
    ]
    tails = [_tail(worker) for worker in culprits if worker.error is None]
    return "\n".join(["; ".join(outcomes), *others, *filter(None, tails)])


def _waited(worker: _Worker) -> bool:
    """Return whether the worker's error is that another rank did not come in time, as gloo and torch word it."""
    return worker.error is not None and ("timed out" in worker.error.lower() or "timeout" in worker.error.lower())


def _outcome(worker: _Worker) -> str:
    if worker.error is not None:
        return f"failed: {worker.error}"
    if worker.running:
        return "hangs, or its step takes longer than --timeout: it still runs, and has reported no error"
    code = worker.process.returncode
    if code == 0:
        return "ended with exit status 0 before its task was done: something in it has ended the process"
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"


def _tail(worker: _Worker) -> str:
    lines = worker.stderr.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join([f"last lines of rank {worker.rank}:", *lines]) if lines else ""
