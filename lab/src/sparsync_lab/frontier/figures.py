"""The numbers of a study: for each number of ranks and steps a row for each method, at its best learning rate."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparsync.base import registry
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.study import ORACLE, FrontierStudy
from sparsync_lab.report.summary import behind
from sparsync_lab.scheme_choice import LAB_SCHEMES, SchemeChoice

Kind = Literal["baseline", "published", "ours", "your own", "limit"]

BASELINES = ("dense", "bf16", LAB_SCHEMES["laprop"])
LOSSES = {
    "perplexity": "nats",
    "bits per byte": "bits per byte",
}  # metric -> unit of the loss: ln(perplexity), or itself
OURS = ("two_shot", "in_turn", "exact_micro", "exact_exdyna", "exact_oktopk", "auto_protect")

_T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and the lowest and highest."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, and half the width of its 95 % interval by Student's t distribution; None where there is none, as of one seed."""

    mean: float
    half: float | None


@dataclass(frozen=True)
class MethodRow:
    """One method at its best rate. Traffic is that of one rank in a step, over all seeds."""

    label: str
    kind: Kind
    rate: float
    edge: bool  # the rate is the first or the last of several, so a better one may lie beyond
    optimizer: str  # the name of the one that trained, and how many times the rate it takes
    bits: float  # for each parameter; 0 where a method has no cost, as a limit that cannot be reached
    nbytes: float
    rounds: float
    union: float
    end: Mean  # quality
    error: float | None  # the largest over seeds of its standard error over the validation data, where the job knows it
    behind: tuple[
        tuple[int, Mean], ...
    ]  # after how many steps, and percent behind dense at its best rate, seed by seed
    broken: str = ""  # why it is no result: "exchanged nothing", or "failed: " and the cause
    loss: float | None = None  # in the unit of `LOSSES`; None for another metric
    loss_behind: Interval | None = None  # more than dense's, seed by seed
    behind_best: float | None = None  # percent behind the better one of dense and laprop; None without laprop


@dataclass(frozen=True)
class Panel:
    """All methods with the same ranks and steps, those that send least first."""

    ranks: int
    steps: int
    seeds: int
    rows: tuple[MethodRow, ...]
    dense_deviation: float | None = None  # standard deviation of dense's loss over seeds


def panels(
    study: FrontierStudy,
    finished: Mapping[Key, Finished],
    lower: bool,
    ours: Sequence[str] = OURS,
    metric: str = "",
) -> tuple[Panel, ...]:
    """Return the numbers of a complete study. `metric`: of the job; where it is one of `LOSSES`, losses are compared too."""
    found: list[Panel] = []
    for ranks in study.ranks:
        for steps in study.steps:
            best = {choice.label: _best(study, finished, choice.label, ranks, steps, lower) for choice in study.schemes}
            ends = {label: [each.end for each in trained] for label, (*_, trained) in best.items()}
            laprops = [each.label for each in study.schemes if _is_laprop(each)]
            first = _first(ends, ["dense", *laprops], lower)
            rows: list[MethodRow] = []
            for choice in study.schemes:
                row = _row(study, choice, *best[choice.label], best["dense"][-1], lower, ours)
                if laprops:
                    pairs = zip(ends[choice.label], ends[first], strict=True)
                    row = replace(row, behind_best=_mean([behind(*pair, lower) for pair in pairs]).mean)
                rows.append(_with_losses(row, ends[choice.label], ends["dense"], metric))
            rows.sort(key=lambda row: (row.bits, row.behind[-1][1].mean))
            found.append(Panel(ranks, steps, len(study.seeds), tuple(rows), _deviation(ends["dense"], metric)))
    return tuple(found)


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % interval, by Student's t distribution; no interval of one value, or where any is not finite."""
    if not all(map(math.isfinite, values)):
        return Interval(math.inf if math.inf in values else math.nan, None)
    mean, free = statistics.fmean(values), len(values) - 1
    if not free:
        return Interval(mean, None)
    return Interval(mean, _t_quantile(free) * statistics.stdev(values) / math.sqrt(len(values)))


