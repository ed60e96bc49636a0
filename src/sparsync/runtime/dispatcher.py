"""The threads on which a model's buckets are reduced while the backward pass, or training itself, goes on.

Buckets begin and end in the order in which they were submitted. Between the two several are on their way at once, see `flights`, where
their exchanges cannot mix: over gloo, on channels of their own. On GPUs a bucket ends before the next one begins.
"""

import atexit
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.comm.group import Origin
from sparsync.core import Bucket, Report
from sparsync.runtime.connection import Connection, Reducing, Reduction, described, is_known
from sparsync.runtime.flights import MOST, Baton, Flight
from sparsync.runtime.handle import Handle
from sparsync.runtime.summary import Hidden

EXIT_S = 5.0  # how long a process that ends waits for its workers to close their connections
ALIVE_CHECK_S = 1.0  # between two checks whether the thread that is waited for still runs

Result = TypeVar("Result")
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], "futures.Future[Any]"] | None]
Prepare = Callable[[], None]
Promised = Any  # a future of a Tensor; what `then` returns is of another class than torch.futures.Future


class Worker:
    """A thread for the jobs of one model. It starts with the first job, and again with the first one after `stop`."""

    def __init__(self) -> None:
        self._origin = Origin()
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, job: Callable[[], Result]) -> "futures.Future[Result]":
        """Queue `job`, and return the future of its result. Raises RuntimeError in a fork."""
        self._origin.check()
        if self._thread is None:
            thread = threading.Thread(target=_run, args=(self._jobs,), name="sparsync-worker", daemon=True)
            thread.start()  # raises where the process may have no more threads
            self._thread = thread
            atexit.register(_end, self._thread, self._jobs)
        done: futures.Future[Result] = futures.Future()
        self._jobs.put((job, done))
        return done

    def finish(self) -> None:
        """Wait until all jobs are done. Raises RuntimeError if the thread has ended, as it does when the interpreter ends."""
        if self._thread is None:
            return None
        last = self.submit(lambda: None)
        while True:
            try:
                return last.result(ALIVE_CHECK_S)
            except futures.TimeoutError:
                if not self._thread.is_alive():
                    raise RuntimeError(
                        "the thread that reduces gradients has ended; call attach on the model again"
                    ) from None

    def stop(self, last: Callable[[], None] = lambda: None) -> None:
        """End the thread after the queued jobs and `last`, without waiting for them."""
        if self._thread is not None:
            self._jobs.put((last, futures.Future()))
            self._jobs.put(None)
            self._thread = None


def _run(jobs: _Jobs) -> None:
    while _next(jobs):
        pass


def _next(jobs: _Jobs) -> bool:
    """Wait for a job and do it; return False at the end. A separate frame, so that nothing of the model is held while waiting."""
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
    """End a thread before the interpreter ends: if it closed its group later, it would be killed inside C++, with SIGABRT."""
    jobs.put(None)
    thread.join(EXIT_S)


class _Threads:
    """The thread that begins buckets, and those that each reduce one."""

    def __init__(self) -> None:
        self.begins = Worker()
        self._reduce: list[Worker] = []

    def reduces(self, number: int) -> Worker:
        """Return the thread of a bucket; that of the one MOST before."""
        while len(self._reduce) < min(number + 1, MOST):
            self._reduce.append(Worker())
        return self._reduce[number % MOST]

    def finish(self) -> None:
        """Wait until all jobs are done."""
        self.begins.finish()
        for each in self._reduce:
            each.finish()

    def stop(self) -> None:
        """End the threads after the queued jobs, without waiting for them."""
        self.begins.stop(self._stop_reducing)

    def _stop_reducing(self) -> None:
        for each in self._reduce:
            each.stop()


