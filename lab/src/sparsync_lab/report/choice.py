"""Choose a scheme from the numbers of a run, and explain the choice in sentences.

The plain all-reduce is dense, or bf16 if that is faster and near dense's quality. The choice is the fastest scheme near dense's quality,
by the time to the target if any scheme reached it with every seed, else by the step time. It must finish with every seed, and beat the
plain all-reduce with every seed by more than the noise: the difference between the run's computing steps, which all compute the same, and
at least 3 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sparsync_lab.report.format import seconds_text, target_text, times_text
from sparsync_lab.report.summary import BASELINES, MATTERS, Ratio, RunSummary, SchemeFigures, spread

WITHIN = 2.0  # percent behind dense's quality that still count as near
_MORE = {"": "", ">": "more than ", "<": "at most "}  # a ratio's prefix, by its bound


@dataclass(frozen=True)
class Choice:
    """The recommended scheme and its alternatives."""

    by_target: bool  # compared by the time to the target; False: by the step time
    plain: SchemeFigures | None  # the plain all-reduce, bf16 or dense; None if neither finished
    chosen: SchemeFigures | None  # None: nothing near dense's quality beats the plain all-reduce
    fastest: SchemeFigures | None  # of all finished schemes but the plain ones, whatever its quality


def choose(summary: RunSummary) -> Choice:
    finished = [scheme for scheme in summary.schemes if scheme.ended]
    everywhere = [scheme for scheme in finished if scheme.reached == len(scheme.seeds)]
    by_target = bool(everywhere)
    plain = _plain(finished, by_target)
    counting = [scheme for scheme in (everywhere if by_target else finished) if scheme.label not in BASELINES]
    near = [scheme for scheme in counting if is_near(scheme)]
    faster = [scheme for scheme in near if plain and _beats(summary, scheme, plain, by_target)]
    return Choice(by_target, plain, _soonest(faster, by_target), _soonest(counting, by_target))


def is_near(scheme: SchemeFigures) -> bool:
    """Tell whether its quality is at most WITHIN percent behind dense's; False if unknown."""
    gap = scheme.behind_dense
    return scheme.label == "dense" or (gap is not None and gap.median <= WITHIN)


def speed_baseline(summary: RunSummary) -> str:
    """Name the baseline of all speed-ups in a report: the plain all-reduce of the choice, or else bf16 if it ran."""
    plain = choose(summary).plain
    return plain.label if plain else "bf16" if summary.scheme("bf16") else "dense"


def sentences(summary: RunSummary) -> tuple[str, ...]:
    """Recommend a scheme in one sentence, with its speed and quality, and qualify that in at most four more."""
    found = choose(summary)
    chosen, plain, fastest = found.chosen, found.plain, found.fastest
    if why := _no_choice(summary, found):
        return (f"No choice: {why}",)
    assert plain is not None
    said = [
        f"Use {chosen.label}: {_told(summary, found, chosen)}."
        if chosen
        else f"Use {'dense bf16' if plain.label == 'bf16' else 'dense'}: nothing faster was found that ends within {WITHIN:g} % of dense."
    ]
    if fastest and fastest is not chosen:
        said.append(f"The fastest scheme is {fastest.label}: {_told(summary, found, fastest)}.")
    if summary.run.target is not None and not found.by_target:
        said.append(f"No scheme reached {target_text(summary.run)} with every seed, so steps are compared.")
    if len(plain.seeds) == 1:
        said.append("This is one seed: how far another one would differ is unknown.")
    if summary.scheme("bf16") is None:
        said.append("bf16, which sends half of what dense sends, has not run: add it to --schemes.")
    return tuple(said)


def failure(summary: RunSummary) -> str | None:
    """Explain why the run failed: a scheme exchanged nothing, or dense never was finite; None if it did not."""
    names = [scheme.label for scheme in summary.schemes if scheme.exchanged_nothing]
    if names:
        return f"{' and '.join(names)} exchanged nothing; the report says why, and the other rows count"
    dense = summary.scheme("dense")
    seeds = [seed for seed in dense.seeds if seed.steps] if dense else []
    if not seeds or any(seed.ever_finite for seed in seeds):
        return None
    first = min(seed.nonfinite_step or 1 for seed in seeds)
    never = f"dense's training loss or {summary.run.metric} never was finite, not even at step {first}"
    return f"{never}, so nothing was compared; the report says more"


