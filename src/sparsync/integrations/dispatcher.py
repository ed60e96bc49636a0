"""One thread that reduces buckets one after the other, in the order they were handed over.

A scheme is several collectives in a row. Issued from callbacks on a shared group, those of different buckets mix; here every phase of
a bucket ends before the next bucket begins, in the same order on all ranks, on a group nobody else uses. The backward pass goes on
meanwhile, and buckets wait in line.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync import phases
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Report
from sparsync.integrations.rollback import Reducer, Rollback

EXIT_S = 5.0  # how long a process that ends waits for its dispatchers to close their connections
_REWOUND = -2  # the number of no step
ALIVE_CHECK_S = 1.0  # between two looks at whether the thread that is waited for still runs


@dataclass
class _Job:
    bucket: Bucket
    scheme: Reducer
    prepare: Callable[[], None] | None
    written: Callable[[], Bucket] | None
    done: Future
    ready: Any  # the CUDA event after which the gradient is there; None on CPU. torch's stubs know two unrelated Event classes
    error: list[str] = field(default_factory=list)  # what went wrong, if anything did


class Dispatcher:
    """Reduces buckets over `comm` on a thread of its own, and hands each Report to `on_report` on that thread.

    With `skipped`, buckets of a step in which one overflowed keep what they have written.

    After a failure the ranks no longer agree on what comes next on the wire. So the failing rank closes its connections, which makes
    the others fail at once instead of waiting; on each of them the other buckets of that step fail too, with the same cause; and the
    next step starts on fresh connections, after `reset_shared_state`, provided that all ranks come to the same one.
    """

    def __init__(
        self,
        comm: GroupComm,
        on_report: Callable[[Report], None],
        reset_shared_state: Callable[[], None],
        skipped: Rollback | None = None,
    ) -> None:
        self._group = comm
        self._skipped = skipped
        self._reset_shared_state = reset_shared_state
        self._comm = MeteredComm(comm)
        self._on_report = on_report
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Step and cause of the last failure. Not the exception: its traceback would keep the connections open.
        self._failure: tuple[int, str] | None = None

    def submit(
        self,
        bucket: Bucket,
        scheme: Reducer,
        prepare: Callable[[], None] | None = None,
        written: Callable[[], Bucket] | None = None,
    ) -> Future:
        """A future that becomes `bucket.grad` once `scheme` has reduced it, after `prepare` has run on the dispatcher's thread.

        `written` gives what holds the result until the step ends, where `bucket` does not; it is called once the result is there.
        Returns at once; what goes wrong, in `prepare` too, is raised by the future.
        """
        device = bucket.grad.device
        done: Future[Tensor | None] = Future(devices=[device] if device.type == "cuda" else None)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        job = _Job(bucket, scheme, prepare, written, done, ready)

        # HACK: DDP shows an exception set on a future as "Unable to cast ... to Tensor"; raised in a callback it keeps its message.
        def result(finished: Future) -> Tensor:
            if job.error:
                raise RuntimeError(job.error[0])
            return finished.value()

        promised = done.then(result)
        self._put(job)
        return promised

    def rewind(self) -> None:
        """Makes a step that comes again, after an older state was loaded, another one than before; call it after `flush`."""
        if self._failure is not None:
            self._failure = _REWOUND, self._failure[1]
        if self._skipped is not None:
            self._skipped.ended()

    def flush(self) -> None:
        """Returns when all that was handed over is done."""
        if self._thread is None:
            return
        idle = threading.Event()
        self._put(idle)
        while not idle.wait(ALIVE_CHECK_S):
            if not self._thread.is_alive():
                raise RuntimeError("the thread that reduces gradients has ended; attach to the model anew")

    def step_ended(self) -> None:
        """Lets go of what the step has written; call it when all its futures are done."""
        if self._skipped is not None:
            self._skipped.ended()

    def stop(self) -> None:
        """Ends the thread when all that was handed over is done; does not wait for that."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None  # another one begins with the next job, if there is any

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
        """Waits for a job and does it; False for the end. In a frame of its own, which keeps nothing of the model while waiting again."""
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
        bucket = job.bucket
        if self._failure is not None and self._failure[0] == bucket.step:
            job.error.append(f"bucket {bucket.key!r} was not reduced: {self._failure[1]}")
            return
        cause, lost = "", False
        try:
            if job.prepare is not None:
                job.prepare()
            if self._failure is not None:
                self._reconnect(bucket.step)
            report = self._reported(job)
            if self._skipped is not None:
                with torch.no_grad():
                    self._skipped.reduced(job.scheme, job.written() if job.written else bucket, report)
            self._on_report(report)
        except BaseException as error:  # it becomes the error of this step, on the thread that waits for it
            cause, lost = f"{type(error).__name__}: {error}", isinstance(error, ConnectionLostError)
            job.error.append(f"{job.scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}: {cause}")
        if job.error:
            self._failure = bucket.step, job.error[0]
            with suppress(Exception):  # the step has failed already; why is what its caller needs to hear
                told = self._group.end(because="" if lost else cause)
                if told:
                    job.error[0] = f"{job.error[0]} ({told})"
                    self._failure = bucket.step, job.error[0]

    def _reported(self, job: _Job) -> Report:
        began = time.perf_counter()
        with torch.no_grad(), phases.recorded(job.bucket.key) as spent:
            report = job.scheme.reduce(job.bucket, self._comm)
        sent, wait_s = self._comm.take()
        return replace(report, sent=sent, seconds=time.perf_counter() - began, wait_s=wait_s, phases=spent)

    def _reconnect(self, step: int) -> None:
        self._group = self._group.reconnect(fingerprint=f"gradients of step {step}")
        self._comm = MeteredComm(self._group)
        self._reset_shared_state()
        self._failure = None


def _end(thread: threading.Thread, jobs: queue.SimpleQueue) -> None:
    """Ends a dispatcher's thread before the interpreter goes: one that closes its group later is killed inside C++, with SIGABRT."""
    jobs.put(None)
    thread.join(EXIT_S)
