"""The processes of all ranks: started together, listened to, and ended together whatever happens to one of them."""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparsync.lab.netlab import Network
from sparsync.lab.settings import Settings
from sparsync.lab.worker import encode_spec

GRACE_S = 3.0  # how long the other ranks may take to say what happened to them, and to end, once one has failed
SHOWN_LINES = 15  # of a failed rank's standard error


class RankFailedError(RuntimeError):
    """A rank ended early; the message names it and tells why."""


@dataclass
class _Worker:
    rank: int
    process: subprocess.Popen[str]
    errors: Path  # its standard error
    said: str | None = None  # the error it reported itself


@dataclass
class Fleet:
    """The running ranks. `messages` yields what rank 0 says until all have ended."""

    workers: list[_Worker]
    silence_s: float  # without a word from any rank for this long, they are taken for hung
    _inbox: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = field(default_factory=queue.SimpleQueue)

    def messages(self) -> Iterator[dict[str, Any]]:
        """Every message of rank 0, as it comes. Raises RankFailedError as soon as any rank fails."""
        for worker in self.workers:
            threading.Thread(target=self._listen, args=(worker,), daemon=True).start()
        running = len(self.workers)
        while running:
            worker, message = self._next()
            if message is None:
                running -= 1
                if worker.process.wait() != 0:
                    self._fail()
            elif message["kind"] == "error":
                worker.said = message["message"]
                self._fail()
            else:
                yield message

    def _next(self) -> tuple[_Worker, dict[str, Any] | None]:
        try:
            return self._inbox.get(timeout=self.silence_s)
        except queue.Empty:
            raise RankFailedError(
                f"no rank has said anything for {self.silence_s:g} s; they hang, or steps are longer: raise --timeout"
            ) from None

    def _listen(self, worker: _Worker) -> None:
        assert worker.process.stdout is not None
        for line in worker.process.stdout:
            if line.endswith("\n"):  # a rank that is killed may leave half a line
                self._inbox.put((worker, json.loads(line)))
        self._inbox.put((worker, None))

    def _fail(self) -> None:
        """Gives the other ranks a moment to tell their side, then raises for the one that failed first."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(worker.process.poll() is None for worker in self.workers):
            try:
                worker, message = self._inbox.get(timeout=0.1)
            except queue.Empty:
                continue
            if message is not None and message["kind"] == "error":
                worker.said = message["message"]
        raise RankFailedError(_diagnosis(self.workers))


def _diagnosis(workers: Sequence[_Worker]) -> str:
    """Which rank is to blame: one that was killed rather than one that complains, since the complaints of the others follow from it."""
    ended = [worker for worker in workers if worker.process.poll() not in (None, 0)]
    killed = [worker for worker in ended if worker.process.returncode < 0]
    silent = [worker for worker in ended if worker.said is None]
    culprits = killed or silent or [worker for worker in workers if worker.said is not None]
    told = [f"rank {worker.rank} {_fate(worker)}" for worker in culprits]
    others = [f"rank {w.rank}: {w.said}" for w in workers if w.said is not None and w not in culprits]
    tails = [_tail(worker) for worker in culprits if worker.said is None]
    return "\n".join(["; ".join(told), *others, *tails])


def _fate(worker: _Worker) -> str:
    if worker.said is not None:
        return f"failed: {worker.said}"
    code = worker.process.returncode
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit status {code}"


def _tail(worker: _Worker) -> str:
    lines = worker.errors.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join([f"last lines of rank {worker.rank}:", *lines]) if lines else ""


@contextmanager
def fleet(settings: Settings, network: Network) -> Iterator[Fleet]:
    """One worker process a rank, each in its place of `network`; none is left when the block ends."""
    with tempfile.TemporaryDirectory(prefix="sparsync-") as folder:
        spec = encode_spec(settings, network.interface, network.limited, str(Path(folder) / "rendezvous"))
        workers: list[_Worker] = []
        try:
            for rank in range(settings.ranks):
                workers.append(_start(rank, settings, network, Path(folder)))
            for worker in workers:
                assert worker.process.stdin is not None
                worker.process.stdin.write(spec + "\n")
                worker.process.stdin.flush()  # left open: the worker ends when it closes
            yield Fleet(workers, silence_s=2 * settings.timeout_s)
        finally:
            _stop(workers)


def _start(rank: int, settings: Settings, network: Network, folder: Path) -> _Worker:
    errors = folder / f"rank{rank}.err"
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(settings.ranks), "OMP_NUM_THREADS": "1"}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            network.command(rank, [sys.executable, "-m", "sparsync.lab.worker"]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the program that started them; it ends them in order
        )
    return _Worker(rank, process, errors)


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
