"""The pictures of a run: quality over time, over steps and over bytes, and where the time of a step goes.

Made with matplotlib figures alone, without its global state, so that the same records give the same picture.
"""

import io
import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from sparsync_lab.report import breakdown, curves
from sparsync_lab.report.curves import FAINT, INK
from sparsync_lab.report.format import (
    behind_text,
    byte_unit,
    bytes_text,
    place_text,
    quality_axis,
    quality_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.lead import headline
from sparsync_lab.report.results import Quality
from sparsync_lab.report.summary import RunSummary, SchemeFigures
from sparsync_lab.report.theme import themed
from sparsync_lab.report.verdict import WITHIN, speed_baseline

ORIGIN = "Description"  # the key of the text in a PNG that says what it shows, see `_origin`
# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too light for a line on white.
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BASELINE_HUES = {"dense": "#3d3d3d", "bf16": "#8a8a8a"}  # grey, so that the compared schemes stand out
_WARNINGS = {
    "disturbed": ("#f2c14e", "#222221")
}  # behind a warning, and its type: the same on a light and on a dark page
_WARNING = ("#b00020", "#fffffe")
_BANNER = "banner"
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
    "text.parse_math": False,  # "$" in a label is a dollar
}
_SIZE, _DPI = (9.0, 5.0), 160  # inches
_NARROW = (4.3, 4.0)  # the same for a telephone: the table below it says which curve has which colour
_WIDEST = 0.94  # of the width of a picture: as wide as a line of text may be
_RIGHT = 0.975  # of the width of a picture: where all axes end


@dataclass(frozen=True)
class Picture:
    """A picture three times: as a file, and for wide and narrow pages, on which it has the page's colours."""

    png: bytes
    svg: str
    narrow: str = ""  # without names and without its title
    title: str = ""


def pictures(summary: RunSummary, within: float = WITHIN) -> dict[str, Picture]:
    """Return the pictures by name; each shows the banners of the run. `within`: as in `verdict`."""
    draws = {
        "quality_over_time": partial(quality_over_time, within=within),
        "quality_over_steps": quality_over_steps,
        "quality_over_bytes": quality_over_bytes,
        "step_breakdown": step_breakdown,
    }
    return {name: _picture(summary, name, draw) for name, draw in draws.items()}


def hues(summary: RunSummary) -> dict[str, str]:
    """Return a colour for each scheme, the same in every picture and table: grey for the baselines, then by order in the run."""
    return hues_of([scheme.label for scheme in summary.schemes])


