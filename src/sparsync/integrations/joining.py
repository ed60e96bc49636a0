"""Small buckets that are reduced as one: a scheme's exchanges and its time per call are then paid once for all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from sparsync.core import Bucket, laid_out

Prepare = Callable[[], None]
Promised = Any  # a future of a Tensor; what `then` returns is of another class than torch.futures.Future
Submit = Callable[[Bucket, Prepare | None], Promised]


@dataclass
class _Waiting:
    """A bucket that waits for others, and the future of its mean."""

    bucket: Bucket
    done: Future
    error: list[str] = field(default_factory=list)  # one message if the reduction failed

    def promise(self) -> Promised:
        # HACK: as in Dispatcher.submit, an exception that is set on a future loses its message in DDP.
        def result(finished: Future) -> Tensor:
            if self.error:
                raise RuntimeError(self.error[0])
            return finished.value()

        return self.done.then(result)


class Joining:
    """Joins the buckets of a step, in order, until they have `nbytes` bytes, and submits them as one.

    Where buckets are joined depends on their sizes and types only, so it is the same on all ranks.
    """

    def __init__(self, submit: Submit, nbytes: int) -> None:
        self._submit, self._nbytes = submit, nbytes
        self._waiting: list[_Waiting] = []
        self._prepare: Prepare | None = None

    def begin_step(self, prepare: Prepare) -> None:
        """Forget what a step that failed has left; `prepare` runs before the first reduction of the new step."""
        self._waiting, self._prepare = [], prepare

    def submit(self, bucket: Bucket, last: bool) -> Promised:
        """Return the future of the mean of `bucket`, [n]; `last`: no other bucket of this step follows."""
        first = self._waiting[0].bucket.grad if self._waiting else bucket.grad
        if (first.dtype, first.device) != (bucket.grad.dtype, bucket.grad.device):
            self.flush()
        held = sum(each.bucket.grad.nbytes for each in self._waiting)
        full = last or held + bucket.grad.nbytes >= self._nbytes
        if full and not self._waiting:
            return self._submit(bucket, self._prepared())
        device = bucket.grad.device
        waiting = _Waiting(bucket, Future(devices=[device] if device.type == "cuda" else None))
        promised = waiting.promise()
        self._waiting.append(waiting)
        if full:
            self.flush()
        return promised

    def flush(self) -> None:
        """Submit what waits."""
        parts, self._waiting = self._waiting, []
        if not parts:
            return
        buckets, lengths = [each.bucket for each in parts], [each.bucket.grad.numel() for each in parts]

        def split(finished: Future) -> None:
            try:
                for each, mean in zip(parts, finished.value().split(lengths), strict=True):
                    # Not a view of the mean: DDP takes the offset in the storage for zero.
                    each.bucket.grad.copy_(mean)
            except Exception as error:  # it becomes the error of each bucket, on the thread that waits for it
                for each in parts:
                    each.error.append(str(error))
            for each in parts:
                each.done.set_result(each.bucket.grad)

        try:
            whole, prepare = _joined(buckets), self._prepared()
        except Exception as error:
            # On the thread that reduces, so that the step ends on all ranks; not the exception, whose traceback holds the step.
            cause = f"{type(error).__name__}: {error}"
            whole, prepare = buckets[0], partial(_fail, cause)
        self._submit(whole, prepare).then(split)

    def abandon(self, error: Exception) -> None:
        """Fail what waits, because what it waits for will not come."""
        parts, self._waiting = self._waiting, []
        for each in parts:
            each.error.append(f"{type(error).__name__}: {error}")
            each.done.set_result(each.bucket.grad)

    def _prepared(self) -> Prepare | None:
        prepare, self._prepare = self._prepare, None
        return prepare


def _joined(buckets: Sequence[Bucket]) -> Bucket:
    """Return one bucket with copies of the gradients of several."""
    layout = laid_out((entry.name, entry.shape or len(entry.span)) for each in buckets for entry in each.layout)
    key = f"{buckets[0].key}-{buckets[-1].key}" if len(buckets) > 1 else buckets[0].key
    return Bucket(key, torch.cat([each.grad for each in buckets]), buckets[0].step, layout)


def _fail(cause: str) -> None:
    raise RuntimeError(f"small buckets could not be joined: {cause}")
