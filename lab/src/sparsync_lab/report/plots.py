"""The pictures of a run: quality over time and over steps.

Made with matplotlib figures alone, without its global state, so that the same records give the same picture.
"""

import io
import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from sparsync_lab.report import curves
from sparsync_lab.report.choice import sentences, speed_baseline
from sparsync_lab.report.curves import FAINT, INK
from sparsync_lab.report.format import (
    behind_text,
    place_text,
    quality_axis,
    quality_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.results import Quality
from sparsync_lab.report.summary import RunSummary, SchemeFigures

ORIGIN = "Description"  # the key of the text in a PNG that says what it shows, see `_origin`
# Okabe and Ito, "Color Universal Design" (2008), without yellow, which is too light for a line on white.
_HUES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_BASELINE_HUES = {"dense": "#3d3d3d", "bf16": "#8a8a8a"}  # grey, so that the compared schemes stand out
_WARNINGS = {"disturbed": ("#f2c14e", "#222222")}  # behind a warning, and its type
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
    "text.parse_math": False,  # "$" in a label is a dollar
}
_SIZE, _DPI = (9.0, 5.0), 160  # inches
_WIDEST = 0.94  # of the width of a picture: as wide as a line of text may be
_RIGHT = 0.975  # of the width of a picture: where all axes end


def pictures(summary: RunSummary) -> dict[str, bytes]:
    """Return the pictures by name, as PNG; each shows the banners of the run."""
    draws = {
        "quality_over_time": quality_over_time,
        "quality_over_steps": quality_over_steps,
    }
    return {name: _picture(summary, draw) for name, draw in draws.items()}


def hues(summary: RunSummary) -> dict[str, str]:
    """Return a colour for each scheme, the same in every picture: grey for the baselines, then by order in the run."""
    return hues_of([scheme.label for scheme in summary.schemes])


def hues_of(labels: Sequence[str]) -> dict[str, str]:
    """Return a colour for each of these labels of schemes, and for the baselines."""
    others = [label for label in labels if label not in _BASELINE_HUES]
    return _BASELINE_HUES | {label: _HUES[number % len(_HUES)] for number, label in enumerate(others)}


def quality_over_time(summary: RunSummary, figure: Figure) -> None:
    """Draw quality over training time, with the target and when each scheme reached it; the title is the choice of the run."""
    run, hue = summary.run, hues(summary)
    said = sentences(summary)[0]
    title = said.rstrip(".") if said.startswith("Use") else f"{quality_axis(run)} over training time"
    beside = (
        "without evaluations; beside a name: "
        + ("" if run.target is None else f"speed-up over {speed_baseline(summary)}, ")
        + "% behind dense"
    )
    axes = _axes(summary, figure, title, f"{place_text(run)}; {beside}{_band(summary)}")
    drawn = [curves.curve(each, _seconds, _name_with_time(summary, each), hue[each.label]) for each in summary.schemes]
    axes.set_xlabel("seconds of training")
    curves.draw(axes, run, drawn)


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
    curves.draw(axes, run, drawn)


def _picture(summary: RunSummary, draw: Callable[[RunSummary, Figure], None]) -> bytes:
    png = io.BytesIO()
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        FigureCanvasAgg(figure)  # makes itself the figure's canvas, on which texts can be measured
        draw(summary, figure)
        figure.savefig(png, format="png", metadata={ORIGIN: json.dumps(_origin(summary))})
    return png.getvalue()


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
    """Return axes under a title, a line with workload and links, and above them the banners of the run."""
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
    return figure.add_axes((0.09, 0.11, _RIGHT - 0.09, top - 0.195))


def _fit(text: Text) -> None:
    """Make the type of a line smaller where it is wider than the picture, as with a long name of a scheme."""
    width = text.get_window_extent().width
    text.set_fontsize(float(text.get_fontsize()) * min(1.0, _WIDEST * _SIZE[0] * _DPI / width))


def _seconds(point: Quality) -> float:
    return point.seconds


def _steps(point: Quality) -> float:
    return float(point.step)


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


def _band(summary: RunSummary) -> str:
    """Return what the bands of the curves are, where there are any."""
    several = any(len(scheme.seeds) > 1 for scheme in summary.schemes)
    return "; medians over the seeds, lowest to highest shaded" if several else ""
