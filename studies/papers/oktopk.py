"""Ok-Topk: volume, xi, thresholds and regions, and time to a loss beside other sparse all-reduces (Li and Hoefler, arXiv 2201.07598).

Times are predicted: every exchange takes its latency and the bytes of its busiest rank over the rate of a stated link, and every step a
stated time to compute. Nothing depends on the time that the measuring machine takes.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsync.core import count_for
from sparsync.schemes import OkTopk
from sparsync_lab.predict.network import Link
from sparsync_lab.predict.schemes import plan
from studies import parts, published
from studies.papers import Claim, Section
from studies.papers.oktopk_runs import (
    DENSITY,
    JOB,
    RANKS,
    RULES,
    SEEDS,
    SETTLED,
    SHORT,
    SPARSE,
    STEPS,
    TRAINED,
    UNEQUAL,
    VOLUME_ELEMENTS,
    VOLUME_RANKS,
    XI_RANKS,
    at_best_rate,
    end,
    selected,
    short,
    trainings,
    volume_of,
)

MOST_RANKS = 256  # of the closed form
COMPUTE_S = 0.02  # of a step, assumed
NETWORKS = {"100 Mbit/s, 100 µs": Link(1e8, 100e-6), "1 Gbit/s, 50 µs": Link(1e9, 50e-6)}


def volume_table(folder: Path) -> str:
    """Make the table of words per worker and step, in multiples of k."""
    rows: list[Sequence[str]] = [
        ("paper", "2(P-1)", f"(4 to {2 + 1 / DENSITY:.0f})(P-1)/P", "4 log2 P", "6(P-1)/P", "-", "-", "-", "-")
    ]
    for P in VOLUME_RANKS:
        counted = volume_of(folder, P)
        rows.append(
            (
                str(P),
                *(f"{counted[name]:.1f}" for name in ("TopkA", "TopkDSA", "gTopk")),
                f"{counted['Ok-Topk']:.2f}",
                f"{counted['busiest']:.2f}",
                f"{counted['evaluation']:.1f}",
                f"{counted['period']:.2f}",
                f"{counted['exact_oktopk']:.2f}",
            )
        )
    heads = "P, TopkA, TopkDSA, gTopk, Ok-Topk, busiest, evaluating, mean of 32, exact_oktopk"
    return parts.table(heads.split(", "), rows)


@dataclass(frozen=True)
class Reached:
    """The steps and the predicted seconds of a method until it first evaluates at the target; means over seeds."""

    steps: float
    seconds: Mapping[str, float]  # by network


def target(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """Find the lowest perplexity that every training reaches, at any of its evaluations."""
    return max(min(each[1] for each in one["evaluations"]) for runs in found.values() for one in runs)


def reached(runs: Sequence[Mapping[str, Any]], perplexity: float) -> Reached:
    """Predict when trainings of one method reach a perplexity."""
    first = [next(each for each in one["evaluations"] if each[1] <= perplexity) for one in runs]

    def seconds(link: Link) -> float:
        times = (
            steps * COMPUTE_S + rounds * link.latency_s + 8 * nbytes / link.bits_per_s
            for steps, _, rounds, nbytes in first
        )
        return statistics.fmean(times)

    return Reached(
        statistics.fmean(steps for steps, *_ in first), {name: seconds(link) for name, link in NETWORKS.items()}
    )


def time_table(folder: Path) -> str:
    """Make the table of the trainings: rate, quality, traffic, and time to the target."""
    best = {name: at_best_rate(folder, name) for name in TRAINED}
    goal = target({name: runs for name, (_, runs) in best.items()})
    rows = []
    for name, (rate, runs) in best.items():
        ends, found = [end(one) for one in runs], reached(runs, goal)
        nbytes = statistics.fmean(one["evaluations"][-1][3] for one in runs) / STEPS
        rows.append(
            (
                name,
                f"{rate:g}",
                f"{statistics.fmean(ends):.1f} ({min(ends):.1f} to {max(ends):.1f})",
                f"{nbytes / 1e3:.1f}",
                f"{statistics.fmean(one['evaluations'][-1][2] for one in runs) / STEPS:.1f}",
                f"{found.steps:.0f}",
                *(f"{each:.1f}" for each in found.seconds.values()),
            )
        )
    heads = ("method", "rate", "perplexity at the end", "kB per step", "rounds", f"steps to {goal:.1f}", *NETWORKS)
    return parts.table(heads, rows)


@dataclass(frozen=True)
class Counts:
    """The counts over k, after the first steps and between two evaluations of the thresholds."""

    selected: list[float]  # mean over ranks
    survivors: list[float]

    @staticmethod
    def off(counts: Sequence[float]) -> float:
        """Compute the mean of |count/k - 1| in percent."""
        return 100 * statistics.fmean(abs(count - 1) for count in counts)


def counts_of(folder: Path, text: str) -> Counts:
    """Read the counts of a rule from a short training."""
    period = 128 if "=128" in text else 32
    between = [each for each in short(folder, text) if each["step"] >= SETTLED and each["step"] % period]
    return Counts([each["local"] for each in between], [each["survivors"] for each in between])


def threshold_table(folder: Path) -> str:
    """Make the table of counts between two evaluations of the thresholds, by the rule that scales them."""
    rows = []
    for rule, text in RULES.items():
        found = counts_of(folder, text)
        cells = [
            cell
            for counts in (found.selected, found.survivors)
            for cell in (f"{Counts.off(counts):.0f} %", f"{min(counts):.2f} to {max(counts):.2f}")
        ]
        rows.append((rule, *cells))
    return parts.table(("thresholds", "selected: mean error", "over k", "survivors: mean error", "over k"), rows)


def region_shares(figures: Sequence[Mapping[str, float]], division: int) -> list[float]:
    """Compute what the busiest region receives over the mean, averaged over 8 steps before and 8 steps after a division."""
    spans = range(division - 8, division), range(division, division + 8)
    return [statistics.fmean(each["received"] for each in figures if each["step"] in span) for span in spans]


def xi_of(folder: Path, ranks: int) -> list[float]:
    """Read xi of each step from a short training."""
    return [each["xi"] for each in short(folder, RULES["re-used (default)"], ranks)]


def section(folder: Path) -> Section:
    """Measure all, and return the claims with the tables below."""
    below = f"""\
