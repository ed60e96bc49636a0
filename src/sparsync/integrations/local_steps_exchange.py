"""One exchange of a fragment of the weights, while computing goes on or not: agreement, then each bucket through the scheme."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sparsync.base.scheme import Scheme, overflowed
from sparsync.comm.announcement import RanksDifferError
from sparsync.comm.group import ConnectionLostError
from sparsync.core import Bucket, Comm, Cost, Report
from sparsync.integrations.connection import Connection
from sparsync.integrations.dispatcher import EXIT_S
from sparsync.integrations.local_steps_agreement import Agreement
from sparsync.integrations.local_steps_weights import WeightBucket

_Jobs = queue.SimpleQueue[tuple[Callable[[], str], "Future[str]"] | None]


@dataclass
class Exchange:
    """What is sent of some buckets, and after `wait` what came of it."""

    buckets: Sequence[WeightBucket]
    own: list[Tensor]  # the own weights when it was sent, [n] each
    changes: list[Bucket]  # start - own, and afterwards the mean over ranks
    agreement: Agreement
    due: int  # applied when this many steps were made
    background: bool = False  # the own weights change before it is applied
    held: list[Tensor | None] = field(
        default_factory=list
    )  # what stays in the own weights of what was not sent; None: nothing
    dropped: bool = False  # NaN or Inf somewhere
    reports: list[Report] = field(default_factory=list)
    raised: bool = False  # an error was raised for it already
    _job: "Future[str] | None" = None
    _streams: dict[torch.device, Any] = field(default_factory=dict)  # torch's stubs know two unrelated Event classes

    def wait(self) -> str:
        """Wait until the exchange has ended, and return why it failed; "" if it did not."""
        if self._job is not None and (failure := self._job.result()):
            return failure
        for device, ended in self._streams.items():
            torch.cuda.current_stream(device).wait_event(ended)
            for tensor in (*(each.grad for each in self.changes), *(each for each in self.held if each is not None)):
                if tensor.device == device:
                    tensor.record_stream(torch.cuda.current_stream(device))
        self._streams = {}
        return ""


class Exchanger:
    """Runs exchanges over `connection` one after the other, in the same order on all ranks; those that may wait on a thread of its own."""

    def __init__(self, connection: Connection, scheme: Scheme, comm: Comm, keep: float, threaded: bool) -> None:
        self._connection, self._scheme, self._comm, self._keep = connection, scheme, comm, keep
        self._worker = _Worker() if threaded else None
        if self._worker is not None:
            weakref.finalize(self, self._worker.stop)

    def start(self, exchange: Exchange, step: int) -> None:
        """Make the exchange; return at once if it is one for the background and there is a thread.

        `step` goes into the reports. On the caller's thread it raises, and `fail` is to follow; a failure in the background is returned by
        `Exchange.wait`.
        """
        if self._worker is None or not exchange.background:
            self._wait_for_others()
            self._reduce(exchange, step)
            return
        devices = {each.grad.device for each in exchange.changes if each.grad.is_cuda}
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        exchange._job = self._worker.submit(lambda: self._in_background(exchange, step, ready))

    def fail(self, exchange: Exchange, step: int, error: BaseException) -> None:
        """Close the connection, behind the exchanges on their way, because an error on this thread keeps `exchange` from being made.

        Raises `error`, but where the other ranks find the failure out only when the exchange is due: then this one fails like theirs.
        """
        if self._worker is not None and exchange.background and isinstance(error, Exception):
            failure = f"{type(error).__name__}: {error}"
            exchange._job = self._worker.submit(lambda: self._failed(step, failure, lost=False))
            return
        try:
            if isinstance(error, Exception):
                self._wait_for_others()
        finally:
            others = self._connection.close(error)
        if isinstance(error, ConnectionLostError):
            error.args = (f"{error}{others}",)
        raise error

    def stop(self) -> None:
        """End the thread after the exchanges on their way, without waiting for them."""
        if self._worker is not None:
            self._worker.stop()

    def held(self, bucket: WeightBucket) -> Tensor | None:
        """Return `keep` times what this rank has not sent of a bucket, [n]; None where that is nothing."""
        if self._keep == 0:
            return None
        unsent = self._scheme.unsent(bucket.bucket(bucket.common, 0), self._comm)
        return None if unsent is None else unsent.to(bucket.dtype) * self._keep

    def _wait_for_others(self) -> None:
        """Wait until the exchanges on their way, whose connection the next one uses, have ended."""
        if self._worker is not None:
            self._worker.submit(str).result()

    def _in_background(
        self, exchange: Exchange, step: int, ready: dict[torch.device, Any]
    ) -> str:  # Any: as in Exchange
        """Make the exchange, and return why it failed; "" if it did not. No exception: its traceback would keep connections open."""
        try:
            self._on_streams(lambda: self._reduce(exchange, step), exchange, dict(ready))
            return ""
        except BaseException as error:
            failure, lost = (
                f"{type(error).__name__}: {error}",
                isinstance(error, (ConnectionLostError, RanksDifferError)),
            )
        return self._failed(step, failure, lost)

    def _failed(self, step: int, failure: str, lost: bool) -> str:
        reported = self._connection.close("" if lost else failure)
        return f"the exchange of step {step} failed: {failure}{reported}"

    def _on_streams(self, work: Callable[[], None], exchange: Exchange, ready: dict[torch.device, Any]) -> None:
        """Do the work on a stream of its own on each device, after its event of `ready`."""
        if not ready:
            work()
            return
        device, event = ready.popitem()
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            self._on_streams(work, exchange, ready)
            exchange._streams[device] = stream.record_event()

    def _reduce(self, exchange: Exchange, step: int) -> None:
        """Reduce all buckets, or none when the weights of some rank are not finite. A failure leaves nothing lost and nothing twice."""
        reduced: list[int] = []
        number = exchange.changes[0].step
        first = exchange.agreement.bucket(number, exchange.changes[0].grad.device)
        try:
            agreed = self._connection.reduce(first, exchange.agreement)
            exchange.dropped = bool(exchange.agreement.not_finite)
            for position, change in enumerate(exchange.changes):
                if exchange.dropped:
                    # On all ranks alike. What was sent of other buckets is in the residuals again, see Rollback.
                    details = {"overflow": True}
                    report = Report(
                        self._scheme.name, change.key, step, change.grad.numel(), 0, 0, Cost(), Cost(), details=details
                    )
                else:
                    report = self._connection.reduce(change, self._scheme)
                    reduced.append(position)
                    exchange.dropped = overflowed(report, change.grad)
                exchange.reports.append(replace(report, step=step))
            with torch.no_grad():
                exchange.held = [self.held(each) for each in exchange.buckets]
        except BaseException:
            for position in reduced if not exchange.dropped and self._scheme.has_residual else ():
                # What this bucket sent is in the residual again, so the next change of it begins here.
                self._scheme.rollback(exchange.changes[position])
                exchange.buckets[position].start = exchange.own[position]
            raise
        self._connection.end_step()  # not after a failure: this step was not reduced here
        exchange.reports[0] = _with_agreement(exchange.reports[0], agreed)


class _Worker:
    """Runs jobs in their order on a daemon thread; a process that ends waits for it at most `EXIT_S` seconds."""

    def __init__(self) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], str]) -> "Future[str]":
        """Return a future of what `job` will return."""
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name="sparsync-local-steps", daemon=True)
            self._thread.start()
            atexit.register(_end, self._thread, self._jobs)
        done: Future[str] = Future()
        self._jobs.put((job, done))
        return done

    def stop(self) -> None:
        """End the thread after the jobs submitted so far, without waiting for them; the next job starts another thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _run(jobs: _Jobs) -> None:
    while _next(jobs):
        pass


def _next(jobs: _Jobs) -> bool:
    """Wait for a job and do it; return False at the end. In a frame of its own, so that nothing of the model is held while waiting."""
    found = jobs.get()
    if found is None:
        return False
    job, done = found
    try:
        done.set_result(job())
    except BaseException as error:  # raised again where it is waited for
        done.set_exception(error)
    return True


def _end(thread: threading.Thread, jobs: _Jobs) -> None:
    """End the thread before the interpreter ends; see dispatcher.py."""
    jobs.put(None)
    thread.join(EXIT_S)


def _with_agreement(report: Report, agreed: Report) -> Report:
    """Return the report of the first bucket with what the agreement before it has sent and taken."""
    sent = agreed.sent if report.sent is None or agreed.sent is None else report.sent + agreed.sent
    seconds, wait_s = (
        (getattr(report, name) or 0.0) + (getattr(agreed, name) or 0.0) for name in ("seconds", "wait_s")
    )
    return replace(report, cost=report.cost + agreed.cost, sent=sent, seconds=seconds, wait_s=wait_s)
