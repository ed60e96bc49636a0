"""One thread that reduces buckets one after the other, in the order in which they were submitted.

A scheme is several collectives in a row. Issued from callbacks on a shared group, those of different buckets mix; here every phase of
a bucket ends before the next bucket begins, in the same order on all ranks, on a group nobody else uses. The backward pass goes on
meanwhile, and buckets wait in line.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.base.scheme import Scheme
from sparsync.comm.announcement import RanksDifferError
from sparsync.comm.group import ConnectionLostError
from sparsync.core import Bucket, Report
from sparsync.integrations.connection import Connection
from sparsync.integrations.summary import Hidden

EXIT_S = 5.0  # how long a process that ends waits for its dispatchers to close their connections
ALIVE_CHECK_S = 1.0  # between two looks at whether the thread that is waited for still runs


@dataclass
class _Job:
    bucket: Bucket
    scheme: Scheme
    prepare: Callable[[], None] | None
    written: Callable[[], Bucket] | None
    done: Future
    submitted_s: float  # of time.perf_counter
    ready: Any  # the CUDA event after which the gradient is there; None on CPU. torch's stubs know two unrelated Event classes
    error: list[str] = field(default_factory=list)  # one message if the job failed


class Dispatcher:
    """Reduces buckets over `connection` on a thread of its own, and passes each Report to `on_report` on that thread.

    When a bucket fails, the other buckets of its step fail too, with the same cause.
    """

    def __init__(self, connection: Connection, on_report: Callable[[Report], None]) -> None:
        self._connection = connection
        self._on_report = on_report
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Step and cause of the last failure. Not the exception: its traceback would keep the connections open.
        self._failure: tuple[int, str] | None = None
        self._exposure = _Exposure()

    def submit(
        self,
        bucket: Bucket,
        scheme: Scheme,
        prepare: Callable[[], None] | None = None,
        written: Callable[[], Bucket] | None = None,
    ) -> Future:
        """Return a future that becomes `bucket.grad` once `scheme` has reduced it.

        `prepare` runs before, on the dispatcher's thread; `written` is as in Connection.reduce. Returns at once; errors, those of
        `prepare` too, are raised by the future.
        """
        device = bucket.grad.device
        done: Future[Tensor | None] = Future(devices=[device] if device.type == "cuda" else None)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        job = _Job(bucket, scheme, prepare, written, done, time.perf_counter(), ready)

        # HACK: DDP shows an exception set on a future as "Unable to cast ... to Tensor"; raised in a callback it keeps its message.
        def result(finished: Future) -> Tensor:
            if job.error:
                raise RuntimeError(job.error[0])
            return finished.value()

        promised = done.then(result)
        self._put(job)
        return promised

    def flush(self) -> None:
        """Wait until all submitted buckets are reduced, and end the step: the next bucket belongs to another one."""
        if self._thread is not None:
            idle = threading.Event()
            self._put(idle)
            while not idle.wait(ALIVE_CHECK_S):
                if not self._thread.is_alive():
                    raise RuntimeError("the thread that reduces gradients has ended; call attach on the model again")
        self._failure = None
        self._connection.end_step()

    def wait(self, promised: Future) -> None:
        """Wait for a bucket inside the backward pass, and count the time as not hidden. Raises what its reduction raised."""
        began = time.perf_counter()
        try:
            promised.wait()
        finally:
            self._exposure.waited_s = (self._exposure.waited_s or 0.0) + time.perf_counter() - began

    def hidden(self) -> Hidden:
        """Return how long buckets were reduced, and for how much of it the backward pass waited.

        DDP waits where it cannot be seen: at the end of the backward pass, from when the last bucket of a step was submitted until it is
        reduced. An integration that waits itself calls `wait`, and its waits are counted instead. On CUDA the times are the host's.
        """
        return self._exposure.hidden()

    def stop(self) -> None:
        """End the thread after the buckets submitted so far, without waiting for them; the next bucket starts another thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None

    def _put(self, job: _Job | threading.Event) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sparsync-dispatcher", daemon=True)
            self._thread.start()
            atexit.register(_end, self._thread, self._jobs)
        self._jobs.put(job)

    def _run(self) -> None:
        while self._next():
            pass

    def _next(self) -> bool:
        """Wait for a job and do it; return False at the end. In a frame of its own, so that nothing of the model is held while waiting."""
        job = self._jobs.get()
        if isinstance(job, _Job):
            self._reduce(job)
        elif job is not None:
            job.set()
        return job is not None

    def _reduce(self, job: _Job) -> None:
        if job.ready is None:
            self._attempt(job)
            job.done.set_result(job.bucket.grad)
            return
        device = job.bucket.grad.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        with torch.cuda.stream(stream):  # a host sync inside a scheme holds up this thread only
            stream.wait_event(job.ready)
            self._attempt(job)
            job.done.set_result(job.bucket.grad)

    def _attempt(self, job: _Job) -> None:
        began = time.perf_counter()
        try:
            self._try(job)
        finally:
            self._exposure.add(job.bucket.step, job.submitted_s, began, time.perf_counter())

    def _try(self, job: _Job) -> None:
        bucket, lost = job.bucket, False
        if self._failure is not None and self._failure[0] == bucket.step:
            job.error.append(f"bucket {bucket.key!r} was not reduced: {self._failure[1]}")
            return
        try:
            self._on_report(self._connection.reduce(bucket, job.scheme, job.written, job.prepare))
            self._failure = None
            return
        except BaseException as error:  # it becomes the error of this step, on the thread that waits for it
            cause, lost = f"{type(error).__name__}: {error}", isinstance(error, (ConnectionLostError, RanksDifferError))
        # After the except clause: until there the error's traceback keeps the connections open.
        reported = self._connection.close("" if lost else cause)
        job.error.append(f"{job.scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}: {cause}{reported}")
        self._failure = bucket.step, job.error[0]


@dataclass
class _Exposure:
    """The seconds spent on reducing, and those of them in which the backward pass waited."""

    reducing_s: float = 0.0
    ended_s: float = 0.0  # waited at the end of the steps before this one
    step: int | None = None
    step_s: float = 0.0  # of this step: reducing,
    step_ended_s: float = 0.0  # and from when its latest bucket was submitted until it was reduced
    waited_s: float | None = None  # in `Dispatcher.wait`; None where nothing calls that

    def add(self, step: int, submitted_s: float, began_s: float, ended_s: float) -> None:
        """Add a bucket of a step; buckets come in the order in which they were submitted."""
        if step != self.step:
            self.ended_s += min(self.step_s, self.step_ended_s)
            self.step, self.step_s = step, 0.0
        self.reducing_s += ended_s - began_s
        self.step_s += ended_s - began_s
        self.step_ended_s = ended_s - submitted_s

    def hidden(self) -> Hidden:
        ended_s = self.ended_s + min(self.step_s, self.step_ended_s)
        return Hidden(self.reducing_s, min(self.reducing_s, ended_s if self.waited_s is None else self.waited_s))


def _end(thread: threading.Thread, jobs: queue.SimpleQueue) -> None:
    """End a dispatcher's thread before the interpreter ends: one that closes its group later is killed inside C++, with SIGABRT."""
    jobs.put(None)
    thread.join(EXIT_S)
