"""TopkA: every rank sends its largest elements to all; the rest stays in its residual (Aji and Heafield, arXiv 1704.05021).

The selections of P ranks overlap little, so up to P * k elements of the result are set, and a rank receives (P-1) * k: both grow
with P. Differs from the paper: nothing of note; NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass

from typing_extensions import Self

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm
from sparsync.feedback import Accumulator, Residuals
from sparsync.schemes.gathered_selections import gather_selections, gather_selections_planned
from sparsync.selection.density import check_density, count_for
from sparsync.wire.values import Values, check_values


@dataclass
class TopK(ErrorFeedbackScheme):
    """Send each rank's share `density` of its elements of largest magnitude to all; the mean divides their sum by P.

    Among equal magnitudes the elements that come first are sent. Where any rank's selection holds NaN or Inf, or the mean overflows the
    gradient's type, it shows in the gradient of every rank, so that a loss scaler finds it, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank sends; 0.001 to 0.01 in the literature
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "topk"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the published algorithm is the exact one."""
        return cls(density=density)

    def count(self, bucket: Bucket) -> int:
        """Return how many elements each rank sends of this bucket at its step; the same on every rank."""
        return count_for(self.density, bucket.grad.numel())

    def planned(self, given: Given) -> Plan:
        counts = {count_for(self.density, given.n): given.P}
        return gather_selections_planned(given, counts, self.values, self.residual_nbytes(given))

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        own = acc.top_k(self.count(bucket))  # [k]
        return gather_selections(own, [own.index.numel()] * comm.size, self.values, bucket, comm)
