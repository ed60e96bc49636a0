"""The constants by which the programs of Ok-Topk's authors scale their thresholds between evaluations (arXiv 2201.07598)."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

Program = Literal["vgg", "lstm", "bert"]


@dataclass(frozen=True)
class Scaling:
    """Factors for a threshold that selects fewer or more elements than a band, in multiples of k."""

    band: tuple[Fraction, Fraction]
    lowered_by: float
    raised_by: float


@dataclass(frozen=True)
class Constants:
    """The constants of one of the authors' programs."""

    local: Scaling  # of th_loc
    overall: Scaling  # of th_glob
    tightened_above: Fraction | None  # times k selected elements; None: never
    imbalance: float  # infinite: never balances; 1: always


CONSTANTS: dict[Program, Constants] = {
    "vgg": Constants(
        Scaling((Fraction(2, 3), Fraction(5, 4)), 1.012, 1.012),
        Scaling((Fraction(2, 3), Fraction(4, 3)), 1.008, 1.008),
        Fraction(4, 3),
        math.inf,
    ),
    "lstm": Constants(
        Scaling((Fraction(3, 4), Fraction(5, 4)), 1.012, 1.012),
        Scaling((Fraction(3, 4), Fraction(5, 4)), 1.01, 1.008),
        Fraction(3, 2),
        math.inf,
    ),
    "bert": Constants(
        Scaling((Fraction(4, 5), Fraction(5, 4)), 1.025, 1.025),
        Scaling((Fraction(4, 5), Fraction(5, 4)), 1.036, 1.025),
        None,
        1.0,
    ),
}


def scaled(threshold: float, count: int, k: int, scaling: Scaling) -> float:
    """Scale a threshold that selected `count` elements, for the next step."""
    low, high = scaling.band
    if count < low * k:
        return threshold / scaling.lowered_by
    return threshold * scaling.raised_by if count > high * k else threshold
