"""Format the tables of a study for a terminal and as Markdown."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sparsync_lab.frontier.figures import LOSSES, Interval, MethodRow, Panel
from sparsync_lab.report.format import behind_text, significant
from sparsync_lab.terminal import NOTHING, Table

# Heading, cell of a row, whether the cell needs a result, and whether a page shows the column.
Column = tuple[str, Callable[[MethodRow], str], bool, bool]


def table(
    panel: Panel, metric: str, names: Mapping[str, str], beside: Mapping[str, Panel] = MappingProxyType({})
) -> Table:
    """Tabulate one panel, fewest bits first; `names` maps labels to the names shown.

    `beside`: the same methods on other jobs, by name, with a column each.
    """
    unit = LOSSES.get(metric, "")
    columns: list[Column] = [
        ("method", lambda row: names[row.label], False, True),
        ("\nkind", lambda row: row.kind, False, False),
        ("bits per\nparameter\nper step", lambda row: significant(row.bits) if row.bits else NOTHING, False, True),
        ("kB\nper step", lambda row: significant(row.nbytes / 1e3) if row.bits else NOTHING, False, False),
        ("message\nrounds", lambda row: significant(row.rounds, 2) if row.bits else NOTHING, False, True),
        ("\nunion", lambda row: significant(row.union), False, False),
        ("\nrate", lambda row: f"{row.rate:g}{'!' if row.edge else ''}", False, False),
    ]
    if _several(panel):
        columns.append(("\noptimizer", lambda row: row.optimizer, False, False))
    columns.append((f"{metric}\nat the end", _end, False, True))
    if unit not in ("", metric):  # the loss is not the metric
        columns.append((f"{unit}\nat the end", lambda row: significant(row.loss or 0.0, 4), True, False))
    if unit:
        columns.append((f"{unit}\nbehind dense", lambda row: interval_text(row.loss_behind), True, True))
    columns.append(("% behind\ndense", _range, True, True))
    if panel.rows[0].behind_best is not None:
        columns.append(("% behind\ndense or laprop", lambda row: behind_text(row.behind_best or 0.0), True, True))
    columns += [(f"% behind\ndense,\n{name}", _range_in(other), True, True) for name, other in beside.items()]
    rows = tuple(
        tuple(NOTHING if row.broken and result else cell(row) for _, cell, result, _ in columns) for row in panel.rows
    )
    title = f"{panel.ranks} ranks, {panel.steps} steps"
    if panel.seeds > 1:
        title += f", means over {panel.seeds} seeds, (lowest to highest){', +- 95 % interval' if unit else ''}"
    if panel.dense_deviation is not None:
        title += f"; dense's standard deviation {significant(panel.dense_deviation, 2)} {unit}"
    less = {head for head, *_, on_page in columns if not on_page}
    order = ("\nunion", "kB\nper step", "\nrate", "\noptimizer", "\nkind")
    first = [head for head in order if head in less]
    return Table(title, tuple(head for head, *_ in columns), rows, (*first, *sorted(less - {*first})))


def brief(shown: Table) -> Table:
    """Keep only the columns that a page shows."""
    kept = [i for i, head in enumerate(shown.heads) if head not in shown.less]
    rows = tuple(tuple(row[i] for i in kept) for row in shown.rows)
    return Table(shown.title, tuple(shown.heads[i] for i in kept), rows)


def remarks(panels: Sequence[Panel]) -> list[str]:
    """Write the remarks below the tables."""
    lines = [
        "Bits and kB: what one rank sends per step, in closed form; `sparsync compare` counts frames too. Message rounds: "
        "exchanges that wait for each other. All three are means over ranks and steps.",
        "Rate: the best rate tried, times the job's; dense has its best rate, too.",
    ]
    errors = [row.error for panel in panels for row in panel.rows if row.label == "dense" and row.error is not None]
    if errors:
        lines.append(
            f"Standard error of dense's quality over the validation windows: {significant(max(errors), 2)} at most. All methods are "
            "evaluated on the same windows, so their differences are more certain."
        )
    if any(row.edge for panel in panels for row in panel.rows):
        lines.append("!: the best rate is the lowest or the highest tried; a better one may lie beyond it.")
    if any(map(_several, panels)):
        lines.append(
            "Optimizer: the job's, or SGD without momentum for a scheme with its own momentum; each rank then clips its own gradient."
        )
    rows = [row for panel in panels for row in panel.rows]
    if any(row.loss_behind is not None for row in rows):
        lines.append(
            "Behind dense in nats or bits: difference of the losses, seed by seed; +-: half of its 95 % interval over seeds, Student's t."
        )
    if any(row.behind_best is not None for row in rows):
        lines.append(
            "Dense or laprop: the one of the better mean. LaProp is AdamW that divides before its momentum, as exchanged AdamW steps do."
        )
    if any(math.isinf(row.end.mean) for panel in panels for row in panel.rows):
        lines.append("inf: the training diverged with a seed or more.")
    return lines


def broken(panels: Sequence[Panel]) -> list[str]:
    """Write a line for each row without a result: its training failed, or no exchange changed the weights."""
    return [
        f"{row.label} {_capitals(row.broken)} ({panel.ranks} ranks, {panel.steps} steps, rate {row.rate:g}). Its row is no result."
        for panel in panels
        for row in panel.rows
        if row.broken
    ]


def _capitals(broken: str) -> str:
    if broken == "exchanged nothing":
        return "EXCHANGED NOTHING: all was left out, because weights or gradients were NaN or infinite, or it ended before the first"
    return f"FAILED{broken.removeprefix('failed')}"


def _several(panel: Panel) -> bool:
    """Tell whether the methods train with different optimizers."""
    return len({row.optimizer for row in panel.rows}) > 1


def interval_text(found: Interval | None) -> str:
    """Format a difference of losses with its 95 % interval, to a thousandth: +0.012 +- 0.008."""
    if found is None:
        return NOTHING
    mean = f"{found.mean:+.3f}" if round(found.mean, 3) else "0"
    if not found.half:
        return mean if math.isfinite(found.mean) else f"{found.mean:g}"
    return f"{mean} +- {found.half:.3f}"


def _end(row: MethodRow) -> str:
    return row.broken.partition(":")[0].replace(" ", "\n") or significant(row.end.mean, 4)


def _range_in(other: Panel) -> Callable[[MethodRow], str]:
    """Make the cell of a method's row in another panel."""
    rows = {each.label: each for each in other.rows}
    return lambda row: NOTHING if rows[row.label].broken else _range(rows[row.label])


def _range(row: MethodRow) -> str:
    low, middle, high = (behind_text(each) for each in (row.behind.low, row.behind.mean, row.behind.high))
    return middle if row.behind.low == row.behind.high else f"{middle} ({low} to {high})"