class Dispatcher:
    """Reduces buckets over `connection` on threads, and passes each Report to `on_report` there, in order.

    When a bucket fails, the buckets after it in its step fail too, with the same cause.
    """

    def __init__(self, connection: Connection, on_report: Callable[[Report], None]) -> None:
        self._connection, self._on_report = connection, on_report
        self._threads = _Threads()
        self.stop = self._threads.stop
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Step and cause of the last failure. Not the exception: its traceback would keep the connections open.
        self._failure: tuple[int, str] | None = None
        self._exposure = _Exposure()
        self._baton = Baton()
        self._flown, self._step_in_air = 0, -1
        self._in_air: deque[Flight] = deque()  # in the order of submission, with those that have ended
        self._on_ground = threading.Lock()  # to begin a bucket, and to close after a failure
        # Of the first bucket to fail: the bucket, why, and whether other ranks know, until the connection is closed.
        self._cause: tuple[_Task, str, bool] | None = None

    def submit(
        self,
        bucket: Bucket,
        scheme: Reduction,
        prepare: Prepare | None = None,
        written: Callable[[], Bucket] | None = None,
        send_all: bool = False,
        last: bool = False,
    ) -> Promised:
        """Return at once a future of the reduced `bucket.grad`, which also raises all errors. Arguments as of Connection.reduce.

        `last`: no other bucket of this step follows, so that this one needs no thread of its own.
        """
        device, submitted_s = bucket.grad.device, time.perf_counter()
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        task = _Task(bucket, scheme, prepare, written, send_all, last, submitted_s, future_on(device))
        promised = promise(task.done, task.error)

        def job() -> None:
            with task.foreseen(self._failed):
                if self._connection.overlaps(bucket, scheme):
                    self._take_off(task)
                    return
                self._land()
                began = time.perf_counter()
                with nullcontext() if ready is None else torch.cuda.stream(self._stream_after(device, ready)):
                    self._reduce(task)
                    self._exposure.add(bucket.step, submitted_s, began, time.perf_counter())
                    task.done.set_result(bucket.grad)

        self._threads.begins.submit(job)
        return promised

    def flush(self) -> None:
        """Wait until all submitted buckets are reduced, and end the step."""
        self._threads.finish()
        for device, stream in self._streams.items():  # after a failure nobody else waits for it
            torch.cuda.current_stream(device).wait_stream(stream)
        self._failure = None
        self._connection.end_step()
        self._connection.settle()

    def wait(self, promised: Promised) -> None:
        """Wait for a bucket inside the backward pass, and count the time as not hidden. Raises what the reduction raised."""
        began = time.perf_counter()
        try:
            promised.wait()
        finally:
            self._exposure.waited_s = (self._exposure.waited_s or 0.0) + time.perf_counter() - began

    def hidden(self) -> Hidden:
        """Return how long buckets were reduced, and for how much of it the backward pass waited. On CUDA the times are the host's.

        DDP waits at the end of the backward pass, from the submission of the last bucket until it is reduced. An integration that waits
        by itself calls `wait`, and its waits count instead.
        """
        return self._exposure.hidden()

    def _stream_after(self, device: torch.device, ready: Any) -> torch.cuda.Stream:  # Any: the stubs have two Events
        """Return this device's stream for reducing, which waits for the gradient."""
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(ready)
        return stream

    def _reduce(self, task: "_Task") -> None:
        """Reduce a bucket; if that fails, note why for the thread that waits."""
        if self._failed_before(task):
            return

        def reduce() -> None:
            self._on_report(
                self._connection.reduce(task.bucket, task.scheme, task.written, task.prepare, task.send_all)
            )

        if failure := self._connection.attempt(reduce):
            self._failed(task, f"{task.scheme.name} failed on {task.what}: {failure}")

    def _take_off(self, task: "_Task") -> None:
        """Begin a bucket, and leave its exchanges to another thread."""
        if self._in_air and self._step_in_air != task.bucket.step:
            self._land()
        while len(self._in_air) >= MOST:
            self._in_air.popleft().ended.wait()
        number, self._step_in_air = self._flown, task.bucket.step
        flight = Flight(number, self._in_air[-1] if self._in_air else None)
        began = time.perf_counter()
        reducing: Reducing | None = None
        try:
            # Not while a failure is told to other ranks, after which nothing of this step may begin.
            with self._on_ground:
                if not self._failed_before(task):
                    reducing = self._connection.begin(
                        task.bucket, task.scheme, task.prepare, task.send_all, partial(self._baton.lent, number)
                    )
                    self._flown += 1
                    self._in_air.append(flight)
                    self._baton.want(number)  # here, so that buckets start in order
        except BaseException as error:
            self._note(task, error)
            self._land()
            self._close_after(task)
            task.done.set_result(task.bucket.grad)
            return
        if reducing is None:
            self._land()  # its future must not be there before those of the buckets before
            task.done.set_result(task.bucket.grad)
            return
        taken_off = reducing

        def fly() -> None:
            with task.foreseen(self._failed):
                try:
                    self._fly(task, flight, taken_off, began)
                finally:
                    flight.landed.set()
                    flight.ended.set()

        if task.last:
            fly()
            return
        try:
            self._threads.reduces(number).submit(fly)
        except RuntimeError:  # no more threads: other buckets would wait for this one
            fly()

    def _fly(self, task: "_Task", flight: Flight, reducing: Reducing, began: float) -> None:
        """Do the exchanges of a bucket, then wait for the buckets before, and report it."""
        failed = False
        try:
            with self._baton.held(flight.number):
                self._connection.exchange(reducing)
        except BaseException as error:
            self._note(task, error)
            failed = True
        flight.landed.set()
        flight.wait_for_turn()
        if self._failed_before(task):
            task.done.set_result(task.bucket.grad)
            return
        if not failed:
            try:
                self._on_report(self._connection.end(reducing, task.written))
            except BaseException as error:
                self._note(task, error)
                failed = True
        if failed:
            self._close_after(task)
        self._exposure.add(task.bucket.step, task.submitted_s, began, time.perf_counter())
        task.done.set_result(task.bucket.grad)

    def _land(self) -> None:
        """Wait until all buckets on their way have ended."""
        while self._in_air:
            self._in_air.popleft().ended.wait()

    def _note(self, task: "_Task", error: BaseException) -> None:
        """Note why a bucket failed, if it is the first one, and end the waits of the others."""
        if self._cause is None:
            self._connection.note(error)
            self._cause = task, described(error), is_known(error)
        self._connection.abort()

    def _close_after(self, task: "_Task") -> None:
        """Close the connection because this bucket has failed, or one after it, unless that was done for one before."""
        if self._failed_before(task):
            self._cause = None
            return
        with self._on_ground:
            for each in list(self._in_air):
                each.landed.wait()
            assert self._cause is not None
            first, cause, known = self._cause
            failure = self._connection.closed_after(cause, known)
            self._cause = None
            self._failed(task, f"{first.scheme.name} failed on {first.what}: {failure}")

    def _failed(self, task: "_Task", why: str) -> None:
        task.error.append(why)
        self._failure = task.bucket.step, why

    def _failed_before(self, task: "_Task") -> bool:
        """Return whether a bucket before has failed in this step, and fail this one, too."""
        if self._failure is None:
            return False
        if self._failure[0] != task.bucket.step:
            self._failure = None
            return False
        task.error.append(f"bucket {task.bucket.key!r} was not reduced: {self._failure[1]}")
        return True


