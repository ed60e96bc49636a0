"""Quality curves on matplotlib axes: medians over seeds, the target as a line, every name on a pole at its curve's end."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from matplotlib.axes import Axes

from sparsync_lab.report.format import percent, quality_axis, significant
from sparsync_lab.report.results import Quality, Run
from sparsync_lab.report.summary import SchemeFigures

INK, FAINT = "#222222", "#777777"
_LOG_FROM = 25.0  # the x axis is logarithmic where the longest curve is this many times the shortest
_LOG_QUALITY_FROM = 2.0  # the same for y, and only where lower is better: the logarithm of a perplexity is the loss
_SETTLED = 1 / 6  # of the evaluations: the y axis begins with the worst value after those
_LOG_TICKS = [digits * 10.0**power for power in range(-3, 7) for digits in (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)]
_POLE, _GAP, _LINE = 6.0, 14.0, 1.5  # pixels: pole to name, name to name; a line of names in heights of their type
_APART = (
    3.0  # heights of their type that ticks stand apart at least on the x axis, where they are numbers of some digits
)

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """The curve of one scheme: the medians over its seeds and, where there are several, the lowest and highest at the same places."""

    name: str
    hue: str
    middle: tuple[Point, ...]
    band: tuple[tuple[float, float], ...]  # as long as `middle`, or empty

    @property
    def end(self) -> Point:
        return self.middle[-1]


def curve(scheme: SchemeFigures, position: Callable[[Quality], float], name: str, hue: str) -> Curve:
    """Return the scheme's finite evaluations over `position`; the middle has the steps at which every seed was evaluated."""
    by_step = [{point.step: point for point in row if math.isfinite(point.value)} for row in scheme.curve]
    shared = sorted(set.intersection(*(set(points) for points in by_step))) if by_step else []
    middle = tuple(
        (median(position(points[step]) for points in by_step), median(points[step].value for points in by_step))
        for step in shared
    )
    values = [[points[step].value for points in by_step] for step in shared]
    band = tuple((min(each), max(each)) for each in values) if len(by_step) > 1 else ()
    return Curve(name, hue, middle, band)


def draw(axes: Axes, run: Run, curves: Sequence[Curve]) -> None:
    """Draw the curves, the target, a dot where a curve first meets it, and the names."""
    axes.set_ylabel(quality_axis(run))
    curves = [each for each in curves if each.middle]
    if not curves:
        axes.text(0.5, 0.5, "nothing was evaluated", ha="center", transform=axes.transAxes, color=FAINT)
        return
    # Names need room, so they are measured before the axes are laid out.
    sizes = [size(axes, each.name) for each in curves]
    height = max(height for _, height in sizes)
    _set_x(axes, curves, [width for width, _ in sizes])
    _set_x_ticks(axes, _APART * height)
    ends = [axes.transData.transform(each.end)[0] for each in curves]
    beside = min(ends) > axes.bbox.x1 - 1  # all end with the axis: there is nothing but names to the right of it
    rows = [] if beside else _rows(ends, [width for width, _ in sizes])
    spacing = _LINE * height
    _set_y(axes, run, curves, spacing * (1 if beside else max(rows) + 1.8))
    _set_y_ticks(axes, run, [each.end[1] for each in curves], spacing)
    for each in curves:
        if each.band:
            places, (low, high) = [x for x, _ in each.middle], zip(*each.band, strict=True)
            axes.fill_between(places, low, high, color=each.hue, alpha=0.15, linewidth=0)
        crossing = _crossing(each.middle, run)
        # On logarithmic axes the straight line between two evaluations is not the linear one, so it is drawn through the dot.
        line = each.middle if crossing is None else sorted([*each.middle, crossing])
        axes.plot(*zip(*line, strict=True), color=each.hue, linewidth=2)
        axes.plot(*zip(*each.middle, strict=True), color=each.hue, linewidth=0, marker="o", markersize=3)
        if crossing is not None:
            axes.plot(*crossing, marker="o", markersize=9, color=each.hue, markeredgecolor="white", zorder=4)
    if run.target is not None:
        _draw_target(axes, f"target {run.target:g}{percent(run)}", run.target)
    if beside:
        _draw_names_beside(axes, curves, spacing)
    else:
        _draw_names_under(axes, run, curves, rows, spacing)


