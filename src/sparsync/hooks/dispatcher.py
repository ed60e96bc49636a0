"""One thread that reduces buckets one after the other, in the order they were handed over.

A scheme is several collectives in a row. Issued from callbacks on a shared group, those of different buckets mix; here every phase of
a bucket ends before the next bucket begins, in the same order on all ranks, on a group nobody else uses. The backward pass goes on
meanwhile, and buckets wait in line.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Report
from sparsync.protocols import Comm, Scheme


@dataclass
class _Job:
    bucket: Bucket
    done: Future
    error: list[Exception]
    ready: Any  # the CUDA event after which the gradient is there; None on CPU. torch's stubs know two unrelated Event classes


class Dispatcher:
    """Reduces buckets with `scheme` over `comm` on a thread of its own, and hands each Report to `on_report` on that thread.

    After a failure the other buckets of the same step fail at once with the same error, since the ranks no longer agree on what comes
    next on the wire; the next step tries anew.
    """

    def __init__(self, scheme: Scheme, comm: Comm, on_report: Callable[[Report], None]) -> None:
        self._scheme = scheme
        self._comm = MeteredComm(comm)
        self._on_report = on_report
        self._jobs: queue.SimpleQueue[_Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._failure: tuple[int, Exception] | None = None  # step and cause

    def submit(self, bucket: Bucket) -> Future:
        """A future that becomes `bucket.grad` once it is reduced. Returns at once; never raises."""
        device = bucket.grad.device
        done: Future[Tensor | None] = Future(devices=[device] if device.type == "cuda" else None)
        error: list[Exception] = []
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        # HACK: DDP shows an exception set on a future as "Unable to cast ... to Tensor"; raised in a callback it keeps its message.
        def result(finished: Future) -> Tensor:
            if error:
                raise error[0]
            return finished.value()

        self._put(_Job(bucket, done, error, ready))
        return done.then(result)

    def call(self, fn: Callable[[], None]) -> None:
        """Runs `fn` on the dispatcher's thread, between the buckets handed over before and after."""
        self._put(fn)

    def flush(self) -> None:
        """Returns when all that was handed over is done."""
        if self._thread is not None:
            idle = threading.Event()
            self._put(idle.set)
            idle.wait()

    def _put(self, job: "_Job | Callable[[], None]") -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sparsync-dispatcher", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            if isinstance(job, _Job):
                self._reduce(job)
            else:
                job()

    def _reduce(self, job: _Job) -> None:
        bucket = job.bucket
        if job.ready is None:
            self._attempt(job)
            job.done.set_result(bucket.grad)
            return
        device = bucket.grad.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):  # a host sync inside a scheme holds up this thread only
            stream.wait_event(job.ready)
            self._attempt(job)
            job.done.set_result(bucket.grad)

    def _attempt(self, job: _Job) -> None:
        bucket = job.bucket
        if self._failure is not None and self._failure[0] == bucket.step:
            job.error.append(RuntimeError(f"bucket {bucket.key!r} was not reduced: {self._failure[1]}"))
            return
        began = time.perf_counter()
        try:
            with torch.no_grad():
                report = self._scheme.reduce(bucket, self._comm)
        except (
            Exception
        ) as error:  # whatever a scheme raises becomes the error of this step, on the thread that waits for it
            self._failure = bucket.step, error
            job.error.append(
                RuntimeError(f"{self._scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}: {error}")
            )
            self._comm.take()
            return
        sent, wait_s = self._comm.take()
        self._on_report(replace(report, sent=sent, seconds=time.perf_counter() - began, wait_s=wait_s))
