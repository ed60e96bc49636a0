"""Hard threshold: every rank sends the elements that reach a threshold which never changes (Sahu et al., arXiv 2108.00951).

Instead of the error of each step, a fixed threshold minimises the total error of a whole training under a budget of elements; how many
are sent changes from step to step, and is not controlled. Without a `threshold` it is 1/(2 sqrt(k)), k = density * n, of the authors' code.

Differs from the paper: residual and threshold are in units of the gradient, not of learning rate times gradient; n is the size of a
bucket, not of the model; selections are gathered without padding; NaN and Inf are noticed, by the message that holds the counts.
"""

import math
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Update
from sparsync.comm.plan import Given, Plan
from sparsync.core import check_density, count_for
from sparsync.feedback import Residuals
from sparsync.wire import Values, check_values
from sparsync_lab.rivals.above_threshold import gather_above, gather_above_planned


@dataclass
class HardThreshold(ErrorFeedbackScheme):
    """Send what reaches a threshold that never changes (arXiv 2108.00951).

    Each rank sends it to all; the mean divides the sum by P. What stays below the threshold waits in the residual until it has grown. NaN
    or Inf on any rank makes every gradient NaN, and changes nothing else.
    """

    density: float = 0.01  # only gives the threshold where there is none: 1/(2 sqrt(density * n))
    threshold: float | None = None  # in units of the gradient; 0 sends everything but zeros
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "hard_threshold"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if self.threshold is not None and not 0 <= self.threshold < math.inf:
            raise ValueError(f"threshold must be a finite magnitude, 0 or more, got {self.threshold}; None derives it")

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the rule of the authors' code, 1/(2 sqrt(density * n))."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        return gather_above_planned(given, self.density, self.values, self.residual_nbytes(given), 1)

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        return gather_above(acc, self._threshold, self.values, bucket, comm)

    def _threshold(self, acc: Tensor) -> float:
        if self.threshold is not None:
            return self.threshold
        return 1 / (2 * math.sqrt(count_for(self.density, acc.numel())))
