"""The base class of all schemes: what an integration calls, with a default for everything but `reduce`."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from sparsync.core import Bucket, Comm, Report


class Scheme(ABC):
    """One way to reduce gradients: subclass it, give it a `name`, and write `reduce`.

    An instance holds the state of one rank; each rank makes its own, with the same settings. The defaults describe a scheme without
    state: nothing is saved, nothing is rolled back. A scheme with error feedback subclasses `sparsync.base.ErrorFeedbackScheme`
    instead and writes `step`. Write a scheme as a dataclass, so that all of its settings are compared between the ranks.
    """

    name: str

    @abstractmethod
    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        """Replace `bucket.grad` [n] by an estimate of the mean gradient, the same bits on every rank.

        Called on every rank for the same buckets in the same order. NaN or Inf on any rank must show in the result on every rank,
        and leave the scheme's state as it was. An exception on any rank fails the step on all ranks.
        """

    def state_dict(
        self,
    ) -> dict[str, Any]:  # Any: nested dicts of tensors, numbers and strings, as weights_only loads them
        """Return this rank's state, copied. Residuals stand under "residual", flat, by parameter name."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError for the state of another scheme."""
        if state:
            raise ValueError(
                f"{type(self).__name__} has no state, this one has {sorted(state)}; load it into the scheme it is of"
            )

    @property
    def has_residual(self) -> bool:
        """Whether anything is held back from one step to a later one."""
        return False

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the residual of each named parameter by its factor."""
        return

    def rollback(self, bucket: Bucket) -> None:
        """Add what `reduce` wrote to `bucket.grad` to the residual again, on all ranks, because the step will not be applied."""
        return

    def reset_shared_state(self) -> None:
        """Forget thresholds, partitions and whatever else must agree across ranks, but no residual: after a failure it may differ."""
        return

    def config_fingerprint(self) -> str:
        """Return what must be the same on every rank: all settings of a dataclass, else the class's name."""
        return repr(self) if is_dataclass(self) else type(self).__qualname__
