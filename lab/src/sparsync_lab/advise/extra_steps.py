"""How many times as many steps a method needs for dense's quality, from how it makes the weights deviate on recorded gradients.

The curve is fitted to trainings of this package's own jobs, which are in extra_steps.toml beside this file: of each, the deviation that
`replay` measures on its recorded gradients, and the factor that the whole training came to. `python -m studies extra_steps` makes the file.

    log(factor) = a max(0, -log(progress)) + b scatter^2

with one pair (a, b) for optimizers that divide by second moments, and one for the others: of the same gradients Adam makes other steps.
For the former b is 0: their steps are scattered anyway, and with the term the trainings of `gpt` came out worse.
What it leaves out: a method that lets the ranks' weights differ (local steps) shows its cost only in gradients that were computed there;
learning rates other than the job's own; trainings much longer than those of the file.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np

from sparsync_lab.advise.replay import Deviation
from sparsync_lab.predict.advice import Extra
from sparsync_lab.toml import tomllib

SHARE = 0.8  # of the fitted trainings are within the interval
SLOWEST = 0.01  # the smallest progress distinguishable from zero
LEAST = 0.05  # what the logarithm of a factor is uncertain by at least, in proportion to which residuals count


@dataclass(frozen=True)
class Training:
    """A training that was done to its end beside dense ones of several lengths, and the deviation on its recorded gradients."""

    job: str
    method: str
    adaptive: bool  # the optimizer divides by second moments
    progress: float
    scatter: float
    factor: float

    @property
    def features(self) -> tuple[float, float]:
        lag, scatter = _features(self.progress, self.scatter)
        return lag, 0.0 if self.adaptive else scatter


@dataclass(frozen=True)
class FittedCurve:
    """The fitted curve of one kind of optimizer, and the residuals of its trainings, each by a curve fitted to the other jobs."""

    a: float
    b: float
    residuals: tuple[float, ...]  # log(factor) less the prediction, sorted

    def extra(self, deviation: Deviation) -> Extra:
        """Return the factor, at least 1, and the interval of the residuals' quantiles."""
        lag, scatter = _features(deviation.progress, deviation.scatter)
        expected = self.a * lag + self.b * scatter
        below, above = np.quantile(self.residuals or (0.0,), ((1 - SHARE) / 2, (1 + SHARE) / 2))
        # Residuals grow with what is predicted.
        width = LEAST + expected
        low, high = expected + min(0.0, below) * width, expected + max(0.0, above) * width
        return Extra(math.exp(expected), math.exp(max(0.0, low)), math.exp(high))


@lru_cache(maxsize=1)
def trainings() -> tuple[Training, ...]:
    """Return the trainings of the file."""
    content = tomllib.loads(files("sparsync_lab.advise").joinpath("extra_steps.toml").read_text("utf-8"))
    return tuple(Training(**each) for each in content["training"])


@lru_cache(maxsize=2)
def curve(adaptive: bool) -> FittedCurve:
    """Return the curve for optimizers of this kind. Raises ValueError where no training is of it."""
    own = [each for each in trainings() if each.adaptive == adaptive]
    if not own:
        raise ValueError(
            "extra_steps.toml has no training with an optimizer of this kind; make it by python -m studies extra_steps"
        )
    a, b = fitted(own)
    return FittedCurve(a, b, tuple(sorted(residual for _, residual in held_out(own))))


def held_out(own: Sequence[Training]) -> list[tuple[Training, float]]:
    """Return each training with its residual, in units of the prediction's width, by a curve that was fitted without its job.

    Where there is one job only, without its own method.
    """
    jobs = {each.job for each in own}
    found = []
    for each in own:
        rest = [other for other in own if (other.job != each.job if len(jobs) > 1 else other.method != each.method)]
        expected = predicted(each, fitted(rest))
        found.append((each, (math.log(each.factor) - expected) / (LEAST + expected)))
    return found


def predicted(training: Training, coefficients: Sequence[float]) -> float:
    """Return the logarithm of the factor."""
    return float(np.dot(coefficients, training.features))


def fitted(own: Iterable[Training]) -> tuple[float, float]:
    """Return (a, b) by least squares of the logarithm: of both, or of one alone where the other would be below 0."""
    trainings = list(own)
    features = np.array([each.features for each in trainings])  # [trainings, 2]
    logarithms = np.log([max(1.0, each.factor) for each in trainings])
    both = np.linalg.lstsq(features, logarithms, rcond=None)[0]
    alone = [np.linalg.lstsq(features * kept, logarithms, rcond=None)[0].clip(min=0) for kept in ((1, 0), (0, 1))]
    found = [both] if min(both) >= 0 else alone
    a, b = min(found, key=lambda each: float(np.square(features @ each - logarithms).sum()))
    return float(a), float(b)


def _features(progress: float, scatter: float) -> tuple[float, float]:
    return max(0.0, -math.log(max(progress, SLOWEST))), scatter**2
