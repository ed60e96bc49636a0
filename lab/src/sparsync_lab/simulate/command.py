"""`sparsync simulate`: print the prediction of a set-up as tables or JSON, or list the set-ups."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from sparsync_lab.report.format import bytes_text, ratio_text, seconds_text, significant
from sparsync_lab.terminal import Table, aligned, show

if TYPE_CHECKING:
    from sparsync_lab.simulate.model import Predicted
    from sparsync_lab.simulate.setup import SetUp

TIME_ONLY = (
    "This is only the time of a step: what a scheme does to quality is not in it, nor the further steps that it may need. "
    "`sparsync frontier` and `sparsync compare` measure that."
)


def list_presets() -> None:
    """Print the package's set-ups. Does not import torch."""
    from sparsync_lab.simulate import setup as setups

    print(aligned({name: setups.read(name).title for name in setups.names()}))


def simulate(name: str, ranks: int | None, gbit_per_s: float | None, as_json: str | None) -> None:
    """Predict the set-up called `name`, and print it; the file `as_json` gets all figures.

    Raises ValueError for an invalid set-up, and RuntimeError if a file cannot be written.
    """
    from sparsync_lab.simulate import setup as setups
    from sparsync_lab.simulate.model import GBIT_PER_S, RANKS, predict

    chosen = setups.read(name)
    here = [predict(chosen, entry, ranks, gbit_per_s) for entry in chosen.scheme]
    by_ranks = [predict(chosen, entry, P, gbit_per_s) for entry in chosen.scheme for P in RANKS]
    by_rate = [predict(chosen, entry, ranks, rate) for entry in chosen.scheme for rate in GBIT_PER_S]
    content = {
        "set_up": chosen.name,
        "title": chosen.title,
        "job": asdict(chosen.job),
        "network": asdict(chosen.network),
        "memory_gb_per_s": chosen.memory.gb_per_s,
        "sources": dict(chosen.sources),
        "predicted": [asdict(each) for each in here],
        "by_ranks": [asdict(each) for each in by_ranks],
        "by_gbit_per_s": [asdict(each) for each in by_rate],
    }
    if as_json == "-":
        print(json.dumps(content))
        return
    if as_json is not None:
        write(Path(as_json), json.dumps(content, indent=1) + "\n")
    _print(chosen, here, by_ranks)


def _print(chosen: "SetUp", here: "Sequence[Predicted]", by_ranks: "Sequence[Predicted]") -> None:
    """Print the step time of the set-up, then how the schemes scale."""
    job, first = chosen.job, here[0]
    heads = ("scheme", "step", "exposed", "all of it", "sent", f"{job.unit}\na second", "speed-up")
    steps = tuple(
        (
            each.label,
            *(seconds_text(value) for value in (each.step_s, each.exposed_s, each.communication_s)),
            bytes_text(each.nbytes),
            _rounded(each.throughput),
            ratio_text(first.step_s / each.step_s),
        )
        for each in here
    )
    ranks = sorted({each.ranks for each in by_ranks})
    shares = {(each.label, each.ranks): f"{100 * job.compute_s / each.step_s:.1f}" for each in by_ranks}
    rows = tuple((each.label, *(shares[each.label, P] for P in ranks)) for each in here)
    named = tuple(map(str, ranks))
    scale = f"Percent of the step that is computation, {first.gbit_per_s:g} Gbit/s, by ranks"
    about = f"{first.ranks} ranks, {first.gbit_per_s:g} Gbit/s, {job.elements:,} parameters, {seconds_text(job.compute_s)} of computation"
    assumed = [(f"Assumed, not published: {', '.join(chosen.assumed)}.", "dim")] if chosen.assumed else []
    show(
        [Table(about, heads, steps), Table(scale, ("scheme", *named), rows, less=named[1::2])],
        [(f"{chosen.title}\n", "bold")],
        [(TIME_ONLY, "dim"), *assumed],
    )


def _rounded(value: float) -> str:
    """Format the value with three significant digits and thousands separators: 7,910,000."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else significant(value)


def write(path: Path, content: str) -> None:
    """Write a file. Raises RuntimeError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another place") from error