def size(axes: Axes, text: str) -> tuple[float, float]:
    """Return width and height of the text as a name, in pixels."""
    drawn = axes.text(0, 0, text, weight="bold")
    box = drawn.get_window_extent()
    drawn.remove()
    return box.width, box.height


def _set_x(axes: Axes, curves: Sequence[Curve], widths: Sequence[float]) -> None:
    """Make the x axis end with the longest curve, and the axes so narrow that every name fits to the right of its curve's end."""
    ends = [each.end[0] for each in curves]
    positive = [x for each in curves for x, _ in each.middle if x > 0] or [1.0]
    last = max(ends) or max(positive)
    if min(ends) > 0 and last / min(ends) > _LOG_FROM:
        first = min(positive)
        axes.set_xscale("log")
        axes.set_xlim(first, last)
        places = [math.log(end / first) / math.log(last / first) for end in ends]
    else:
        axes.set_xlim(0, last)
        places = [end / last for end in ends]
    # No narrower than half of what they are: a name that is wider is cut off.
    box, whole = axes.get_position(), axes.bbox.width
    fits = [
        (whole - width - _POLE - 2 * _GAP) / place for place, width in zip(places, widths, strict=True) if place > 0
    ]
    room = min(fits, default=whole)
    axes.set_position((box.x0, box.y0, box.width * min(1.0, max(0.5, room / whole)), box.height))


def _set_x_ticks(axes: Axes, apart: float) -> None:
    """Set ticks at the end of the axis and, `apart` pixels from it and one another, at round numbers."""
    first, last = axes.get_xlim()
    log = axes.get_xscale() == "log"
    round_ones = [tick for tick in (_LOG_TICKS if log else axes.get_xticks()) if first <= tick <= last]
    ticks = _apart([last, *round_ones], lambda x: axes.transData.transform((x, axes.get_ylim()[0]))[0], apart)
    axes.set_xticks(ticks, [_written(tick, tick in round_ones) for tick in ticks])
    axes.set_xticks([], minor=True)


def _set_y_ticks(axes: Axes, run: Run, ends: Sequence[float], apart: float) -> None:
    """Add ticks where curves end, the best end first, to those of the axis, all `apart` pixels from one another."""
    shown = sorted(
        (y for y in ends if min(axes.get_ylim()) <= y <= max(axes.get_ylim())), reverse=not run.lower_is_better
    )
    round_ones = [] if run.target is None else [run.target]
    round_ones += [float(tick) for tick in axes.get_yticks()]
    ticks = _apart([*shown, *round_ones], lambda y: axes.transData.transform((axes.get_xlim()[1], y))[1], apart)
    axes.set_yticks(ticks, [_written(tick, tick in round_ones) for tick in ticks])


def _apart(ticks: Sequence[float], pixel: Callable[[float], float], least: float) -> list[float]:
    """Return the ticks, in ascending order, less those that are nearer than `least` pixels to an earlier one."""
    kept: list[float] = []
    for tick in ticks:
        if all(abs(pixel(tick) - pixel(other)) >= least for other in kept):
            kept.append(float(tick))
    return sorted(kept)


def _written(tick: float, is_round: bool) -> str:
    return f"{round(tick, 10):g}" if is_round or tick == round(tick) else significant(tick)


def _set_y(axes: Axes, run: Run, curves: Sequence[Curve], room: float) -> None:
    """Make the y axis show where the curves differ, after the first steep fall; `room` pixels stay free for the names."""
    settled = int(max(len(each.middle) for each in curves) * _SETTLED)
    shown = [y for each in curves for _, y in each.middle[min(settled, len(each.middle) - 1) :]]
    shown += [] if run.target is None else [run.target]
    low, high = min(shown), max(shown)
    free = min(room / axes.bbox.height, 0.6)
    if run.lower_is_better and low > 0 and high / low > _LOG_QUALITY_FROM:
        bottom = low / (high / low) ** (free / (1 - free))
        axes.set_yscale("log", subs=())
        axes.set_yticks([tick for tick in _LOG_TICKS if 0.95 * low <= tick <= high])
        axes.set_yticks([], minor=True)
        axes.set_ylim(bottom, high)
    else:
        margin = (high - low or abs(high) or 1.0) * free / (1 - free)
        axes.set_ylim((low - margin, high) if run.lower_is_better else (low, high + margin))
        # No ticks among the names: an accuracy of 110 % looks like a mistake.
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])


