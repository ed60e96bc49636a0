"""The step in flight: threads reduce its buckets while the backward pass, or training itself, goes on.

A bucket stays on one thread, and one thread computes at a time: the one with the earliest bucket that is ready. While it waits for other
ranks, the next one computes, so nothing interrupts a scheme between two exchanges. On GPUs, and if exchanges could mix, a bucket ends
before the next one begins. Buckets begin and end in the order of submission.
"""

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.comm.worker import Worker
from sparsync.core import Bucket, Report
from sparsync.runtime.connection import Connection, Reducing, Reduction, described
from sparsync.runtime.summary import Hidden

MOST = 8  # buckets in flight at once

Prepare = Callable[[], None]
Promised = Any  # a future of a Tensor; `then` returns another class than torch.futures.Future


class Turns:
    """One thread at a time has the turn: the one with the smallest number among those that want it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken = False
        self._wanted: list[int] = []  # a heap

    def want(self, number: int) -> None:
        """Announce that a thread will take its turn. Threads with larger numbers wait for it."""
        with self._changed:
            heapq.heappush(self._wanted, number)

    @contextmanager
    def taken(self, number: int) -> Iterator[None]:
        """Take the turn inside, after `want`."""
        self._take(number)
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def lent(self, number: int) -> Iterator[None]:
        """Lend the turn of this thread to others inside."""
        self._give()
        try:
            yield
        finally:
            self.want(number)
            self._take(number)

    def _take(self, number: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._taken and self._wanted[0] == number)
            heapq.heappop(self._wanted)
            self._taken = True

    def _give(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()


@dataclass(eq=False)
class _Submitted:
    """A bucket in flight: the arguments of `submit`, and the future of its mean."""

    number: int
    begins_after: int  # the number of buckets that end first
    begins_step: bool
    bucket: Bucket
    scheme: Reduction
    prepare: Prepare | None
    written: Callable[[], Bucket] | None
    send_all: bool
    done: Future
    ready: Any  # an event of the gradient's stream; None on a CPU. Any: torch's stubs have two classes
    submitted_s: float
    error: list[str] = field(default_factory=list)  # one message if it has failed
    exchanged: threading.Event = field(default_factory=threading.Event)  # its exchanges have ended


class StepInFlight:
    """Reduces the buckets of a step over `connection` on threads, and passes each Report to `on_report` there, in order.

    The first error of a step ends the waits of its other buckets. Once their exchanges have ended, the connection is closed, and all
    unfinished buckets of the step fail with the cause.
    """

    def __init__(self, connection: Connection, on_report: Callable[[Report], None]) -> None:
        self._connection, self._on_report = connection, on_report
        self._workers: list[Worker] = []
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._turns, self._changed = Turns(), threading.Condition()
        self._step = -1
        self._first = self._next = self._ended = self._begins_after = 0  # numbers of buckets
        self._unfinished: list[_Submitted] = []  # submitted and not ended
        # The first error of the step, until the connection is closed.
        self._error: tuple[_Submitted, BaseException] | None = None
        self._failure = ""  # its message, once the connection is closed
        self.hidden = Hidden()

    def submit(
        self,
        bucket: Bucket,
        scheme: Reduction,
        prepare: Prepare | None = None,
        written: Callable[[], Bucket] | None = None,
        send_all: bool = False,
    ) -> Promised:
        """Queue a bucket; return a future of the reduced `bucket.grad`, which raises all errors. Arguments as of Connection.begin."""
        device, number = bucket.grad.device, self._next
        overlaps = self._connection.overlaps(bucket, scheme)
        begins = bucket.step != self._step
        place = 0 if begins or not overlaps else (number - self._first) % MOST
        while place >= len(self._workers):
            self._workers.append(Worker())
        worker = self._workers[place]
        worker.start()
        if begins:
            self._step, self._first = bucket.step, number
        if begins or not overlaps:
            self._begins_after = number
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        given = (bucket, scheme, prepare, written, send_all, future_on(device), ready, time.perf_counter())
        submitted = _Submitted(number, self._begins_after, begins, *given)
        self._next, self._begins_after = number + 1, self._begins_after if overlaps else number + 1
        promised = promise(submitted.done, submitted.error)
        with self._changed:
            self._unfinished.append(submitted)
        self._turns.want(number)  # here, so that buckets begin in order
        worker.submit(partial(self._reduce, submitted))
        return promised

    def flush(self) -> None:
        """Wait until all submitted buckets are reduced, and end the step."""
        self._wait_until_ended(self._next)
        for device, stream in self._streams.items():  # after a failure nothing else waits for them
            torch.cuda.current_stream(device).wait_stream(stream)
        self._step = -1
        self._connection.end_step()
        self._connection.settle()

    def stop(self) -> None:
        """End the threads after the submitted buckets, without waiting for them."""
        for each in self._workers:
            each.stop()

    def wait(self, promised: Promised) -> None:
        """Wait for a bucket inside the backward pass, and count the time as not hidden. Raises the error of the reduction."""
        began = time.perf_counter()
        try:
            promised.wait()
        finally:
            self.hidden.waited(time.perf_counter() - began)

    def _reduce(self, submitted: _Submitted) -> None:
        """Reduce a bucket on its thread: exchange when its turn comes, then end in order."""
        self._wait_until_ended(submitted.begins_after)
        try:
            with ExitStack() as stack:
                began_s = time.perf_counter()
                reducing = self._exchange(submitted, stack)
                submitted.exchanged.set()
                self._wait_until_ended(submitted.number)
                self._end(submitted, reducing)
                self.hidden.add(submitted.bucket.step, submitted.submitted_s, began_s, time.perf_counter())
                submitted.done.set_result(submitted.bucket.grad)
        except BaseException as unforeseen:  # else the backward pass waits forever
            self._fail(submitted, f"bucket {submitted.bucket.key!r} was not reduced: {described(unforeseen)}")
            submitted.done.set_exception(RuntimeError(submitted.error[0]))
        finally:
            submitted.exchanged.set()
            with self._changed:
                self._unfinished.remove(submitted)
                self._ended = submitted.number + 1
                self._changed.notify_all()

    def _exchange(self, submitted: _Submitted, stack: ExitStack) -> Reducing | None:
        """Begin a bucket on its stream, until `stack` ends, and run its exchanges; return None if it or an earlier one has failed.

        It takes its turn first, so that later buckets get theirs after an error.
        """
        connection, number = self._connection, submitted.number
        with self._turns.taken(number):
            if submitted.begins_step:
                self._failure = ""
                connection.end_step()  # even if this bucket fails before it begins
            if self._error is not None or self._failure:
                return None
            try:
                self._enter_stream(submitted, stack)
                waits = partial(self._turns.lent, number)
                reducing = connection.begin(
                    submitted.bucket, submitted.scheme, submitted.prepare, submitted.send_all, waits
                )
                connection.exchange(reducing)
                return reducing
            except BaseException as error:
                self._note(submitted, error)
                return None

    def _end(self, submitted: _Submitted, reducing: Reducing | None) -> None:
        """Report a bucket whose exchanges have ended; close the connection if it is the first that has failed."""
        if self._failure:
            submitted.error.append(f"bucket {submitted.bucket.key!r} was not reduced: {self._failure}")
            return
        if reducing is not None:
            try:
                self._on_report(self._connection.end(reducing, submitted.written))
                return
            except BaseException as error:
                self._note(submitted, error)
        with self._changed:
            others = list(self._unfinished)
        for each in others:
            if each.begins_after <= submitted.number:  # it may have begun
                each.exchanged.wait()
        assert self._error is not None
        first, cause = self._error
        what = f"bucket {first.bucket.key!r} at step {first.bucket.step}"
        told = f"{first.scheme.name} failed on {what}: {described(cause)}"
        self._fail(submitted, f"{told}{self._connection.close(cause)}")
        self._error = None  # only now: no other bucket of the step may begin

    def _note(self, submitted: _Submitted, error: BaseException) -> None:
        """Note the error of a bucket, if it is the first of the step, and end the waits of the others."""
        self._error = self._error or (submitted, error)
        self._connection.abort()

    def _fail(self, submitted: _Submitted, why: str) -> None:
        submitted.error.append(why)
        self._failure = why

    def _wait_until_ended(self, count: int) -> None:
        """Wait until this number of buckets have ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended >= count)

    def _enter_stream(self, submitted: _Submitted, stack: ExitStack) -> None:
        """Reduce on a stream of the gradient's device, after the gradient is ready, until `stack` ends. A CPU has none."""
        if submitted.ready is None:
            return
        device = submitted.bucket.grad.device
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_event(submitted.ready)
        stack.enter_context(torch.cuda.stream(stream))


