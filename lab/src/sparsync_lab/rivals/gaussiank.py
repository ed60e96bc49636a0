"""GaussianK: the threshold of a top-k selection is estimated as if the elements were normally distributed (Shi et al., arXiv 1911.08772).

With mean m and standard deviation s of acc, the threshold is m + z s, where a normal variable is beyond +-z with probability d. Up to three
times it is halved where fewer than 2k/3 elements reach it, and multiplied by 1.5 where more than 4k/3 do. It takes no sorting; tails
that are heavier than normal ones make it select too few.

Differs from the paper and the authors' code: what equals the threshold is selected, zeros never are; selections are gathered without
padding; NaN and Inf are noticed, by the message that holds the counts.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Update
from sparsync.comm.plan import Given, Plan
from sparsync.core import check_density, count_for
from sparsync.feedback import Residuals
from sparsync.wire import Values, check_values
from sparsync_lab.rivals.above_threshold import gather_above, gather_above_planned

CORRECTIONS = 3  # of the threshold, at most


@dataclass
class GaussianK(ErrorFeedbackScheme):
    """Send as topk, by the threshold of a normal distribution (arXiv 1911.08772).

    Each rank sends to all what reaches its threshold for `density`; the mean divides the sum by P. NaN or Inf on any rank makes every
    gradient NaN, and changes nothing else.
    """

    density: float = 0.01  # share of elements each rank asks for
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "gaussiank"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the rule is the published one."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        return gather_above_planned(given, self.density, self.values, self.residual_nbytes(given), 2 + CORRECTIONS)

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        return gather_above(acc, self._threshold, self.values, bucket, comm)

    def _threshold(self, acc: Tensor) -> float:
        k, size = count_for(self.density, acc.numel()), acc.abs()
        threshold = _normal_threshold(acc, self.density)
        for _ in range(CORRECTIONS):
            # A host sync.
            count = int((size >= threshold).sum())
            if 2 * k <= 3 * count <= 4 * k:
                break
            threshold *= 0.5 if 3 * count < 2 * k else 1.5
        return threshold


def _normal_threshold(acc: Tensor, density: float) -> float:
    """Return m + z s of `acc`, [n]; its mean is small beside s, but for few elements."""
    # In float64, where squares of the largest float32 are finite. A host sync.
    deviation, mean = (float(each) for each in torch.std_mean(acc.double(), correction=0))
    return mean - NormalDist().inv_cdf(density / 2) * deviation
