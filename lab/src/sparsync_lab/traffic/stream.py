"""Streams of gradients, by step and rank: drawn from a seed, or from a job that trains with the dense mean."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from sparsync.core import ParameterSpan, generator
from sparsync.schemes import Span
from sparsync_lab.workloads import one_process
from sparsync_lab.workloads.base import Workload, share

SIGNAL = 0.2  # share of a rank's energy that is common to all ranks
_LAYERS = 12  # at most; fewer if the smallest would have less than _SMALLEST elements
_SMALLEST = 16
_GROWTH = 1.6  # ratio of a layer's size to the next smaller one
_SIGNAL_STEPS = 20  # until the signal has changed into an independent one
_SCALE_STEPS = 400  # the same for the drift of the scales
_DRIFT = 0.5  # standard deviation of the drift of a scale's logarithm


class Stream(Protocol):
    """A source of gradients: one per rank at every step, all of the same parameters."""

    @property
    def ranks(self) -> int: ...

    @property
    def layout(self) -> tuple[ParameterSpan, ...]: ...

    def gradients(self, step: int) -> list[Tensor]:
        """Return one float32 gradient [n] per rank, for reading only."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Drawn gradients: layers of very different size and scale, heavy tails, and ranks with a common signal.

    A rank's gradient is scale * (sqrt(SIGNAL) * common + sqrt(1 - SIGNAL) * own). Common and own have unit variance and follow Student's t
    distribution with 4 degrees of freedom. The common signal changes into another within 20 steps. Every parameter has a scale, e^N(0, 1),
    that drifts by about half of its size within 400 steps. At step 0 a gradient's root of the expected squared norm is 1, as the start
    thresholds of MiCRO and ExDyna assume. All is a function of (seed, rank, step): rank r's gradient does not depend on P.
    """

    ranks: int
    elements: int
    seed: int = 0
    _drawn: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def layout(self) -> tuple[ParameterSpan, ...]:
        return layers(self.elements, self.seed)

    def gradients(self, step: int) -> list[Tensor]:
        common = self._common(step).mul(math.sqrt(SIGNAL))  # [n]
        scale = self._scale(step)  # [n]
        own = (heavy_tailed(self.elements, self.seed, f"noise{rank}", step) for rank in range(self.ranks))
        return [each.mul_(math.sqrt(1 - SIGNAL)).add_(common).mul_(scale) for each in own]

    def _common(self, step: int) -> Tensor:
        def signal(period: int) -> Tensor:
            if period not in self._drawn:
                for old in [key for key in self._drawn if key < period - 1]:
                    del self._drawn[old]
                self._drawn[period] = heavy_tailed(self.elements, self.seed, "signal", period)
            return self._drawn[period]

        return _between(signal, step, _SIGNAL_STEPS)

    def _scale(self, step: int) -> Tensor:
        lengths = torch.tensor([len(each.span) for each in self.layout])

        def drift(period: int) -> Tensor:
            return torch.randn(len(lengths), generator=generator(self.seed, "traffic/drift", period))

        first = torch.randn(len(lengths), generator=generator(self.seed, "traffic/scale", 0))
        start = (first + _DRIFT * drift(0)).exp()
        now = (first + _DRIFT * _between(drift, step, _SCALE_STEPS)).exp()
        now = now / (lengths * start.square()).sum().sqrt()
        return now.repeat_interleave(lengths)


class OfJob:
    """Gradients of a job that trains with the dense mean of all ranks; all compute their share of the batch on the same weights."""

    def __init__(self, workload: Workload, ranks: int, seed: int, steps: int) -> None:
        share(getattr(workload, "batch_size", ranks), 0, ranks)
        workload.prepare()
        self.workload, self.ranks, self.seed = workload, ranks, seed
        self.model = workload.model(seed)
        self.layout = one_process.layout(self.model)
        self._optimizer, self._schedule = workload.optimizer(self.model, steps)

    def gradients(self, step: int) -> list[Tensor]:
        """Compute the gradients of the next step, and train on their mean. Steps must be requested in order."""
        found = one_process.gradients(self.workload, self.model, self.seed, step, self.ranks)
        one_process.set_gradient(self.model, self.layout, torch.stack(found).mean(0))
        self.workload.clip(self.model)
        self._optimizer.step()
        self._schedule.step()
        return found


def layers(n: int, seed: int) -> tuple[ParameterSpan, ...]:
    """Make parameters "layer0.weight", "layer0.bias", ... of `n` elements in total, with geometrically growing sizes in a drawn order.

    A bias has as many elements as a square weight has rows.
    """
    count = _LAYERS
    while count > 1 and n * (_GROWTH - 1) / (_GROWTH**count - 1) < _SMALLEST:
        count -= 1
    share = [_GROWTH**place for place in range(count)]
    stops = [round(n * sum(share[: place + 1]) / sum(share)) for place in range(count)]
    sizes = [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
    layout: list[ParameterSpan] = []
    start = 0
    for number, place in enumerate(torch.randperm(count, generator=generator(seed, "traffic/order", 0)).tolist()):
        stop = start + sizes[place]
        bias = stop - (math.isqrt(sizes[place]) if sizes[place] > 1 else 0)
        layout += [
            ParameterSpan(f"layer{number}.weight", Span(start, bias)),
            ParameterSpan(f"layer{number}.bias", Span(bias, stop)),
        ]
        start = stop
    return tuple(layout)


def heavy_tailed(n: int, seed: int, key: str, step: int) -> Tensor:
    """Draw `n` float32 numbers from Student's t distribution with 4 degrees of freedom, scaled to unit variance.

    Its quantile function has a closed form: t(u) = sign(u - 1/2) 2 sqrt(cos(arccos(sqrt a) / 3) / sqrt a - 1) with a = 4 u (1 - u).
    """
    u = torch.rand(n, generator=generator(seed, f"traffic/{key}", step))
    u.clamp_(min=2**-25)  # the quantile of 0 is infinite
    root = (u * (1 - u)).mul_(4).sqrt_()
    size = root.acos().div_(3).cos_().div_(root).sub_(1).clamp_(min=0).sqrt_()
    return size.mul_(math.sqrt(2)).copysign_(u.sub_(0.5))


def _between(draw: Callable[[int], Tensor], step: int, period: int) -> Tensor:
    """Mix two successive draws, from one into the other within `period` steps, at constant variance."""
    number, rest = divmod(step, period)
    angle = math.pi / 2 * rest / period
    return draw(number).mul(math.cos(angle)).add_(draw(number + 1), alpha=math.sin(angle))
