"""What `attach` takes to exchange weight changes every few steps: LocalSteps, and DiLoCo's outer optimizer."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from sparsync.exchanges.steps_options import StepOptions

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class OuterSGD:
    """Make the outer optimizer of DiLoCo: SGD with momentum on the common weights, with the mean change as its gradient."""

    rate: float = 0.7  # DiLoCo's; 1 without momentum is no outer optimizer
    momentum: float = 0.9  # DiLoCo's
    nesterov: bool = True  # DiLoCo's

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer of these parameters."""
        return torch.optim.SGD(
            parameters, lr=self.rate, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0
        )


@dataclass(frozen=True, kw_only=True)
class LocalSteps(StepOptions):
    """Exchange weight changes every few steps: what `sparsync.attach(..., exchange=LocalSteps(every=32))` takes, the same on all ranks.

    For every optimizer, and for several. Raises ValueError for a value out of range.

    Args:
        every: the steps between two exchanges, H.
        keep: in [0, 1], the part of what a rank has not sent that stays in its own weights.
        outer: None, `OuterSGD(...)`, or a function that makes a torch optimizer of a list of parameters, here the common weights.
        fragments: parts of the parameters, exchanged in turn at steps spread evenly over `every`.
        delay: in [0, every], the steps after which the result is applied; computing goes on meanwhile.
        mixing: how a delayed result is combined with the current weights, see `LocalTraining.step`.
        clip_factor: of `handle.clip_grad_norm_`: the ratio of the norms of local and mean gradient. None: sqrt(P), as for pure noise.
        bucket_mb: megabytes of a bucket.
        check_weights_every: steps between two comparisons of a digest of the common weights, made with the next exchange of the first
            fragment, 0: never.
    """

    every: int
    keep: float = 0.5
    outer: MakeOptimizer | None = None
    fragments: int = 1
    delay: int = 0
    mixing: float | None = None
    clip_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("every", "fragments", "delay"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name)!r}")
        if self.every < 1:
            raise ValueError(f"every must be at least 1 step, got {self.every}")
        if not 1 <= self.fragments <= self.every:
            raise ValueError(f"fragments must be in [1, every={self.every}], got {self.fragments}")
        if not 0 <= self.delay <= self.every:
            raise ValueError(f"delay must be in [0, every={self.every}] steps, got {self.delay}")
        if self.mixing is not None and not 0 <= self.mixing < 1:
            raise ValueError(f"mixing must be in [0, 1), the part of a rank's own weights, or None, got {self.mixing}")
        if self.clip_factor is not None and not self.clip_factor > 0:
            raise ValueError(f"clip_factor must be above 0, or None for sqrt(P), got {self.clip_factor!r}")

    def described(self) -> dict[str, object]:
        return {**super().described(), "outer": None if self.outer is None else _described(self.outer)}


def _described(outer: MakeOptimizer) -> str:
    """Return an outer optimizer's class and settings as text."""
    made = outer([nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"outer must make a torch optimizer of a list of parameters, it made a {type(made).__name__}")
    return f"{type(made).__name__}({', '.join(f'{name}={value!r}' for name, value in made.defaults.items())})"
