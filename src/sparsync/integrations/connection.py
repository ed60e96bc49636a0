"""The connection of one scheme on one model to the other ranks: reduces its buckets, and recovers from failures."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from sparsync import phases
from sparsync.base.scheme import Scheme
from sparsync.base.sharded import ReduceScatterScheme
from sparsync.comm.group import ConnectionLostError, GroupComm
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Report
from sparsync.integrations.rollback import Rollback


class Connection:
    """Reduces buckets over `comm`, one at a time and in the same order on all ranks.

    After a failure the ranks no longer agree on what comes next on the wire. So the failing rank closes its connections, which makes
    the others fail at once instead of waiting. The next bucket opens fresh ones, after `scheme.reset_shared_state`, provided that all
    ranks come with the same step. Of a communicator that is no GroupComm nothing is opened or closed.
    """

    def __init__(self, scheme: Scheme | ReduceScatterScheme, comm: Comm) -> None:
        self._scheme = scheme
        self._group, self._comm = comm, MeteredComm(comm)
        self._rollback = Rollback() if scheme.has_residual else None
        self._broken = False

    def reduce(self, bucket: Bucket, scheme: Scheme, written: Callable[[], Bucket] | None = None) -> Report:
        """Have `scheme` reduce `bucket` in place, and return its report with bytes and times as measured.

        `written` returns the bucket that holds the result until the step ends, where that is not `bucket`. An error carries a note with
        the scheme, the bucket and the step; `close` is to follow.
        """
        try:
            if self._broken:
                if isinstance(self._group, GroupComm):
                    self._group = self._group.reconnect(fingerprint=f"gradients of step {bucket.step}")
                self._comm, self._broken = MeteredComm(self._group), False
                self._scheme.reset_shared_state()
            began = time.perf_counter()
            with torch.no_grad():
                with phases.recorded(bucket.key) as spent:
                    report = scheme.reduce(bucket, self._comm)
                sent, wait_s = self._comm.take()
                report = replace(report, sent=sent, seconds=time.perf_counter() - began, wait_s=wait_s, phases=spent)
                if self._rollback is not None:
                    self._rollback.reduced(scheme, written() if written else bucket, report)
        except BaseException as error:
            error.add_note(f"{scheme.name} failed on bucket {bucket.key!r} at step {bucket.step}")
            raise
        return report

    def close(self, cause: BaseException | str) -> str:
        """Close after a failure, and return what the other ranks report of it, in parentheses; "" where that says nothing new.

        `cause` is what the others are sent; a lost connection is none, for its cause is on another rank.
        """
        self._broken = True
        if isinstance(cause, BaseException):
            cause = "" if isinstance(cause, ConnectionLostError) else f"{type(cause).__name__}: {cause}"
        with suppress(Exception):  # the error that closes the connection is on its way to the caller already
            if isinstance(self._group, GroupComm) and (others := self._group.close_and_report(cause)):
                return f" ({others})"
        return ""

    def end_step(self) -> None:
        """Forget what the step has written; the next bucket belongs to another step."""
        if self._rollback is not None:
            self._rollback.end_step()
