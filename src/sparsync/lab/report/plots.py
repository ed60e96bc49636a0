"""The pictures of a run: quality over time, quality over bytes, and where the time of a step goes.

Made with matplotlib figures alone, without its global state, so that the same records give the same picture.
"""

import io
from collections.abc import Callable, Mapping, Sequence

from sparsync.lab.extra import lab_extra
from sparsync.lab.report import curves
from sparsync.lab.report.curves import FAINT, INK
from sparsync.lab.report.format import (
    banner,
    byte_unit,
    bytes_text,
    headline,
    place_text,
    quality_axis,
    ratio_text,
    seconds_text,
)
from sparsync.lab.report.results import Quality
from sparsync.lab.report.summary import SchemeFigures, Summary

with lab_extra("matplotlib"):
    from matplotlib import rc_context
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too light for a line on white.
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BASELINE_HUES = {"dense": "#3d3d3d", "bf16": "#8a8a8a"}  # grey, so that the compared schemes stand out
_WARNING = "#b00020"
STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#e8e8e8",
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.parse_math": False,  # "$" in a label is a dollar
}
# The components of the time of a step, in the order of a bar.
_COMPONENT_HUES = {
    "computing": "#b5b5b5",
    "in the scheme": "#E69F00",
    "link's least time": "#0072B2",
    "communicating": "#8cc8ee",
    "communicating beyond it": "#8cc8ee",
    "other": "#e6e6e6",
}
_SIZE, _DPI = (9.0, 5.0), 160  # inches
_WIDEST = 0.94  # of the width of a picture: as wide as a line of text may be
_LONGEST = 30  # characters of a label
_BESIDE = 20.0  # pixels between a bar and its text, and beyond it
_RIGHT = 0.975  # of the width of a picture: where all axes end
_VISIBLE = 0.02  # of a step: the medians of its components do not add up exactly, and a smaller difference is not drawn


def pictures(summary: Summary) -> dict[str, bytes]:
    """Return PNG images by file name; over links without limit each shows the warning."""
    return {
        "quality_over_time.png": _png(summary, quality_over_time),
        "quality_over_bytes.png": _png(summary, quality_over_bytes),
        "step_breakdown.png": _png(summary, step_breakdown),
    }


def hues(summary: Summary) -> dict[str, str]:
    """Return a colour for each scheme, the same in every picture and table: grey for the baselines, then by order in the run."""
    return hues_of([scheme.label for scheme in summary.schemes])


