"""The state of DDP's communication hook: the handle that reduces the buckets, or none, and then the plain mean.

DDP takes one hook for good, so what may change is the state: a handle that was detached leaves it, and another one takes its place.
"""

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Promised = torch.futures.Future[Tensor]


class BucketHandle(Protocol):
    """What reduces DDP's buckets."""

    @property
    def closed(self) -> bool: ...

    def submit(self, bucket: Any) -> Promised: ...  # Any: dist.GradBucket, which torch does not export


class HookState:
    """What DDP passes to the hook with each bucket. `handle` is None until it is opened, and after it was detached.

    A copy has no handle, as a copy of a DistributedDataParallel model has no hook. One by `pickle` of a hook that was not opened yet, of
    the default group, can be opened as the original can: trainers that start processes pass it to them.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, make: Callable[["HookState"], BucketHandle] | None = None
    ) -> None:
        self.group = group  # None: the default one
        self.handle: Any = None  # Any: of the class that `make` returns
        self.registered = False  # with a reducer of DDP, by `attach`
        self._make = make
        self._refused = ""
        self._seen: dict[int, weakref.ref[Tensor]] = {}  # the parameters whose gradients came, by id
        self._other_model = False  # the backward pass under way is of a model that the state is not for

    def __reduce__(self) -> tuple[Any, ...]:  # Any: as object.__reduce__
        keeps = self._make is not None and self.handle is None and self.group is None
        return HookState, (None, self._make) if keeps else ()

    def __deepcopy__(self, memo: dict[int, Any]) -> "HookState":
        return HookState()

    @property
    def free(self) -> bool:
        """Whether `attach` may give it another handle."""
        return self._make is None if self.handle is None else self.handle.closed

    def open(self) -> Any:  # Any: as `handle`
        """Return the handle, which this call makes where there is none yet: collective over the ranks of the group.

        The first bucket opens it otherwise; to load a checkpoint, call this before. Raises as `sparsync.attach`, and RuntimeError for one
        that was detached.
        """
        if self.handle is None:
            if self._make is None:
                raise RuntimeError("this hook was detached, or copied; call sparsync.attach on the model")
            self.handle = self._make(self)
        return self.handle

    def submit(self, bucket: Any) -> Promised:  # Any: as BucketHandle
        """Return the future of the reduced bucket."""
        if self.handle is None and self._make is None:
            return plain_mean(bucket, self.group)
        try:
            if self._refused:
                raise RuntimeError(self._refused)
            self._check_model(bucket)
            handle = self.open()
        except Exception as error:  # a hook that raises breaks DDP's reducer for good; a failed future does not
            if not self._other_model:  # which the model that the state is for has nothing to do with
                self._refused = str(error)
            return failed(bucket.buffer(), str(error))
        return handle.submit(bucket)

    def _check_model(self, bucket: Any) -> None:  # Any: as BucketHandle
        """Raise ValueError for a bucket of another model than those before: each backward pass begins with parameters that are known."""
        parameters = bucket.parameters()
        known = [each for each in parameters if (seen := self._seen.get(id(each))) is not None and seen() is each]
        if bucket.index() == 0:
            self._other_model = bool(self._seen) and not known
        if self._other_model:
            raise ValueError(
                "this pair of a state and a hook reduces another model already, and two models would mix their residuals in it; "
                "make a pair for each model: sparsync.ddp_comm_hook(scheme), each with a scheme of its own"
            )
        if len(known) < len(parameters):
            self._seen |= {id(each): weakref.ref(each) for each in parameters}

    def release(self, handle: BucketHandle) -> None:
        """Reduce densely from now on, if `handle` is what reduces."""
        if self.handle is handle:
            self.handle = self._make = None


def plain_mean(bucket: Any, group: dist.ProcessGroup | None) -> Promised:  # Any: as BucketHandle
    """Return the future of the mean of a bucket over the ranks of `group`, by one all-reduce of it: torch's allreduce_hook."""
    group = group if group is not None else dist.group.WORLD
    mean = bucket.buffer().div_(dist.get_world_size(group))
    work = dist.all_reduce(mean, group=group, async_op=True)
    assert work is not None  # only for a rank outside the group
    return work.get_future().then(lambda done: done.value()[0])


def failed(buffer: Tensor, message: str) -> Promised:
    """Return a future that raises RuntimeError with `message`."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()

    # HACK: as in Dispatcher.submit, an exception that is set on a future loses its message in DDP.
    def result(_: torch.futures.Future[Tensor]) -> Tensor:
        raise RuntimeError(message)

    promised = done.then(result)
    done.set_result(buffer)
    return promised
