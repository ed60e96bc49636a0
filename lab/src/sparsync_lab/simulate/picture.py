"""The picture of a set-up: how its schemes scale with ranks, and what they gain by the rate of the links; as SVG."""

import io
from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from sparsync_lab.report.curves import INK
from sparsync_lab.report.plots import STYLE
from sparsync_lab.simulate.model import Predicted
from sparsync_lab.simulate.setup import SetUp

# Okabe and Ito, "Color Universal Design" (2008); the first, which the others are compared with, is grey.
_HUES = ("#3d3d3d", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(chosen: SetUp, here: Sequence[Predicted], by_ranks: Sequence[Predicted], by_rate: Sequence[Predicted]) -> str:
    """Return the SVG. The same figures give the same bytes."""
    with rc_context(STYLE | {"svg.hashsalt": "sparsync", "svg.fonttype": "none"}):  # pyright: ignore[reportArgumentType]  # as in plots
        figure = Figure(figsize=(11, 4.4))
        FigureCanvasSVG(figure)
        left, right = figure.subplots(1, 2)
        labels = [each.label for each in here]
        for place, label in enumerate(labels):
            hue = _HUES[place % len(_HUES)]
            scaled = [each for each in by_ranks if each.label == label]
            shares = [100 * chosen.job.compute_s / each.step_s for each in scaled]
            left.plot([each.ranks for each in scaled], shares, color=hue, marker="o", markersize=3.5, label=label)
            rated = [each for each in by_rate if each.label == label]
            first = [each for each in by_rate if each.label == labels[0]]
            gains = [a.step_s / b.step_s for a, b in zip(first, rated, strict=True)]
            right.plot([each.gbit_per_s for each in rated], gains, color=hue, marker="o", markersize=3.5, label=label)
        _logarithmic(left, [each.ranks for each in by_ranks], base=2)
        left.set(xlabel="ranks", ylabel="computation, % of the step", ylim=(0, 102))
        left.set_title(f"{here[0].gbit_per_s:g} Gbit/s", color=INK, loc="left")
        _logarithmic(right, [each.gbit_per_s for each in by_rate], base=10)
        right.set(xlabel="Gbit/s of a link", ylabel=f"speed-up over {labels[0]}")
        right.set_yscale("log")
        right.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        right.yaxis.set_minor_formatter(lambda value, _: f"{value:g}x" if value in (2, 5, 20, 50) else "")
        right.set_title(f"{here[0].ranks} ranks", color=INK, loc="left")
        left.legend(frameon=False, loc="lower left")
        figure.suptitle(
            f"{chosen.title} (time of a step, predicted; quality is not in it)", color=INK, x=0.01, ha="left"
        )
        figure.tight_layout()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def _logarithmic(axes: Axes, values: Sequence[int | float], base: int) -> None:
    ticks = sorted(set(values))
    axes.set_xscale("log", base=base)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=8, rotation=45 if len(ticks) > 8 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
