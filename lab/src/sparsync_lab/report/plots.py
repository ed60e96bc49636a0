"""Draw quality over time: medians over the seeds, with the target and a name beside each curve.

Uses matplotlib figures alone, without its global state, so that the same records give the same picture.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator

from sparsync_lab.report.choice import sentences, speed_baseline
from sparsync_lab.report.format import behind_text, percent, place_text, quality_axis, ratio_text, seconds_text
from sparsync_lab.report.results import Run
from sparsync_lab.report.summary import RunSummary, SchemeFigures

INK, FAINT = "#222222", "#777777"
# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too light for a line on white.
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BASELINE_HUES = {"dense": "#3d3d3d", "bf16": "#8a8a8a"}  # grey, so that the compared schemes stand out
_WARNINGS = {"disturbed": ("#f2c14e", "#222222")}  # background and text colour of a warning
_WARNING = ("#b00020", "#ffffff")
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.parse_math": False,  # "$" in a label is literal
}
_SIZE, _DPI = (9.0, 5.0), 160  # inches
_WIDEST = 0.94  # share of a picture's width that a line of text may take
_LOG_FROM = 25.0  # the x axis is logarithmic if the longest curve is this many times the shortest
_LOG_QUALITY_FROM = 2.0  # the same for y, if lower is better: the logarithm of a perplexity is the loss
_SETTLED = 1 / 6  # of the evaluations: the y axis begins with the worst value after these
_APART = 1.5  # text heights between two names beside the curves

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The curve of one scheme: the medians over its seeds and, with several seeds, the lowest and highest at the same places."""

    name: str
    hue: str
    middle: tuple[Point, ...]
    band: tuple[Point, ...]  # as long as `middle`, or empty


def picture(summary: RunSummary) -> bytes:
    """Draw quality over training time as PNG, with each scheme's arrival at the target; the title is the run's choice.

    It shows the banners of the run.
    """
    png = io.BytesIO()
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)  # makes itself the figure's canvas, on which texts can be measured
        _quality_over_time(summary, figure)
        figure.savefig(png, format="png")
    return png.getvalue()


def _quality_over_time(summary: RunSummary, figure: Figure) -> None:
    run = summary.run
    said = sentences(summary)[0]
    title = said.rstrip(".") if said.startswith("Use") else f"{quality_axis(run)} over training time"
    beside = (
        "without evaluations; beside a name: "
        + ("" if run.target is None else f"speed-up over {speed_baseline(summary)}, ")
        + "% behind dense"
    )
    several = any(len(scheme.seeds) > 1 for scheme in summary.schemes)
    band = "; medians over the seeds, lowest to highest shaded" if several else ""
    axes = _axes(summary, figure, title, f"{place_text(run)}; {beside}{band}")
    axes.set_xlabel("seconds of training")
    _draw(axes, run, _curves(summary))


def _axes(summary: RunSummary, figure: Figure, title: str, subtitle: str) -> Axes:
    """Add axes below the banners of the run, a title, and a line with workload and links."""
    title = title[:1].upper() + title[1:]
    top = 0.925
    for banner in summary.banners:
        behind, type_ = _WARNINGS.get(banner.kind, _WARNING)
        box = {"facecolor": behind, "edgecolor": behind, "boxstyle": "square,pad=0.6"}
        place = {"ha": "center", "va": "center", "weight": "bold", "color": type_, "bbox": box}
        _fit(figure.text(0.5, top + 0.03, banner.text, **place))
        top -= 0.07
    _fit(figure.text(0.02, top, title, fontsize=14, weight="bold", color=INK))
    _fit(figure.text(0.02, top - 0.052, subtitle, color=FAINT))
    return figure.add_axes((0.09, 0.11, 0.885, top - 0.195))


def _fit(text: Text) -> None:
    """Shrink the font of a line that is wider than the picture, as with a long scheme name."""
    width = text.get_window_extent().width
    text.set_fontsize(float(text.get_fontsize()) * min(1.0, _WIDEST * _SIZE[0] * _DPI / width))


def _curves(summary: RunSummary) -> list[Curve]:
    """Collect the finite evaluations of each scheme over time, at the steps where every seed was evaluated."""
    made, hues = [], iter(_HUES * len(summary.schemes))
    for scheme in summary.schemes:
        by_step = [{point.step: point for point in row if math.isfinite(point.value)} for row in scheme.curve]
        shared = sorted(set.intersection(*map(set, by_step))) if by_step else []
        points = [[each[step] for each in by_step] for step in shared]
        middle = tuple((median(each.seconds for each in row), median(each.value for each in row)) for row in points)
        bands = ([each.value for each in row] for row in points if len(row) > 1)
        hue = _BASELINE_HUES.get(scheme.label) or next(hues)
        made.append(Curve(_name(summary, scheme), hue, middle, tuple((min(own), max(own)) for own in bands)))
    return [each for each in made if each.middle]


