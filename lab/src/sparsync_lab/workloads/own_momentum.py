"""Train with the optimizer that a scheme needs: SGD without momentum, after clipping, if it has its own momentum; or a baseline's.

The job's groups of parameters, schedule and weight decay stay.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync import Scheme
from sparsync_lab.rivals.laprop import BorrowedGroups, LongAdamW
from sparsync_lab.workloads.base import Workload
from sparsync_lab.workloads.muon import Several

SGD_BY_ADAM = 100.0  # ratio of usual learning rates of SGD with momentum and Adam: 0.1 by 0.001


class PlainSGD(BorrowedGroups):
    """Replace a job's `optimizer` by SGD without momentum on its groups, so that the job's schedule sets the rates.

    The rate is `factor` times a group's. Weight decay is decoupled, and per step as strong as the job optimizer's.
    """

    def __init__(self, optimizer: Optimizer, factor: float = 1.0) -> None:
        # Momentum multiplies the effect of a constant pull on a weight by 1 / (1 - momentum).
        self._decays = [
            group.get("weight_decay", 0.0) / (1 - group.get("momentum", 0.0)) for group in optimizer.param_groups
        ]
        for group in optimizer.param_groups:
            group.update(momentum=0.0, nesterov=False)
        super().__init__(optimizer)
        self.factor = factor

    def update_(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        parameter.mul_(1 - group["lr"] * self._decays[number])
        parameter.add_(grad, alpha=-self.factor * group["lr"])


def optimizer_for(scheme: Scheme, workload: Workload, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
    """Make the job's optimizer and schedule; replace the optimizer by PlainSGD for a scheme with a momentum, or by a baseline's.

    A job with AdamW, or another optimizer that divides, has a rate for Adam; a job with SGD, a rate for SGD. If the scheme needs the other
    kind, as its `writes_steps` says, PlainSGD multiplies Adam's rate by 100 or divides SGD's by 100, as a first guess.
    Raises ValueError for `adamw` and `laprop` with a job without AdamW.
    """
    optimizer, schedule = workload.optimizer(model, steps)
    if isinstance(scheme, LongAdamW):
        return scheme.replace(optimizer), schedule
    if not scheme.has_momentum:
        return optimizer, schedule
    by_sgd = isinstance(optimizer, SGD)
    writes_steps = any(getattr(each, "writes_steps", False) for each in (scheme, *scheme.inner.values()))
    factor = 1.0 if by_sgd != writes_steps else 1 / SGD_BY_ADAM if by_sgd else SGD_BY_ADAM
    return PlainSGD(optimizer, factor), schedule


def made_for(scheme: Scheme, workload: Workload) -> str:
    """Name the optimizer that trains this job with the scheme, and its factor on the job's rate."""
    optimizer, _ = optimizer_for(scheme, workload, workload.model(seed=0), 1)
    if not isinstance(optimizer, PlainSGD):
        members = optimizer.members if isinstance(optimizer, Several) else [optimizer]
        return " + ".join(type(each).__name__.removesuffix("Optimizer") for each in members)
    return "SGD" if optimizer.factor == 1 else f"SGD, {optimizer.factor:g} x the rate"


def own_clip_factor(ranks: int) -> float:
    """Compute how much longer than the mean gradient a rank's gradient may be, if it is clipped before the reduction.

    The mean of uncorrelated gradients is shorter by the square root of their number (as in Deep Gradient Compression).
    """
    return ranks**0.5
