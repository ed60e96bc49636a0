"""The connection of one model to the other ranks: reduces buckets, rolls back skipped steps, recovers from failures."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch

from sparsync.base.state import Rollback
from sparsync.comm.announcement import Announcement, RanksDifferError, Told, announcement_cost
from sparsync.comm.channels import Waits, abort
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.comm.lane import Lane
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Cost, Report, add_note, digest, recorded_phases
from sparsync.runtime.comparison import Compared, Comparison
from sparsync.runtime.findings import warn_of

_CURE = (
    "all ranks must reduce the same model at the same step, from the same checkpoint: reduce equally often on all of them, and load "
    "each checkpoint on all of them"
)
_SETTINGS_CURE = "give all ranks a scheme with the same settings"
_AFTER_FAILURE = (
    "where a step was reduced on some ranks and failed on others, their weights and residuals differ from then on: load a checkpoint on "
    "all ranks, handle and model, or start again"
)

_NOT_FINITE = (
    "the mean gradient of a step holds NaN or Inf, on all ranks; a loss scaler skips such a step, and nothing else does"
)


@runtime_checkable
class Reduction(Protocol):
    """The interface that a connection calls. Every State has it, see there; anything else subclasses this and writes `reduce`."""

    name: str

    def reduce(self, bucket: Bucket, comm: Comm) -> Report: ...

    def send_all(self, bucket: Bucket, comm: Comm) -> Report:
        return self.reduce(bucket, comm)

    @property
    def has_residual(self) -> bool:
        return False

    @property
    def interleaves(self) -> bool:
        return True

    def rollback(self, bucket: Bucket) -> None:
        return

    def shared_text(self, bucket: Bucket) -> str:
        return ""

    def reset_shared_state(self) -> None:
        return

    @property
    def settings(self) -> str:
        return self.name


@dataclass(eq=False)
class Reducing:
    """A bucket that was announced and is being reduced."""

    bucket: Bucket
    scheme: Reduction
    send_all: bool
    lane: Lane | None  # None if the bucket was not announced
    comm: MeteredComm
    begun_s: float  # duration of `begin`
    report: Report | None = None  # once its exchanges have ended


class Connection:
    """Reduces buckets over `comm`, in the same order on all ranks.

    Before every reduction the ranks compare the bucket, the last step, shared state and optimizer settings, and in some steps the weights.
    After a failure they no longer agree on what comes next on the wire. So the failing rank resets the scheme's shared state and closes its
    connections, which makes the others fail at once instead of waiting. The next bucket opens new ones, if all ranks come with the same
    step and have reduced the same steps before. Only a GroupComm is compared, opened and closed.
    `on_written` is called with each bucket that a scheme with a residual has reduced, and True if it was rolled back. `on_rolled_back`, if
    given, is called if the host learns of a rollback later, in `settle`, as on a GPU.
    """

    def __init__(
        self,
        scheme: Reduction,
        comm: Comm,
        what: str = "gradients",
        on_written: Callable[[Bucket, bool], None] = lambda bucket, rolled_back: None,
        on_rolled_back: Callable[[], None] | None = None,
    ) -> None:
        self._what, self._on_written, self._on_rolled_back = what, on_written, on_rolled_back
        self.scaled = False  # a loss scaler skips non-finite steps, so do not warn of them
        self._group = comm
        self._waits: Waits = nullcontext  # for buckets of `reduce`
        self._numbers: dict[str, int] = {}  # of lanes, by bucket key; the same on all ranks
        self.use(scheme)
        self._broken = False
        self.closed = False  # `shut` was called
        self.lost = False  # the last failure was a lost connection: another rank has failed, or is gone
        self._reduced = -1  # the last step with every bucket reduced
        self._step: int | None = None  # the step under way, without a failure so far
        self.partly_applied = False  # this rank has a part of a step: all ranks raise until a checkpoint is loaded
        self._layouts: dict[str, tuple[tuple[object, ...], int]] = {}  # by key: the latest layout, and its digest
        self._comparison: Callable[[], Comparison | None] = lambda: None
        self._compared: Compared | None = None  # in the step under way; None: not read yet
        self.failed = False  # a step has failed since the last one that was reduced

    def reduce(self, bucket: Bucket, scheme: Reduction, written: Callable[[], Bucket] | None = None) -> Report:
        """Reduce `bucket` in place by `scheme`, and return its report with measured bytes and times.

        `written` returns the bucket that holds the result until the step ends, if that is not `bucket`. After an error call `close`.
        Raises RanksDifferError, on all ranks, if they are about to reduce different buckets.
        """
        reducing = self.begin(bucket, scheme)
        self.exchange(reducing)
        return self.end(reducing, written)

    @contextmanager
    def waiting(self, waits: Waits) -> Iterator[None]:
        """Make `reduce` enter `waits` around its waits for other ranks, inside the block."""
        self._waits = waits
        try:
            yield
        finally:
            self._waits = nullcontext

    def begin(
        self,
        bucket: Bucket,
        scheme: Reduction,
        prepare: Callable[[], None] | None = None,
        send_all: bool = False,
        waits: Waits | None = None,
    ) -> "Reducing":
        """Announce a bucket before its exchanges, in the same order on all ranks. `waits` is entered around every wait.

        `prepare` is called first; if it raises, the step fails on all ranks. `send_all`: by `Scheme.send_all`, the same on all ranks.
        """
        with _noted(bucket, scheme):
            self._open(bucket.step, prepare)
            began = time.perf_counter()
            with torch.no_grad():
                lane = self._announce(bucket, scheme, waits or self._waits)
            begun_s = time.perf_counter() - began
            return Reducing(bucket, scheme, send_all, lane, MeteredComm(lane or self._group), begun_s)

    def exchange(self, reducing: "Reducing") -> None:
        """Reduce a bucket by its scheme. Buckets that overlap may run this at once, on a thread each."""
        bucket, scheme, began = reducing.bucket, reducing.scheme, time.perf_counter()
        with _noted(bucket, scheme), torch.no_grad(), recorded_phases(bucket.key) as spent:
            report = (scheme.send_all if reducing.send_all else scheme.reduce)(bucket, reducing.comm)
            announced, lane = Cost(), reducing.lane
            if lane is not None:
                lane.settle()  # if no operation did
                announced = sum([announcement_cost(lane.size)] * lane.announcements, announced)
            sent, wait_s = reducing.comm.take()
            cost, sent = report.cost + announced, sent + announced
            # Without the wait for its turn.
            seconds = reducing.begun_s + time.perf_counter() - began
            reducing.report = replace(report, cost=cost, sent=sent, seconds=seconds, wait_s=wait_s, phases=spent)

    def end(self, reducing: "Reducing", written: Callable[[], Bucket] | None = None) -> Report:
        """End a bucket after its exchanges, in the order of `begin`: note what to roll back, and return the report."""
        bucket, scheme, report = reducing.bucket, reducing.scheme, reducing.report
        assert report is not None
        if self._rollback is not None:
            with _noted(bucket, scheme), torch.no_grad():
                result = written() if written else bucket
                self._on_written(result, self._rollback.reduced(scheme, result, report))
        return report

    def overlaps(self, bucket: Bucket, scheme: Reduction) -> bool:
        """Tell whether the exchanges of this bucket may overlap those of others: over gloo, if its scheme allows it."""
        travels = isinstance(self._group, GroupComm) and self._group.size > 1 and bucket.grad.device.type == "cpu"
        return travels and scheme.interleaves

    def abort(self) -> None:
        """End all waits for other ranks, on all threads: they raise."""
        if isinstance(self._group, GroupComm) and self._group.group is not None:
            with suppress(Exception):  # the process group may be gone already
                abort(self._group.group)

    def any_of(self, own: Sequence[str], names: Sequence[str], step: int) -> set[str]:
        """Find the `names` that any rank has among its `own`, before the first bucket of `step`. See `GroupComm.any_of`.

        Its bytes count with the next bucket. After an error call `close`.
        """
        self._open(step)
        if isinstance(self._group, GroupComm):
            return self._group.any_of(own, names, step, self._reduced)
        mine = torch.tensor(list("\n".join(own).encode()), dtype=torch.uint8)
        texts = [bytes(each.tolist()).decode() for each in self._group.all_gather(mine)]
        return {each for text in texts for each in text.split("\n")} & set(names)

    def _open(self, step: int, prepare: Callable[[], None] | None = None) -> None:
        """Begin a step; after a failure, on fresh connections."""
        if self.closed:
            raise RuntimeError("this handle is closed; wrap the model again, and call sparsync.attach")
        if step != self._step:
            self.end_step()
            self.settle()
            self._step = step
        if prepare is not None:
            prepare()
        if not self._broken:
            return
        if isinstance(self._group, GroupComm):
            part = f", but rank {self._group.rank} has applied only a part of one" if self.partly_applied else ""
            reduced = f"step {self._reduced} as the last one before that was reduced{part}"
            self._group = self._group.reconnect(f"{self._what} of step {step}, and {reduced}", _AFTER_FAILURE)
        if self.partly_applied:  # without another rank, or without a comparison, nothing has raised so far
            raise RuntimeError(f"an error left a step half applied on this rank; {_AFTER_FAILURE}")
        self._numbers.clear()
        self._broken = False

    def use(self, scheme: Reduction) -> None:
        """Reduce with `scheme` from the next step on."""
        self._scheme, self._settings = scheme, scheme.settings
        self._rollback = Rollback(self._on_rolled_back is not None) if scheme.has_residual else None

    def compare(self, comparison: Comparison) -> None:
        """Compare what `comparison` reads in every step. Refers to it weakly, because it refers to models."""
        self._comparison = weakref.ref(comparison)

    def compare_in_next_step(self, compared: Compared) -> None:
        """Compare `compared`, read before, in the step that begins with the next bucket."""
        self.end_step()
        self._compared = compared

    def continue_after(self, step: int) -> None:
        """Make `step` the last one that was reduced, because a checkpoint of it was loaded."""
        self._reduced, self._step, self.partly_applied = step, None, False

    def regroup(self, group: Comm, step: int) -> None:
        """Reduce over another group of ranks after `step`, the last one that was reduced. The next step compares weights."""
        if isinstance(self._group, GroupComm):
            with suppress(Exception):  # the process group may be gone already
                self._group.close(for_good=True)
        self._group = group
        self._broken, self.lost, self.failed, self._compared = False, False, True, None
        self._numbers.clear()
        self._scheme.reset_shared_state()
        self.continue_after(step)

    def shut(self) -> None:
        """Close for good. Safe to call again, while the process ends, and in a fork."""
        self.closed = self._broken = True
        if isinstance(self._group, GroupComm) and self._group.origin.is_here:
            with suppress(Exception):
                self._group.finish()
            with suppress(Exception):  # the process group may be gone already
                self._group.close()

    def _announce(self, bucket: Bucket, scheme: Reduction, waits: Waits) -> Lane | None:
        """Announce a bucket to the other ranks, and return its lane; None if there is nobody to tell."""
        if not isinstance(self._group, GroupComm) or self._group.size == 1:
            return None
        if self._compared is None:
            comparison = self._comparison()
            steps = bucket.step + 1 if self.failed else 1  # after a failure weights are compared at once
            self._compared = comparison.at(bucket.step, steps) if comparison is not None else Compared()
        compared = self._compared
        what = (bucket.grad.dtype, scheme.name, bucket.layout, self._settings)
        known = self._layouts.get(bucket.key)
        if known is None or known[0] != what:
            text = "\n".join([self._settings, *_lines(bucket, scheme)])
            known = self._layouts[bucket.key] = what, digest(text)
        shared, reduced = scheme.shared_text(bucket), self._reduced
        saved, optimizers, weights, loaded, thrown_away = compared.told
        last = f"step {reduced} as the last one that was reduced" if reduced >= 0 else "no step that was reduced before"

        def told() -> list[Told]:
            # An error names the first difference, because later ones may follow from it.
            return [
                Told([f"step {bucket.step}"], _CURE),
                Told([last], _CURE),
                Told([self._settings], _SETTINGS_CURE),
                saved,
                thrown_away,
                optimizers,
                Told(_lines(bucket, scheme), _CURE),
                weights,
                loaded,
                Told([f"state of {scheme.name}: {shared}"], _CURE),
            ]

        number = self._numbers.setdefault(bucket.key, len(self._numbers))
        announcement = Announcement((bucket.step, reduced, known[1] ^ compared.number, digest(shared)), told)
        return self._group.announce(announcement, number, waits)

    def reduce_before_step(self, bucket: Bucket, scheme: Reduction) -> Report:
        """Reduce a bucket before its step, which begins afterwards or never. An error closes the connection."""
        try:
            return self.reduce(bucket, scheme)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._step = self._compared = None
            if self._rollback is not None:
                self._rollback.end_step()

    def close(self, cause: BaseException | str) -> str:
        """Close after a failure, and return the other ranks' reports of it, in parentheses; "" if they say nothing new.

        Sends `cause` to the other ranks, except a lost connection, whose cause is on another rank, and a difference between ranks, which
        all know. After KeyboardInterrupt this does not wait for them.
        """
        self._broken, self.failed, self._step, self._compared = True, True, None, None
        self._scheme.reset_shared_state()  # now, because a checkpoint may be loaded before the next step
        self.lost = isinstance(cause, ConnectionLostError)
        within_s = 0.0 if isinstance(cause, KeyboardInterrupt) else None
        if isinstance(cause, BaseException):
            cause = "" if isinstance(cause, (ConnectionLostError, RanksDifferError)) else described(cause)
        with suppress(Exception):  # the caller gets the error that closes the connection
            if isinstance(self._group, GroupComm) and (others := self._group.close_and_report(cause, within_s)):
                return f" ({others})"
        return ""

    def fail(self, error: BaseException) -> None:
        """Close after `error`; add the other ranks' reports to the message of a lost connection."""
        others = self.close(error)
        if isinstance(error, ConnectionLostError):
            error.args = (f"{error}{others}",)

    @contextmanager
    def step(self) -> Iterator[None]:
        """End the step with the block; an error inside closes the connection."""
        self.settle()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self.end_step()

    def attempt(self, work: Callable[[], None], caught: type[BaseException] = BaseException) -> str:
        """Do the work, and return ""; if it fails, close, and return the error and the other ranks' reports as text."""
        try:
            work()
        except caught as error:
            return f"{described(error)}{self.close(error)}"
        return ""

    def end_step(self) -> None:
        """End the step: the next bucket belongs to another one."""
        if self._step is not None:
            self._reduced, self._step, self._compared, self.failed = self._step, None, None, False
        if self._rollback is not None:
            self._rollback.end_step()

    def settle(self) -> None:
        """Read from the device whether the last step was non-finite; if so, roll back what it has written."""
        if self._rollback is not None and self._rollback.settle():
            if self._on_rolled_back is not None:
                self._on_rolled_back()
            if not self.scaled:
                warn_of(_NOT_FINITE)


@contextmanager
def _noted(bucket: Bucket, scheme: Reduction) -> Iterator[None]:
    """Add the bucket and the step to an error."""
    try:
        yield
    except BaseException as error:
        add_note(error, f"{scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}")
        raise


def described(error: BaseException) -> str:
    """Write the class and the message of an error."""
    return f"{type(error).__name__}: {error}"


def _lines(bucket: Bucket, scheme: Reduction) -> list[str]:
    """Describe what a bucket must have in common on all ranks, line by line."""
    n, parameters = bucket.grad.numel(), len(bucket.layout)
    first = f"bucket {bucket.key!r} of {scheme.name}: {n} elements of {bucket.grad.dtype} in {parameters} parameters"
    return [first, *(f"parameter {each.name!r} of {list(each.shape) or len(each.span)}" for each in bucket.layout)]
