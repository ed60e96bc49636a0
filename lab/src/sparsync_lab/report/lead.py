"""The first sentences of a report: what to choose at the ranks and links of the run, why, and when the plain all-reduce is better."""

import math
from collections.abc import Sequence

from sparsync_lab.report.format import (
    place_text,
    quality_text,
    rate_text,
    ratio_text,
    seconds_text,
    significant,
    target_text,
    times_text,
)
from sparsync_lab.report.results import Run
from sparsync_lab.report.summary import RunSummary, SchemeFigures, SeedFigures, Spread
from sparsync_lab.report.verdict import WITHIN, Verdict, fewest_bits, ratio_of, seconds_of, verdict

_MORE = {"": "", ">": "more than ", "<": "at most "}  # before a ratio, by its bound


def first_line(summary: RunSummary, within: float = WITHIN) -> str:
    """Return the result in one line: what to use, how fast it is and what it costs; "" where the run does not show that.

    Speed is that over the plain all-reduce, quality that after as many steps of dense.
    """
    found = verdict(summary, within)
    chosen, plain = found.chosen, found.plain
    if not _shows_choice(summary) or plain is None:
        return ""
    if chosen is None:
        return f"Use {_named(plain)}: nothing faster was found that ends within {within:g} % of dense."
    ratio = ratio_of(chosen, plain, found.by_target)
    if ratio is None:
        return ""
    times = f"{_MORE[ratio.bound]}{times_text(ratio.spread.median)}x as fast as {plain.name}"
    aim = f" to {target_text(summary.run)}" if found.by_target else ""
    gap = chosen.behind_dense
    if gap is None:
        return f"Use {chosen.name}: {times}{aim}; its quality beside dense is unknown."
    steps = min(seed.steps for seed in chosen.seeds)
    return f"Use {chosen.name}: {times}{aim}, {_worse(gap.median)} after {steps} steps."


def _worse(gap: float) -> str:
    """Return percent behind dense in words: 3.0 % worse than dense, 0.4 % better than dense, as good as dense."""
    rounded = round(gap, 1)
    return f"{abs(rounded):.1f} % {'worse' if rounded > 0 else 'better'} than dense" if rounded else "as good as dense"


def paragraph(summary: RunSummary, within: float = WITHIN) -> str:
    """Return the result of the run in full sentences made from its numbers: the choice first."""
    return f"{lead(summary, within)} {details(summary)}".strip()


def lead(summary: RunSummary, within: float = WITHIN) -> str:
    """Return what to choose and why, with the quality beside each time, and when the plain all-reduce is the better choice."""
    run, found = summary.run, verdict(summary, within)
    if run.ranks == 1:
        return f"{_setting(run)} there is nothing to choose: one rank sends nothing. Compare with --ranks 2 or more."
    if diverged := _diverged_seeds(summary):
        return _dense_diverged(summary, diverged)
    if not summary.times_count:
        return _without_times(summary, within)
    if found.plain is None and found.fastest is None:
        return f"{_setting(run)} there is nothing to choose from: no scheme finished with every seed."
    if summary.disturbed:
        return f"{_choice(summary, found, within)} Measure again on a quiet machine before you choose."
    return _choice(summary, found, within)


def _choice(summary: RunSummary, found: Verdict, within: float) -> str:
    run = summary.run
    if found.chosen is None:
        return _nothing(summary, found, within)
    if found.near is found.chosen or found.chosen.behind_dense is None:
        figures = _figures(summary, found, found.chosen)
        return f"{_setting(run)} {_choose(summary)} {found.chosen.name}: {figures}. {_instead(summary, found)}"
    return _for_the_target_only(summary, found, within)


def details(summary: RunSummary) -> str:
    """Return what else there is to say in full sentences: who missed the target, and the quality at the end where nobody met it."""
    run = summary.run
    if run.target is None:
        return _ends(summary)
    if not any(scheme.reached for scheme in summary.schemes):
        return f"No scheme reached {target_text(run)}. {_ends(summary)}"
    return " ".join(
        _missed(run, scheme) for scheme in summary.schemes if _fell_short(scheme) and not scheme.exchanged_nothing
    )


