"""Uncompressed baselines with other optimizers: AdamW with a longer beta2, and LaProp (Ziyin et al., arXiv 2002.04839), which divides
each gradient by the root of its second moments before the momentum.

    v = beta2 v + (1 - beta2) g^2                                                      g: the mean gradient, clipped as the job does
    m = beta1 m + (1 - beta1) rate g / (sqrt(v / (1 - beta2^t)) + eps)
    w = (1 - rate * weight_decay) w - m / (1 - beta1^t)

LaProp is what `steps(...)/SCHEME` would do without compression, if every rank had the second moments of the mean gradient: the uncompressed
limit of exchanging AdamW steps, as dense is the limit of exchanging gradients.

As with exchanged steps, a step's rate stays with its gradient (without a schedule that is the paper's rule), weights decay as in AdamW,
and beta2 is at least 0.999 unless given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from sparsync.exchanges.rules import AdamWRule
from sparsync.schemes import Dense


class BorrowedGroups(Optimizer):
    """An optimizer with the groups of `job`, which it replaces. A parameter without a gradient does not move."""

    def __init__(self, job: Optimizer) -> None:
        super().__init__(job.param_groups, {})
        self._job = job

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state into the existing groups: torch's method makes new ones."""
        groups = self.param_groups
        super().load_state_dict(state_dict)
        for group, loaded in zip(groups, self.param_groups, strict=True):
            group.update(loaded)
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  # no loss to return
        # HACK: a schedule warns unless its optimizer has stepped, which it reads from this private attribute.
        vars(self._job)["_opt_called"] = True
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update_(parameter, parameter.grad, group, number)

    def update_(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        """Update one parameter of group `number`."""
        raise NotImplementedError


@dataclass(frozen=True)
class LongAdamW(Dense):
    """Write the mean gradient, as `dense`, and train with the job's AdamW, but with the beta2 of exchanged steps."""

    # Of the second moments; None: as with exchanged steps, the beta2 of the job's AdamW, but at least 0.999.
    beta2: float | None = None

    name = "adamw"  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]  # a class has one name

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2 is not None and not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must be in [0, 1), got {self.beta2}")

    def __repr__(self) -> str:
        """Show all settings, with the rule in place of a missing beta2."""
        settings = f"wire={self.wire!r}, form={self.form!r}, beta2={beta2_described(self.beta2)!r}"
        return f"{type(self).__name__}({settings})"

    def replace(self, optimizer: Optimizer) -> Optimizer:
        """Make the optimizer in place of the job's; of one with `members`, as Muon and AdamW, only AdamW, and in place.

        Raises ValueError without an AdamW.
        """
        members: list[Optimizer] | None = getattr(optimizer, "members", None)
        if members is None:
            return self.replace_adamw(optimizer)
        places = [place for place, each in enumerate(members) if isinstance(each, Adam)] or range(len(members))
        for place in places:
            members[place] = self.replace_adamw(members[place])
        return optimizer

    def replace_adamw(self, optimizer: Optimizer) -> Optimizer:
        """Make the optimizer in place of an AdamW. Raises ValueError for any other."""
        if not isinstance(optimizer, Adam):
            raise ValueError(
                f"{self.name} takes the place of an AdamW, and the job has {type(optimizer).__name__}; leave {self.name} out, or "
                "choose a job with AdamW"
            )
        for group in optimizer.param_groups:
            group["betas"] = group["betas"][0], beta2_of_steps(self.beta2, group["betas"][1])
        return optimizer


@dataclass(frozen=True, repr=False)
class LaProp(LongAdamW):
    """Write the mean gradient, as `dense`, and train with LaProp in place of the job's AdamW (arXiv 2002.04839)."""

    name = "laprop"

    def replace_adamw(self, optimizer: Optimizer) -> Optimizer:
        """Make LaProp in place of an AdamW. Raises ValueError as LaPropOptimizer."""
        return LaPropOptimizer(super().replace_adamw(optimizer))


class LaPropOptimizer(BorrowedGroups):
    """Replace `optimizer`, an AdamW, by LaProp on its groups, so that the job's schedule sets the rates.

    Settings are read from the groups in each step. Raises ValueError unless the optimizer is an AdamW, or an Adam without weight decay.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            if group["amsgrad"] or group["maximize"]:
                raise ValueError("laprop has neither amsgrad nor maximize; make the job's optimizer without")
            if group["weight_decay"] and not group["decoupled_weight_decay"]:
                raise ValueError("laprop decays weights as AdamW does, and this Adam decays gradients; use AdamW")
        super().__init__(optimizer)

    def update_(self, parameter: Tensor, grad: Tensor, group: dict[str, Any], number: int) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state.update(t=0, m=torch.zeros_like(parameter), v=torch.zeros_like(parameter))
        state["t"] += 1
        t, m, v = state["t"], state["m"], state["v"]
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (v / (1 - beta2**t)).sqrt_().add_(group["eps"])
        m.mul_(beta1).addcdiv_(grad, root, value=(1 - beta1) * group["lr"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(m, alpha=1 / (1 - beta1**t))


def beta2_of_steps(given: float | None, adamw: float) -> float:
    """Compute the beta2 of `steps(beta2=given)/SCHEME` with an AdamW whose beta2 is `adamw`."""
    return AdamWRule(rate=0.0, decay=0.0, beta1=0.0, beta2=adamw, eps=1.0).remembers(given)


def beta2_described(given: float | None) -> float | str:
    """Describe the beta2 of exchanged steps with any AdamW: the number, or the rule."""
    return f"at least {beta2_of_steps(None, 0.0)}" if given is None else float(given)
