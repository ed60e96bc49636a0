"""The step that reduce-scatters with a residual share; see `scheme` for what a reduce-scatter is here."""

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
    """A reduce-scatter that keeps what it does not send in a residual of the whole gradient on each rank: write `total`.

    Conserved is the sum of residuals over ranks + P x the mean. Where any rank's gradient holds NaN or Inf, all ranks get NaN and residuals
    stay as they were; a sum that overflows at its owner is NaN there only.
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
        """Return the sum over ranks of this rank's chunk, which is at `own`; how many elements this rank selected; and report details.

        Leaves in `acc.values` what was not sent. Raises NonFiniteError, on all ranks, when any found NaN or Inf, unless that shows in
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
            # What the mean's type drops is this rank's, as the chunk is.
            own.of(acc.residual).add_(lacking(total, out, share))
        return Report(
            self.name, bucket.key, bucket.step, n, selected, n, comm.sent, details={"overflow": False, **details}
        )
