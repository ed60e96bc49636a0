"""What schemes with error feedback have in common."""

from collections.abc import Mapping

from sparsync.base.scheme import Scheme
from sparsync.core import Bucket
from sparsync.feedback import ErrorFeedback


class Keeping(Scheme):
    """A scheme with error feedback."""

    @property
    def _kept(self) -> ErrorFeedback:
        raise NotImplementedError

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self._kept.rescale(factors)

    @property
    def has_residual(self) -> bool:
        return True

    def rollback(self, bucket: Bucket) -> None:
        self._kept.put_back(bucket)
