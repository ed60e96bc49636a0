"""Faults in a picture over time: a line for each with its name, the pauses shaded, and below the axes how many ranks there were."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sparsync_lab.report.curves import FAINT, INK
from sparsync_lab.report.results import Run
from sparsync_lab.report.summary import SchemeFigures, named_faults

_STRIP, _BETWEEN = 0.09, 0.03  # of the height of a picture: the axes of the ranks, and what is free above them
_NEAR = 14.0  # pixels, within which two names share a line of text
_APART = 0.1  # of a rank, so that lines of several schemes are seen


def make_room(axes: Axes) -> None:
    """Leave room for `draw_ranks` below the axes. Before anything is drawn on them."""
    box = axes.get_position()
    taken = _STRIP + _BETWEEN
    axes.set_position((box.x0, box.y0 + taken, box.width, box.height - taken))


def draw(axes: Axes, run: Run, schemes: Sequence[SchemeFigures], hues: Mapping[str, str]) -> None:
    """Draw the faults and the pauses on axes whose x is seconds, and the ranks over time below them."""
    begin, end = axes.get_xlim()
    for scheme in schemes:
        for training in scheme.under_faults:
            for each in training.given:
                if each.pause_s and each.paused_s is not None:
                    axes.axvspan(
                        each.paused_s, each.paused_s + each.pause_s, color=hues[scheme.label], alpha=0.13, linewidth=0
                    )
    axes.set_xlim(begin, end)
    _draw_names(axes, run, [(at_s, name) for at_s, name in named_faults(schemes) if begin <= at_s <= end])
    _draw_ranks(axes, schemes, hues)


def _draw_names(axes: Axes, run: Run, found: Sequence[tuple[float, str]]) -> None:
    """Draw the lines, and each name beside its line, where curves are not: those of several near lines at the first of them."""
    at_top, place = run.lower_is_better, axes.get_xaxis_transform()
    texts: list[tuple[float, str]] = []
    for at_s, name in found:
        axes.axvline(at_s, color=FAINT, linewidth=1, linestyle=(0, (1, 2)), zorder=1.6)
        near = texts and axes.transData.transform((at_s, 1))[0] - axes.transData.transform((texts[-1][0], 1))[0] < _NEAR
        if near:
            texts[-1] = (texts[-1][0], f"{texts[-1][1]}, {name}")
        else:
            texts.append((at_s, name))
    for at_s, name in texts:
        where = {"xytext": (3, 0), "textcoords": "offset points", "xycoords": place, "rotation": 90, "fontsize": 8}
        axes.annotate(name, (at_s, 0.98 if at_top else 0.02), va="top" if at_top else "bottom", color=INK, **where)


def _draw_ranks(axes: Axes, schemes: Sequence[SchemeFigures], hues: Mapping[str, str]) -> None:
    figure, box = axes.get_figure(), axes.get_position()
    assert figure is not None
    strip = figure.add_axes((box.x0, box.y0 - _STRIP - _BETWEEN, box.width, _STRIP))
    strip.set_xscale(axes.get_xscale())
    most = 1
    for number, scheme in enumerate(schemes):
        shift = _APART * (number - (len(schemes) - 1) / 2)
        for training in scheme.under_faults:
            if steps := training.ranks_over_time:
                times = [max(at_s, axes.get_xlim()[0]) for at_s, _ in steps] + [training.end_s]
                ranks = [count + shift for _, count in steps]
                strip.step(times, [*ranks, ranks[-1]], where="post", color=hues[scheme.label], linewidth=1.5)
                most = max(most, *(count for _, count in steps))
    strip.set_xlim(axes.get_xlim())
    strip.set_ylim(0, most + 0.5)
    strip.yaxis.set_major_locator(MaxNLocator(min(most, 4), integer=True))
    strip.set_ylabel("ranks")
    strip.set_xlabel(axes.get_xlabel())
    strip.set_xticks(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()])
    strip.set_xticks([], minor=True)
    axes.set_xlabel("")
    axes.tick_params(labelbottom=False)
