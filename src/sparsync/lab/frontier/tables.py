"""The tables of a study: on a terminal, and as Markdown."""

import math
from collections.abc import Sequence

from sparsync.lab.frontier.figures import Mean, Panel, Row
from sparsync.lab.report.format import behind_text, significant
from sparsync.lab.report.tables import NOTHING, Table


def table(panel: Panel, metric: str) -> Table:
    """Return the table of one panel, those that send least first."""
    *parts, _ = [step for step, _ in panel.rows[0].behind]
    heads = [
        "method",
        "\nkind",
        "bits of a parameter\nand step",
        "kB\na step",
        "message\nrounds",
        "\nunion",
        "\nrate",
        f"{metric}\nat the end",
        "% behind\ndense",
        *[f"\nat {step}" for step in parts],
    ]
    rows = [
        (
            row.label,
            row.kind,
            significant(row.bits) if row.bits else NOTHING,
            significant(row.nbytes / 1e3) if row.bits else NOTHING,
            significant(row.rounds, 2) if row.bits else NOTHING,
            significant(row.union),
            f"{row.rate:g}{'!' if row.edge else ''}",
            significant(row.end.mean, 4),
            _range(row),
            *[behind_text(mean.mean) for _, mean in row.behind[:-1]],
        )
        for row in panel.rows
    ]
    seeds = "" if panel.seeds == 1 else f", means over {panel.seeds} seeds, (lowest to highest)"
    return Table(f"{panel.ranks} ranks, {panel.steps} steps{seeds}", tuple(heads), tuple(rows))


def remarks(panels: Sequence[Panel]) -> list[str]:
    """Return the lines under the tables."""
    lines = [
        "Bits and kB: what one rank sends in a step; message rounds: exchanges that wait for each other. Means over ranks and steps.",
        "Rate: the best of those that were tried, times the job's own. Each method is compared with dense at its best rate, seed by seed.",
    ]
    if any(row.edge for panel in panels for row in panel.rows):
        lines.append("!: the best rate is the lowest or the highest that was tried, so a better one may lie beyond.")
    if any(math.isinf(row.end.mean) for panel in panels for row in panel.rows):
        lines.append("inf: the training diverged with a seed or more.")
    return lines


def markdown(shown: Table) -> str:
    """Return the table as Markdown, under its title."""
    lines = [[head.replace("\n", " ").strip() for head in shown.heads], ["---"] * len(shown.heads)]
    lines += [[f"`{name}`", *cells] for name, *cells in shown.rows]
    return "\n".join([f"{shown.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _range(row: Row) -> str:
    last: Mean = row.behind[-1][1]
    middle = behind_text(last.mean)
    return middle if last.low == last.high else f"{middle} ({behind_text(last.low)} to {behind_text(last.high)})"
