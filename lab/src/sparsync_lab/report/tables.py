"""The tables of a report, as cells of text and on a terminal: the quality, the traffic and the time of each scheme."""

import math
from collections.abc import Callable, Iterable, Sequence

from sparsync_lab.labels import PHASES
from sparsync_lab.report.format import (
    behind_text,
    byte_unit,
    percent,
    quality_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.lead import details, first_line, lead
from sparsync_lab.report.summary import RunSummary, SchemeFigures, Spread
from sparsync_lab.report.verdict import WITHIN, speed_baseline
from sparsync_lab.terminal import NOTHING, WIDTH, Table, lines_of

Column = tuple[str, Callable[[SchemeFigures], str]]  # a heading, and the cell of a scheme under it

# Beside every time: what was paid for it.
_BEHIND: Column = (
    "% behind\ndense",
    lambda scheme: (
        NOTHING if scheme.label == "dense" or scheme.exchanged_nothing else _cell(scheme.behind_dense, behind_text)
    ),
)

# Beside every number of bytes: what it is for a model of any size.
_BITS: Column = (
    "bits per\nparameter\nper step",
    lambda scheme: _middle(scheme.over_seeds("bits"), 1.0),
)


def tables(summary: RunSummary) -> tuple[Table, ...]:
    """Return the tables of quality, traffic and time, and of the phases where any were recorded.

    Over several seeds a cell has a second line with the range.
    """
    inside = _inside(summary)
    return (_reached(summary), _sent(summary), _spent(summary), *([inside] if inside else []))


def remarks(summary: RunSummary) -> tuple[str, ...]:
    """Return the lines under the tables: the physical limit, how several seeds are shown, then every note."""
    lines = []
    if any(scheme.behind_dense is not None for scheme in summary.schemes):
        lines.append(
            f"% behind dense: how much worse the {summary.run.metric} is after the same number of steps, the last that both took."
        )
    if summary.dense_link_s is not None:
        lines.append(
            f"No dense float32 all-reduce can take less than {seconds_text(summary.dense_link_s)} a step on these links: "
            f"2 (P-1)/P x 4 bytes x {summary.run.workload['parameters']} parameters."
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
    if any(len(scheme.seeds) > 1 for scheme in summary.schemes):
        lines.append("Over several seeds: the median, and under it the lowest and the highest.")
    return (*lines, *summary.notes)


def as_text(
    summary: RunSummary, width: int = WIDTH, colour: bool = False, ascii_only: bool = False, within: float = WITHIN
) -> str:
    """Return the warnings, the choice, tables and remarks in lines of at most `width` columns.

    `colour`: with a terminal's escape sequences. `ascii_only`: with no line-drawing characters. `within`: as in `verdict`.
    """
    above = warnings(summary)
    below = [(remark, "yellow" if remark in summary.notes else "dim") for remark in remarks(summary)]
    first = first_line(summary, within)
    choice = [*([(first, "bold")] if first else []), (lead(summary, within), "" if first else "bold")]
    choice += [(text, "") for text in (details(summary), "\n") if text]
    return lines_of(tables(summary), [*above, *choice], [*below, *above], width, colour, ascii_only)


def warnings(summary: RunSummary) -> list[tuple[str, str]]:
    """Return the line of each banner, with its style."""
    return [
        (f"!!! {each.text} {each.why}".rstrip(), "black on yellow" if each.kind == "disturbed" else "bold white on red")
        for each in summary.banners
    ]


def _reached(summary: RunSummary) -> Table:
    run, schemes = summary.run, summary.schemes
    to_target = [] if run.target is None else _to_target(summary, run.target)
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.name),
        (
            f"{run.metric}\nat the end",
            lambda scheme: _broken(scheme) or _cell(scheme.over_seeds("quality"), lambda x: quality_text(run, x)),
        ),
        _BEHIND,
        _BITS,
        *to_target,
        ("steps\ntaken", lambda scheme: _range(seed.steps for seed in scheme.seeds)),
    ]
    less = ("steps\ntaken", *(to_target[place][0] for place in (2,) if to_target), _BITS[0])
    return _table("What each scheme reached" + ("" if run.target is None else ", and when"), columns, schemes, less)


def _broken(scheme: SchemeFigures) -> str:
    """Return why there is no quality at the end, where that is so with a seed; else ""."""
    if scheme.exchanged_nothing:
        return "exchanged\nnothing"
    return next((seed.status.partition(":")[0] for seed in scheme.seeds if not seed.finished), "")


def _to_target(summary: RunSummary, target: float) -> list[Column]:
    goal = f"{target:g}{percent(summary.run)}"
    unit, size = byte_unit(spread.high for scheme in summary.schemes if (spread := scheme.target_bytes) is not None)
    counted = "interface" if summary.interface_counted else "payload"
    baseline = speed_baseline(summary)
    return [
        (f"seconds\nto {goal}", lambda scheme: _arrival(scheme, scheme.target_s, 1.0)),
        (f"speed-up\nover {baseline}", lambda scheme: _speedup(scheme, baseline)),
        (f"{unit} to {goal}\n({counted})", lambda scheme: _arrival(scheme, scheme.target_bytes, size)),
    ]


