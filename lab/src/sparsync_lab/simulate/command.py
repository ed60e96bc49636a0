"""`sparsync simulate`: what a set-up would do, as a table, JSON and a picture; the list of set-ups; published figures predicted."""

import argparse
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
    "This is the time of a step, and no more: what a scheme does to quality is not in it, nor the steps that it may need "
    "beyond those of the first. `sparsync frontier` and `sparsync compare` measure that."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sparsync simulate`."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--preset",
        metavar="NAME|FILE.toml",
        help="a name of --list, or a file like those in sparsync_lab/simulate/presets",
    )
    what.add_argument("--list", action="store_true", help="list the presets")
    add("--ranks", type=int, default=None, help="instead of the preset's own")
    add(
        "--gbit",
        type=float,
        default=None,
        metavar="RATE",
        help="Gbit/s of a link between nodes, instead of the preset's own",
    )
    add("--out", type=Path, default=None, metavar="FOLDER", help="write a picture (SVG) and all figures (JSON) there")
    add("--json", default=None, metavar="FILE", help="write the figures there; -: on standard output, and nothing else")


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run `sparsync simulate`."""
    for name in ("--ranks", "--gbit", "--out", "--json"):
        value = getattr(options, name.removeprefix("--"))
        if value is not None and options.list:
            raise ValueError(f"{name} goes with --preset, got {name} {value} and --list; leave one of them out")
    from sparsync_lab.checked import checked
    from sparsync_lab.simulate import setup as setups

    for name, kind, value in (("--ranks", setups.Ranks, options.ranks), ("--gbit", setups.Positive, options.gbit)):
        if value is not None:
            checked(kind, value, name)
    if options.list:
        list_presets()
    else:
        simulate(options.preset, options.ranks, options.gbit, options.out, options.json)


def list_presets() -> None:
    """Print the set-ups that come with the package. Imports no torch."""
    from sparsync_lab.simulate import setup as setups

    print(aligned({name: setups.read(name).title for name in setups.names()}))


def simulate(name: str, ranks: int | None, gbit_per_s: float | None, out: Path | None, as_json: str | None) -> None:
    """Predict the set-up called `name`, and print it; `out` gets a picture and the figures, `as_json` the figures alone.

    Raises ValueError for a set-up that cannot be, and RuntimeError where a file cannot be written.
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
    if out is not None:
        from sparsync_lab.simulate.picture import draw

        write(out / f"{chosen.name}.json", json.dumps(content, indent=1) + "\n")
        write(out / f"{chosen.name}.svg", draw(chosen, here, by_ranks, by_rate))
    _print(chosen, here, by_ranks)
    if out is not None:
        print(f"\n{out / chosen.name}.svg, {out / chosen.name}.json")


def _print(chosen: "SetUp", here: "Sequence[Predicted]", by_ranks: "Sequence[Predicted]") -> None:
    """Print the set-up's own step, then how the schemes scale."""
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
    """Return three digits of the value, with thousands apart: 7,910,000."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else significant(value)


def write(path: Path, content: str) -> None:
    """Write a file. Raises RuntimeError where that cannot be done."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another place") from error
