"""The numbers of a study: for each number of ranks and steps a row for each method, at its best learning rate."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparsync.base import registry
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.frontier.study import ORACLE, FrontierStudy
from sparsync_lab.report.summary import behind
from sparsync_lab.scheme_choice import SchemeChoice

Kind = Literal["baseline", "published", "ours", "your own", "limit"]

BASELINES = ("dense", "bf16")
OURS = ("two_shot", "micro", "exdyna", "oktopk", "auto_protect")  # as published they are NAME.published


@dataclass(frozen=True)
class Mean:
    """The mean over seeds, and the lowest and highest."""

    mean: float
    low: float
    high: float


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


@dataclass(frozen=True)
class Panel:
    """All methods with the same ranks and steps, those that send least first."""

    ranks: int
    steps: int
    seeds: int
    rows: tuple[MethodRow, ...]


def panels(
    study: FrontierStudy, finished: Mapping[Key, Finished], lower: bool, ours: Sequence[str] = OURS
) -> tuple[Panel, ...]:
    """Return the numbers of a complete study."""
    found: list[Panel] = []
    for ranks in study.ranks:
        for steps in study.steps:
            best = {choice.label: _best(study, finished, choice.label, ranks, steps, lower) for choice in study.schemes}
            *_, dense = best["dense"]
            rows = [_row(study, choice, *best[choice.label], dense, lower, ours) for choice in study.schemes]
            rows.sort(key=lambda row: (row.bits, row.behind[-1][1].mean))
            found.append(Panel(ranks, steps, len(study.seeds), tuple(rows)))
    return tuple(found)


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
