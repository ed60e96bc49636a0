"""The picture of a study: six panels over the steps, one line for each scheme."""

import io
from collections.abc import Callable, Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from PIL import Image

from sparsync_lab.report.curves import FAINT, INK
from sparsync_lab.report.format import byte_unit
from sparsync_lab.report.plots import STYLE, hues_of
from sparsync_lab.traffic.observe import Record

_SIZE, _DPI = (11.0, 9.0), 100  # inches
_COLOURS = 256  # of the palette; the picture has a few hues and their shades
_LOG_FROM = 30.0  # a panel whose values span more than this factor has a logarithmic axis

Value = Callable[[Record], int | float | None]


def picture(records: Sequence[Record], title: str, subtitle: str) -> bytes:
    """Return a PNG image of all step records."""
    series: dict[str, list[Record]] = {}
    for record in records:
        series.setdefault(record["scheme"], []).append(record)
    with rc_context(STYLE):  # pyright: ignore[reportArgumentType]  # its key type is a union of 300 literals
        figure = Figure(figsize=_SIZE, dpi=_DPI, facecolor="white")
        canvas = FigureCanvasAgg(figure)
        figure.text(0.02, 0.962, title, fontsize=14, weight="bold", color=INK)
        figure.text(0.02, 0.935, subtitle, color=FAINT)
        _draw(figure, series, hues_of(list(series)))
        canvas.draw()
        whole = Image.frombytes("RGBA", canvas.get_width_height(), bytes(canvas.buffer_rgba())).convert("RGB")
    image = io.BytesIO()
    whole.quantize(_COLOURS).save(image, "PNG", optimize=True)
    return image.getvalue()


def _draw(figure: Figure, series: dict[str, list[Record]], hues: dict[str, str]) -> None:
    axes = figure.subplots(3, 2, sharex=True, gridspec_kw={"hspace": 0.3, "wspace": 0.2})
    figure.subplots_adjust(left=0.075, right=0.975, top=0.845, bottom=0.06)
    unit, size = byte_unit(max(record["bytes"]) for each in series.values() for record in each)
    panels: tuple[tuple[Axes, str, Value, Value | None], ...] = (
        (axes[0][0], "density of the union (thin: asked for)", _named("density"), _asked),
        (axes[0][1], "share of the energy written (thin: by as many largest)", _named("captured"), _named("best")),
        (axes[1][0], "imbalance: most of a rank over the mean", _named("imbalance"), None),
        (axes[1][1], "selected: union (thin: mean rank)", _named("union"), lambda record: _mean(record["local"])),
        (axes[2][0], f"{unit} sent by a rank: most (thin: mean)", lambda record: max(record["bytes"]) / size,
         lambda record: _mean(record["bytes"]) / size),
        (axes[2][1], "steps waited: longest (thin: mean)", _named("staleness_max"), _named("staleness_mean")),
    )  # fmt: skip
    for place, title, value, thin in panels:
        place.set_title(title, loc="left", fontsize=10.5, color=INK)
        shown = [_line(place, each, value, hues[label], 1.6) for label, each in series.items()]
        shown += [_line(place, each, thin, hues[label], 0.7) for label, each in series.items() if thin]
        _scale(place, [y for line in shown for y in line])
    for place in axes[2]:
        place.set_xlabel("step")
    handles = [Line2D([], [], color=hues[label], linewidth=2.5, label=label) for label in series]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.01, 0.928), ncols=min(4, len(handles)), frameon=False
    )


def _line(axes: Axes, records: Sequence[Record], value: Value, hue: str, width: float) -> list[float]:
    """Draw a line, and return its values; none where the scheme has no such value."""
    found = [(record["step"], float(y)) for record in records if (y := value(record)) is not None]
    if found:
        axes.plot(*zip(*found, strict=True), color=hue, linewidth=width)
    return [y for _, y in found]


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Let the y axis begin at zero, or make it logarithmic where the lines would otherwise overlap."""
    above = [value for value in values if value > 0]
    if above and len(above) == len(values) and max(above) > _LOG_FROM * min(above):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: "")
    elif values:
        axes.set_ylim(0, 1.08 * max(*values, 1e-9))


def _named(name: str) -> Value:
    return lambda record: record[name]


def _asked(record: Record) -> float:
    return record["asked"] / record["elements"]


def _mean(values: Sequence[int | float]) -> float:
    return sum(values) / len(values)
