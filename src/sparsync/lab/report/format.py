"""Text from numbers: units, the sentence that sums up a run, and the warning that every output must show."""

import math
from collections.abc import Iterable

from sparsync.lab.report.results import Run
from sparsync.lab.report.summary import SchemeFigures, Summary


def significant(value: float, digits: int = 3) -> str:
    """Return the value with so many significant digits, never as a power of ten: 0.0123, 1.20, 35.1, 1012."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    # Rounding first, so that 9.996 becomes 10.0 and not 10.00.
    decimals = digits - 1 - math.floor(math.log10(abs(round(value, decimals))))
    return f"{value:.{max(0, decimals)}f}"


def seconds_text(seconds: float) -> str:
    """Return seconds as text: 43.0 ms, 3.30 s, 1012 s, 5.30 h."""
    for unit, size, below in (("ms", 1e-3, 1.0), ("s", 1.0, 1e4)):
        if seconds < below:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds / 3600)} h"


def byte_unit(values: Iterable[float | None]) -> tuple[str, float]:
    """Return the unit, and its size, in which the largest of the values is easy to read; decimal, as link rates are."""
    largest = max((value for value in values if value is not None and math.isfinite(value)), default=0.0)
    return next(((unit, size) for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if largest >= size), ("B", 1.0))


def bytes_text(nbytes: float) -> str:
    unit, size = byte_unit([nbytes])
    return f"{significant(nbytes / size)} {unit}"


def rate_text(bits_per_s: float) -> str:
    """Return a link rate as text: 100 Mbit/s, 2.5 Gbit/s."""
    units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
    unit, size = next((unit, size) for unit, size in units if bits_per_s >= size or size == 1.0)
    return f"{bits_per_s / size:g} {unit}"


def ratio_text(value: float, bound: str = "") -> str:
    """Return a ratio to two digits, from 10 on to three: 0.96x, 7.4x, > 16.4x."""
    return f"{bound} {_times(value)}x".strip()


def behind_text(value: float) -> str:
    """Return percent behind dense with a sign, to a tenth: +1.4, -0.3, 0."""
    if not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, 1)
    return f"{rounded:+.1f}" if rounded else "0"


def percent(run: Run) -> str:
    """Return the sign behind a quality: "%" where the workload's unit is percent, else nothing."""
    return "%" if "percent" in quality_axis(run) else ""


def quality_axis(run: Run) -> str:
    """Return the name of the quality with its unit, as the workload gives it."""
    return str(run.workload.get("unit") or run.metric)


def quality_text(run: Run, value: float) -> str:
    return significant(value, 4) + percent(run)


def target_text(run: Run) -> str:
    """Return the target as text: "perplexity 135", or "accuracy 92%"."""
    return f"{run.metric} {run.target:g}{percent(run)}"


def place_text(run: Run) -> str:
    """Return workload, ranks and links of the run as text."""
    links = f"{rate_text(run.rate_bits_per_s)} links" if run.limited and run.rate_bits_per_s else "links without limit"
    workload = run.config.get("workload", "workload")
    return f"{workload}, {run.ranks} {'rank' if run.ranks == 1 else 'ranks'}, {links}"


def banner(run: Run) -> str | None:
    """Return the warning above every output with times of a run over links without limit; None over limited links."""
    if run.limited:
        return None
    asked = "" if run.config["link"] == "none" else f" ({run.config['link']} was asked for)"
    return f"THE LINKS HAD NO LIMIT{asked}: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A NETWORK"


def headline(summary: Summary) -> str | None:
    """Return the result of the run as a title of a picture: the fastest scheme beside dense; None if dense was faster."""
    best, dense = fastest(summary), summary.scheme("dense")
    ratio = best.speedup["dense"] if best else None
    if best is None or best.target_s is None or dense is None or ratio is None:
        return None
    if not summary.run.limited or ratio.spread.median <= 1:
        return None
    if dense.target_s is not None:
        beside = f"dense in {seconds_text(dense.target_s.median)}"
    else:
        beside = f"dense not in {seconds_text(max(seed.evaluated_s for seed in dense.seeds))}"
    times = ratio_text(ratio.spread.median, ratio.bound)
    return f"{target_text(summary.run)}: {best.label} in {seconds_text(best.target_s.median)}, {beside} ({times})"


def fastest(summary: Summary) -> SchemeFigures | None:
    """Return the scheme, other than dense, that reached the target first; None if none did."""
    arrived = [(found.median, scheme) for scheme in summary.schemes if (found := scheme.target_s) is not None]
    others = [(target_s, scheme) for target_s, scheme in arrived if scheme.label != "dense"]
    return min(others, key=lambda pair: pair[0])[1] if others else None


