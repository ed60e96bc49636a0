"""The options of `attach(exchange=...)`: Steps, LocalSteps and DiLoCo's outer optimizer."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.runtime.comparison import CHECK_WEIGHTS_EVERY

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]

_BUCKET_MB = 25.0
_FORGOTTEN = 0.03  # the largest share of the residual that a step drops if elements are left out


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of all step methods, the same on all ranks. Raises ValueError for a value out of range."""

    keep: float | None = (
        0.0  # in [0, 1], the share of unsent changes that stays in a rank's own weights; None: see `keep_for`
    )
    bucket_mb: float | None = (
        _BUCKET_MB  # megabytes of a bucket; None: one bucket if the scheme sends every element, else 25
    )
    check_weights_every: int = CHECK_WEIGHTS_EVERY  # steps between two comparisons of the common weights, 0: never

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise ValueError(
                f"keep must be in [0, 1], the share of unsent changes that stays in a rank's own weights, got {self.keep}"
            )
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0 megabytes, got {self.bucket_mb}")

    def keep_for(self, scheme: Scheme) -> float:
        """Choose `keep` to suit the scheme if it is None."""
        return self.keep or 0.0

    def megabytes_for(self, scheme: Scheme) -> float:
        """Choose `bucket_mb` to suit the scheme if it is None."""
        if self.bucket_mb is not None:
            return self.bucket_mb
        return _BUCKET_MB if scheme.leaves_out or not scheme.has_residual else math.inf

    def described(self) -> dict[str, object]:
        """Give the options by name, as ranks compare them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Steps(StepOptions):
    """Exchange an optimizer's steps, or gradients over common scales, at every step: `sparsync.attach(..., exchange=Steps())`.

    The same settings on all ranks. For AdamW, Adam without weight decay, and Muon. Raises ValueError for a value out of range.

    Args:
        keep: in [0, 1], the share of unsent changes that stays in a rank's own weights. None: 0.2 if the scheme leaves elements out or the
            optimizer is Muon, else 0.5. With 0 and every element sent, gradients over common scales are exchanged.
        block: adjacent elements with one ratio, or scales relative to their mean.
        measure_every: steps between two measurements of the ratio. A measurement all-reduces 2 bytes per block beside the step, or 4, with
            what averages second moments, except with Muon or common scales. It serves from the next step on, the first one from its own
            on. The first 8 steps all measure.
        beta2: in [0, 1), of the second moments. None: AdamW's, and at least 0.999, because rare rows and one rank's gradients are noisy;
            for Muon, which has none, 0.95.
        decay: in [0, 1], the share of the residual that stays from step to step. None: 1 if the scheme sends all elements, else 1 minus
            the share that it sends, and at least 0.97, so that elements are forgotten no faster than they are sent. A `decay` of the
            scheme itself takes precedence.
        bucket_mb: megabytes of a bucket. None: the whole model in one bucket if the scheme sends every element, else 25.
        check_weights_every: steps between two comparisons of a digest of the common weights, 0: never.
    """

    keep: float | None = None
    bucket_mb: float | None = None
    block: int = 64
    measure_every: int = 8
    beta2: float | None = None
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta2 is not None and not 0 <= self.beta2 < 1:
            raise ValueError(
                f"beta2 must be in [0, 1), or None for the optimizer's and at least 0.999, got {self.beta2}"
            )
        if self.decay is not None and not 0 <= self.decay <= 1:
            raise ValueError(f"decay must be in [0, 1], the share of the residual that a step keeps, got {self.decay}")
        if self.block < 1:
            raise ValueError(f"block must be at least 1 element, got {self.block}")
        if self.measure_every < 1:
            raise ValueError(f"measure_every must be at least 1 step, got {self.measure_every}")

    def keep_for(self, scheme: Scheme, muon: bool = False) -> float:
        """Choose `keep` to suit the scheme, and Muon if it makes some of the steps, if it is None."""
        if self.keep is None:
            return 0.2 if scheme.leaves_out or muon else 0.5
        return float(self.keep)

    def common_for(self, scheme: Scheme, muon: bool) -> bool:
        """Tell whether second moments are the mean gradients': if every element is sent, without own weights and without Muon.

        Muon ended nearer to dense with steps made of a rank's own second moments (docs/log.md, "Gradients over common scales").
        """
        return not self.keep_for(scheme, muon) and not scheme.leaves_out and not muon

    def decay_for(self, scheme: Scheme) -> float:
        """Choose `decay` to suit a scheme without inner schemes if it is None."""
        if self.decay is None:
            return 1 - min(_FORGOTTEN, scheme.share_sent) if scheme.leaves_out else 1.0
        return float(self.decay)


@dataclass(frozen=True)
class OuterSGD:
    """Make the outer optimizer of DiLoCo: SGD with momentum on the common weights, with the mean change as its gradient."""

    rate: float = 0.7  # DiLoCo's; 1 without momentum equals no outer optimizer
    momentum: float = 0.9  # DiLoCo's
    nesterov: bool = True  # DiLoCo's

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Make the optimizer of these parameters."""
        return torch.optim.SGD(
            parameters, lr=self.rate, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0
        )


@dataclass(frozen=True, kw_only=True)
class LocalSteps(StepOptions):
    """Exchange weight changes every few steps: `sparsync.attach(..., exchange=LocalSteps(every=32))`, the same on all ranks.

    For one or several optimizers of any kind. Raises ValueError for a value out of range.

    Args:
        every: the steps between two exchanges, H.
        keep: in [0, 1], the share of unsent changes that stays in a rank's own weights.
        outer: None, `OuterSGD(...)`, or a function that makes a torch optimizer of a list of parameters, the common weights.
        fragments: parts of the parameters, exchanged in turn at steps spread evenly over `every`.
        delay: in [0, every], the steps until the result is applied; training goes on meanwhile.
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
    """Write an outer optimizer's class and settings as text."""
    made = outer([nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"outer must make a torch optimizer of a list of parameters, it made a {type(made).__name__}")
    return f"{type(made).__name__}({', '.join(f'{name}={value!r}' for name, value in made.defaults.items())})"
