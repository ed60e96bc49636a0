"""The driver of reduce-scatters with error feedback. `scheme` describes a reduce-scatter."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsync.base.scheme import ReduceScatterScheme
from sparsync.base.state import State
from sparsync.comm.metered import MeteredComm
from sparsync.core import Bucket, Comm, Detail, NonFiniteError, Report, Span, exact_divisor, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded


@dataclass(frozen=True)
class KeepingReduceScatter(ReduceScatterScheme):
    """A reduce-scatter that keeps what it does not send in a residual of the whole gradient on each rank. Implement `total`.

    Invariant: the sum of the residuals over ranks + P x the mean. If any rank's gradient holds NaN or Inf, all ranks get NaN and residuals
    do not change; a sum that overflows is NaN on its owner only.
    """

    config: Any  # the scheme

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.config.name

    @property
    def residuals(self) -> Residuals:
        """The precision of the residual."""
        return getattr(self.config, "residuals", "float32")

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient."""
        return getattr(self.config, "decay", 1.0)

    @abstractmethod
    def total(self, acc: Accumulator, own: Span, bucket: Bucket, comm: Comm) -> tuple[Tensor, int, dict[str, Detail]]:
        """Sum this rank's chunk, at `own`, over ranks. Return the sum, the number of elements this rank selected, and report details.

        Leaves the unsent part in `acc.values`. Raises NonFiniteError on all ranks if any has NaN or Inf, unless it shows in
        the sums of all ranks.
        """

    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        n, P, m, comm = bucket.grad.numel(), comm.size, out.numel(), MeteredComm(comm)
        acc, own = state.accumulate(bucket), Span(comm.rank * m, (comm.rank + 1) * m)
        try:
            total, selected, details = self.total(acc, own, bucket, comm)
        except NonFiniteError:
            return self.found_inf(bucket, out, comm.sent)
        share = P if average else 1
        out.copy_(rounded(total / exact_divisor(total, share), out.dtype))
        if not acc.finite or not kernels.all_finite(out):
            return self.found_inf(bucket, out, comm.sent)
        with phase("apply"):
            acc.keep()
            # The rounding error of the chunk belongs to its owner.
            own.of(acc.residual).add_(lacking(total, out, share))
        return Report(
            self.name, bucket.key, bucket.step, n, selected, n, comm.sent, details={"overflow": False, **details}
        )