Words per worker and step over k, counted with all ranks in one process ({VOLUME_ELEMENTS:,} elements, k = {DENSITY:.0%}), means over ranks
except gTopk (the busiest rank). All but Ok-Topk pack positions in fewer than 4 bytes. "Evaluating" is the first step, in which all non-zero
sums travel; "mean of 32" has one of them.

{volume_table(folder)}

Counts between two evaluations, over k, in a training of {RANKS} ranks from step {SETTLED} to {SHORT} (one seed, no dense steps). VGG, LSTM
and BERT are `OkTopk(bug_compatible=True, program=...)`.

{threshold_table(folder)}

Seconds to the lowest perplexity that all reach: `shakespeare-small` with width {JOB["width"]}, {RANKS} ranks, {STEPS} steps, density
{DENSITY:.0%}, {len(SEEDS)} seeds, each method at its best rate for the first. They are predicted: {1e3 * COMPUTE_S:.0f} ms to compute
a step (assumed), the busiest rank's rounds and bytes over the link, and nothing for selection and encoding.

{time_table(folder)}"""
    return Section([*volume_claims(folder), *training_claims(folder), published_claim()], below)


def volume_claims(folder: Path) -> list[Claim]:
    """Compare the counted volumes with the paper's bounds."""
    counted = {P: volume_of(folder, P) for P in VOLUME_RANKS}
    first, last = VOLUME_RANKS[0], VOLUME_RANKS[-1]
    over = {P: each["Ok-Topk"] * P / (P - 1) for P, each in counted.items()}  # k (P-1)/P
    most = {name: max(each[name] * P / (P - 1) for P, each in counted.items()) for name in ("busiest", "period")}
    _, runs = at_best_rate(folder, "Ok-Topk")
    trained = statistics.fmean(one["evaluations"][-1][3] for one in runs) / STEPS / 4 / selected()
    closed = plan(OkTopk(DENSITY), VOLUME_ELEMENTS, MOST_RANKS).cost().nbytes / 4 / count_for(DENSITY, VOLUME_ELEMENTS)
    growth = {name: counted[last][name] / counted[8][name] for name in SPARSE}
    rivals = ("TopkA", "TopkDSA", "gTopk")
    return [
        Claim(
            "less than 6k words per worker",
            f"{min(over.values()):.2f} to {max(over.values()):.2f} k (P-1)/P for P = {first} to {last}, mean over ranks; busiest rank "
            f"up to {most['busiest']:.2f}; with one evaluation in 32 steps up to {most['period']:.2f}; "
            f"by closed form {closed:.2f} k at P = {MOST_RANKS}; "
            f"in training, where re-used thresholds select more, the busiest of {RANKS} ranks has {trained:.1f} k",
            f"{'reproduced' if max(over.values()) < 6 else 'here it is more'} on average, if k are selected and k survive"
            + "; not for the busiest rank" * (most["busiest"] >= 6)
            + "; not for that of a training" * (trained * RANKS / (RANKS - 1) >= 6),
            "< 6k (P-1)/P",
        ),
        Claim(
            "asymptotically optimal",
            f"{over[last] / 2:.2f} times the bound at P = {last}, {over[8] / 2:.2f} at P = 8",
            "reproduced" if over[last] < 1.25 * over[8] else "here the factor grows with P",
            "bound 2k (P-1)/P",
        ),
        Claim(
            "more scalable than other sparse all-reduces",
            f"volume at P = {last} over that at P = 8: " + ", ".join(f"{name} {growth[name]:.2f}" for name in SPARSE),
            "reproduced, by volume" if all(growth["Ok-Topk"] < growth[name] for name in rivals) else "here it is not",
        ),
    ]