def _draw(axes: Axes, run: Run, curves: Sequence[Curve]) -> None:
    """Draw the curves, the target, a dot where a curve first meets it, and the names."""
    axes.set_ylabel(quality_axis(run))
    if not curves:
        axes.text(0.5, 0.5, "nothing was evaluated", ha="center", transform=axes.transAxes, color=FAINT)
        return
    _set_limits(axes, run, curves)
    for each in curves:
        if each.band:
            low, high = zip(*each.band, strict=True)
            axes.fill_between([x for x, _ in each.middle], low, high, color=each.hue, alpha=0.15, linewidth=0)
        crossing = _crossing(each.middle, run)
        # On logarithmic axes a straight line misses the linear interpolation between two evaluations, so draw it through the dot.
        line = each.middle if crossing is None else sorted([*each.middle, crossing])
        axes.plot(*zip(*line, strict=True), color=each.hue, linewidth=2)
        axes.plot(*zip(*each.middle, strict=True), color=each.hue, linewidth=0, marker="o", markersize=3)
        if crossing is not None:
            axes.plot(*crossing, marker="o", markersize=9, color=each.hue, markeredgecolor="white", zorder=4)
    if run.target is not None:
        axes.axhline(run.target, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
        place: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "va": "bottom"}
        axes.annotate(f"target {run.target:g}{percent(run)}", (0, run.target), (4, 3), color=INK, **place)
    _draw_names(axes, curves)


def _set_limits(axes: Axes, run: Run, curves: Sequence[Curve]) -> None:
    """End the x axis with the longest curve, and let the y axis show where the curves differ, after the first steep fall."""
    ends = [each.middle[-1][0] for each in curves]
    positive = [x for each in curves for x, _ in each.middle if x > 0] or [1.0]
    last = max(ends) or max(positive)
    if min(ends) > 0 and last / min(ends) > _LOG_FROM:
        axes.set_xscale("log")
        _ticks_of_log(axes.xaxis)
        axes.set_xlim(min(positive), last)
    else:
        axes.set_xlim(0, last)
    settled = int(max(len(each.middle) for each in curves) * _SETTLED)
    shown = [y for each in curves for _, y in each.middle[min(settled, len(each.middle) - 1) :]]
    shown += [] if run.target is None else [run.target]
    low, high = min(shown), max(shown)
    if run.lower_is_better and low > 0 and high / low > _LOG_QUALITY_FROM:
        axes.set_yscale("log")
        _ticks_of_log(axes.yaxis)
        axes.set_ylim(low / 1.03, high * 1.03)
    else:
        margin = 0.04 * (high - low or abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)


def _ticks_of_log(axis: Any) -> None:  # Any: an axis of matplotlib, which has no common type
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 7)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def _draw_names(axes: Axes, curves: Sequence[Curve]) -> None:
    """Make room at the right for the names, each at about the height of its curve's end, joined to it by a thin line."""
    figure = axes.get_figure()
    assert figure is not None
    texts = [figure.text(0, 0, each.name, weight="bold", va="center", color=each.hue) for each in curves]
    box, (whole, tall) = axes.get_position(), figure.bbox.size
    widest = max(text.get_window_extent().width for text in texts)
    for text in texts:  # names leave at least half of the width
        text.set_fontsize(float(text.get_fontsize()) * min(1.0, 0.45 * whole / widest))
    boxes = [text.get_window_extent() for text in texts]
    width = box.width - (max(each.width for each in boxes) + 20) / whole
    axes.set_position((box.x0, box.y0, width, box.height))
    apart = _APART * max(each.height for each in boxes)
    ends = [axes.transData.transform(each.middle[-1]) for each in curves]
    order = sorted(range(len(curves)), key=lambda place: ends[place][1])
    heights: list[float] = []
    for place in order:
        heights.append(max([float(ends[place][1]), *(height + apart for height in heights[-1:])]))
    # Shift all down so that ups and downs balance, within the axes if there is room.
    down = sum(height - ends[place][1] for height, place in zip(heights, order, strict=True)) / len(order)
    down = max(min(down, heights[0] - axes.bbox.y0), heights[-1] - axes.bbox.y1)
    right = axes.bbox.x1 + 14
    for height, place in zip(heights, order, strict=True):
        texts[place].set_position(((right + 6) / whole, (height - down) / tall))
        (x, y), hue = ends[place] / (whole, tall), curves[place].hue
        line = {"transform": figure.transFigure, "color": hue, "linewidth": 0.9, "alpha": 0.5, "clip_on": False}
        axes.plot((x, right / whole), (y, (height - down) / tall), scalex=False, scaley=False, zorder=1.8, **line)


def _crossing(points: Sequence[Point], run: Run) -> Point | None:
    """Find where the drawn line first meets the target."""
    target = run.target
    for (x, y), (next_x, next_y) in pairwise(points):
        if target is not None and (next_y <= target < y if run.lower_is_better else y < target <= next_y):
            return x + (y - target) / (y - next_y) * (next_x - x), target
    return None


def _name(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Label a curve with the scheme, its time to the target, its speed-up over the baseline, and its percent behind dense."""
    facts, gap = list[str](), scheme.behind_dense
    if scheme.exchanged_nothing:
        return f"{scheme.label}  exchanged nothing"
    if summary.run.target is not None:
        baseline = speed_baseline(summary)
        found, ratio = scheme.target_s, scheme.speedup[baseline]
        facts = ["not reached" if found is None else seconds_text(found.median)]
        if scheme.label != baseline and found and ratio:
            facts.append(ratio_text(ratio.spread.median, ratio.bound))
    if scheme.label != "dense" and gap:
        facts.append(f"{behind_text(gap.median)} %")
    return f"{scheme.label}  {', '.join(facts)}".rstrip()
