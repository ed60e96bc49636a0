"""The training that a scheme was made for: with its own momentum SGD without momentum, and clipping before it reduces; or LaProp.

Everything else of the job stays: its groups of parameters, its schedule, and how much its weights decay.
"""

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sparsync import Scheme
from sparsync.schemes import PerParameter
from sparsync_lab.rivals.borrowed_groups import BorrowedGroups
from sparsync_lab.rivals.laprop import LaProp, in_place_of_adamw
from sparsync_lab.workloads.base import Workload
from sparsync_lab.workloads.muon import Several

SGD_BY_ADAM = 100.0  # times a usual learning rate of Adam is a usual one of SGD with momentum: 0.1 by 0.001


class PlainSGD(BorrowedGroups):
    """SGD without momentum in the place of a job's `optimizer`, whose groups it takes over, so that the job's schedule sets its rates.

    It takes `factor` times the rate of a group. Weights decay beside the gradient (decoupled), as much in a step as by the job's optimizer.
    """

    def __init__(self, optimizer: Optimizer, factor: float = 1.0) -> None:
        # What pulls a weight at every step acts 1 / (1 - momentum) times.
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
    """Return the job's optimizer and schedule; with a scheme with its own momentum PlainSGD, with LaProp its optimizer, in its place.

    A job that AdamW trains, or another that divides, has a rate of Adam, one that SGD trains a rate of SGD. PlainSGD takes 100 times the
    one, or a hundredth of the other, where the scheme wants a rate of the other kind, as its `writes_steps` says: where to look first.
    Raises ValueError for LaProp with a job that AdamW does not train.
    """
    optimizer, schedule = workload.optimizer(model, steps)
    if isinstance(scheme, LaProp):
        return in_place_of_adamw(optimizer, scheme.beta2), schedule
    if not scheme.has_momentum:
        return optimizer, schedule
    by_sgd = isinstance(optimizer, SGD)
    members = [scheme.default, *scheme.patterns.values()] if isinstance(scheme, PerParameter) else [scheme]
    writes_steps = any(getattr(each, "writes_steps", False) for each in members)
    factor = 1.0 if by_sgd != writes_steps else 1 / SGD_BY_ADAM if by_sgd else SGD_BY_ADAM
    return PlainSGD(optimizer, factor), schedule


def made_for(scheme: Scheme, workload: Workload) -> str:
    """Return the name of the optimizer that the scheme trains this job with, and how many times the job's rate it takes."""
    optimizer, _ = optimizer_for(scheme, workload, workload.model(seed=0), 1)
    if not isinstance(optimizer, PlainSGD):
        members = optimizer.members if isinstance(optimizer, Several) else [optimizer]
        return " + ".join(type(each).__name__.removesuffix("Optimizer") for each in members)
    return "SGD" if optimizer.factor == 1 else f"SGD, {optimizer.factor:g} x the rate"


def own_clip_factor(ranks: int) -> float:
    """Return how much longer than the mean gradient a rank's own one may be, where it is clipped before it is reduced.

    The mean of gradients that have nothing in common is shorter by the root of their number (as in Deep Gradient Compression).
    """
    return ranks**0.5