def failure(summary: RunSummary) -> str | None:
    """Return why the run is not what was asked for: a scheme exchanged nothing, or dense never was finite; None where it is."""
    return _nothing_exchanged(summary) or _nothing_finite(summary)


def _nothing_exchanged(summary: RunSummary) -> str | None:
    names = [scheme.name for scheme in summary.schemes if scheme.exchanged_nothing]
    return f"{' and '.join(names)} exchanged nothing; the report says why, and the other rows count" if names else None


def _nothing_finite(summary: RunSummary) -> str | None:
    dense = summary.scheme("dense")
    seeds = [seed for seed in dense.seeds if seed.steps] if dense else []
    if not seeds or any(seed.ever_finite for seed in seeds):
        return None
    first = min(seed.nonfinite_step or 1 for seed in seeds)
    never = f"dense's training loss or {summary.run.metric} never was finite, not even at step {first}"
    return f"{never}, so nothing was compared; the report says more"


def headline(summary: RunSummary, within: float = WITHIN) -> str | None:
    """Return the choice as the title of a picture, with its quality; None where there is no choice beside the plain all-reduce."""
    run, found = summary.run, verdict(summary, within)
    chosen, plain = found.chosen, found.plain
    ratio = ratio_of(chosen, plain, found.by_target) if chosen and plain else None
    own = seconds_of(chosen, found.by_target) if chosen else None
    if not _shows_choice(summary) or chosen is None or plain is None or ratio is None or own is None:
        return None
    other, times = seconds_of(plain, found.by_target), ratio_text(ratio.spread.median, ratio.bound)
    gap = f", {behind_words(chosen.behind_dense.median)}" if chosen.behind_dense else ""
    if found.by_target:
        late = f"not in {seconds_text(_longest(plain))}" if other is None else f"in {seconds_text(other)}"
        return f"{target_text(run)}: {chosen.name} in {seconds_text(own)}, {plain.name} {late} ({times}){gap}"
    assert other is not None  # without a target it was compared by the time of a step
    return f"{chosen.name}: {seconds_text(own)} a step, {plain.name} {seconds_text(other)} ({times}){gap}"


def behind_words(gap: float) -> str:
    """Return percent behind dense in words: 3.0 % behind dense, 0.4 % ahead of dense, as good as dense."""
    if not math.isfinite(gap):
        return "infinitely far behind dense" if gap > 0 else "not comparable with dense's"
    rounded = round(gap, 1)
    return f"{abs(rounded):.1f} % {'behind' if rounded > 0 else 'ahead of'} dense" if rounded else "as good as dense"


def _setting(run: Run) -> str:
    workload, rest = place_text(run).split(", ", 1)
    return f"On {workload} ({rest})"


def _choose(summary: RunSummary) -> str:
    return "this disturbed run points to" if summary.disturbed else "choose"


def _shows_choice(summary: RunSummary) -> bool:
    """Return whether the times of a run say what to choose: they count, nothing disturbed them, and dense did not diverge."""
    several = summary.run.ranks > 1
    return several and summary.times_count and not summary.disturbed and not _diverged_seeds(summary)


def _diverged_seeds(summary: RunSummary) -> list[SeedFigures]:
    """Return dense's seeds that ended with a loss or a quality that is not finite."""
    dense = summary.scheme("dense")
    return [seed for seed in dense.seeds if seed.diverged] if dense else []


