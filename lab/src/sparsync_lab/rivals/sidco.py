"""SIDCo: the threshold of a top-k selection is estimated from a sparsity-inducing distribution, in stages (arXiv 2101.10761).

Stage 1 fits a distribution to the magnitudes and takes the threshold that a quarter of them reach. Each further stage fits the excess
of those that reach it, so that in the end the asked share does. The number of stages M adapts: every 5 steps, one stage less
where over 20 % more were selected than asked for, one more where over 20 % fewer were; the other way round from then on where that
brought the selection no nearer. With m and v, mean and variance of a stage's magnitudes, and r the share that is to reach its threshold:

    "exponential"    -m ln r                                                  SIDCo-E
    "pareto"         a (1 - r^c) / c,  c = (m^2/v - 1)/2, a = m (m^2/v + 1)/2   SIDCo-P, generalised Pareto by moments
    "gamma_pareto"   stage 1: the quantile of a gamma distribution of shape b,    SIDCo-GP; then as "pareto"
                     b = (3 - s + sqrt((s-3)^2 + 24 s)) / (12 s), s = ln m - mean(ln x)

Differs from the paper: the gamma quantile is computed, not approximated; magnitudes are divided by their largest, not by their
norm; selections are gathered without padding; what equals the threshold is selected; NaN and Inf are noticed, by the message that
holds the counts. As in the authors' code, the stages of each rank are its own, and the direction of a change may turn; here it also turns
at one stage and at the most, ceil(log2(1/d)).
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Update
from sparsync.comm.plan import Given, Plan
from sparsync.core import check_density, count_for
from sparsync.feedback import Residuals
from sparsync.wire import Values, check_values
from sparsync_lab.rivals.above_threshold import gather_above, gather_above_planned

Distribution = Literal["exponential", "pareto", "gamma_pareto"]
FIRST_SHARE = 0.25  # of the elements reach the threshold of stage 1, where there are more stages
WINDOW = 5  # steps between two changes of the number of stages
TOLERANCE = 0.2  # of the mean selection, relative to what was asked for
_SMALLEST = 2.0**-52  # added to magnitudes before their logarithm, relative to the largest


@dataclass
class Stages:
    """How many stages one rank uses for a bucket, and what the last steps selected."""

    count: int = 1
    direction: int = 1  # of the next change where too few are selected; -1: there one stage less
    ratio: float = 0.0  # selected over asked, in the last window; 0 before its end
    steps: int = 0  # of this window
    selected: int = 0  # in these steps, together

    def accept(self, selected: int, k: int, most: int) -> None:
        """End a step that selected `selected` elements where `k` were asked for; there are at most `most` stages."""
        self.steps += 1
        self.selected += selected
        if self.steps < WINDOW:
            return
        ratio, last = self.selected / (self.steps * k), self.ratio
        self.ratio, self.steps, self.selected = ratio, 0, 0
        if abs(ratio - 1) <= TOLERANCE:
            return
        if last and abs(ratio - 1) >= abs(last - 1):
            self.direction = -self.direction
        change = self.direction if ratio < 1 else -self.direction
        if not 1 <= self.count + change <= most:
            self.direction, change = -self.direction, -change
        self.count = max(1, min(most, self.count + change))


@dataclass
class SIDCo(ErrorFeedbackScheme):
    """Send as topk, by the threshold of an exponential, gamma or Pareto distribution (arXiv 2101.10761).

    Each rank sends to all what reaches its threshold for `density`; the mean divides the sum by P. NaN or Inf on any rank makes every
    gradient NaN, and changes nothing else.
    """

    density: float = 0.01  # share of elements each rank asks for
    distribution: Distribution = "exponential"  # that of magnitudes; the three of the paper
    stages: int | None = None  # None: adapted every 5 steps, from 1 on
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "sidco"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.state = self.own_state("stages", Stages)
        check_density(self.density)
        check_values(self.values)
        if self.distribution not in get_args(Distribution):
            raise ValueError(
                f"distribution must be one of {', '.join(get_args(Distribution))}, got {self.distribution!r}"
            )
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"stages must be at least 1, or None to adapt them, got {self.stages}")

    @classmethod
    def published(cls, density: float = 0.001, distribution: Distribution = "exponential") -> Self:
        """Return the same: the rule is the published one."""
        return cls(density, distribution)

    def planned(self, given: Given) -> Plan:
        return gather_above_planned(
            given, self.density, self.values, self.residual_nbytes(given), 2 + (self.stages or 1)
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        state = self.state.of(bucket, comm.size)
        count, k = self.stages or state.count, count_for(self.density, bucket.grad.numel())
        most = max(1, math.ceil(-math.log2(self.density)))
        return gather_above(
            acc,
            lambda x: estimate(x.abs(), self.density, count, self.distribution),
            self.values,
            bucket,
            comm,
            {"stages": count},
            lambda selected: state.accept(selected, k, most),
        )


def estimate(size: Tensor, density: float, stages: int, distribution: Distribution) -> float:
    """Return a threshold that about density * n of the magnitudes `size` [n] reach."""
    # A host sync. Shares of the largest magnitude, whose squares are finite.
    largest = float(size.max())
    if not largest:
        return 0.0
    tail, base, threshold = size.double() / largest, 0.0, 0.0
    for stage, share in enumerate(_shares(density, stages)):
        if stage:
            tail = tail[tail > threshold]
            if tail.numel() < 2:  # nothing to fit
                break
            base = float(tail.min())
        fitted = "pareto" if stage and distribution == "gamma_pareto" else distribution
        threshold = base + _reached_by(share, tail - base, fitted)
    return threshold * largest


def _shares(density: float, stages: int) -> list[float]:
    """Return which share of its magnitudes reaches the threshold of each stage; their product is `density`."""
    if stages == 1 or density >= FIRST_SHARE:
        return [density]
    return [FIRST_SHARE, *[(density / FIRST_SHARE) ** (1 / (stages - 1))] * (stages - 1)]


def _reached_by(share: float, x: Tensor, distribution: Distribution) -> float:
    """Return what `share` of the magnitudes `x` [m] reach by the distribution fitted to them."""
    mean = float(x.mean())
    if distribution == "exponential":
        return -mean * math.log(share)
    if distribution == "pareto":
        variance = float((x - mean).square().mean())
        return _pareto(share, mean, variance) if variance else mean
    s = math.log(mean) - float((x + _SMALLEST).log().mean())
    return _gamma(share, mean, s) if s > 0 else mean


def _pareto(share: float, mean: float, variance: float) -> float:
    """Return what `share` of a generalised Pareto distribution of this mean and variance is above."""
    ratio = mean * mean / variance
    scale, shape = 0.5 * mean * (ratio + 1), 0.5 * (ratio - 1)
    if abs(shape) < 1e-9:  # exponential, its limit
        return -scale * math.log(share)
    return -scale * math.expm1(shape * math.log(share)) / shape


def _gamma(share: float, mean: float, s: float) -> float:
    """Return what `share` of a gamma distribution is above, of this mean and this s = ln mean - mean of logarithms."""
    shape = (3 - s + math.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    low, high = 0.0, max(1.0, shape)
    while _above(high, shape) > share:
        low, high = high, 2 * high
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _above(middle, shape) > share else (low, middle)
    return mean / shape * high


def _above(x: float, shape: float) -> float:
    """Return the probability that a gamma variable of this shape and scale 1 exceeds x."""
    pair = torch.tensor([shape, x], dtype=torch.float64, device="cpu")
    return float(torch.special.gammaincc(pair[0], pair[1]))
