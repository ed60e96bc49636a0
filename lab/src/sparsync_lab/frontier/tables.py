"""Format the tables of a study for a terminal and as Markdown."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from sparsync_lab.frontier.figures import LOSSES, Interval, MethodRow, Panel
from sparsync_lab.report.format import behind_text, significant
from sparsync_lab.terminal import NOTHING, Table

# Heading, cell of a row, whether the cell needs a result.
Column = tuple[str, Callable[[MethodRow], str], bool]


def table(panel: Panel, metric: str, beside: Mapping[str, Panel] = MappingProxyType({})) -> Table:
    """Tabulate one panel, fewest bits first. `beside`: the same methods on other jobs, by name, with a column each."""
    unit = LOSSES.get(metric, "")
    columns: list[Column] = [
        ("method", lambda row: row.label, False),
        ("bits per\nparameter\nper step", lambda row: significant(row.bits), False),
        ("message\nrounds", lambda row: significant(row.rounds, 2), False),
        ("\nrate", lambda row: f"{row.rate:g}{'!' if row.edge else ''}", False),
        (f"{metric}\nat the end", _end, False),
    ]
    if unit:
        columns.append((f"{unit}\nbehind dense", lambda row: interval_text(row.loss_behind), True))
    columns.append(("% behind\ndense", _range, True))
    if panel.rows[0].behind_best is not None:
        columns.append(("% behind the\nbest uncompressed", lambda row: behind_text(row.behind_best or 0.0), True))
    columns += [(f"% behind\ndense,\n{name}", _range_in(other), True) for name, other in beside.items()]
    rows = tuple(
        tuple(NOTHING if row.broken and result else cell(row) for _, cell, result in columns) for row in panel.rows
    )
    title = f"{panel.ranks} ranks, {panel.steps} steps"
    if panel.seeds > 1:
        title += f", means over {panel.seeds} seeds, (lowest to highest){', +- 95 % interval' if unit else ''}"
    if panel.dense_deviation is not None:
        title += f"; dense's standard deviation {significant(panel.dense_deviation, 2)} {unit}"
    return Table(title, tuple(head for head, *_ in columns), rows)


def remarks(panels: Sequence[Panel]) -> list[str]:
    """Write the remarks below the tables."""
    rows = [row for panel in panels for row in panel.rows]
    lines = [
        "Bits: what one rank sends per parameter per step, in closed form. Message rounds: exchanges that wait for each other. Both are "
        "means over ranks and steps. Rate: the best one tried, times the job's; docs/frontier.md explains the other columns."
    ]
    if any(row.edge for row in rows):
        lines.append("!: the best rate is the lowest or the highest tried; a better one may lie beyond it.")
    if any(math.isinf(row.end.mean) for row in rows):
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
