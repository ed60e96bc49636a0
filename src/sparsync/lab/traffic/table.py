"""The summaries of a study as a table on a terminal."""

import io
from collections.abc import Sequence

from sparsync.lab.extra import lab_extra
from sparsync.lab.format import significant
from sparsync.lab.tables import NOTHING, WIDTH
from sparsync.lab.traffic.observe import Record

_COLUMNS = (  # heading, name of the value in a window, and the unit it is told in
    ("density error\nmean", "density_error_mean", 0.01),
    ("%\nworst", "density_error_worst", 0.01),
    ("kB a rank\nmean", "bytes_mean", 1e3),
    ("\nmax", "bytes_max", 1e3),
    ("imbalance\nmean", "imbalance_mean", 1.0),
    ("energy %\nwritten", "captured_mean", 0.01),
    ("longest\nwait", "staleness_max", 1),
)


def as_text(summaries: Sequence[Record], title: str, width: int = WIDTH, ascii_only: bool = False) -> str:
    """A row a scheme, over the steps after the first 50, or after the first where there are no more."""
    with lab_extra("rich"):
        from rich import box
        from rich.console import Console
        from rich.table import Table
    lines = io.StringIO()
    start = "after_50" if summaries[0]["after_50"] else "after_1"
    shown = Table(box=box.ASCII if ascii_only else box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("scheme", overflow="fold", min_width=5)
    for head, _, _ in _COLUMNS:
        shown.add_column(head, justify="right", no_wrap=True)
    for summary in summaries:
        window = summary[start] or {}
        shown.add_row(summary["scheme"], *(_cell(window.get(name), unit) for _, name, unit in _COLUMNS))
    Console(file=lines, width=width, highlight=False, markup=False, emoji=False).print(shown)
    heading = f"{title}; after step {start.removeprefix('after_')}"
    return "\n".join([heading, *(line.rstrip() for line in lines.getvalue().splitlines() if line.strip()), ""])


def _cell(value: int | float | None, unit: int | float) -> str:
    if isinstance(value, int) and unit == 1:
        return str(value)
    return NOTHING if value is None else significant(value / unit)
