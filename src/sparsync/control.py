"""What a scheme carries from step to step besides residuals: plain numbers for each bucket, and the published threshold rule.

Everything here is a function of what all ranks know, so the ranks agree without a message.
Sources: MiCRO (arXiv 2310.00967), ExDyna (arXiv 2402.13781).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, TypeVar

from sparsync.core import Bucket

State = TypeVar("State")


@dataclass
class ByBucket(Generic[State]):
    """One `State`, a dataclass of plain numbers, for each bucket key.

    It starts anew whenever the bucket's layout or the number of ranks differs from the last step's: partitions, counts and thresholds
    of other elements mean nothing. (Residuals are kept by parameter instead, and survive.)
    """

    make: Callable[..., State]
    _by_key: dict[str, State] = field(default_factory=dict)
    _shape: dict[str, list[Any]] = field(default_factory=dict)  # Any: nested lists of names and numbers

    def of(self, bucket: Bucket, P: int) -> State:
        """The state of this bucket, for reading and writing."""
        shape = [P, *([slot.name, len(slot.span)] for slot in bucket.layout)]
        if self._shape.get(bucket.key) != shape:
            self._shape[bucket.key] = shape
            self._by_key[bucket.key] = self.make()
        return self._by_key[bucket.key]

    def state_dict(self) -> dict[str, Any]:  # Any: numbers and lists of them
        return {
            key: {"shape": self._shape[key], "state": asdict(state)}  # pyright: ignore[reportArgumentType]  # a dataclass
            for key, state in self._by_key.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._shape = {key: list(entry["shape"]) for key, entry in state.items()}
        self._by_key = {key: self.make(**_copied(entry["state"])) for key, entry in state.items()}


@dataclass
class ThresholdScaling:
    """Online threshold scaling: the threshold grows or shrinks by a fixed factor, by how many elements the last union had.

    No message is needed: every rank knows K, the size of the last union. `step` counts the steps of this bucket.
    """

    step: int = 0
    threshold: float = 0.0
    union: int = 0  # K of the last step

    def next(self, k: int, bug_compatible: bool) -> float:
        """The threshold of this step for a wanted union of `k`; stays unchanged until `accept`.

        1/(2 sqrt(k)) at first; then, with q = K/k, times 1.005 for q > 1.1, 1.00125 for 1 < q <= 1.1, 0.9987 for 0.909 < q <= 1 and
        0.995 below. In the authors' code the third factor is never reached: the second is taken down to 0.909.
        """
        if self.step == 0:
            return 1.0 / (2.0 * math.sqrt(k))
        ratio = self.union / k
        if ratio > 1.1:
            return self.threshold * 1.005
        if ratio > 0.909:
            return self.threshold * (1.00125 if ratio > 1.0 or bug_compatible else 0.9987)
        return self.threshold * 0.995

    def accept(self, threshold: float, union: int) -> None:
        """Ends a step that selected `union` elements with `threshold`."""
        self.step += 1
        self.threshold = threshold
        self.union = union


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in state.items()}
