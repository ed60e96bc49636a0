"""MiCRO: exclusive partitions that rotate over the ranks, and a threshold that steers the size of the union (arXiv 2310.00967).

A rank searches one partition of its accumulated gradient for large elements. Partitions do not overlap, so neither do selections.
Every rank then sends its values at all positions that any rank has selected. All ranks share one threshold, scaled by a fixed
factor per step until the union has density * n elements. This needs no message, because every rank knows the last union.

Differs from the paper, as the authors' code does: residual and threshold are in units of the gradient, not of learning rate * gradient.
Differs from the authors' code: small buckets (n < P, density * n < 1) and P = 1 work; NaN and Inf are noticed; positions take 4 bytes,
not 8; the threshold falls where the union is up to 9 % too small, while theirs rises. `bug_compatible=True` undoes the last two.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.collectives.values import exchange_counts, mean_at
from sparsync.core import Bucket, Comm, Span, check_density, count_for, spans
from sparsync.feedback import Accumulator
from sparsync.selection.exclusive import rotation
from sparsync.wire import ValueCodec


@dataclass(frozen=True)
class MiCRO(ErrorFeedbackScheme):
    """Send all ranks' values at the positions where some rank exceeds a threshold in its partition; the mean divides by P.

    Every bucket has a separate threshold. The authors' program has one for the model: use one bucket for that.
    If any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes.
    """

    density: float = 0.01  # share of the elements in the union of all ranks; 0.001 in the authors' scripts
    bug_compatible: bool = False  # the threshold as the authors' code scales it, and 8 bytes per position

    name = "micro"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, P = bucket.grad.numel(), comm.size
        scaling = state.shared_state("scaling", ThresholdScaling, bucket, P)
        t, k = scaling.step, max(1, int(self.density * n)) if self.bug_compatible else count_for(self.density, n)
        # 1: this rank's partition rotates with the step
        mine = self.partitions(state, bucket, P)[rotation(comm.rank, t, P)]
        # 2: the threshold follows K, the size of the last union
        threshold = scaling.next(k, self.bug_compatible)
        # 3: select what reaches the threshold; if nothing does, one element that moves with the step
        index = acc.above(threshold, mine).index  # [k_r]; a host sync: k_r depends on the data
        if len(mine) and not index.numel():
            index = index.new_tensor([mine.start + t % len(mine)])
        # 4: gather the counts (which raises on all ranks if any has NaN or Inf), then the positions, padded to the longest selection
        counts = exchange_counts(index.numel(), acc.is_finite, comm, index.device)
        gathered = all_gather_padded(index.long() if self.bug_compatible else index, counts, comm)
        # 5: sum the values of all ranks at all K positions
        mean, _ = mean_at(acc.values, [part.to(torch.int32) for part in gathered], comm, ValueCodec("float32"))

        def commit() -> None:
            scaling.step, scaling.threshold, scaling.union = t + 1, threshold, sum(counts)
            self.accept(state, bucket, counts)

        # 6: what was sent leaves the residual
        return Update(mean, mean.index, counts[comm.rank], details={"threshold": threshold}, commit=commit)

    def rescaled(self, state: State, factors: Mapping[str, float]) -> None:
        for names, scaling in state.all_of("scaling", ThresholdScaling):
            scaling.threshold *= max(factors.get(name, 1.0) for name in names)  # too few are sent rather than too many

    def partitions(self, state: State, bucket: Bucket, P: int) -> Sequence[Span]:
        """Return the spans of the P partitions at this step: here, always the same spans of equal lengths."""
        return spans(bucket.grad.numel(), P)

    def accept(self, state: State, bucket: Bucket, counts: Sequence[int]) -> None:
        """Record, in `commit`, that rank r selected `counts[r]` elements; here, do nothing."""


@dataclass
class ThresholdScaling:
    """A threshold that grows or shrinks by a fixed factor per step, depending on the size of the last union."""

    step: int = 0  # of this bucket
    threshold: float = 0.0
    union: int = 0  # K of the last step

    def next(self, k: int, bug_compatible: bool) -> float:
        """Compute the threshold of this step for a union of `k` elements, without changing any field.

        1/(2 sqrt(k)) in the first step. Then, with q = K/k, the last one times 1.005 for q > 1.1, 1.00125 for 1 < q <= 1.1, 0.9987 for
        0.909 < q <= 1, and 0.995 below. In the authors' code the third factor is never reached: the second applies down to 0.909.
        """
        if self.step == 0:
            return 1.0 / (2.0 * math.sqrt(k))
        q = self.union / k
        if q > 1.1:
            return self.threshold * 1.005
        if q > 0.909:
            return self.threshold * (1.00125 if q > 1.0 or bug_compatible else 0.9987)
        return self.threshold * 0.995


def all_gather_padded(index: Tensor, counts: Sequence[int], comm: Comm) -> list[Tensor]:
    """Gather the selections of all ranks, padded to the longest, in rank order; rank r's has `counts[r]` elements."""
    longest = max(counts)
    padded = torch.nn.functional.pad(index, (0, longest - index.numel()))
    gathered = comm.all_gather(padded, [longest] * comm.size)
    return [part[:count] for part, count in zip(gathered, counts, strict=True)]
