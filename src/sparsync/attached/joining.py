"""Small buckets that are reduced as one: a scheme's exchanges and its time per call are then paid once for all of them.

And the buckets of a checkpoint. DDP has other buckets in the first step after a restart than it had before, and what a scheme selects
depends on them: so that step waits for all of DDP's buckets, and reduces those that the step before the checkpoint had.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.core import Bucket, ParameterSpan, laid_out
from sparsync.runtime.dispatcher import Prepare, Promised, future_on, promise

Submit = Callable[[Bucket, Prepare | None], Promised]
Layout = list[tuple[str, list[str]]]  # the keys of a step's buckets, in order, each with the names of its parameters


@dataclass
class _WaitingBucket:
    """A bucket that waits for others, and the future of its mean."""

    bucket: Bucket
    done: Future
    error: list[str] = field(default_factory=list)  # one message if the reduction failed


class Joining:
    """Joins the buckets of a step, in order, until they have `nbytes` bytes, and submits them as one.

    Where buckets are joined depends on their sizes and types only, so it is the same on all ranks. `before` is what joined them until now,
    between two steps.
    """

    def __init__(self, submit: Submit, nbytes: int, before: "Joining | None" = None) -> None:
        self._submit, self._nbytes = submit, nbytes
        self._waiting: list[_WaitingBucket] = []
        self._prepare: Prepare | None = None
        # The buckets of the next step; []: as they come.
        self._wanted: Layout = before._wanted if before is not None else []
        self._submitted: Layout = []  # the buckets of this step so far
        # The buckets of the last step that was submitted whole.
        self.layout: Layout = before.layout if before is not None else []

    def want(self, layout: Layout) -> None:
        """Reduce these buckets in the next step, if they have the parameters that come then, and each has one type."""
        self._wanted = layout if layout != self.layout else []

    def begin_step(self, prepare: Prepare) -> None:
        """Forget what a step that failed has left; `prepare` runs before the first reduction of the new step."""
        self._waiting, self._prepare, self._submitted = [], prepare, []

    def end_step(self) -> None:
        """Note that all buckets of the step were submitted."""
        self.layout = self._submitted

    def submit(self, bucket: Bucket, last: bool) -> Promised:
        """Return the future of the mean of `bucket`, [n]; `last`: no other bucket of this step follows."""
        if self._wanted:
            promised = self._hold(bucket)
            if last:
                self.flush()
            return promised
        first = self._waiting[0].bucket.grad if self._waiting else bucket.grad
        if (first.dtype, first.device) != (bucket.grad.dtype, bucket.grad.device):
            self.flush()
        held = sum(each.bucket.grad.nbytes for each in self._waiting)
        full = last or held + bucket.grad.nbytes >= self._nbytes
        if full and not self._waiting:
            return self._pass_on(bucket, self._prepared())
        promised = self._hold(bucket)
        if full:
            self.flush()
        return promised

    def flush(self) -> None:
        """Submit what waits."""
        parts, self._waiting = self._waiting, []
        if not parts:
            return
        buckets = [each.bucket for each in parts]
        wanted, self._wanted = self._wanted, []
        try:
            made = _rearranged(wanted, buckets) or _grouped(buckets)
        except Exception as error:
            # On the thread that reduces, so that the step ends on all ranks; not the exception, whose traceback holds the step.
            made = [_Copied(buckets[0], [buckets[0].grad], partial(_fail, f"{type(error).__name__}: {error}"))]
        pending = list(made)

        def write(copied: _Copied, finished: Future) -> None:
            try:
                lengths = [part.numel() for part in copied.parts]
                for part, mean in zip(copied.parts, finished.value().split(lengths), strict=True):
                    # Not a view of the mean: DDP takes the offset in the storage for zero.
                    part.copy_(mean)
            except Exception as error:  # it becomes the error of each bucket, on the thread that waits for it
                for each in parts:
                    each.error.append(str(error))
            pending.remove(copied)
            if not pending:
                for each in parts:
                    each.done.set_result(each.bucket.grad)

        for copied in made:
            self._pass_on(copied.bucket, copied.prepare or self._prepared()).then(partial(write, copied))

    def abandon(self, error: Exception) -> None:
        """Fail what waits, because what it waits for will not come."""
        parts, self._waiting = self._waiting, []
        for each in parts:
            each.error.append(f"{type(error).__name__}: {error}")
            each.done.set_result(each.bucket.grad)

    def _hold(self, bucket: Bucket) -> Promised:
        """Have a bucket wait for `flush`, and return its future."""
        waiting = _WaitingBucket(bucket, future_on(bucket.grad.device))
        self._waiting.append(waiting)
        return promise(waiting.done, waiting.error)

    def _pass_on(self, bucket: Bucket, prepare: Prepare | None) -> Promised:
        self._submitted.append((bucket.key, [entry.name for entry in bucket.layout]))
        return self._submit(bucket, prepare)

    def _prepared(self) -> Prepare | None:
        prepare, self._prepare = self._prepare, None
        return prepare


@dataclass(eq=False)
class _Copied:
    """A bucket with copies of gradients, one after the other, and the parts of other buckets that they go back to."""

    bucket: Bucket
    parts: list[Tensor]
    prepare: Prepare | None = None  # in place of the step's


def _grouped(buckets: Sequence[Bucket]) -> list[_Copied]:
    """Return one bucket for each run of buckets of one type on one device."""
    runs: list[list[Bucket]] = []
    for each in buckets:
        if runs and (runs[-1][0].grad.dtype, runs[-1][0].grad.device) == (each.grad.dtype, each.grad.device):
            runs[-1].append(each)
        else:
            runs.append([each])
    return [_joined(run) for run in runs]


def _joined(buckets: Sequence[Bucket]) -> _Copied:
    """Return one bucket with what several have, which are of one type."""
    key = f"{buckets[0].key}-{buckets[-1].key}" if len(buckets) > 1 else buckets[0].key
    return _copied(
        key, buckets[0].step, [entry for each in buckets for entry in each.layout], [each.grad for each in buckets]
    )


def _rearranged(wanted: Layout, buckets: Sequence[Bucket]) -> list[_Copied] | None:
    """Return the buckets that are wanted, made from what `buckets` have; None where parameters differ, or types in one of them."""
    found = {entry.name: (entry, each) for each in buckets for entry in each.layout}
    if sorted(found) != sorted(name for _, names in wanted for name in names):
        return None
    if any(len({(found[name][1].grad.dtype, found[name][1].grad.device) for name in names}) > 1 for _, names in wanted):
        return None
    made = []
    for key, names in wanted:
        entries = [found[name][0] for name in names]
        parts = [entry.span.of(found[name][1].grad) for entry, name in zip(entries, names, strict=True)]
        made.append(_copied(key, buckets[0].step, entries, parts))
    return made


def _copied(key: str, step: int, entries: Sequence[ParameterSpan], parts: list[Tensor]) -> _Copied:
    """Return a bucket of these parameters, copied from these parts of others."""
    layout = laid_out((entry.name, entry.shape or len(entry.span)) for entry in entries)
    return _Copied(Bucket(key, torch.cat(parts), step, layout), parts)


def _fail(cause: str) -> None:
    raise RuntimeError(f"small buckets could not be joined: {cause}")