def _dense_diverged(summary: RunSummary, seeds: Sequence[SeedFigures]) -> str:
    """Return that there is nothing to compare with, and why."""
    which = ", ".join(f"seed {seed.seed} (first at step {seed.nonfinite_step})" for seed in seeds)
    if any(seed.nonfinite_loss == 1 for seed in seeds):
        cure = "The loss of the first step comes before any update: look for NaN in the job's data and weights, or in its loss."
    else:
        cure = "The training fails without any scheme: give the job a lower learning rate, or clip its gradients."
    return (
        f"{_setting(summary.run)} dense diverged with {which}: at the end its training loss or {summary.run.metric} is NaN or infinite. "
        f"So there is nothing to compare with, and no choice. {cure}"
    )


def _without_times(summary: RunSummary, within: float) -> str:
    least, dense = fewest_bits(summary, within), summary.scheme("dense")
    if summary.run.times_count:
        why = "The slow reference kernels ran, so the times of this run prove nothing about a scheme"
    else:
        why = "The links of this run had no limit, so its times prove nothing about a network"
    first = f"{why}, and it does not show what to choose."
    bits = least.over_seeds("bits") if least else None
    if least is None or bits is None or dense is None:
        return first
    return (
        f"{first} Of the schemes within {within:g} % of dense, {least.name} sent the least, {significant(bits.median)} bits per "
        f"parameter per step: {_quality(summary, least)}."
    )


def _nothing(summary: RunSummary, found: Verdict, within: float) -> str:
    """Return that the plain all-reduce is the choice, and beside it the fastest scheme with its quality."""
    run, fastest = summary.run, found.fastest
    if not found.by_target and all(each.behind_dense is None for each in summary.schemes):
        return (
            f"{_setting(run)} nothing can be chosen by time alone: dense has not run, so no loss of quality is known; "
            "add it to --schemes."
        )
    if found.plain is None:
        return f"{_setting(run)} nothing can be chosen: neither bf16 nor dense finished to compare with."
    noise = f"by more than the noise ({seconds_text(summary.noise_s)} a step)"
    if found.by_target:
        sooner = f"reached {target_text(run)} sooner {noise}"
    else:
        sooner = f"was faster {noise} and within {within:g} % of dense's {run.metric}"
    use = _choose(summary) if summary.disturbed else "use"
    first = f"{_setting(run)} {use} {_named(found.plain)}: no scheme {sooner}."
    if fastest is None:
        return first
    return f"{first} The fastest other one is {fastest.name}: {_figures(summary, found, fastest)}."


def _for_the_target_only(summary: RunSummary, found: Verdict, within: float) -> str:
    """Return the choice where it ends farther behind dense than wanted, and the one that does not."""
    assert found.chosen is not None
    figures = _figures(summary, found, found.chosen)
    first = f"{_setting(summary.run)} {_choose(summary)} {found.chosen.name} if only the target counts: {figures}."
    if found.near is not None:
        return f"{first} To end within {within:g} % of dense choose {found.near.name}: {_figures(summary, found, found.near)}."
    use = "" if found.plain is None else f"use {_named(found.plain)}: "
    return f"{first} To end within {within:g} % of dense {use or 'there is no choice: '}no faster scheme came so near."


def _figures(summary: RunSummary, found: Verdict, scheme: SchemeFigures) -> str:
    """Return the time of a scheme beside that of the plain all-reduce, what it sends, and its quality."""
    return f"{_time(summary.run, found, scheme)}{_sent(scheme, found.plain)}; {_quality(summary, scheme)}"


def _time(run: Run, found: Verdict, scheme: SchemeFigures) -> str:
    seconds, plain = seconds_of(scheme, found.by_target), found.plain
    assert seconds is not None  # it was compared
    if found.by_target:
        own = f"it reached {target_text(run)} after {seconds_text(seconds)} of training"
    else:
        own = f"a step takes {seconds_text(seconds)}"
    ratio = ratio_of(scheme, plain, found.by_target) if plain else None
    if plain is None or ratio is None:
        return own
    other = seconds_of(plain, found.by_target)
    beside = f"not in {seconds_text(_longest(plain))}" if other is None else seconds_text(other)
    times = f"{_MORE[ratio.bound]}{times_text(ratio.spread.median)}"
    return f"{own}, {times} times as fast as {plain.name} ({beside}{_range(ratio.spread, scheme)})"