def _no_choice(summary: RunSummary, found: Choice) -> str:
    """Explain why the run shows no choice, and what to do; "" if it shows one."""
    dense = summary.scheme("dense")
    diverged = [seed for seed in dense.seeds if seed.diverged] if dense else []
    if summary.run.ranks == 1:
        return "one rank sends nothing; compare with --ranks 2 or more."
    if diverged:
        which = ", ".join(f"seed {seed.seed} (first at step {seed.nonfinite_step})" for seed in diverged)
        fix = "give the job a lower learning rate, or clip its gradients"
        if any(seed.nonfinite_loss == 1 for seed in diverged):
            fix = (
                "the loss of the first step comes before any update, so look for NaN in the job's data, weights or loss"
            )
        return f"dense diverged with {which}, so there is nothing to compare with; {fix}."
    if not summary.times_count:
        return "the times of this run prove nothing."
    if summary.disturbed:
        return "measure again on a quiet machine."
    if found.plain is None:
        return "neither bf16 nor dense finished with every seed."
    return "" if dense else "dense has not run, so no loss of quality is known; add it to --schemes."


def _told(summary: RunSummary, found: Choice, scheme: SchemeFigures) -> str:
    """Compare a scheme's speed with the plain all-reduce, and its quality with dense, with ranges over the seeds."""
    assert found.plain is not None
    ratio, seconds = _ratio(scheme, found.plain, found.by_target), _seconds(scheme, found.by_target)
    assert seconds is not None  # it was compared
    several = len(scheme.seeds) > 1
    aim = f" to {target_text(summary.run)}" if found.by_target else ""
    speed = f"{seconds_text(seconds)}{aim or ' a step'}"
    if ratio is not None:
        over = f" ({times_text(ratio.spread.low)} to {times_text(ratio.spread.high)})" if several else ""
        speed = f"{_MORE[ratio.bound]}{times_text(ratio.spread.median)}x{over} as fast as {found.plain.label}{aim}"
    gap, steps = scheme.behind_dense, min(seed.steps for seed in scheme.seeds)
    if gap is None:
        return speed
    over = f" ({_worse(gap.low)} to {_worse(gap.high)})" if several and gap.low != gap.high else ""
    return f"{speed}, {_worse(gap.median)}{over} after {steps} steps"


def _worse(gap: float) -> str:
    """Format percent behind dense: 3.0 % worse than dense, 0.4 % better than dense, as good as dense."""
    if not math.isfinite(gap):
        return "diverged"
    rounded = round(gap, 1)
    return f"{abs(rounded):.1f} % {'worse' if rounded > 0 else 'better'} than dense" if rounded else "as good as dense"


def _seconds(scheme: SchemeFigures, by_target: bool) -> float | None:
    """Take the median seconds to the target, or of a step."""
    found = scheme.target_s if by_target else scheme.over_seeds("step_s")
    return None if found is None else found.median


def _ratio(scheme: SchemeFigures, plain: SchemeFigures, by_target: bool) -> Ratio | None:
    """Compute the speed-up over the plain all-reduce, seed by seed; None if unknown."""
    if by_target:
        return scheme.speedup[plain.label]
    beside = {seed.seed: seed.step_s for seed in plain.seeds}
    pairs = [(beside.get(seed.seed), seed.step_s) for seed in scheme.seeds]
    found = spread(other / own for other, own in pairs if other is not None and own)
    return None if found is None else Ratio(found)


def _plain(finished: Sequence[SchemeFigures], by_target: bool) -> SchemeFigures | None:
    """Pick the faster of bf16 and dense, if they ran."""
    known = {scheme.label: scheme for scheme in finished}
    dense, bf16 = known.get("dense"), known.get("bf16")
    if bf16 is not None and dense is not None and not is_near(bf16):
        return dense
    return _soonest([each for each in (bf16, dense) if each is not None], by_target) or bf16 or dense


def _soonest(schemes: Sequence[SchemeFigures], by_target: bool) -> SchemeFigures | None:
    timed = [(seconds, scheme) for scheme in schemes if (seconds := _seconds(scheme, by_target)) is not None]
    return min(timed, key=lambda pair: pair[0])[1] if timed else None


def _beats(summary: RunSummary, scheme: SchemeFigures, plain: SchemeFigures, by_target: bool) -> bool:
    ratio, step = _ratio(scheme, plain, by_target), plain.over_seeds("step_s")
    if ratio is None or ratio.bound == "<" or step is None or not step.median:
        return False
    return ratio.spread.low > 1 + max(MATTERS, summary.noise_s / step.median)