def training_claims(folder: Path) -> list[Claim]:
    """Compare what trainings show with the paper's claims."""
    best = trainings(folder)
    goal, dense = target(best), statistics.fmean(map(end, best["dense"]))
    times = {name: reached(runs, goal).seconds for name, runs in best.items()}
    behind = {name: 100 * (statistics.fmean(map(end, best[name])) / dense - 1) for name in TRAINED if name != "dense"}
    quickest = {network: min(times, key=lambda name: times[name][network]) for network in NETWORKS}
    default, *others = (counts_of(folder, text) for text in RULES.values())
    scaled = [Counts.off(each.selected) for each in others]
    highest = max(each["local"] for each in short(folder, RULES["re-used (default)"])[:32])
    before, after = region_shares(short(folder, UNEQUAL), 64)
    xis = {P: xi_of(folder, P) for P in XI_RANKS}
    settled = {P: statistics.fmean(each[SETTLED:]) for P, each in xis.items()}
    speed_ups = (
        f"{network}: "
        + ", ".join(
            f"{name} {each[network] / times['Ok-Topk'][network]:.2f}"
            for name, each in times.items()
            if name != "Ok-Topk"
        )
        for network in NETWORKS
    )
    return [
        Claim(
            "an estimated threshold selects about k",
            f"{Counts.off(default.selected):.0f} % off k on average, with the authors' scaling {min(scaled):.0f} to "
            f"{max(scaled):.0f} %; up to {highest:.1f} k in the first 32 steps",
            "reproduced"
            if Counts.off(default.selected) <= 25
            else ("reproduced" if max(scaled) <= 25 else "not reproduced")
            + " with the authors' scaling; plain re-use selects more, because residuals grow between evaluations",
        ),
        Claim(
            "regions are balanced",
            f"the busiest region receives {before:.2f} times the mean with equal widths, {after:.2f} after a division",
            "reproduced" if after < before else "here it is not",
        ),
        Claim(
            "convergence is proved, if xi is small",
            f"xi from step {SETTLED} on, and its largest: "
            + ", ".join(f"{settled[P]:.2f} and {max(each):.2f} (P = {P})" for P, each in xis.items()),
            "reproduced: no growth with P"
            if settled[XI_RANKS[-1]] <= 1.25 * settled[XI_RANKS[0]]
            else "here xi grows with P",
        ),
        Claim(
            "accuracy similar to dense",
            "perplexity behind dense: " + ", ".join(f"{name} {each:+.1f} %" for name, each in behind.items()),
            "reproduced"
            if behind["Ok-Topk"] <= 2
            else f"here it is {behind['Ok-Topk']:.1f} % behind, after {STEPS} steps",
        ),
        Claim(
            "quicker than dense and other sparse all-reduces",
            "time to the same perplexity over Ok-Topk's: " + "; ".join(speed_ups),
            "reproduced"
            if set(quickest.values()) == {"Ok-Topk"}
            else f"here the quickest is {' or '.join(sorted(set(quickest.values())))}, at {RANKS} ranks"
            + ", in one round" * ("TopkA" in quickest.values())
            + "; selection counts as nothing",
        ),
    ]


def published_claim() -> Claim:
    """Compare the speed-up of the abstract with the prediction of docs/published.md."""
    predicted = {row.name: row.predicted or math.nan for row in published.rows()[0]}
    return Claim(
        "BERT on 256 GPUs is trained 3.29 to 12.95 times as fast",
        f"{predicted['oktopk-bert-low']:.2f} to {predicted['oktopk-bert-high']:.2f}, predicted for the authors' programs",
        "needs 256 GPUs; [published](published.md) says what the prediction assumes",
        "3.29 to 12.95",
    )