def hues_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of these labels of schemes, and for the baselines."""
    others = [label for label in labels if label not in _BASELINE_HUES]
    return _BASELINE_HUES | {label: _HUES[number % len(_HUES)] for number, label in enumerate(others)}


def quality_over_time(summary: Summary, figure: Figure) -> None:
    """Draw quality over training time, with the target and when each scheme reached it."""
    run, hue = summary.run, hues(summary)
    title = headline(summary) or f"{quality_axis(run)} over training time"
    axes = _axes(summary, figure, title, f"{place_text(run)}; evaluations do not count as training time")
    drawn = [curves.curve(each, _seconds, _name_with_time(summary, each), hue[each.label]) for each in summary.schemes]
    axes.set_xlabel("seconds of training")
    curves.draw(axes, run, drawn)


def quality_over_bytes(summary: Summary, figure: Figure) -> None:
    """Draw quality over the bytes a rank has sent: by its interface, or as payload where no interface was counted."""
    run, hue = summary.run, hues(summary)
    counted = "all bytes that left its network interface" if summary.interface_counted else "payload, without framing"
    axes = _axes(summary, figure, f"{quality_axis(run)} over bytes sent", f"{place_text(run)}; {counted}")
    drawn = [curves.curve(each, _nbytes, _name_with_bytes(summary, each), hue[each.label]) for each in summary.schemes]
    unit, size = byte_unit(x for each in drawn for x, _ in each.middle)
    axes.set_xlabel(f"{unit} sent by one rank")
    curves.draw(axes, run, [each.divided(size) for each in drawn])


def step_breakdown(summary: Summary, figure: Figure) -> None:
    """Draw where the time of a step goes, one bar for each scheme, with the least time of the link in a strong colour."""
    title = "Where the time of a training step goes"
    axes = _axes(summary, figure, title, f"{place_text(summary.run)}; medians over the steps")
    rows = [(scheme, components) for scheme in summary.schemes if (components := _components(scheme))]
    labels = [_short(scheme.label) for scheme, _ in rows]
    _make_room(axes, labels)
    # The axis ends where the text beside the longest bar still fits.
    axes.set_xlim(0, max((_draw_bar(axes, place, *row) for place, row in enumerate(rows)), default=1.0))
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    if rows:
        _draw_legend(figure, axes, rows)


def _png(summary: Summary, draw: Callable[[Summary, Figure], None]) -> bytes:
    image = io.BytesIO()
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)  # makes itself the figure's canvas, on which texts can be measured
        draw(summary, figure)
        figure.savefig(image, format="png")
    return image.getvalue()


def _axes(summary: Summary, figure: Figure, title: str, subtitle: str) -> Axes:
    """Return axes under a title, a line with workload and links, and the warning where the links had no limit."""
    warning = banner(summary.run)
    top = 0.925 if warning is None else 0.855
    if warning is not None:
        box = {"facecolor": _WARNING, "edgecolor": _WARNING, "boxstyle": "square,pad=0.6"}
        _fit(figure.text(0.5, 0.955, warning, ha="center", va="center", weight="bold", color="white", bbox=box))
    _fit(figure.text(0.02, top, title[:1].upper() + title[1:], fontsize=14, weight="bold", color=INK))
    _fit(figure.text(0.02, top - 0.052, subtitle, color=FAINT))
    return figure.add_axes((0.09, 0.11, _RIGHT - 0.09, top - 0.195))


def _fit(text: Text) -> None:
    """Make the type of a line smaller where it is wider than the picture, as with a long name of a scheme."""
    width = text.get_window_extent().width
    text.set_fontsize(float(text.get_fontsize()) * min(1.0, _WIDEST * _SIZE[0] * _DPI / width))


def _make_room(axes: Axes, labels: Sequence[str]) -> None:
    """Move the left side of the axes to make room for the labels, and the upper one for a legend."""
    box = axes.get_position()
    width = max((curves.size(axes, label)[0] for label in labels), default=0.0)
    left = min(0.4, box.width * (width + _BESIDE) / axes.bbox.width + 0.02)
    axes.set_position((left, box.y0, _RIGHT - left, box.height - 0.065))


def _seconds(point: Quality) -> float:
    return point.seconds


def _nbytes(point: Quality) -> float:
    assert point.bytes is not None  # a Summary has them filled in
    return point.bytes


def _name_with_time(summary: Summary, scheme: SchemeFigures) -> str:
    """Return the scheme, when it reached the target, and how many times as fast as dense."""
    if summary.run.target is None:
        return _short(scheme.label)
    found, ratio = scheme.target_s, scheme.speedup["dense"]
    if found is None:
        return f"{_short(scheme.label)}  not reached"
    over = f", {ratio_text(ratio.spread.median, ratio.bound)}" if ratio and scheme.label != "dense" else ""
    return f"{_short(scheme.label)}  {seconds_text(found.median)}{over}"


def _name_with_bytes(summary: Summary, scheme: SchemeFigures) -> str:
    """Return the scheme, and the bytes that a rank had sent when it reached the target."""
    if summary.run.target is None:
        return _short(scheme.label)
    found = scheme.target_bytes
    return f"{_short(scheme.label)}  {'not reached' if found is None else bytes_text(found.median)}"


def _short(label: str) -> str:
    """Return the label, its middle left out where it would take half of a picture; tables have it whole."""
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST // 2]}…{label[-_LONGEST // 3 :]}"


def _components(scheme: SchemeFigures) -> dict[str, float]:
    """Return seconds of a step by name, in the order of the bar; empty where no step was recorded. Over seeds: medians."""
    found = {name: scheme.over_seeds(name) for name in ("step_s", "compute_s", "scheme_s", "wait_s", "rest_s")}
    middle = {name: each.median for name, each in found.items() if each is not None}
    if "step_s" not in middle:
        return {}
    components = {"computing": middle["compute_s"], "in the scheme": middle["scheme_s"]}
    if scheme.link_s is None:
        components["communicating"] = middle["wait_s"]
    else:
        # A queue may hold the last bytes of a step before the link has carried them.
        components["link's least time"] = min(scheme.link_s, middle["wait_s"])
        components["communicating beyond it"] = max(0.0, middle["wait_s"] - scheme.link_s)
    if middle["rest_s"] > _VISIBLE * middle["step_s"]:
        components["other"] = middle["rest_s"]
    return components


def _draw_bar(axes: Axes, place: int, scheme: SchemeFigures, components: Mapping[str, float]) -> float:
    """Draw a bar and the text beside it; return the length of an axis on which both fit.

    Where the components overlapped, so that they add up to more than the measured step, a mark shows where the step ended.
    """
    start = 0.0
    for name, seconds in components.items():
        axes.barh(place, 1e3 * seconds, left=1e3 * start, height=0.6, color=_COMPONENT_HUES[name])
        start += seconds
    step, over = scheme.over_seeds("step_s"), scheme.step_over_compute
    assert step is not None  # it has components
    if _overlapped(scheme, components):
        axes.plot([1e3 * step.median] * 2, [place - 0.4, place + 0.4], color=INK, linewidth=2.5)
    text = seconds_text(step.median) + (f", {ratio_text(over.median)} computing alone" if over else "")
    end = 1e3 * max(start, step.median)
    axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", color=INK)
    return end / (1 - (curves.size(axes, text)[0] + _BESIDE) / axes.bbox.width)


def _overlapped(scheme: SchemeFigures, components: Mapping[str, float]) -> bool:
    step = scheme.over_seeds("step_s")
    return step is not None and sum(components.values()) > (1 + _VISIBLE) * step.median


def _draw_legend(figure: Figure, axes: Axes, rows: Sequence[tuple[SchemeFigures, Mapping[str, float]]]) -> None:
    names = [name for name in _COMPONENT_HUES if any(name in components for _, components in rows)]
    handles: list[Artist] = [Patch(color=_COMPONENT_HUES[name], label=name) for name in names]
    if any(_overlapped(*row) for row in rows):
        handles.append(Line2D([], [], color=INK, linewidth=2.5, label="end of step"))
    axes.legend(
        handles=handles,
        ncols=len(handles),
        loc="lower left",
        bbox_to_anchor=(0.01, axes.get_position().y1),
        bbox_transform=figure.transFigure,
        frameon=False,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        handletextpad=0.5,
    )
