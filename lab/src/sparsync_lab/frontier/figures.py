"""Compute the numbers of a study: a row per method at its best learning rate, for each number of ranks and steps."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparsync.base import registry
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.study import FrontierStudy
from sparsync_lab.report.summary import behind
from sparsync_lab.scheme_choice import LAB_SCHEMES, SchemeChoice

Kind = Literal["baseline", "published", "ours", "your own"]

BASELINES = ("dense", "bf16", *LAB_SCHEMES.values())
# metric -> unit of the loss: ln(perplexity), or the metric itself
LOSSES = {"perplexity": "nats", "bits per byte": "bits per byte"}
OURS = ("two_shot", "in_turn", "exact_micro", "exact_exdyna", "exact_oktopk", "auto_protect")


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, with the lowest and highest value."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with half the width of its 95 % interval (Student's t); None with one seed."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class MethodRow:
    """One method at its best rate. Traffic is per rank and step, averaged over seeds."""

    label: str
    kind: Kind
    rate: float
    edge: bool  # the rate is the lowest or highest of several, so a better one may lie beyond
    bits: float  # per parameter
    rounds: float
    union: float
    end: Mean  # quality
    behind: Mean  # percent behind dense at its best rate, seed by seed, at the end; for bits per byte, of a byte's perplexity
    broken: str = ""  # why it is no result: "exchanged nothing", or "failed: " and the cause
    loss_behind: Interval | None = None  # excess over dense's loss, seed by seed; None for a metric without a loss
    behind_best: float | None = None  # percent behind the best of dense, adamw and laprop; None without the last two


@dataclass(frozen=True)
class Panel:
    """All methods for one number of ranks and steps, sorted by the bits they send."""

    ranks: int
    steps: int
    seeds: int
    rows: tuple[MethodRow, ...]
    dense_deviation: float | None = None  # standard deviation of dense's loss over seeds


def panels(study: FrontierStudy, finished: Mapping[Key, Finished], lower: bool, metric: str = "") -> tuple[Panel, ...]:
    """Compute the panels of a complete study. Losses are compared if the job's `metric` is in `LOSSES`."""
    return tuple(_panel(study, finished, ranks, steps, lower, metric) for ranks in study.ranks for steps in study.steps)


def _panel(
    study: FrontierStudy, finished: Mapping[Key, Finished], ranks: int, steps: int, lower: bool, metric: str
) -> Panel:
    rates: dict[str, tuple[float, bool]] = {}  # the best, and whether it is the lowest or highest of several
    trainings: dict[str, list[Finished]] = {}  # at the best rate
    for choice in study.schemes:
        tried, rate = study.tried(finished, choice.label, ranks, steps, lower)
        assert rate is not None  # the study is complete
        rates[choice.label] = rate, len(tried) > 1 and rate in (tried[0], tried[-1])
        keys = [study.key(choice.label, ranks, steps, seed, rate) for seed in study.seeds]
        trainings[choice.label] = [finished[key] for key in keys]
    ends = {label: [each.end for each in trained] for label, trained in trainings.items()}
    others = [each.label for each in study.schemes if each.local is None and each.name in LAB_SCHEMES.values()]
    best = _first(ends, ["dense", *others], lower)
    losses = {label: _losses(values, metric) for label, values in ends.items()} if metric in LOSSES else {}

    def percent(label: str, base: str) -> Mean:
        pairs = zip(ends[label], ends[base], strict=True)
        if metric == "bits per byte":  # 2 to their power is the perplexity of a byte
            pairs = ((2**one, 2**other) for one, other in pairs)
        return _mean([behind(*pair, lower) for pair in pairs])

    def row(choice: SchemeChoice) -> MethodRow:
        label, trained = choice.label, trainings[choice.label]
        return MethodRow(
            label,
            kind(choice),
            *rates[label],
            bits=statistics.fmean(each.bits for each in trained),
            rounds=statistics.fmean(each.trained.rounds for each in trained),
            union=statistics.fmean(each.trained.union for each in trained),
            end=_mean(ends[label]),
            behind=percent(label, "dense"),
            broken=_broken(trained),
            loss_behind=interval(_gaps(losses[label], losses["dense"])) if losses else None,
            behind_best=percent(label, best).mean if others else None,
        )

    rows = sorted(map(row, study.schemes), key=lambda row: (row.bits, row.behind.mean))
    dense = losses.get("dense", [])
    deviation = statistics.stdev(dense) if len(dense) > 1 and all(map(math.isfinite, dense)) else None
    return Panel(ranks, steps, len(study.seeds), tuple(rows), deviation)


def interval(values: Sequence[float]) -> Interval:
    """Compute the mean and its 95 % interval (Student's t); no interval for a single value or if any is not finite."""
    if not all(map(math.isfinite, values)):
        return Interval(math.inf if math.inf in values else math.nan, None)
    mean, free = statistics.fmean(values), len(values) - 1
    if not free:
        return Interval(mean, None)
    return Interval(mean, _t_quantile(free) * statistics.stdev(values) / math.sqrt(len(values)))


def within(t: float, free: int) -> float:
    """Compute the probability that |T| < t, for Student's T with `free` degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle, odd = math.atan(t / math.sqrt(free)), free % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(odd, free - 1, 2):  # of the cosine
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _t_quantile(free: int) -> float:
    """Find the t with `within(t, free)` = 95 %, by bisection."""
    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, free) < 0.95 else (low, middle)
    return low


def _first(ends: Mapping[str, Sequence[float]], labels: Sequence[str], lower: bool) -> str:
    """Pick the label with the best mean quality; NaN counts as worst."""
    means = {label: statistics.fmean(ends[label]) for label in labels}
    worst = math.inf if lower else -math.inf
    return (min if lower else max)(labels, key=lambda label: worst if math.isnan(means[label]) else means[label])


def _gaps(losses: Sequence[float], dense: Sequence[float]) -> list[float]:
    return [
        one - other if math.isfinite(other) and not math.isnan(one) else math.nan
        for one, other in zip(losses, dense, strict=True)
    ]


def _losses(ends: Sequence[float], metric: str) -> list[float]:
    return [math.log(each) if metric == "perplexity" and each > 0 else each for each in ends]


def _broken(trained: Sequence[Finished]) -> str:
    failed = [f"failed: {each.failed}" for each in trained if each.failed]
    nothing = ["exchanged nothing" for each in trained if each.trained.exchanges == 0]
    return (failed + nothing + [""])[0]


def kind(choice: SchemeChoice) -> Kind:
    """Classify a method by its scheme's name; schemes from a file, a module or another package are the user's."""
    if choice.local is None and choice.name in BASELINES:
        return "baseline"
    if choice.name in OURS:
        return "ours"
    return "published" if registry.where(choice.name).startswith(("sparsync.", "sparsync_lab.")) else "your own"


def _mean(values: Sequence[float]) -> Mean:
    if any(math.isnan(value) for value in values):
        return Mean(math.nan, math.nan, math.nan)
    return Mean(statistics.fmean(values), min(values), max(values))
