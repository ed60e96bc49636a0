"""Threads that work for a model or a communicator, and the process they belong to."""

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any, TypeVar

EXIT_S = 5.0  # longest wait of an ending process for its workers to close their connections

Result = TypeVar("Result")
_Jobs = queue.SimpleQueue[tuple[Callable[[], Any], "futures.Future[Any]"] | None]


@dataclass(frozen=True)
class Origin:
    """The process that created this object. A fork of it, such as a DataLoader's worker, inherits objects, but not their threads."""

    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether this is the original process, and not a fork."""
        return os.getpid() == self.process

    def check(self) -> None:
        """Raise RuntimeError in a fork."""
        if not self.is_here:
            raise RuntimeError(
                f"this is process {os.getpid()}, forked from process {self.process}, which made the handle or communicator; its threads "
                "and connections are not here; use it in the process that made it"
            )


class Worker:
    """A thread for the jobs of its owner. It starts with the first job, also after a `stop`, and ends with this object.

    If it is `joined`, an ending process waits for its jobs, at most EXIT_S seconds.
    """

    def __init__(self, joined: bool = True) -> None:
        self._origin, self._joined = Origin(), joined
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run. Raises RuntimeError in a fork, and if the process may have no more threads."""
        self._origin.check()
        if self._thread is None:
            thread = threading.Thread(target=_work, args=(self._jobs,), name="sparsync-worker", daemon=True)
            thread.start()
            self._thread = thread
            weakref.finalize(self, self._jobs.put, None)
            if self._joined:
                _running[thread] = self._jobs

    def submit(self, job: Callable[[], Result]) -> "futures.Future[Result]":
        """Queue `job`, and return the future of its result. Raises as `start`."""
        self.start()
        done: futures.Future[Result] = futures.Future()
        self._jobs.put((job, done))
        return done

    def stop(self) -> None:
        """End the thread after the queued jobs, without waiting for them."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread = None


def _work(jobs: _Jobs) -> None:
    """Do the jobs one after the other, until None comes. The thread's body."""
    while _do_next(jobs):
        pass


def _do_next(jobs: _Jobs) -> bool:
    """Wait for a job and do it; return False at the end. A separate frame, so that a waiting thread refers to no model."""
    queued = jobs.get()
    if queued is None:
        return False
    job, done = queued
    try:
        done.set_result(job())
    except BaseException as error:  # the future raises it again
        done.set_exception(error)
    finally:
        del queued, job, done  # the error refers to this frame
    return True


_running = weakref.WeakKeyDictionary[threading.Thread, _Jobs]()


@atexit.register
def _end_all() -> None:
    """End all threads before the interpreter ends: a thread that closes its group later is killed inside C++, with SIGABRT."""
    running, deadline = dict(_running), time.monotonic() + EXIT_S
    for jobs in running.values():
        jobs.put(None)
    for thread in running:
        thread.join(max(0.0, deadline - time.monotonic()))