@dataclass(eq=False)
class _Task:
    """A bucket that was submitted, the arguments of `Dispatcher.submit`, and the future of its mean."""

    bucket: Bucket
    scheme: Reduction
    prepare: Prepare | None
    written: Callable[[], Bucket] | None
    send_all: bool
    last: bool
    submitted_s: float
    done: Future
    error: list[str] = field(default_factory=list)

    @property
    def what(self) -> str:
        return f"bucket {self.bucket.key!r} at step {self.bucket.step}"

    @contextmanager
    def foreseen(self, failed: Callable[["_Task", str], None]) -> Iterator[None]:
        """Fail with what the block raises, or the backward pass would wait for ever."""
        try:
            yield
        except BaseException as unforeseen:
            failed(self, f"bucket {self.bucket.key!r} was not reduced: {described(unforeseen)}")
            self.done.set_exception(RuntimeError(self.error[0]))


def future_on(device: torch.device) -> Future:
    """Return a future of a tensor on this device."""
    return Future(devices=[device] if device.type == "cuda" else None)


def promise(done: Future, error: list[str]) -> Promised:
    """Return the future of the value of `done`; it raises what `error` then holds.

    HACK: DDP shows an exception set on a future as "Unable to cast ... to Tensor"; raised in a callback it keeps its message.
    """

    def result(finished: Future) -> Tensor:
        if error:
            raise RuntimeError(error[0])
        return finished.value()

    return done.then(result)


@dataclass
class _Exposure:
    """The seconds spent on reducing, and those in which the backward pass waited for it."""

    reducing_s: float = 0.0
    ended_s: float = 0.0  # waited at the end of earlier steps
    step: int | None = None
    step_s: float = 0.0  # reducing, in this step
    step_ended_s: float = 0.0  # from the submission of its latest bucket until that was reduced
    last_s: float = 0.0  # when the one before ended
    waited_s: float | None = None  # in `Dispatcher.wait`; None where nothing calls it

    def add(self, step: int, submitted_s: float, began_s: float, ended_s: float) -> None:
        """Add a bucket, in the order of submission."""
        if step != self.step:
            self.ended_s += min(self.step_s, self.step_ended_s)
            self.step, self.step_s = step, 0.0
        began_s, self.last_s = max(began_s, self.last_s), ended_s  # while several were reduced counts once
        self.reducing_s += ended_s - began_s
        self.step_s += ended_s - began_s
        self.step_ended_s = ended_s - submitted_s

    def hidden(self) -> Hidden:
        ended_s = self.ended_s + min(self.step_s, self.step_ended_s)
        return Hidden(self.reducing_s, min(self.reducing_s, ended_s if self.waited_s is None else self.waited_s))


class AttachedHandle(Handle):
    """The handle that `attach` returns. Buckets are reduced on a thread, which ends with the handle."""

    def __init__(self, *args: Any, **options: Any) -> None:  # Any: those of Handle
        super().__init__(*args, **options)
        self._dispatcher = Dispatcher(self._connection, self._reports.append)
        weakref.finalize(self, self._dispatcher.stop)

    def close(self) -> None:
        self._dispatcher.stop()
        super().close()

    def detach(self) -> None:
        """Have the model reduce as it did before `attach`. Call it on all ranks, between two steps.

        Reports, summary and state stay readable; the scheme of this handle cannot be changed any more.
        """
        raise NotImplementedError

    def _hidden(self) -> Hidden:
        return self._dispatcher.hidden()

    def _flush(self) -> None:
        self._dispatcher.flush()
