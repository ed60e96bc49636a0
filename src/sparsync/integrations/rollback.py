"""Steps that a loss scaler skips: what their finite buckets wrote returns to the residuals, so that nothing is lost."""

from sparsync.base.scheme import Scheme, overflowed
from sparsync.core import Bucket, Report


class Rollback:
    """Tracks the buckets that a step has written, and rolls them back when one of them is non-finite.

    A bucket with NaN or Inf has them on every rank, and its scheme has left its residual alone. The other buckets of that step, earlier
    and later ones, have sent from their residuals what nobody will apply: each rank adds the mean that was written to its residual again,
    P times in all. All ranks see the same buckets and do the same, so no message is needed.
    """

    def __init__(self) -> None:
        self._step: int | None = None
        self._written: list[tuple[Scheme, Bucket]] = []
        self._skipped = False

    def reduced(self, scheme: Scheme, bucket: Bucket, report: Report) -> None:
        """Take note of a bucket that `scheme` has just reduced; roll back what this step has written if it is to be skipped.

        To be called in the same order on all ranks, while no gradient of the step has been touched since it was reduced.
        """
        if bucket.step != self._step:
            self._step, self._written, self._skipped = bucket.step, [], False
        if overflowed(report, bucket.grad):
            self._skipped = True
        elif scheme.has_residual:
            self._written.append((scheme, bucket))
        if self._skipped:
            for each, written in self._written:
                each.rollback(written)
            self._written = []

    def end_step(self) -> None:
        """Forget the step. The next bucket belongs to another one, even if that has the same number."""
        self._step, self._written = None, []
