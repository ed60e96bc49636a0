"""What the reduction of a step leaves: the mean of each bucket, and of it what must be kept."""

from dataclasses import dataclass, field

from torch import Tensor

from sparsync.core import Bucket, Report
from sparsync.exchanges.weights import Part
from sparsync.kernels import operations as kernels


class FewNonzero(Bucket):
    """A bucket of which the elements that are not zero are kept. Reading `grad` makes the vector."""

    def __init__(self, bucket: Bucket) -> None:
        self.key, self.step, self.layout = bucket.key, bucket.step, bucket.layout
        self._like, self._kept = bucket.grad.new_empty(0), kernels.select_ge(bucket.grad, 0.0)

    @property
    def grad(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        whole = self._like.new_zeros(self._kept.length)
        kernels.put_(whole, self._kept.index, self._kept.value)
        return whole


@dataclass
class Mean:
    """The mean of a bucket of `n` elements over the ranks: that of the part that was reduced, if any, and zero elsewhere."""

    n: int
    part: Part
    bucket: Bucket | None = None

    def whole(self) -> Tensor | None:
        """Return it as a vector, [n]; None where nothing was reduced."""
        return None if self.bucket is None else self.part.whole(self.bucket.grad, self.n)


@dataclass
class Reduced:
    """What was reduced in a step so far: the reports, and the mean of each bucket. `skipped`: it holds NaN or Inf, see Rollback."""

    reports: list[Report] = field(default_factory=list)
    means: list[Mean] = field(default_factory=list)
    skipped: bool = False
