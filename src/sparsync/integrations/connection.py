"""The connection of one scheme on one model to the other ranks: reduces its buckets, and recovers from failures."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from sparsync import phases
from sparsync.base.scheme import Scheme
from sparsync.base.sharded import ReduceScatterScheme
from sparsync.comm.announcement import Announcement, RanksDifferError, announcement_cost
from sparsync.comm.group import REPORTS_S, ConnectionLostError, GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.comm.waiting import abort
from sparsync.core import Bucket, Comm, Cost, Report, add_note, digest
from sparsync.integrations.rollback import Rollback

_CURE = (
    "all ranks must reduce the same model at the same step, from the same checkpoint: reduce equally often on all of them, and load "
    "each checkpoint on all of them"
)
_AFTER_FAILURE = (
    "where a step was reduced on some ranks and failed on others, their weights and residuals differ from then on: load a checkpoint on "
    "all ranks, handle and model, or start again"
)


class Connection:
    """Reduces buckets over `comm`, one at a time and in the same order on all ranks.

    Before each reduction the ranks compare what they are about to reduce, after which step, and with which shared state. After a failure
    they no longer agree on what comes next on the wire. So the failing rank closes its connections, which makes the others fail at once
    instead of waiting. The next bucket opens fresh ones, after `scheme.reset_shared_state`, provided that all ranks come with the same
    step and have reduced the same steps before. Of a communicator that is no GroupComm nothing is compared, opened or closed.
    """

    def __init__(self, scheme: Scheme | ReduceScatterScheme, comm: Comm, what: str = "gradients") -> None:
        self._scheme, self._what = scheme, what
        self._group, self._comm = comm, MeteredComm(comm)
        self._rollback = Rollback() if scheme.has_residual else None
        self._settings = scheme.config_fingerprint() if isinstance(scheme, Scheme) else scheme.name
        self._broken = self._shut = False
        self._reduced = -1  # the last step of which every bucket was reduced
        self._step: int | None = None  # the one under way, of which no bucket has failed
        self.partly_applied = False  # this rank has a part of a step: no state to continue from
        self._layouts: dict[str, tuple[tuple[object, ...], int]] = {}  # what a bucket was last time, and its digest

    def reduce(
        self,
        bucket: Bucket,
        scheme: Scheme,
        written: Callable[[], Bucket] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Report:
        """Have `scheme` reduce `bucket` in place, and return its report with bytes and times as measured.

        `prepare` is called first; where it raises, the step fails on all ranks. `written` returns the bucket that holds the result until
        the step ends, where that is not `bucket`. An error carries a note with the scheme, the bucket and the step; `close` is to follow.
        Raises RanksDifferError, on all ranks, where they differ in what they are about to reduce.
        """
        try:
            if self._shut:
                raise RuntimeError("this handle is closed; wrap the model again, and make a new one")
            self._begin(bucket.step)
            if prepare is not None:
                prepare()
            if self._broken:
                if isinstance(self._group, GroupComm):
                    reduced = f"step {self._reduced} as the last one before that was reduced{self._part()}"
                    self._group = self._group.reconnect(
                        f"{self._what} of step {bucket.step}, and {reduced}", _AFTER_FAILURE
                    )
                if self.partly_applied:  # where there is no other rank to differ from, or nothing is compared
                    raise RuntimeError(f"this rank has a step that was applied in part; {_AFTER_FAILURE}")
                self._comm, self._broken = MeteredComm(self._group), False
                self._scheme.reset_shared_state()
            began = time.perf_counter()
            with torch.no_grad():
                with phases.recorded(bucket.key) as spent:
                    announced = self._announce(bucket, scheme)
                    report = scheme.reduce(bucket, self._comm)
                    self._settle()
                sent, wait_s = self._comm.take()
                seconds, cost, sent = time.perf_counter() - began, report.cost + announced, sent + announced
                report = replace(report, cost=cost, sent=sent, seconds=seconds, wait_s=wait_s, phases=spent)
                if self._rollback is not None:
                    self._rollback.reduced(scheme, written() if written else bucket, report)
        except BaseException as error:
            add_note(error, f"{scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}")
            raise
        return report

    def use(self, scheme: Scheme | ReduceScatterScheme, settings: str) -> None:
        """Reduce with `scheme` from the next step on; ranks compare its `settings` before each bucket from then on."""
        self._scheme, self._settings = scheme, settings
        self._rollback = Rollback() if scheme.has_residual else None

    def continue_after(self, step: int) -> None:
        """Take `step` for the last one that was reduced, because a checkpoint of it was loaded."""
        self._reduced, self._step, self.partly_applied = step, None, False

    def close_partly_applied(self, cause: BaseException) -> None:
        """Close because what was reduced was not applied in full on this rank: all ranks raise until a checkpoint is loaded."""
        self.partly_applied = True
        self.close(cause)

    def _part(self) -> str:
        return f", but rank {self._group.rank} has applied only a part of one" if self.partly_applied else ""

    @property
    def closed(self) -> bool:
        """Whether `shut` was called."""
        return self._shut

    def shut(self) -> None:
        """Close for good, and give the connections back. Safe to call again, and while the process ends."""
        self._shut = self._broken = True
        if isinstance(self._group, GroupComm):
            with suppress(Exception):  # the process group may be gone already
                if self._group.group is not None:
                    abort(self._group.group)  # wakes another thread that waits
                self._group.close()

    def _begin(self, step: int) -> None:
        if step != self._step:
            self.end_step()
            self._step = step

    def _announce(self, bucket: Bucket, scheme: Scheme) -> Cost:
        """Tell the other ranks what is reduced, and return what that costs."""
        if not isinstance(self._group, GroupComm) or self._group.size == 1:
            return Cost()
        what = (bucket.grad.dtype, scheme.name, bucket.layout, self._settings)
        known = self._layouts.get(bucket.key)
        if known is None or known[0] != what:
            known = self._layouts[bucket.key] = what, digest("\n".join(self._fixed(bucket, scheme)))
        shared, reduced = scheme.shared_text(bucket), self._reduced

        def lines() -> list[str]:
            after = f"step {reduced} as the last one that was reduced"
            return [
                f"step {bucket.step}",
                after if reduced >= 0 else "no step that was reduced before",
                *self._fixed(bucket, scheme),
                f"state of {scheme.name}: {shared}",
            ]

        self._group.announce(Announcement((bucket.step, reduced, known[1], digest(shared)), lines, _CURE))
        return announcement_cost(self._group.size)

    def _fixed(self, bucket: Bucket, scheme: Scheme) -> list[str]:
        # The same lines in the same order on all ranks: the first two that differ are what an error compares.
        return [f"settings {self._settings}", *_lines(bucket, scheme)]

    def _settle(self) -> None:
        if isinstance(self._group, GroupComm):
            self._group.settle()

    def close(self, cause: BaseException | str) -> str:
        """Close after a failure, and return what the other ranks report of it, in parentheses; "" where that says nothing new.

        `cause` is what the others are sent; a lost connection is none, for its cause is on another rank, and neither is a difference
        between ranks, which all know. After KeyboardInterrupt this does not wait for the others.
        """
        self._broken, self._step = True, None
        within_s = 0.0 if isinstance(cause, KeyboardInterrupt) else REPORTS_S
        if isinstance(cause, BaseException):
            cause = (
                "" if isinstance(cause, (ConnectionLostError, RanksDifferError)) else f"{type(cause).__name__}: {cause}"
            )
        with suppress(Exception):  # the error that closes the connection is on its way to the caller already
            if isinstance(self._group, GroupComm) and (others := self._group.close_and_report(cause, within_s)):
                return f" ({others})"
        return ""

    def end_step(self) -> None:
        """Forget what the step has written; the next bucket belongs to another step."""
        if self._step is not None:
            self._reduced, self._step = self._step, None
        if self._rollback is not None:
            self._rollback.end_step()


def _lines(bucket: Bucket, scheme: Scheme) -> list[str]:
    """Return what must be the same on all ranks of a bucket, line by line."""
    n, parameters = bucket.grad.numel(), len(bucket.layout)
    return [
        f"bucket {bucket.key!r} of {scheme.name}: {n} elements of {bucket.grad.dtype} in {parameters} parameters",
        *(
            f"parameter {entry.name!r} of {list(entry.shape) if entry.shape else len(entry.span)}"
            for entry in bucket.layout
        ),
    ]
