"""The thread on which a model's buckets are reduced, one after the other, in the order in which they were submitted.

A scheme is several collectives in a row. Issued from callbacks on a shared group, those of different buckets would mix; here a bucket
ends before the next one begins, on a private group, while the backward pass, or training itself, goes on.
"""

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.futures import Future

from sparsync.comm.group import Origin
from sparsync.core import Bucket, Report
from sparsync.runtime.connection import Connection, Reduction, described
from sparsync.runtime.findings import Finding, warn_of
from sparsync.runtime.handle import Handle
from sparsync.runtime.optimizers import Members
from sparsync.runtime.parameter_names import trained
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
            self._thread = threading.Thread(target=_run, args=(self._jobs,), name="sparsync-worker", daemon=True)
            self._thread.start()
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

    def stop(self) -> None:
        """End the thread after the queued jobs, without waiting for them."""
        if self._thread is not None:
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


class Dispatcher:
    """Reduces buckets over `connection` on a thread, and passes each Report to `on_report` there.

    When a bucket fails, the other buckets of its step fail too, with the same cause.
    """

    def __init__(self, connection: Connection, on_report: Callable[[Report], None]) -> None:
        self._connection, self._on_report = connection, on_report
        self._worker = Worker()
        self.stop = self._worker.stop
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        # Step and cause of the last failure. Not the exception: its traceback would keep the connections open.
        self._failure: tuple[int, str] | None = None
        self._exposure = _Exposure()

    def submit(
        self,
        bucket: Bucket,
        scheme: Reduction,
        prepare: Prepare | None = None,
        written: Callable[[], Bucket] | None = None,
        send_all: bool = False,
    ) -> Promised:
        """Return at once a future of the reduced `bucket.grad`, which also raises all errors. Arguments as of Connection.reduce."""
        device, submitted_s = bucket.grad.device, time.perf_counter()
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        done, error = future_on(device), list[str]()
        promised = promise(done, error)

        def job() -> None:
            began = time.perf_counter()
            try:
                with nullcontext() if ready is None else torch.cuda.stream(self._stream_after(device, ready)):
                    self._reduce(bucket, scheme, error, written, prepare, send_all)
                    self._exposure.add(bucket.step, submitted_s, began, time.perf_counter())
                    done.set_result(bucket.grad)
            except BaseException as unforeseen:  # or the backward pass would wait for ever
                error.append(f"bucket {bucket.key!r} was not reduced: {described(unforeseen)}")
                self._failure = bucket.step, error[0]
                done.set_exception(RuntimeError(error[0]))

        self._worker.submit(job)
        return promised

    def flush(self) -> None:
        """Wait until all submitted buckets are reduced, and end the step."""
        self._worker.finish()
        self._failure = None
        self._connection.end_step()

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

    def _reduce(self, bucket: Bucket, scheme: Reduction, error: list[str], *how: Any) -> None:  # Any: as in `submit`
        """Reduce a bucket; if that fails, add the message to `error`, for the thread that waits."""
        if self._failure is not None and self._failure[0] == bucket.step:
            error.append(f"bucket {bucket.key!r} was not reduced: {self._failure[1]}")
            return

        def reduce() -> None:
            self._on_report(self._connection.reduce(bucket, scheme, *how))

        self._failure = None
        if failure := self._connection.attempt(reduce):
            error.append(f"{scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}: {failure}")
            self._failure = bucket.step, error[0]


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
    waited_s: float | None = None  # in `Dispatcher.wait`; None where nothing calls it

    def add(self, step: int, submitted_s: float, began_s: float, ended_s: float) -> None:
        """Add a bucket, in the order of submission."""
        if step != self.step:
            self.ended_s += min(self.step_s, self.step_ended_s)
            self.step, self.step_s = step, 0.0
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


class LateParameters:
    """Warns once of each trained parameter of `module` that was frozen or absent when the model was wrapped, so nothing reduces it.

    Refers to the module weakly.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._members = weakref.ref(module), Members(module)
        self._told: set[str] = set()

    def warn(self, is_reduced: Callable[[str, nn.Parameter], bool], wrapper: str, cure: str) -> None:
        """Warn of those for which `is_reduced` is False. Cheap enough for each step while neither modules nor what is trained changes."""
        module = self._module()
        if module is None or not self._members.changed():
            return
        self._members.note()
        late = [name for name, each in trained(module) if name not in self._told and not is_reduced(name, each)]
        self._told.update(late)
        if late:
            what = f"{', '.join(map(repr, late))} came to be trained after {wrapper}: nothing reduces their gradients"
            warn_of(Finding(what, cure))
