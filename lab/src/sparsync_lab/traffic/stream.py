"""Gradients to try schemes on, step by step and rank by rank: drawn from a seed, or recorded from a training."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync import Span
from sparsync.core import ParameterSpan, generator

JUMP = 10.0  # how many times as large gradients become at the jump
FORMAT = "sparsync gradients 1"
MOST_NUMBERS = 2**32  # of all ranks' gradients in a step

_LAYERS = 12  # at most; fewer where the smallest would have under _SMALLEST elements
_SMALLEST = 16
_GROWTH = 1.6  # from a layer to the next larger one
_SIGNAL_STEPS = 20  # in which the signal changes into an independent one
_SCALE_STEPS = 400  # the same for the drift of the scales
_DRIFT = 0.5  # standard deviation of the drift of a scale's logarithm


class Stream(Protocol):
    """A source of gradients: at every step one for each rank, all of the same parameters."""

    @property
    def ranks(self) -> int: ...

    @property
    def layout(self) -> tuple[ParameterSpan, ...]: ...

    def gradients(self, step: int) -> list[Tensor]:
        """Return one float32 gradient [n] for each rank, for reading only."""
        ...


@dataclass(frozen=True)
class Synthetic:
    """Gradients of an imaginary network: layers of very different size and scale, heavy tails, and ranks with a common signal.

    One rank's gradient is scale * (sqrt(signal) * common + sqrt(1 - signal) * own), with common and own of unit variance and Student's t
    with 4 degrees of freedom. The common signal changes into another within 20 steps. Every parameter has its own scale, e^N(0, 1),
    which drifts by about a half of its size within 400 steps. At step 0 a gradient's root of the expected squared norm is 1, as the start
    thresholds of MiCRO and ExDyna suppose. All of it is a function of (seed, rank, step): rank r's gradient does not depend on P.
    """

    ranks: int
    elements: int
    seed: int = 0
    jump: int | None = None  # the step from which on everything is 10 times as large
    signal: float = 0.2  # share of a rank's energy that all ranks have in common
    _drawn: dict[int, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("ranks", self.ranks), ("elements", self.elements)):
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.ranks * self.elements > MOST_NUMBERS:
            raise ValueError(
                f"--ranks times --elements must be at most {MOST_NUMBERS:,}, as all gradients of a step are held in memory, "
                f"got {self.ranks} x {self.elements}"
            )
        if self.jump is not None and self.jump < 1:
            raise ValueError(f"--jump must be a step from 1 on, got {self.jump}")
        if not 0 <= self.signal <= 1:
            raise ValueError(f"signal must be in [0, 1], the share all ranks have in common, got {self.signal}")

    @property
    def layout(self) -> tuple[ParameterSpan, ...]:
        return layers(self.elements, self.seed)

    def gradients(self, step: int) -> list[Tensor]:
        common = self._common(step).mul(math.sqrt(self.signal))  # [n]
        scale = self._scale(step)  # [n]
        own = (heavy_tailed(self.elements, self.seed, f"noise{rank}", step) for rank in range(self.ranks))
        return [each.mul_(math.sqrt(1 - self.signal)).add_(common).mul_(scale) for each in own]

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
        return (now * (JUMP if self.jump is not None and step >= self.jump else 1.0)).repeat_interleave(lengths)


@dataclass(frozen=True)
class Recorded:
    """Gradients of a training, as `record` wrote them."""

    values: Float[Tensor, "T P n"]
    layout: tuple[ParameterSpan, ...]
    job: str
    seed: int
    every: int  # training steps from one recorded step to the next

    @property
    def ranks(self) -> int:
        return self.values.shape[1]

    @property
    def steps(self) -> int:
        return self.values.shape[0]

    def gradients(self, step: int) -> list[Tensor]:
        return list(self.values[step].float())


def recorded(path: Path) -> Recorded:
    """Return the gradients in `path`, mapped into memory. Raises ValueError where it is not a file of `sparsync gradients`."""
    if not path.is_file():
        raise ValueError(f"--gradients: there is no file {path}; `sparsync gradients --out {path}` makes one")
    try:
        found: Any = torch.load(path, weights_only=True, mmap=True)  # Any: any object in a file
    except Exception as error:  # torch raises many kinds for a file that it did not write
        raise ValueError(f"--gradients: {path} cannot be read ({error}); make it by `sparsync gradients`") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"--gradients: {path} is not a file of `sparsync gradients`, which have the format {FORMAT!r}")
    try:
        return from_record(found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"--gradients: {path} is damaged ({error!r}); make it again by `sparsync gradients`"
        ) from error


def from_record(found: Mapping[str, Any]) -> Recorded:  # Any: as `record` returns
    """Return the gradients that `record` has recorded. Raises ValueError, LookupError and the like for anything else."""
    layout = tuple(ParameterSpan(name, Span(start, stop)) for name, start, stop in found["layout"])
    values, about = found["gradients"], found["about"]
    T, P, n = values.shape
    stops = [0, *(each.span.stop for each in layout)]
    covered = [each.span.start for each in layout] == stops[:-1] and stops == sorted(stops) and stops[-1] == n
    # One that is not contiguous may be far larger than its file.
    if not (T and P and n and covered and values.is_floating_point() and values.is_contiguous()):
        raise ValueError(f"{T} steps of {P} ranks with {n} elements, of parameters that end at {stops[-1]}")
    return Recorded(values, layout, about["workload"], about["seed"], about["every"])


def layers(n: int, seed: int) -> tuple[ParameterSpan, ...]:
    """Return parameters "layer0.weight", "layer0.bias", ... of `n` elements in total; sizes grow geometrically, their order is drawn.

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
    """Return `n` numbers, float32, of Student's t distribution with 4 degrees of freedom, scaled to unit variance.

    Its quantile function is closed: t(u) = sign(u - 1/2) 2 sqrt(cos(arccos(sqrt a) / 3) / sqrt a - 1) with a = 4 u (1 - u).
    """
    u = torch.rand(n, generator=generator(seed, f"traffic/{key}", step))
    u.clamp_(min=2**-25)  # never 0, whose quantile is infinite
    root = (u * (1 - u)).mul_(4).sqrt_()
    size = root.acos().div_(3).cos_().div_(root).sub_(1).clamp_(min=0).sqrt_()
    return size.mul_(math.sqrt(2)).copysign_(u.sub_(0.5))


def _between(draw: Callable[[int], Tensor], step: int, period: int) -> Tensor:
    """Return a mixture of two successive draws that changes from one into the other within `period` steps, at constant variance."""
    number, rest = divmod(step, period)
    angle = math.pi / 2 * rest / period
    return draw(number).mul(math.cos(angle)).add_(draw(number + 1), alpha=math.sin(angle))