def paragraph(summary: Summary) -> str:
    """Return the result of the run in full sentences made from its numbers."""
    run, best = summary.run, fastest(summary)
    sentences = []
    if not run.limited:
        sentences.append("The links of this run had no limit, so its times prove nothing about a network.")
    if run.target is None:
        sentences.append(f"The run ({place_text(run)}) had no target. {_ends(summary)}")
    elif best is not None:
        sentences += [_arrival(summary, best), *_price(summary, best), *_traffic(summary, best)]
    elif (dense := summary.scheme("dense")) is not None and (found := dense.target_s) is not None:
        after = seconds_text(found.median)
        sentences.append(f"{_setting(run)}, only dense reached {target_text(run)}, after {after} of training.")
    else:
        sentences.append(f"{_setting(run)}, no scheme reached {target_text(run)}. {_ends(summary)}")
    if run.target is not None and any(scheme.reached for scheme in summary.schemes):
        sentences += [_missed(run, scheme) for scheme in summary.schemes if _fell_short(scheme)]
    return " ".join(sentences)


def _setting(run: Run) -> str:
    workload, rest = place_text(run).split(", ", 1)
    return f"On {workload} ({rest})"


def _times(value: float) -> str:
    return significant(value, 2 if value < 10 else 3)


def _arrival(summary: Summary, best: SchemeFigures) -> str:
    """Return when the fastest scheme reached the target, and how much sooner than the baselines."""
    run, found = summary.run, best.target_s
    assert found is not None
    over = [
        f"{'more than ' if ratio.bound else ''}{_times(ratio.spread.median)} times as fast as {base}"
        for base, ratio in best.speedup.items()
        if ratio is not None and base != best.label
    ]
    seeds = f" (median of {len(best.seeds)} seeds)" if len(best.seeds) > 1 else ""
    compared = f": {' and '.join(over)}" if over else ""
    return (
        f"{_setting(run)}, {best.label} reached {target_text(run)} after {seconds_text(found.median)} of training"
        f"{seeds}{compared}."
    )


def _price(summary: Summary, best: SchemeFigures) -> list[str]:
    """Return how the quality of the fastest scheme compares with dense's after as many steps."""
    gap = best.behind_dense
    if gap is None or best.label == "dense" or not math.isfinite(gap.median):
        return []
    rounded = round(abs(gap.median), 1)
    beside = f"{rounded:.1f} % {'behind' if gap.median > 0 else 'ahead of'} dense's" if rounded else "that of dense"
    return [f"After as many steps as dense its {summary.run.metric} was {beside}."]


def _traffic(summary: Summary, best: SchemeFigures) -> list[str]:
    """Return how much the fastest scheme sent, beside dense."""
    dense, sent = summary.scheme("dense"), best.over_seeds("sent_bytes")
    dense_sent = dense.over_seeds("sent_bytes") if dense else None
    if sent is None or dense_sent is None or not sent.median or not dense_sent.median:
        return []
    return [
        f"A step of {best.label} sends {bytes_text(sent.median)} per rank, one of dense {bytes_text(dense_sent.median)}, "
        f"{_times(dense_sent.median / sent.median)} times as much."
    ]


def _fell_short(scheme: SchemeFigures) -> bool:
    """Return whether a seed ran to its end without reaching the target; seeds that did not run to their end are in the notes."""
    return any(seed.finished and seed.target_s is None for seed in scheme.seeds)


def _missed(run: Run, scheme: SchemeFigures) -> str:
    last = scheme.over_seeds("quality")
    seeds = f" with {len(scheme.seeds) - scheme.reached} of {len(scheme.seeds)} seeds" if len(scheme.seeds) > 1 else ""
    steps = max(seed.steps for seed in scheme.seeds)
    ended = f", ending at {quality_text(run, last.median)}" if last else ""
    return f"{scheme.label} did not reach it in {steps} steps{seeds}{ended}."


def _ends(summary: Summary) -> str:
    """Return the quality of every scheme at its last evaluation."""
    ends = [(scheme.label, scheme.over_seeds("quality")) for scheme in summary.schemes]
    known = [f"{quality_text(summary.run, end.median)} with {label}" for label, end in ends if end is not None]
    return f"At the end the {summary.run.metric} was {', '.join(known)}." if known else "Nothing was evaluated."
