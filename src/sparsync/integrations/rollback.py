"""Steps that a loss scaler will skip: what their finite buckets have written is kept back again, so that nothing is lost."""

from typing import Protocol, runtime_checkable

from sparsync.base.scheme import overflowed
from sparsync.core import Bucket, Comm, Report


@runtime_checkable
class Reducer(Protocol):
    """The part of a scheme that reduces; one that keeps anything has `rollback`, too."""

    @property
    def name(self) -> str: ...

    def reduce(self, bucket: Bucket, comm: Comm) -> Report: ...


@runtime_checkable
class Keeper(Protocol):
    """A scheme that can take back what it wrote."""

    def rollback(self, bucket: Bucket) -> None: ...


class Rollback:
    """Looks at each bucket once it is reduced. All ranks see the same and do the same, so no message is needed.

    A bucket with NaN or Inf has them on every rank, and its scheme has left its residual alone. Other buckets of that step, before it and
    after it, have sent from their residuals what nobody will apply: each rank keeps the mean that was written, P times in all.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._finite: list[tuple[Keeper, Bucket]] = []
        self._skipped = False

    def reduced(self, scheme: Reducer, bucket: Bucket, report: Report) -> None:
        """To be called after each bucket of a step, in the same order on all ranks, while no gradient of the step has been touched yet."""
        if bucket.step != self._step:
            self._step, self._finite, self._skipped = bucket.step, [], False
        if overflowed(report, bucket.grad):
            self._skipped = True
        elif isinstance(scheme, Keeper) and getattr(scheme, "keeps", True):
            self._finite.append((scheme, bucket))
        if self._skipped:
            for each, written in self._finite:
                each.rollback(written)
            self._finite = []

    def ended(self) -> None:
        """Ends the step: lets go of what it has written, and takes the next bucket for one of another step, whatever its number."""
        self._step, self._finite = None, []
