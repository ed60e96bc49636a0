"""Joins small buckets into one, which saves exchanges; and rebuilds the buckets of a checkpoint.

After a restart, DDP's first step has other buckets than the step before, and schemes select by bucket. So that step waits for all of DDP's
buckets, and reduces the buckets of the checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.core import Bucket, ParameterSpan, laid_out
from sparsync.runtime.step_in_flight import Prepare, Promised, future_on, promise

Submit = Callable[[Bucket, Prepare | None], Promised]
Layout = list[tuple[str, list[str]]]  # a step's buckets in order: key, and names of parameters


@dataclass
class _WaitingBucket:
    """A bucket that waits for others, and the future of its mean."""

    bucket: Bucket
    done: Future
    error: list[str] = field(default_factory=list)  # one message if the reduction failed


class Joining:
    """Joins the buckets of a step, in order, until they have `nbytes` bytes, and submits them as one.

    All ranks join the same buckets, because sizes and types decide. `before` is the Joining that this one replaces between two steps.
    """

    def __init__(self, submit: Submit, nbytes: int, before: "Joining | None" = None) -> None:
        self._submit, self._nbytes = submit, nbytes
        self._waiting: list[_WaitingBucket] = []
        self._prepare: Prepare | None = None
        self._wanted: Layout = before._wanted if before is not None else []  # for the next step; []: as DDP has them
        self._submitted: Layout = []  # in this step, so far
        self.layout: Layout = before.layout if before is not None else []  # of the last step that was submitted whole

    def want(self, layout: Layout, always: bool = False) -> None:
        """Reduce these buckets in the next step, if they have its parameters and one type per bucket.

        Unless `always`, keep DDP's buckets if the last step had this layout.
        """
        self._wanted = layout if always or layout != self.layout else []

    def begin_step(self, prepare: Prepare) -> None:
        """Clear the rest of a failed step; `prepare` runs before the first reduction of the new step."""
        self._waiting, self._prepare, self._submitted = [], prepare, []

    def end_step(self) -> None:
        """Note that all buckets of the step were submitted."""
        self.layout = self._submitted

    def submit(self, bucket: Bucket, last: bool) -> Promised:
        """Submit or hold `bucket`; return the future of its mean, [n]. `last`: no other bucket of this step follows."""
        full = last
        if not self._wanted:
            if self._waiting and _kind(self._waiting[0].bucket) != _kind(bucket):
                self.flush()
            held = sum(each.bucket.grad.nbytes for each in self._waiting)
            full = last or held + bucket.grad.nbytes >= self._nbytes
            if full and not self._waiting:
                return self._pass_on(bucket, self._prepared())
        waiting = _WaitingBucket(bucket, future_on(bucket.grad.device))
        self._waiting.append(waiting)
        promised = promise(waiting.done, waiting.error)
        if full:
            self.flush()
        return promised

    def flush(self) -> None:
        """Submit the waiting buckets."""
        wanted, self._wanted = self._wanted, []
        buckets = [each.bucket for each in self._waiting]
        made = _rearranged(wanted, buckets) or [_joined(list(run)) for _, run in groupby(buckets, _kind)]
        parts, self._waiting = self._waiting, []
        pending, written = list(made), list[Any]()  # Any: torch's stubs know two unrelated Event classes

        def write(copied: _Copied, finished: Future) -> None:
            device = copied.bucket.grad.device
            try:
                lengths = [part.numel() for part in copied.parts]
                for part, mean in zip(copied.parts, finished.value().split(lengths), strict=True):
                    # Not a view of the mean: DDP assumes a storage offset of zero.
                    part.copy_(mean)
                if device.type == "cuda":  # each future calls this on a stream of its pool
                    written.append(torch.cuda.current_stream(device).record_event())
            except Exception as error:  # raised on the threads that wait for these buckets
                for each in parts:
                    each.error.append(str(error))
            pending.remove(copied)
            if not pending:
                for each in parts:
                    if each.bucket.grad.is_cuda:
                        for event in written:
                            torch.cuda.current_stream(each.bucket.grad.device).wait_event(event)
                    each.done.set_result(each.bucket.grad)

        for copied in made:
            self._pass_on(copied.bucket, self._prepared()).then(partial(write, copied))

    def abandon(self, error: Exception) -> None:
        """Fail the waiting buckets, because no more will come."""
        parts, self._waiting = self._waiting, []
        for each in parts:
            each.error.append(f"{type(error).__name__}: {error}")
            each.done.set_result(each.bucket.grad)

    def _pass_on(self, bucket: Bucket, prepare: Prepare | None) -> Promised:
        self._submitted.append((bucket.key, [entry.name for entry in bucket.layout]))
        return self._submit(bucket, prepare)

    def _prepared(self) -> Prepare | None:
        prepare, self._prepare = self._prepare, None
        return prepare


@dataclass(eq=False)
class _Copied:
    """A bucket of copied gradients, and the parts of other buckets that they are written back to."""

    bucket: Bucket
    parts: list[Tensor]


def _joined(buckets: Sequence[Bucket]) -> _Copied:
    """Join buckets of one type into one."""
    key = f"{buckets[0].key}-{buckets[-1].key}" if len(buckets) > 1 else buckets[0].key
    entries = [entry for each in buckets for entry in each.layout]
    return _copied(key, buckets[0].step, entries, [each.grad for each in buckets])


def _rearranged(wanted: Layout, buckets: Sequence[Bucket]) -> list[_Copied] | None:
    """Copy the wanted buckets from `buckets`; None if the parameters differ, or a wanted bucket would mix types."""
    known = {entry.name: (entry, each) for each in buckets for entry in each.layout}
    if sorted(known) != sorted(name for _, names in wanted for name in names):
        return None
    if any(len({_kind(known[name][1]) for name in names}) > 1 for _, names in wanted):
        return None
    made = []
    for key, names in wanted:
        entries = [known[name][0] for name in names]
        parts = [entry.span.of(known[name][1].grad) for entry, name in zip(entries, names, strict=True)]
        made.append(_copied(key, buckets[0].step, entries, parts))
    return made


def _copied(key: str, step: int, entries: Sequence[ParameterSpan], parts: list[Tensor]) -> _Copied:
    """Copy these parts of other buckets into a bucket of these parameters."""
    layout = laid_out((entry.name, entry.shape or len(entry.span)) for entry in entries)
    return _Copied(Bucket(key, torch.cat(parts), step, layout), parts)


def _kind(bucket: Bucket) -> tuple[torch.dtype, torch.device]:
    return bucket.grad.dtype, bucket.grad.device