def _t_quantile(free: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with `free` degrees of freedom, to 0.2 %."""
    if free <= len(_T_QUANTILES):
        return _T_QUANTILES[free - 1]
    z = 1.959964  # the normal one, and the first terms of an expansion in 1 / free
    return z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)


def _first(ends: Mapping[str, Sequence[float]], labels: Sequence[str], lower: bool) -> str:
    """Return the label of the best mean quality; not a number counts as worst."""
    means = {label: statistics.fmean(ends[label]) for label in labels}
    worst = math.inf if lower else -math.inf
    return (min if lower else max)(labels, key=lambda label: worst if math.isnan(means[label]) else means[label])


def _with_losses(row: MethodRow, ends: Sequence[float], dense: Sequence[float], metric: str) -> MethodRow:
    if metric not in LOSSES:
        return row
    own, beside = _losses(ends, metric), _losses(dense, metric)
    gaps = [
        one - other if math.isfinite(other) and not math.isnan(one) else math.nan
        for one, other in zip(own, beside, strict=True)
    ]
    return replace(row, loss=statistics.fmean(own), loss_behind=interval(gaps))


def _deviation(dense: Sequence[float], metric: str) -> float | None:
    losses = _losses(dense, metric) if metric in LOSSES else []
    return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else None


def _losses(ends: Sequence[float], metric: str) -> list[float]:
    return [math.log(each) if metric == "perplexity" and each > 0 else each for each in ends]


def _best(
    study: FrontierStudy, finished: Mapping[Key, Finished], label: str, ranks: int, steps: int, lower: bool
) -> tuple[float, bool, list[Finished]]:
    """Return the best rate, whether it is the lowest or the highest of several, and the trainings at it."""
    rates, rate = study.tried(finished, label, ranks, steps, lower)
    assert rate is not None  # the study is complete
    edge = len(rates) > 1 and rate in (rates[0], rates[-1])
    return rate, edge, [finished[study.key(label, ranks, steps, seed, rate)] for seed in study.seeds]


def _row(
    study: FrontierStudy,
    choice: SchemeChoice,
    rate: float,
    edge: bool,
    trained: Sequence[Finished],
    dense: Sequence[Finished],
    lower: bool,
    ours: Sequence[str],
) -> MethodRow:
    curves = [dict(each.trained.quality) for each in trained]
    beside = [dict(each.trained.quality) for each in dense]
    gaps = [
        (step, _mean([behind(one[step], other[step], lower) for one, other in zip(curves, beside, strict=True)]))
        for step in curves[0]
    ]
    return MethodRow(
        label=choice.label,
        kind=kind(choice, ours),
        rate=rate,
        edge=edge,
        optimizer=study.optimizers[choice.label],
        bits=statistics.fmean(each.bits for each in trained),
        nbytes=statistics.fmean(each.trained.nbytes for each in trained),
        rounds=statistics.fmean(each.trained.rounds for each in trained),
        union=statistics.fmean(each.trained.union for each in trained),
        end=_mean([each.end for each in trained]),
        error=max((error for each in trained if (error := each.trained.quality_error) is not None), default=None),
        behind=tuple(gaps),
        broken=_broken(trained),
    )


def _broken(trained: Sequence[Finished]) -> str:
    failed = [f"failed: {each.failed}" for each in trained if each.failed]
    nothing = ["exchanged nothing" for each in trained if each.trained.exchanges == 0]
    return (failed + nothing + [""])[0]


def _is_laprop(choice: SchemeChoice) -> bool:
    return choice.local is None and choice.name == LAB_SCHEMES["laprop"]


def kind(choice: SchemeChoice, ours: Sequence[str]) -> Kind:
    """Return where a method comes from, by the name of its scheme; one of a file, a module or another package is the user's own."""
    if choice.local is None and choice.name in BASELINES:
        return "baseline"
    if choice.name == ORACLE["oracle"]:
        return "limit"
    if choice.name in ours:
        return "ours"
    return "published" if registry.where(choice.name).startswith(("sparsync.", "sparsync_lab.")) else "your own"


def _mean(values: Sequence[float]) -> Mean:
    if any(math.isnan(value) for value in values):
        return Mean(math.nan, math.nan, math.nan)
    return Mean(statistics.fmean(values), min(values), max(values))
