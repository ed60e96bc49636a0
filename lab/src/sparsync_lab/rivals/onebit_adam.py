"""1-bit Adam: Adam whose second moments are frozen after a dense warm-up, and whose momentum then travels as signs (arXiv 2102.02888).

The result is not a gradient but Adam's step, m / (sqrt(v) + eps): use torch.optim.SGD without momentum, with Adam's learning rate. For
decoupled weight decay call p.mul_(1 - lr * decay) before its step, as AdamW does.

Differs from the paper: the scale of signs is the mean magnitude of 256 values, not of a tensor; the error of a rank as owner of a chunk
joins the rank's residual, and is sent with its next momentum; both bias corrections stop when v is frozen; and where v is 0, because the
warm-up had no gradient, nothing is written, where eps alone would divide.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync import Bucket, Comm, ErrorFeedbackScheme, Report, kernels
from sparsync.base.error_feedback import DenseUpdate
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.comm import MeteredComm
from sparsync.feedback import Residuals, Vectors
from sparsync.schemes import Accumulator, State
from sparsync.wire import ValueCodec

_SIGNS = ValueCodec("sign")


@dataclass(frozen=True)
class OneBitAdam(ErrorFeedbackScheme):
    """Write Adam's step, with frozen second moments and a momentum in 1 bit, for plain SGD to apply (arXiv 2102.02888).

    For `warmup_steps` steps it is the step of the exact mean gradient; then the momentum is summed in 1 bit. A step with NaN or Inf on any
    rank, or whose squares overflow, writes NaN and changes nothing. A rollback keeps the momentum, which has the gradient and brings it
    with later steps. Gradients must not have a changing loss scale. After a failure on some rank the warm-up restarts.
    """

    # Dense steps of exact Adam, until second moments are stable; 15 to 20 % of a training in the paper.
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    residuals: Residuals = "float32"

    name = "onebit_adam"
    has_momentum = True
    writes_steps = True  # elements are about 1, as in Adam's steps, so SGD takes a learning rate of Adam

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_steps < 1:
            raise ValueError(
                f"warmup_steps must be at least 1, the steps that second moments are measured in, got {self.warmup_steps}"
            )
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be in [0, 1), got {value}")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, got {self.eps}")

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        grad, names, steps = bucket.grad, [entry.name for entry in bucket.layout], state.common("steps")
        if not grad.numel():
            return self.report(bucket, selected=0, union=0)
        state.residual(bucket)  # laid out from the first step on
        m, v = state.common_vector("first", bucket), state.common_vector("second", bucket)
        t = min(steps.get(name, 0) for name in names)
        if t < self.warmup_steps:
            report, applied = self._warm_up(m, v, bucket, comm)
        else:
            own = Bucket(bucket.key, self.beta1 * m + (1 - self.beta1) * grad, bucket.step, bucket.layout)
            report = super().reduce(state, own, comm)
            applied = not report.details["overflow"]
            (m if applied else grad).copy_(own.grad)
        if applied:
            frozen = min(t + 1, self.warmup_steps)
            scale = (v / (1 - self.beta2**frozen)).sqrt_().add_(self.eps).mul_(1 - self.beta1 ** (t + 1))
            grad.copy_((m / scale).masked_fill_(v == 0, 0.0))
            steps.update(dict.fromkeys(names, t + 1))
        state.undo[bucket.key] = lambda _: None  # keep the momentum, which has the gradient
        return report

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        """Compute the mean of residual and momentum, as signs."""
        mean = quantized_all_reduce_(acc.values, comm, _SIGNS)
        return DenseUpdate(mean.decoded(), acc.values, details={"warmup": False})

    def start(self, vectors: Vectors | None = None) -> "_WholeSteps":
        return _WholeSteps(self, vectors)

    def _warm_up(self, m: Tensor, v: Tensor, bucket: Bucket, comm: Comm) -> tuple[Report, bool]:
        """Update both moments [n] by the mean gradient if squares are finite; returns the report and whether they are."""
        comm = MeteredComm(comm)
        mean = comm.all_reduce(bucket.grad).to(m.dtype) / comm.size
        square = v.mul(self.beta2).addcmul_(mean, mean, value=1 - self.beta2)
        finite = kernels.all_finite(square)
        if finite:
            m.mul_(self.beta1).add_(mean, alpha=1 - self.beta1)
            v.copy_(square)
        else:
            bucket.grad.fill_(torch.nan)
        return self.report(bucket, comm.sent, details={"warmup": True, "overflow": not finite}), finite


class _WholeSteps(State):
    """A state that weighs every step fully: the momentum holds the step and the residual."""

    def weighed(self, factors: Mapping[str, float]) -> Mapping[str, float]:
        steps = self.common("steps")
        return {name: factor for name, factor in factors.items() if name not in steps}
