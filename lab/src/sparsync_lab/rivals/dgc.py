"""Deep Gradient Compression: top-k of a momentum that every rank accumulates locally (arXiv 1712.01887).

Use SGD without momentum: the scheme applies the momentum.

Differs from the paper: the k largest are exact instead of those above a sampled threshold, because that costs less with this library's
kernels; clipping is per bucket, not per layer; and the warm-up is counted in steps, not epochs.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from sparsync import Bucket, Comm, Report, kernels
from sparsync.base.error_feedback import add_dropped_
from sparsync.core import count_for
from sparsync.schemes import Accumulator, State, TopK, Update

_FIRST_DENSITY = 0.25  # of the warm-up, as in the paper


@dataclass(frozen=True)
class DGC(TopK):
    """Send as topk, of a momentum that each rank accumulates, for plain SGD to apply (arXiv 1712.01887).

    Each rank sends the share `density` of residual + u of largest magnitude, where u = momentum * u + gradient is its momentum. Sent
    elements leave the residual, and with `masking` u too. Without momentum and clipping this is TopK with a warm-up. A rollback returns
    sent elements to the residual, and does not change u. When the number of ranks changes, all ranks continue with the first rank's u.
    """

    density: float = 0.001  # share of elements sent by each rank; the paper's
    momentum: float = 0.9
    masking: bool = True  # clear the momentum of sent elements, which would push on in an old direction
    warmup_steps: int = 100  # density falls from 25 % to `density` geometrically; 4 epochs in the paper
    # Largest norm of a bucket's mean gradient. Each rank clips its gradient to clip * sqrt(P), as the paper clips a P-th of it to
    # clip / sqrt(P): the norm of a mean of P uncorrelated gradients.
    clip: float | None = None

    name = "dgc"
    may_send_whole = False  # a step must know which elements leave the momentum

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be 0 or more, got {self.warmup_steps}")
        if self.clip is not None and self.clip <= 0:
            raise ValueError(f"clip must be above 0, or None not to clip, got {self.clip}")

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if not bucket.grad.numel():
            return super().reduce(state, bucket, comm)
        u = state.vector("velocity", bucket)  # [n]
        moved, before = self._clipped(bucket.grad, comm.size) + self.momentum * u, u.clone()
        own = Bucket(bucket.key, moved, bucket.step, bucket.layout)  # reduced in place
        u.copy_(moved)
        try:
            report = super().reduce(state, own, comm)
        except BaseException:
            u.copy_(before)
            raise
        bucket.grad.copy_(own.grad)
        if not report.details["overflow"] and not kernels.all_finite(bucket.grad):
            # The gradient's dtype is narrower than the reduction's, and overflows on all ranks.
            state.rollback(own)
            report = replace(report, details={**report.details, "overflow": True})
        if report.details["overflow"]:
            u.copy_(before)
        else:
            add_dropped_(state.residual(own), own.grad, bucket.grad, comm)
        return report

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        update = super().step(state, acc, bucket, comm)
        cleared = update.cleared
        assert cleared is not None  # TopK clears what it has selected
        u = state.vector("velocity", bucket)
        return replace(update, commit=lambda: kernels.clear_(u, cleared)) if self.masking else update

    def count(self, bucket: Bucket) -> int:
        n, t = bucket.grad.numel(), bucket.step
        if t >= self.warmup_steps or self.density >= _FIRST_DENSITY:
            return count_for(self.density, n)
        return count_for(_FIRST_DENSITY * (self.density / _FIRST_DENSITY) ** (t / self.warmup_steps), n)

    @property
    def has_momentum(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.momentum > 0

    def _clipped(self, grad: Tensor, P: int) -> Tensor:
        if self.clip is None:
            return grad
        norm = grad.norm()  # no host sync
        return grad * (self.clip * P**0.5 / norm.clamp(min=1e-30)).clamp(max=1.0)
