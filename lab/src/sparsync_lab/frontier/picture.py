"""Draw a study: percent behind dense over bits on a logarithmic axis, with a numbered mark per method."""

import io
import math
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from sparsync_lab.frontier.figures import MethodRow, Panel
from sparsync_lab.report.plots import FAINT, INK, STYLE

_HUES = {"baseline": "#8a8a8a", "published": "#D55E00", "ours": "#0072B2", "your own": "#009E73"}
_MARKS = {"baseline": "D", "published": "s", "ours": "o", "your own": "^"}
_WIDTH, _HEIGHT, _SIDE = 6.0, 4.6, 4.4  # inches: a panel, and the width of the list of names
_LINE = 0.19  # inches: one line of that list
_DPI = 110
_LINEAR = 2.0  # percent: the vertical axis is linear up to here, then logarithmic
_TICKS = (-5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def picture(panels: Sequence[Panel], title: str) -> bytes:
    """Draw a PNG image with a panel per number of ranks and steps, without methods that diverged."""
    image = io.BytesIO()
    columns = len({panel.ranks for panel in panels})
    lines = math.ceil(len(panels) / columns)
    numbers = {row.label: place for place, row in enumerate(_listed(panels), start=1)}
    with rc_context(STYLE | {"font.size": 9, "text.parse_math": True}):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        size = (columns * _WIDTH + _SIDE, max(lines * _HEIGHT + 0.5, 1.0 + _LINE * len(numbers)))
        figure = Figure(figsize=size, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(
            0.15 / size[0] * 2, 1 - 0.32 / size[1], title, fontsize=13, weight="bold", color=INK, parse_math=False
        )
        grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
        figure.subplots_adjust(
            left=0.75 / size[0], right=1 - _SIDE / size[0], bottom=0.6 / size[1], top=1 - 0.85 / size[1], wspace=0.06
        )
        # Columns are numbers of ranks, lines are numbers of steps.
        for place, panel in enumerate(panels):
            _draw(grid[place % lines][place // lines], panel, numbers)
        for axes in grid[:, 0]:
            axes.set_ylabel("% behind dense at the end, each at its best rate")
        for axes in grid[-1]:
            axes.set_xlabel("bits sent per parameter per step")
        _list_names(figure, panels, numbers, 1 - (_SIDE - 0.15) / size[0])
        figure.savefig(image, format="png")
    return image.getvalue()


def _listed(panels: Sequence[Panel]) -> list[MethodRow]:
    """List one row per method that any panel draws, sorted by bits."""
    found: dict[str, MethodRow] = {}
    for panel in panels:
        for row in panel.rows:
            if _drawn(row):
                found.setdefault(row.label, row)
    return sorted(found.values(), key=lambda row: row.bits)


def _drawn(row: MethodRow) -> bool:
    return row.bits > 0 and not row.broken and math.isfinite(row.behind.mean)


def _draw(axes: Axes, panel: Panel, numbers: dict[str, int]) -> None:
    axes.set_title(f"{panel.ranks} ranks, {panel.steps} steps", loc="left", fontsize=10, color=INK)
    rows = [row for row in panel.rows if _drawn(row)]
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=_LINEAR, linscale=0.6)
    axes.axhline(0, color=FAINT, linewidth=0.8)
    # The best quality at each number of bits.
    axes.plot(*_undercut(rows), drawstyle="steps-post", color=FAINT, linewidth=1.0, linestyle=(0, (4, 3)), zorder=1.5)
    for row in rows:
        last, hue = row.behind, _HUES[row.kind]
        if last.high > last.low:
            axes.plot([row.bits] * 2, [last.low, last.high], color=hue, linewidth=1.2, alpha=0.6, zorder=2)
        face, ink = ("white", hue) if row.kind == "published" else (hue, "white")
        axes.plot(
            row.bits, last.mean, marker=_MARKS[row.kind], markersize=12, color=face, markeredgecolor=hue, zorder=3
        )
        axes.annotate(
            str(numbers[row.label]), (row.bits, last.mean), ha="center", va="center_baseline", fontsize=7, color=ink,
            weight="bold", zorder=4,
        )  # fmt: skip
    low = min((row.behind.low for row in rows), default=0.0)
    high = max((row.behind.high for row in rows), default=1.0)
    ticks = [tick for tick in _TICKS if low - 1 <= tick <= 2 * max(high, 1)]
    axes.set_ylim(min(low, 0) - 0.7, 1.35 * max(high, 1))
    axes.set_yticks(ticks, [f"{tick:+d}" if tick else "0" for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())


def _undercut(rows: Sequence[MethodRow]) -> tuple[list[float], list[float]]:
    """Compute the line through the methods that no other method beats in both bits and quality."""
    bits: list[float] = []
    gaps: list[float] = []
    for row in sorted(rows, key=lambda row: (row.bits, row.behind.mean)):
        gap = row.behind.mean
        if not gaps or gap < gaps[-1]:
            bits.append(row.bits)
            gaps.append(gap)
    return bits, gaps


def _list_names(figure: Figure, panels: Sequence[Panel], numbers: dict[str, int], left: float) -> None:
    height = figure.get_size_inches()[1]
    top = 1 - 0.85 / height
    kinds = {row.kind for row in _listed(panels)}
    handles = [
        Line2D([], [], linestyle="", marker=_MARKS[kind], markersize=9, markeredgecolor=hue, label=kind,
               color="white" if kind == "published" else hue)
        for kind, hue in _HUES.items() if kind in kinds
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left, top + 0.32 / height), ncols=3, frameon=False,
        handletextpad=0.1, columnspacing=1.0,
    )  # fmt: skip
    for row in _listed(panels):
        number = numbers[row.label]
        y = top - (0.18 + _LINE * (number - 1)) / height
        figure.text(left + 0.02, y, f"{number}", ha="right", color=_HUES[row.kind], weight="bold", fontsize=8)
        size = min(8.0, 380 / len(row.label))
        figure.text(left + 0.025, y, row.label, color=INK, fontsize=size, parse_math=False)