def reduce_together(
    connection: Connection, pairs: Sequence[tuple[Bucket, Reduction]], others: Callable[[], None] | None = None
) -> list[Report]:
    """Reduce buckets of one step at once, while `others` reduces more buckets of it; return the reports of `pairs`.

    While a bucket waits for other ranks, the next one computes. All begin first and end last. If buckets cannot overlap, they are reduced
    one after the other, and `others` is called last. If one fails, `others` may have returned already.
    """
    turns, failed, rest = Turns(), list[BaseException](), [others] if others is not None else []
    if not pairs or not all(connection.overlaps(*each) for each in pairs):
        begun = [connection.begin(*each) for each in pairs]
        for do in (*(partial(connection.exchange, each) for each in begun), *rest):
            do()
        return [connection.end(each) for each in begun]
    begun = [connection.begin(*each, waits=partial(turns.lent, number)) for number, each in enumerate(pairs)]
    jobs = [*(partial(connection.exchange, each) for each in begun), *rest]
    for number in range(len(jobs)):
        turns.want(number)

    def do_in_turn(number: int) -> None:
        try:
            with turns.taken(number):
                jobs[number]()
        except BaseException as error:  # the first one is raised again below: it made the others fail
            failed.append(error)
            connection.abort()

    *beside, last = range(len(jobs))
    threads = [
        threading.Thread(target=do_in_turn, args=(each,), name="sparsync-beside", daemon=True) for each in beside
    ]
    with connection.waiting(partial(turns.lent, last) if rest else nullcontext):
        for each in threads:
            each.start()
        do_in_turn(last)
        for each in threads:
            each.join()
    if failed:
        raise failed[0] from None
    return [connection.end(each) for each in begun]


def future_on(device: torch.device) -> Future:
    """Make a future of a tensor on this device."""
    return Future(devices=[device] if device.type == "cuda" else None)


def promise(done: Future, error: list[str]) -> Promised:
    """Make a future with the value of `done`, which raises the message in `error`, if any.

    HACK: DDP shows an exception set on a future as "Unable to cast ... to Tensor"; raised in a callback it keeps its message.
    """

    def result(finished: Future) -> Tensor:
        if error:
            raise RuntimeError(error[0])
        return finished.value()

    return done.then(result)
