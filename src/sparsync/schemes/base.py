"""What schemes without state have in common, and what those have that keep a residual."""

from collections.abc import Mapping
from typing import Any

from sparsync.core import Bucket
from sparsync.feedback import ErrorFeedback


class Stateless:
    """A scheme that keeps nothing from step to step."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(
                f"{type(self).__name__} keeps no state, this one has {sorted(state)}; load it into the scheme it is of"
            )

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Nothing is kept back, so nothing is rescaled."""

    def begin_anew(self) -> None:
        """Nothing is held."""

    @property
    def keeps(self) -> bool:
        return False

    def put_back(self, bucket: Bucket) -> None:
        """There is nowhere to put it."""


class Keeping:
    """A scheme with error feedback."""

    @property
    def _kept(self) -> ErrorFeedback:
        raise NotImplementedError

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        self._kept.rescale(factors)

    @property
    def keeps(self) -> bool:
        return True

    def put_back(self, bucket: Bucket) -> None:
        self._kept.put_back(bucket)
