"""Online threshold scaling, as MiCRO and ExDyna publish it (arXiv 2310.00967, arXiv 2402.13781)."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync import kernels


@dataclass
class ThresholdScaling:
    """A threshold that grows or shrinks by a fixed factor a step, by how many elements the last union had.

    No message is needed: every rank knows K, the size of the last union. `step` counts the steps of this bucket.
    """

    step: int = 0
    threshold: float = 0.0
    union: int = 0  # K of the last step

    def next(self, k: int, bug_compatible: bool) -> float:
        """Return the threshold of this step for a wanted union of `k`; nothing changes until `accept`.

        1/(2 sqrt(k)) at first; then, with q = K/k, times 1.005 for q > 1.1, 1.00125 for 1 < q <= 1.1, 0.9987 for 0.909 < q <= 1 and
        0.995 below. In the authors' code the third factor is never reached: the second applies down to 0.909.
        """
        if self.step == 0:
            return 1.0 / (2.0 * math.sqrt(k))
        q = self.union / k
        if q > 1.1:
            return self.threshold * 1.005
        if q > 0.909:
            return self.threshold * (1.00125 if q > 1.0 or bug_compatible else 0.9987)
        return self.threshold * 0.995

    def accept(self, threshold: float, union: int) -> None:
        """End a step that selected `union` elements with `threshold`."""
        self.step += 1
        self.threshold = threshold
        self.union = union


def select_above(chunk: Float[Tensor, " m"], threshold: float, step: int) -> Int[Tensor, " k"]:
    """Return the positions in `chunk` where |x| >= threshold, ascending, int64; where there are none, one that moves with `step`.

    Only an empty chunk gives none.
    """
    # A host sync: how many there are depends on the data.
    index = kernels.select_ge(chunk, threshold).index.long()
    if index.numel() == 0 and chunk.numel():
        index = torch.tensor([step % chunk.numel()], device=chunk.device)
    return index
