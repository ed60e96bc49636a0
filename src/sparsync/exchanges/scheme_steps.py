"""Steps reduced by the scheme: for schemes that leave elements out, and for buckets with idle parameters."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.base.state import State, overflowed
from sparsync.core import Bucket, Comm, Report
from sparsync.exchanges.measured import Skip
from sparsync.exchanges.sender import StepsToMake
from sparsync.exchanges.weights import Part
from sparsync.kernels import operations as kernels
from sparsync.runtime.connection import Connection, Reduction


class FewNonzero(Bucket):
    """A bucket that stores only its nonzero elements. Reading `grad` makes the whole vector."""

    def __init__(self, bucket: Bucket) -> None:
        self.key, self.step, self.layout = bucket.key, bucket.step, bucket.layout
        self._like, self._kept = bucket.grad.new_empty(0), kernels.select_ge(bucket.grad, 0.0)

    @property
    def grad(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        whole = self._like.new_zeros(self._kept.length)
        kernels.put_(whole, self._kept.index, self._kept.value)
        return whole


@dataclass
class SchemeMean:
    """The mean step of a bucket of `n` elements, zero for parameters that take no part."""

    state: State
    part: Part
    n: int
    bucket: Bucket | None = None  # None: nothing was reduced

    @property
    def mean(self) -> Tensor | None:
        """The mean as a vector, [n]; None where nothing was reduced."""
        return None if self.bucket is None else self.part.whole(self.bucket.grad, self.n)

    def whole(self) -> Tensor | None:
        return self.mean

    def reduce(
        self,
        connection: Connection,
        own: Tensor,
        steps: StepsToMake | None,
        number: int,
        skip: Skip | None,
        alone: bool,
    ) -> Report:
        """Reduce this rank's step `number`, and return the report, with "overflow"; `own` [n] is uninitialised memory for the step.

        `steps` None: this rank's gradient is not finite, and it sends NaN. `alone`: there is no other bucket.
        """
        state, reduction = self.state, None
        if skip is not None and steps is not None:
            reduction = SchemeStep(state, steps, skip)  # makes the steps
        else:
            own = own.fill_(torch.nan) if steps is None else steps.make(own)
        sent = self.part.bucket(own, number)
        # The count of nonzero elements is a host sync: not if the device decides to skip.
        few = state.scheme.leaves_out and state.has_residual and reduction is None and not alone
        held: list[Bucket] = []

        def written() -> Bucket:
            held.append(FewNonzero(sent) if few else sent)
            return held[0]

        report = connection.reduce(sent, reduction or state, written)
        self.bucket = held[0] if held else sent
        return replace(report, details={**report.details, "overflow": overflowed(report, sent.grad)})

    def rollback(self, bucket: Bucket) -> None:
        """Put what was sent back into the residual."""
        self.state.rollback(bucket)


@dataclass(eq=False)
class SchemeStep(Reduction):
    """The reduction of one bucket's step by a scheme that heeds `skip`: nothing changes if a rank's gradient is not finite."""

    state: State
    steps: StepsToMake
    skip: Skip

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.state.name

    @property
    def has_residual(self) -> bool:
        return self.state.has_residual

    @property
    def interleaves(self) -> bool:
        return self.state.interleaves

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Make this rank's step in `bucket.grad`, and replace it by the mean over ranks."""
        bucket.skip = self.skip.agree(comm)
        self.steps.make(bucket.grad, bucket.skip)
        return self.state.reduce(bucket, comm)

    def rollback(self, bucket: Bucket) -> None:
        self.state.rollback(bucket)
