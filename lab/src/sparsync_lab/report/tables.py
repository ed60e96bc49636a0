"""Format the tables of a report: what each scheme reached and sent, and where its time went."""

import math
from collections.abc import Callable, Sequence

from sparsync_lab.report.choice import sentences, speed_baseline
from sparsync_lab.report.format import (
    behind_text,
    bytes_text,
    percent,
    place_text,
    quality_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.summary import RunSummary, SchemeFigures, Spread
from sparsync_lab.terminal import NOTHING, Table, lines_of

Column = tuple[str, Callable[[SchemeFigures], str]]  # heading, and cell of a scheme


def tables(summary: RunSummary) -> tuple[Table, Table]:
    """Make the tables of the schemes' results and of the time within a step."""
    return reached(summary, f"What each scheme reached: {place_text(summary.run)}"), _spent(summary)


def reached(summary: RunSummary, title: str) -> Table:
    """Tabulate what each scheme sent and reached, as medians over the seeds."""
    run, baseline = summary.run, speed_baseline(summary)
    target = "\na target" if run.target is None else f"\nto {run.target:g}{percent(run)}"
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.label),
        ("sent in\na step", lambda scheme: _middle(scheme.over_seeds("sent_bytes"), bytes_text)),
        ("bits per\nparameter\nper step", lambda scheme: _middle(scheme.over_seeds("bits"))),
        ("bits on\nthe inter-\nface", lambda scheme: _middle(scheme.over_seeds("interface_bits"))),
        ("step\ntime, ms", lambda scheme: _ms(scheme.over_seeds("step_s"))),
        (f"seconds{target}", _arrival),
        (f"speed-up\nover {baseline}", lambda scheme: _speedup(scheme, baseline)),
        (f"{run.metric}\nat the end", lambda scheme: _end(summary, scheme)),
        ("% behind\ndense", _behind),
    ]
    return _table(title, columns, summary.schemes)


def remarks(summary: RunSummary) -> tuple[str, ...]:
    """Write the lines below the tables: explanations of headings, the physical limit, then every note."""
    lines = []
    if any(scheme.behind_dense is not None for scheme in summary.schemes):
        lines.append(
            f"% behind dense: how much worse the {summary.run.metric} is after the same number of steps, the last that both took."
        )
    if other := [
        f"{scheme.label} by {scheme.config['optimizer']}" for scheme in summary.schemes if "optimizer" in scheme.config
    ]:
        lines.append(
            f"Trained by another optimizer than the job's, because the scheme has its own momentum: {', '.join(other)}. Each rank "
            "clips its own gradient, and reduces after the backward pass."
        )
    if any("local_steps" in scheme.config for scheme in summary.schemes):
        lines.append(
            "With local steps the times are means over the steps of a round, from exchange to exchange; medians over the rounds."
        )
    if any(scheme.over_seeds("hidden_s") for scheme in summary.schemes):
        lines.append(
            "hidden: the share of scheme and communicate that did not make the step longer, because the model computed meanwhile. "
            f"< marks a share that may be noise: computing steps differed by up to {seconds_text(summary.noise_s)} in this run."
        )
    return (*lines, *summary.notes)


def as_text(summary: RunSummary) -> str:
    """Format warnings, choice, tables and remarks for standard output."""
    above = warnings(summary)
    below = [(remark, "yellow" if remark in summary.notes else "dim") for remark in remarks(summary)]
    first, *others = sentences(summary)
    said = [(first, "bold"), *([(" ".join(others), "")] if others else []), ("", "")]
    return lines_of(tables(summary), [*above, *said], [*below, *above])


def warnings(summary: RunSummary) -> list[tuple[str, str]]:
    """Format a line per banner, with its style."""
    return [
        (f"!!! {each.text} {each.why}".rstrip(), "black on yellow" if each.kind == "disturbed" else "bold white on red")
        for each in summary.banners
    ]


def _spent(summary: RunSummary) -> Table:
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.label),
        ("\nstep", lambda scheme: _ms(scheme.over_seeds("step_s"))),
        ("\ncompute", lambda scheme: _ms(scheme.over_seeds("own_compute_s"))),
        ("\nscheme", lambda scheme: _ms(scheme.over_seeds("scheme_s"))),
        ("commu-\nnicate", lambda scheme: _ms(scheme.over_seeds("wait_s"))),
        ("hidden\n%", lambda scheme: _hidden(summary, scheme)),
        ("\nother", lambda scheme: _ms(scheme.over_seeds("other_s"))),
        ("link\nneeds", lambda scheme: NOTHING if scheme.link_s is None else significant(1e3 * scheme.link_s)),
        ("step /\ncompute", lambda scheme: _middle(scheme.step_over_compute, lambda x: significant(x, 2) + "x")),
    ]
    title = "Where the time of a step goes, in ms (medians over the steps)"
    return _table(title, columns, summary.schemes)


def _table(title: str, columns: Sequence[Column], schemes: Sequence[SchemeFigures]) -> Table:
    rows = tuple(tuple(cell(scheme) for _, cell in columns) for scheme in schemes)
    return Table(title, tuple(head for head, _ in columns), rows)


def _middle(found: Spread | None, text: Callable[[float], str] = significant) -> str:
    """Format the median; "-" if it is not finite."""
    return NOTHING if found is None or not math.isfinite(found.median) else text(found.median)


def _ms(found: Spread | None) -> str:
    return _middle(found, lambda seconds: significant(1e3 * seconds))


def _arrival(scheme: SchemeFigures) -> str:
    """Format the time to the target, and how many seeds reached it if not all did."""
    if scheme.exchanged_nothing:
        return NOTHING
    middle = "not reached" if scheme.target_s is None else significant(scheme.target_s.median)
    partly = 0 < scheme.reached < len(scheme.seeds)
    return f"{middle}\n{scheme.reached} of {len(scheme.seeds)} seeds" if partly else middle


def _speedup(scheme: SchemeFigures, baseline: str) -> str:
    ratio = scheme.speedup[baseline]
    known = ratio is not None and not scheme.exchanged_nothing and scheme.label != baseline
    return ratio_text(ratio.spread.median, ratio.bound) if ratio is not None and known else NOTHING


def _end(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Format the final quality, or why some seed has none."""
    if scheme.exchanged_nothing:
        return "exchanged\nnothing"
    broken = next((seed.status.partition(":")[0] for seed in scheme.seeds if not seed.finished), "")
    return broken or _middle(scheme.over_seeds("quality"), lambda value: quality_text(summary.run, value))


def _behind(scheme: SchemeFigures) -> str:
    """Format percent behind dense, with the range if seeds differ."""
    gap = scheme.behind_dense
    if scheme.label == "dense" or scheme.exchanged_nothing or gap is None or not math.isfinite(gap.median):
        return NOTHING
    shown = behind_text(gap.median)
    return shown if gap.low == gap.high else f"{shown} ({behind_text(gap.low)} to {behind_text(gap.high)})"


def _hidden(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Format the hidden share of the reduction in percent, after "<" if it does not exceed the noise."""
    share, hidden_s = scheme.over_seeds("hidden_share"), scheme.over_seeds("hidden_s")
    if share is None or hidden_s is None:
        return NOTHING
    text = f"{100 * share.median:.0f}"
    return f"< {text}" if 0 < hidden_s.median <= summary.noise_s else text
