"""Format numbers as text: units, names of places and targets."""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsync_lab.netlab import Delay
    from sparsync_lab.report.results import Run


def significant(value: float, digits: int = 3) -> str:
    """Format the value with `digits` significant digits, never as a power of ten: 0.0123, 1.20, 35.1, 1012."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    # Round first, so that 9.996 becomes 10.0, not 10.00.
    decimals = digits - 1 - math.floor(math.log10(abs(round(value, decimals))))
    return f"{value:.{max(0, decimals)}f}"


def seconds_text(seconds: float) -> str:
    """Format seconds: 43.0 ms, 3.30 s, 1012 s, 5.30 h."""
    for unit, size, below in (("ms", 1e-3, 1.0), ("s", 1.0, 1e4)):
        if seconds < below:
            return f"{significant(seconds / size)} {unit}"
    return f"{significant(seconds / 3600)} h"


def bytes_text(nbytes: int | float) -> str:
    """Format bytes in decimal units, as link rates are: 679 kB, 34.0 MB."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    unit, size = next(((unit, size) for unit, size in units if nbytes >= size), ("B", 1.0))
    return f"{significant(nbytes / size)} {unit}"


def rate_text(bits_per_s: float) -> str:
    """Format a link rate: 100 Mbit/s, 2.5 Gbit/s."""
    units = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
    unit, size = next((unit, size) for unit, size in units if bits_per_s >= size or size == 1.0)
    return f"{bits_per_s / size:g} {unit}"


def ratio_text(value: float, bound: str = "") -> str:
    """Format a ratio to two digits, or three from 10 on: 0.96x, 7.4x, > 16.4x."""
    return f"{bound} {times_text(value)}x".strip()


def times_text(value: float) -> str:
    """Format a ratio to two digits, or three from 10 on: 0.96, 7.4, 16.4."""
    return significant(value, 2 if value < 10 else 3)


def behind_text(value: float) -> str:
    """Format percent behind dense with a sign, to a tenth: +1.4, -0.3, 0."""
    if not math.isfinite(value):
        return f"{value:g}"
    rounded = round(value, 1)
    return f"{rounded:+.1f}" if rounded else "0"


def percent(run: "Run") -> str:
    """Return "%" if the workload's unit is percent, else ""."""
    return "%" if "percent" in quality_axis(run) else ""


def quality_axis(run: "Run") -> str:
    """Name the quality with its unit, as the workload gives it."""
    return str(run.workload.get("unit") or run.metric)


def quality_text(run: "Run", value: float) -> str:
    return significant(value, 4) + percent(run)


def target_text(run: "Run") -> str:
    """Format the target: "perplexity 135", or "accuracy 92%"."""
    return f"{run.metric} {run.target:g}{percent(run)}"


def links_text(up_bits_per_s: float | None, down_bits_per_s: float | None, delay: "Delay | None" = None) -> str:
    """Format the links: "100 Mbit/s links, 25 ms one way", or by direction if they differ; "" without limits.

    A delay has its jitter if any: "25 +- 5 ms one way".
    """
    if delay:
        jitter = f" +- {1e3 * delay.jitter_s:g}" if delay.jitter_s else ""
        return f"{links_text(up_bits_per_s, down_bits_per_s)}, {1e3 * delay.one_way_s:g}{jitter} ms one way"
    if up_bits_per_s is None or down_bits_per_s is None:
        return ""
    if up_bits_per_s == down_bits_per_s:
        return f"{rate_text(up_bits_per_s)} links"
    return f"links of {rate_text(up_bits_per_s)} up and {rate_text(down_bits_per_s)} down"


def place_text(run: "Run") -> str:
    """Format workload, ranks and links of the run."""
    rate = run.rate_bits_per_s
    links = run.config.get("links") or links_text(rate, rate) if run.limited else ""
    between = ", ".join(each for each in (run.network, links) if each) or "links without limit"
    workload = run.config.get("workload", "workload")
    return f"{workload}, {run.ranks} {'rank' if run.ranks == 1 else 'ranks'}, {between}"
