"""Draw quality over time and over steps: medians over the seeds, with the target and a name beside each curve.

Uses matplotlib figures alone, without its global state, so that the same records give the same picture.
"""

import io
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from sparsync_lab.report.choice import sentences, speed_baseline
from sparsync_lab.report.format import (
    behind_text,
    percent,
    place_text,
    quality_axis,
    quality_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.results import Quality, Run
from sparsync_lab.report.summary import RunSummary, SchemeFigures

INK, FAINT = "#222222", "#777777"
ORIGIN = "Description"  # the key of the PNG text that describes the picture, see `_origin`
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


def pictures(summary: RunSummary) -> dict[str, bytes]:
    """Draw the pictures as PNG, by name; each shows the banners of the run."""
    draws = {"quality_over_time": quality_over_time, "quality_over_steps": quality_over_steps}
    return {name: _picture(summary, draw) for name, draw in draws.items()}


def quality_over_time(summary: RunSummary, figure: Figure) -> None:
    """Draw quality over training time, with the target and each scheme's arrival there; the title is the run's choice."""
    run = summary.run
    said = sentences(summary)[0]
    title = said.rstrip(".") if said.startswith("Use") else f"{quality_axis(run)} over training time"
    beside = (
        "without evaluations; beside a name: "
        + ("" if run.target is None else f"speed-up over {speed_baseline(summary)}, ")
        + "% behind dense"
    )
    axes = _axes(summary, figure, title, f"{place_text(run)}; {beside}{_band(summary)}")
    axes.set_xlabel("seconds of training")
    _draw(axes, run, _curves(summary, lambda point: point.seconds, lambda each: _name_with_time(summary, each)))


def quality_over_steps(summary: RunSummary, figure: Figure) -> None:
    """Draw quality over training steps, which shows a scheme's loss of quality independently of the links."""
    run = summary.run
    subtitle = f"{place_text(run)}; beside a name: % behind dense{_band(summary)}"
    axes = _axes(summary, figure, f"{quality_axis(run)} over training steps", subtitle)
    axes.set_xlabel("steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _draw(axes, run, _curves(summary, lambda point: float(point.step), _name_with_gap))


def _picture(summary: RunSummary, draw: Callable[[RunSummary, Figure], None]) -> bytes:
    png = io.BytesIO()
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)  # makes itself the figure's canvas, on which texts can be measured
        draw(summary, figure)
        figure.savefig(png, format="png", metadata={ORIGIN: json.dumps(_origin(summary))})
    return png.getvalue()


def _origin(summary: RunSummary) -> dict[str, Any]:  # Any: JSON
    """Describe a picture: its caption, the command, and each scheme's final quality and seconds to the target."""
    run = summary.run
    return {
        "caption": f"{quality_axis(run)} over training time; {place_text(run)}",
        "command": shlex.join(["sparsync", *run.command[1:]]),
        "schemes": {
            each.label: {
                "quality": quality and quality_text(run, quality.median),
                "seconds": each.target_s and significant(each.target_s.median),
            }
            for each in summary.schemes
            for quality in [each.over_seeds("quality")]
        },
    }


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


def _curves(
    summary: RunSummary, position: Callable[[Quality], float], name: Callable[[SchemeFigures], str]
) -> list[Curve]:
    """Collect the finite evaluations of each scheme over `position`, at the steps where every seed was evaluated."""
    made, hues = [], iter(_HUES * len(summary.schemes))
    for scheme in summary.schemes:
        by_step = [{point.step: point for point in row if math.isfinite(point.value)} for row in scheme.curve]
        shared = sorted(set.intersection(*map(set, by_step))) if by_step else []
        points = [[each[step] for each in by_step] for step in shared]
        values = [[point.value for point in row] for row in points]
        middle = tuple((median(map(position, row)), median(own)) for row, own in zip(points, values, strict=True))
        band = tuple((min(own), max(own)) for own in values) if len(by_step) > 1 else ()
        hue = _BASELINE_HUES.get(scheme.label) or next(hues)
        made.append(Curve(name(scheme), hue, middle, band))
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
    boxes = [text.get_window_extent() for text in texts]
    box, (whole, tall) = axes.get_position(), figure.bbox.size
    # Keep at least half of the width: wider names are cut off.
    width = max(0.5 * box.width, box.width - (max(each.width for each in boxes) + 20) / whole)
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


def _name_with_time(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Label a curve with the scheme, its time to the target, its speed-up over the baseline, and its percent behind dense."""
    if summary.run.target is None:
        return _name_with_gap(scheme)
    baseline = speed_baseline(summary)
    found, ratio, gap = scheme.target_s, scheme.speedup[baseline], scheme.behind_dense
    facts = ["not reached" if found is None else seconds_text(found.median)]
    if scheme.exchanged_nothing:
        return _name_with_gap(scheme)
    if scheme.label != baseline:
        facts += [ratio_text(ratio.spread.median, ratio.bound)] if found and ratio else []
    if scheme.label != "dense":
        facts += [f"{behind_text(gap.median)} %"] if gap else []
    return f"{scheme.name}  {', '.join(facts)}"


def _name_with_gap(scheme: SchemeFigures) -> str:
    """Label a curve with the scheme and its percent behind dense, or that it exchanged nothing."""
    gap = scheme.behind_dense
    if scheme.exchanged_nothing:
        return f"{scheme.name}  exchanged nothing"
    return scheme.name + ("" if gap is None or scheme.label == "dense" else f"  {behind_text(gap.median)} %")


def _band(summary: RunSummary) -> str:
    """Explain the bands of the curves; "" if there are none."""
    several = any(len(scheme.seeds) > 1 for scheme in summary.schemes)
    return "; medians over the seeds, lowest to highest shaded" if several else ""