def hues_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of these labels of schemes, and for the baselines."""
    others = [label for label in labels if label not in _BASELINE_HUES]
    return _BASELINE_HUES | {label: _HUES[number % len(_HUES)] for number, label in enumerate(others)}


def quality_over_time(summary: RunSummary, figure: Figure, within: float = WITHIN) -> None:
    """Draw quality over training time, with the target and when each scheme reached it; the title is the choice of the run."""
    run, hue = summary.run, hues(summary)
    title = headline(summary, within) or f"{quality_axis(run)} over training time"
    beside = (
        "without evaluations; beside a name: "
        + ("" if run.target is None else f"speed-up over {speed_baseline(summary)}, ")
        + "% behind dense"
    )
    axes = _axes(summary, figure, title, f"{place_text(run)}; {beside}{_band(summary)}")
    named = _is_wide(figure)
    drawn = [curves.curve(each, _seconds, _name_with_time(summary, each), hue[each.label]) for each in summary.schemes]
    axes.set_xlabel("seconds of training")
    curves.draw(axes, run, drawn, named)


def quality_over_steps(summary: RunSummary, figure: Figure) -> None:
    """Draw quality over training steps: what the schemes cost in quality, whatever the links."""
    run, hue = summary.run, hues(summary)
    axes = _axes(
        summary,
        figure,
        f"{quality_axis(run)} over training steps",
        f"{place_text(run)}; beside a name: % behind dense{_band(summary)}",
    )
    drawn = [curves.curve(each, _steps, _name_with_gap(each), hue[each.label]) for each in summary.schemes]
    axes.set_xlabel("steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    curves.draw(axes, run, drawn, _is_wide(figure))


def quality_over_bytes(summary: RunSummary, figure: Figure) -> None:
    """Draw quality over the bytes a rank has sent: by its interface, or as payload where no interface was counted."""
    run, hue = summary.run, hues(summary)
    counted = "all bytes that left its network interface" if summary.interface_counted else "payload, without framing"
    axes = _axes(
        summary, figure, f"{quality_axis(run)} over bytes sent", f"{place_text(run)}; {counted}{_band(summary)}"
    )
    drawn = [curves.curve(each, _nbytes, _name_with_bytes(summary, each), hue[each.label]) for each in summary.schemes]
    unit, size = byte_unit(x for each in drawn for x, _ in each.middle)
    axes.set_xlabel(f"{unit} sent by one rank")
    curves.draw(axes, run, [each.divided(size) for each in drawn], _is_wide(figure))


def step_breakdown(summary: RunSummary, figure: Figure) -> None:
    """Draw where the time of a step goes, with the least time of the link in a strong colour."""
    title = "Where the time of a training step goes"
    subtitle = f"{place_text(summary.run)}; medians over the steps; above computing, below it the reduction"
    labels = [scheme.name for scheme in summary.schemes]
    breakdown.draw(figure, _axes(summary, figure, title, subtitle), summary.schemes, labels, _is_wide(figure))


def _picture(summary: RunSummary, name: str, draw: Callable[[RunSummary, Figure], None]) -> Picture:
    png, svg, narrow = io.BytesIO(), io.StringIO(), io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": name}):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)  # makes itself the figure's canvas, on which texts can be measured
        draw(summary, figure)
        figure.savefig(png, format="png", metadata={ORIGIN: json.dumps(_origin(summary))})
        for banner in figure.findobj(lambda artist: artist.get_gid() == _BANNER):
            banner.set_visible(False)  # a page has it once, above everything
        no_origin: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", metadata=no_origin)
        small = Figure(figsize=_NARROW, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(small)
        draw(summary, small)
        small.savefig(narrow, format="svg", metadata=no_origin)
    wide = themed(svg.getvalue(), name)
    return Picture(png.getvalue(), wide, themed(narrow.getvalue(), f"{name}_narrow"), str(small.get_label()))


def _origin(summary: RunSummary) -> dict[str, Any]:  # Any: JSON
    """Return what a picture shows: its caption, the command, and of each scheme the quality at the end and the seconds to the target."""
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
    """Return axes under a title, a line with workload and links, and above them the banners of the run.

    On a narrow figure the title is its label instead, for the page to show.
    """
    title = title[:1].upper() + title[1:]
    if not _is_wide(figure):
        figure.set_label(title)
        return figure.add_axes((0.16, 0.12, 0.8, 0.82))
    top = 0.925
    for banner in summary.banners:
        behind, type_ = _WARNINGS.get(banner.kind, _WARNING)
        box = {"facecolor": behind, "edgecolor": behind, "boxstyle": "square,pad=0.6"}
        place = {"ha": "center", "va": "center", "weight": "bold", "color": type_, "bbox": box}
        _fit(figure.text(0.5, top + 0.03, banner.text, gid=_BANNER, **place))
        top -= 0.07
    _fit(figure.text(0.02, top, title, fontsize=14, weight="bold", color=INK))
    _fit(figure.text(0.02, top - 0.052, subtitle, color=FAINT))
    return figure.add_axes((0.09, 0.11, _RIGHT - 0.09, top - 0.195))


def _is_wide(figure: Figure) -> bool:
    """Return whether there is room for the title and for names beside curves."""
    return figure.get_figwidth() >= _SIZE[0]


def _fit(text: Text) -> None:
    """Make the type of a line smaller where it is wider than the picture, as with a long name of a scheme."""
    width = text.get_window_extent().width
    text.set_fontsize(float(text.get_fontsize()) * min(1.0, _WIDEST * _SIZE[0] * _DPI / width))


def _seconds(point: Quality) -> float:
    return point.seconds


def _steps(point: Quality) -> float:
    return float(point.step)


def _nbytes(point: Quality) -> float:
    assert point.bytes is not None  # a RunSummary has them filled in
    return point.bytes


def _name_with_time(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Return the scheme, when it reached the target, how many times as fast as the baseline, and how many percent behind dense."""
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
    """Return the scheme, and how many percent behind dense it is, or that it exchanged nothing."""
    gap = scheme.behind_dense
    if scheme.exchanged_nothing:
        return f"{scheme.name}  exchanged nothing"
    return scheme.name + ("" if gap is None or scheme.label == "dense" else f"  {behind_text(gap.median)} %")


def _name_with_bytes(summary: RunSummary, scheme: SchemeFigures) -> str:
    """Return the scheme, and the bytes that a rank had sent when it reached the target."""
    if summary.run.target is None:
        return scheme.name
    found = scheme.target_bytes
    return f"{scheme.name}  {'not reached' if found is None else bytes_text(found.median)}"


def _band(summary: RunSummary) -> str:
    """Return what the bands of the curves are, where there are any."""
    several = any(len(scheme.seeds) > 1 for scheme in summary.schemes)
    return "; medians over the seeds, lowest to highest shaded" if several else ""