def _rows(ends: Sequence[float], widths: Sequence[float]) -> list[int]:
    """Return the line of each name, 0 next to the curves, so that no name covers another and no pole crosses a name.

    From right to left, each in the first line where it fits: all names in nearer lines start to the right of its pole.
    """
    rows, free = [0] * len(ends), list[float]()
    for place in sorted(range(len(ends)), key=lambda place: ends[place], reverse=True):
        needed = ends[place] + _POLE + widths[place] + _GAP
        row = next((row for row, start in enumerate(free) if needed <= start), len(free))
        free[: row + 1] = [ends[place]] * (row + 1)  # the pole closes all lines it passes
        rows[place] = row
    return rows


def _draw_target(axes: Axes, text: str, target: float) -> None:
    axes.axhline(target, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1.5)
    top = target >= max(axes.get_ylim())  # above it is the text over the axes
    place = {"xycoords": axes.get_yaxis_transform(), "textcoords": "offset points", "ha": "right"}
    axes.annotate(text, (1, target), (0, -3 if top else 3), va="top" if top else "bottom", color=INK, **place)


def _draw_names_under(axes: Axes, run: Run, curves: Sequence[Curve], rows: Sequence[int], spacing: float) -> None:
    """Draw names in lines beyond the best value, each on a thin pole that stands on the end of its curve."""
    page = [axes.transData.transform(each.end) for each in curves]
    lowest, highest = min(y for _, y in page), max(y for _, y in page)
    for each, (x, y), row in zip(curves, page, rows, strict=True):
        up = lowest - (row + 1) * spacing if run.lower_is_better else highest + (row + 1) * spacing
        _draw_name(axes, each, (x, y), (x, up))


def _draw_names_beside(axes: Axes, curves: Sequence[Curve], spacing: float) -> None:
    """Draw names to the right of the axes, each as near to the end of its curve as there is room, in the order of the ends."""
    ends = [(axes.transData.transform(each.end), each) for each in curves]
    page = sorted(((float(x), float(y), each) for (x, y), each in ends), key=lambda entry: entry[1])
    heights: list[float] = []
    for _, y, _ in page:
        heights.append(max([y, *(height + spacing for height in heights[-1:])]))
    # As many move down as moved up, within the axes where there is room.
    down = sum(height - y for height, (_, y, _) in zip(heights, page, strict=True)) / len(page)
    down = max(min(down, heights[0] - axes.bbox.y0 - spacing / 2), heights[-1] - axes.bbox.y1)
    for height, (x, y, each) in zip(heights, page, strict=True):
        _draw_name(axes, each, (x, y), (x + _GAP, height - down))


def _draw_name(axes: Axes, curve: Curve, end: Point, pole: Point) -> None:
    """Draw a thin line between two places of the page, in pixels, and the curve's name at the second."""
    figure = axes.get_figure()
    assert figure is not None
    # As shares of the figure, which every format has; it may have other pixels.
    (x, y), (name_x, name_y) = figure.transFigure.inverted().transform([end, pole])
    beside, _ = figure.transFigure.inverted().transform((pole[0] + _POLE, 0.0))
    place = {"transform": figure.transFigure, "color": curve.hue}
    axes.plot((x, name_x), (y, name_y), linewidth=0.9, scalex=False, scaley=False, zorder=1.8, clip_on=False, **place)
    axes.text(beside, name_y, curve.name, weight="bold", va="center", **place)


def _crossing(points: Sequence[Point], run: Run) -> Point | None:
    """Return where the drawn line first meets the target."""
    target = run.target
    for (x, y), (next_x, next_y) in pairwise(points):
        if target is not None and (next_y <= target < y if run.lower_is_better else y < target <= next_y):
            return x + (y - target) / (y - next_y) * (next_x - x), target
    return None
