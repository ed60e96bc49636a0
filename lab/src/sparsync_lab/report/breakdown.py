"""Bars of where the time of a step goes: computing above, the reduction below it, where they overlap one under the other."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from sparsync_lab.report import curves
from sparsync_lab.report.curves import INK
from sparsync_lab.report.format import ratio_text, seconds_text
from sparsync_lab.report.summary import SchemeFigures

_HUES = {
    "computing": "#b5b5b5",
    "in the scheme": "#E69F00",
    "link's least time": "#0072B2",
    "communicating": "#8cc8ee",
    "communicating beyond it": "#8cc8ee",
    "other": "#e6e6e6",
}
_LANE = 0.3  # the height of a bar; two stand on one place
_BESIDE = 20.0  # pixels between a bar and its text, and beyond it
_LEFT = 0.4  # of the width of a picture: where the axes begin at most
_LEGEND = 0.065  # of the height of a picture


@dataclass(frozen=True)
class BarPart:
    """One part of a bar, from `start_s` on; `lane` 0 is computing, 1 everything else."""

    name: str
    lane: int
    start_s: float
    seconds: float


def parts(scheme: SchemeFigures) -> list[BarPart]:
    """Return the parts of a step; none where no step was recorded. The reduction begins before computing ends by what is hidden."""
    names = ("step_s", "own_compute_s", "scheme_s", "wait_s", "hidden_s", "other_s")
    found = {name: each.median for name in names if (each := scheme.over_seeds(name)) is not None}
    if "step_s" not in found:
        return []
    # A queue may hold the last bytes of a step before the link has carried them.
    least = None if scheme.link_s is None else min(scheme.link_s, found["wait_s"])
    communicating = (
        [("communicating", found["wait_s"])]
        if least is None
        else [("link's least time", least), ("communicating beyond it", found["wait_s"] - least)]
    )
    made = [BarPart("computing", 0, 0.0, found["own_compute_s"])]
    start = found["own_compute_s"] - found["hidden_s"]
    for name, seconds in [("in the scheme", found["scheme_s"]), *communicating, ("other", found["other_s"])]:
        made.append(BarPart(name, 1, start, seconds))
        start += seconds
    return [part for part in made if part.seconds > 0]


def draw(
    figure: Figure, axes: Axes, schemes: Sequence[SchemeFigures], labels: Sequence[str], wide: bool = True
) -> None:
    """Draw a place for each scheme that has a step, beside its label or, where it is not `wide`, under it, with a legend above."""
    rows = [(scheme, label, found) for scheme, label in zip(schemes, labels, strict=True) if (found := parts(scheme))]
    _make_room(axes, [label for _, label, _ in rows] if wide else [], 1 if wide else 2)
    drawn = [_draw_place(axes, place, scheme, found, wide) for place, (scheme, _, found) in enumerate(rows)]
    last = max((end for end, _ in drawn), default=1.0)
    axes.set_xlim(0, last)
    curves.make_room(axes, [end / last for end, _ in drawn], [width for _, width in drawn])
    axes.set_yticks(range(len(rows)), [label if wide else "" for _, label, _ in rows])
    if not wide:
        for place, (_, label, _) in enumerate(rows):
            axes.text(0, place - 0.34, label, va="bottom", color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(False)
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.set_xlabel("milliseconds")
    if rows:
        _draw_legend(figure, axes, {part.name for _, _, found in rows for part in found}, None if wide else 2)


def _make_room(axes: Axes, labels: Sequence[str], lines: int) -> None:
    """Move the left side of the axes to make room for the labels, and the upper one for a legend of so many lines."""
    box = axes.get_position()
    width = max((curves.size(axes, label)[0] for label in labels), default=0.0)
    left = min(_LEFT, box.width * (width + _BESIDE) / axes.bbox.width + 0.02)
    axes.set_position((left, box.y0, box.x1 - left, box.height - lines * _LEGEND))


def _draw_place(
    axes: Axes, place: int, scheme: SchemeFigures, found: Sequence[BarPart], wide: bool
) -> tuple[float, float]:
    """Draw the bars of a scheme and the text beside them; return where they end, and the width of the text in pixels."""
    for part in found:
        y = place + (part.lane - 0.5) * _LANE
        axes.barh(y, 1e3 * part.seconds, left=1e3 * part.start_s, height=_LANE, color=_HUES[part.name])
    step, over = scheme.over_seeds("step_s"), scheme.step_over_compute
    assert step is not None  # it has parts
    text = seconds_text(step.median) + (f", {ratio_text(over.median)} computing alone" if over and wide else "")
    end = 1e3 * max(step.median, *(part.start_s + part.seconds for part in found))
    axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", color=INK)
    return end, curves.size(axes, text)[0] + _BESIDE


def _draw_legend(figure: Figure, axes: Axes, names: set[str], columns: int | None) -> None:
    handles = [Patch(color=hue, label=name) for name, hue in _HUES.items() if name in names]
    axes.legend(
        handles=handles,
        ncols=columns or len(handles),
        loc="lower left",
        bbox_to_anchor=(0.01, axes.get_position().y1),
        bbox_transform=figure.transFigure,
        frameon=False,
        handlelength=1,
        handleheight=1,
        columnspacing=1.2,
        handletextpad=0.5,
    )