def _range(ratio: Spread, scheme: SchemeFigures) -> str:
    count = len(scheme.seeds)
    return f"; {times_text(ratio.low)} to {times_text(ratio.high)} over {count} seeds" if count > 1 else ""


def _sent(scheme: SchemeFigures, plain: SchemeFigures | None) -> str:
    own, other = scheme.over_seeds("bits"), plain.over_seeds("bits") if plain else None
    if own is None:
        return ""
    instead = "" if other is None else f" instead of {significant(other.median)}"
    return f", and sends {significant(own.median)} bits per parameter per step{instead}"


def _quality(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Return how far the quality is behind dense's after as many steps, with its range over the seeds."""
    gap, metric, count = scheme.behind_dense, summary.run.metric, len(scheme.seeds)
    if gap is None:
        return f"how far its {metric} is behind dense is unknown: dense has not run"
    steps = min(seed.steps for seed in scheme.seeds)
    if count == 1:
        over = "one seed: its spread is unknown"
    else:
        over = f"median of {count} seeds; from {behind_words(gap.low)} to {behind_words(gap.high)}"
    if not math.isfinite(gap.median) and gap.median > 0:
        return f"it diverged within {steps} steps ({over})"
    return f"after {steps} steps its {metric} is {behind_words(gap.median)} ({over})"


def _instead(summary: RunSummary, found: Verdict) -> str:
    """Return when the plain all-reduce is the better choice."""
    chosen, plain = found.chosen, found.plain
    assert chosen is not None
    if plain is None:
        return "Neither bf16 nor dense finished in this run: add them to --schemes before you choose."
    gap, cases = chosen.behind_dense, []
    if found.enough_from is not None:
        cases.append(
            f"links are faster than about {rate_text(float(f'{found.enough_from:.1g}'))} (extrapolated from these times)"
        )
    if gap is not None and round(gap.median, 1) > 0:
        cases.append(f"{gap.median:.1f} % of the {summary.run.metric} count more than the time")
    missing = (
        " bf16, which sends half of it, has not run: add it to --schemes." if summary.scheme("bf16") is None else ""
    )
    if not cases:
        return f"Use {_named(plain)} where links are so fast that a step takes hardly longer than computing.{missing}"
    return f"Use {_named(plain)} where {', or where '.join(cases)}.{missing}"


def _named(plain: SchemeFigures) -> str:
    return "dense bf16" if plain.label == "bf16" else plain.name


def _longest(scheme: SchemeFigures) -> float:
    return max(seed.evaluated_s for seed in scheme.seeds)


def _fell_short(scheme: SchemeFigures) -> bool:
    """Return whether a seed ran to its end without reaching the target; seeds that did not run to their end are in the notes."""
    return any(seed.finished and seed.target_s is None for seed in scheme.seeds)


def _missed(run: Run, scheme: SchemeFigures) -> str:
    last = scheme.over_seeds("quality")
    seeds = f" with {len(scheme.seeds) - scheme.reached} of {len(scheme.seeds)} seeds" if len(scheme.seeds) > 1 else ""
    steps = max(seed.steps for seed in scheme.seeds)
    ended = f", ending at {_value(run, last.median)}" if last else ""
    return f"{scheme.name} did not reach {target_text(run)} in {steps} steps{seeds}{ended}."


def _ends(summary: RunSummary) -> str:
    """Return the quality of every scheme at its last evaluation."""
    ends = [(scheme.name, scheme.over_seeds("quality")) for scheme in summary.schemes if scheme.ended]
    known = [f"{_value(summary.run, end.median)} with {name}" for name, end in ends if end is not None]
    return f"At the end the {summary.run.metric} was {', '.join(known)}." if known else "Nothing was evaluated."


def _value(run: Run, quality: float) -> str:
    return quality_text(run, quality) if math.isfinite(quality) else "NaN or infinite"