def _sent(summary: RunSummary) -> Table:
    schemes = summary.schemes
    sent = [scheme.over_seeds(name) for scheme in schemes for name in ("sent_bytes", "interface_bytes")]
    unit, size = byte_unit(spread.high for spread in sent if spread is not None)
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.name),
        (f"payload\n{unit}", lambda scheme: _middle(scheme.over_seeds("sent_bytes"), size)),
        (f"interface\n{unit}", lambda scheme: _middle(scheme.over_seeds("interface_bytes"), size)),
        _BITS,
        ("bits on\nthe inter-\nface", lambda scheme: _middle(scheme.over_seeds("interface_bits"), 1.0)),
        ("interface\n/ payload", lambda scheme: _times(scheme.interface_ratio, 3)),
        ("\nmessages", lambda scheme: _middle(scheme.over_seeds("messages"), 1.0)),
        ("density of\nthe union", lambda scheme: _middle(scheme.over_seeds("union_density"), 1.0)),
    ]
    less = ("density of\nthe union", f"interface\n{unit}", "\nmessages", "interface\n/ payload")
    return _table("What a rank sends in a step (means over the steps)", columns, schemes, less)


def _spent(summary: RunSummary) -> Table:
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.name),
        ("\nstep", lambda scheme: _middle(scheme.over_seeds("step_s"), 1e-3)),
        _BEHIND,
        _BITS,
        ("\ncompute", lambda scheme: _middle(scheme.over_seeds("own_compute_s"), 1e-3)),
        ("\nscheme", lambda scheme: _middle(scheme.over_seeds("scheme_s"), 1e-3)),
        ("commu-\nnicate", lambda scheme: _middle(scheme.over_seeds("wait_s"), 1e-3)),
        ("hidden\n%", lambda scheme: _hidden(summary, scheme)),
        ("\nother", lambda scheme: _middle(scheme.over_seeds("other_s"), 1e-3)),
        ("link\nneeds", lambda scheme: _middle(_exactly(scheme.link_s), 1e-3)),
        ("step /\ncompute", lambda scheme: _times(scheme.step_over_compute, 2)),
    ]
    less = (_BITS[0], _BEHIND[0], "\nother", "step /\ncompute", "hidden\n%")
    return _table("Where the time of a step goes, in ms (medians over the steps)", columns, summary.schemes, less)


def _inside(summary: RunSummary) -> Table | None:
    """Return the table of phases; None where no scheme recorded any."""
    recorded = [scheme for scheme in summary.schemes if any(_seconds(scheme, name) for name in PHASES)]
    columns: list[Column] = [
        ("scheme", lambda scheme: scheme.name),
        ("in the\nscheme", lambda scheme: _middle(scheme.over_seeds("scheme_s"), 1e-3)),
        *[(f"\n{name}", _phase(name)) for name in PHASES],
    ]
    title = "Where the time inside a scheme goes, in ms (medians over the steps)"
    return _table(title, columns, recorded) if recorded else None


def _seconds(scheme: SchemeFigures, phase: str) -> float:
    spread = scheme.over_seeds(f"{phase}_s")
    return spread.median if spread else 0.0


def _phase(name: str) -> Callable[[SchemeFigures], str]:
    return lambda scheme: _middle(scheme.over_seeds(f"{name}_s"), 1e-3)


def _table(title: str, columns: Sequence[Column], schemes: Sequence[SchemeFigures], less: Sequence[str] = ()) -> Table:
    rows = tuple(tuple(cell(scheme) for _, cell in columns) for scheme in schemes)
    return Table(title, tuple(head for head, _ in columns), rows, tuple(less))


def _cell(spread: Spread | None, text: Callable[[float], str]) -> str:
    """Return the median, and the range where there is one; "-" for what is not finite."""
    if spread is None:
        return NOTHING
    middle, low, high = (
        text(value) if math.isfinite(value) else NOTHING for value in (spread.median, spread.low, spread.high)
    )
    return middle if low == high else f"{middle}\n{low}..{high}"


def _exactly(value: float | None) -> Spread | None:
    return None if value is None else Spread(value, value, value)


def _middle(spread: Spread | None, size: float) -> str:
    return NOTHING if spread is None else significant(spread.median / size)


def _times(spread: Spread | None, digits: int) -> str:
    return NOTHING if spread is None else significant(spread.median, digits) + "x"


def _hidden(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Return the hidden share of the reduction in percent; "<" before one that is not above the noise."""
    share, hidden_s = scheme.over_seeds("hidden_share"), scheme.over_seeds("hidden_s")
    if share is None or hidden_s is None:
        return NOTHING
    text = f"{100 * share.median:.0f}"
    return f"< {text}" if 0 < hidden_s.median <= summary.noise_s else text


def _range(values: Iterable[int]) -> str:
    ordered = sorted(values)
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]}..{ordered[-1]}"


def _arrival(scheme: SchemeFigures, spread: Spread | None, size: float) -> str:
    """Return when the target was reached, in `size`s; how many seeds did so where not all did."""
    if scheme.exchanged_nothing:
        return NOTHING
    if scheme.reached == len(scheme.seeds):
        return _cell(spread, lambda value: significant(value / size))
    middle = "not reached" if spread is None else significant(spread.median / size)
    return middle if len(scheme.seeds) == 1 else f"{middle}\n{scheme.reached} of {len(scheme.seeds)} seeds"


def _speedup(scheme: SchemeFigures, baseline: str) -> str:
    ratio = scheme.speedup[baseline]
    if ratio is None or scheme.exchanged_nothing:
        return NOTHING
    bound = ratio.bound
    return _cell(ratio.spread, lambda value: ratio_text(value, bound))
