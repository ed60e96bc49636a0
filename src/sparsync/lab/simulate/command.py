"""`sparsync simulate`: what a set-up would do, as a table, JSON and a picture; the list of set-ups; published figures predicted."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsync.lab.report.format import bytes_text, ratio_text, seconds_text, significant
from sparsync.lab.simulate import setup as setups
from sparsync.lab.simulate.setup import SetUp

if TYPE_CHECKING:
    from sparsync.lab.simulate.model import Predicted

TIME_ONLY = (
    "This is the time of a step, and no more: what a scheme does to quality is not in it, nor the steps that it may need",
    "beyond those of the first. `sparsync frontier` and `sparsync compare` measure that.",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `sparsync simulate`."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--preset", metavar="NAME|FILE.toml", help="a name of --list, or a file like those in sparsync/predict/presets"
    )
    what.add_argument("--list", action="store_true", help="list the presets")
    what.add_argument(
        "--published", action="store_true", help="compare published figures with what the model says of them"
    )
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
    add("--page", type=Path, default=None, metavar="FILE.md", help="with --published: write the page")


def run(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run `sparsync simulate`."""
    what = "--list" if options.list else "--published" if options.published else "--preset"
    for name, goes_with in (
        ("--ranks", ("--preset",)),
        ("--gbit", ("--preset",)),
        ("--out", ("--preset",)),
        ("--json", ("--preset", "--published")),
        ("--page", ("--published",)),
    ):
        value = getattr(options, name.removeprefix("--"))
        if value is not None and what not in goes_with:
            raise ValueError(
                f"{name} goes with {' or '.join(goes_with)}, got {name} {value} and {what}; leave one of them out"
            )
    for option, name, value in (("--ranks", "ranks", options.ranks), ("--gbit", "gbit_per_s", options.gbit)):
        if value is not None:
            setups.check(name, value, option)
    if options.list:
        list_presets()
    elif options.published:
        published(options.page, options.json)
    else:
        simulate(options.preset, options.ranks, options.gbit, options.out, options.json)


def list_presets() -> None:
    """Print the set-ups that come with the package. Imports no torch."""
    names = setups.names()
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {setups.read(name).title}")


def simulate(name: str, ranks: int | None, gbit_per_s: float | None, out: Path | None, as_json: str | None) -> None:
    """Predict the set-up called `name`, and print it; `out` gets a picture and the figures, `as_json` the figures alone.

    Raises ValueError for a set-up that cannot be, and RuntimeError where a file cannot be written.
    """
    from sparsync.lab.simulate.model import GBIT_PER_S, RANKS, predict

    chosen = setups.read(name)
    here = [predict(chosen, entry, ranks, gbit_per_s) for entry in chosen.schemes]
    by_ranks = [predict(chosen, entry, P, gbit_per_s) for entry in chosen.schemes for P in RANKS]
    by_rate = [predict(chosen, entry, ranks, rate) for entry in chosen.schemes for rate in GBIT_PER_S]
    content = {
        "set_up": chosen.name,
        "title": chosen.title,
        "job": asdict(chosen.job),
        "network": asdict(chosen.network),
        "memory_gb_per_s": chosen.memory_gb_per_s,
        "sources": dict(chosen.sources),
        "predicted": [asdict(each) for each in here],
        "by_ranks": [asdict(each) for each in by_ranks],
        "by_gbit_per_s": [asdict(each) for each in by_rate],
    }
    if as_json == "-":
        print(json.dumps(content))
        return
    print("\n".join(text(chosen, here, by_ranks)))
    if as_json is not None:
        _write(Path(as_json), json.dumps(content, indent=1) + "\n")
    if out is not None:
        from sparsync.lab.simulate.picture import draw

        _write(out / f"{chosen.name}.json", json.dumps(content, indent=1) + "\n")
        _write(out / f"{chosen.name}.svg", draw(chosen, here, by_ranks, by_rate))
        print(f"\n{out / chosen.name}.svg, {out / chosen.name}.json")


def published(page: Path | None, as_json: str | None) -> None:
    """Print the comparison with published figures, or write it to a page or as JSON."""
    from sparsync.lab.simulate import published as rows

    if as_json is not None:
        found, _ = rows.rows()
        content: list[dict[str, Any]] = [{**asdict(row), "error": row.error} for row in found]  # Any: JSON
        if as_json == "-":
            print(json.dumps(content))
        else:
            _write(Path(as_json), json.dumps(content, indent=1) + "\n")
    if page is not None:
        _write(page, rows.page())
    elif as_json is None:
        print(rows.page(), end="")


def text(chosen: SetUp, here: "Sequence[Predicted]", by_ranks: "Sequence[Predicted]") -> list[str]:
    """Return the lines that a terminal shows: the set-up's own step, then how the schemes scale."""
    job, first = chosen.job, here[0]
    lines = [
        chosen.title,
        f"{first.ranks} ranks, {first.gbit_per_s:g} Gbit/s, {job.elements:,} parameters, {seconds_text(job.compute_s)} of computation",
        "",
    ]
    width = max(len(each.label) for each in here)
    lines.append(
        f"{'':{width}} {'step':>10} {'exposed':>10} {'all of it':>10} {'sent':>10} {job.unit + '/s':>14} {'speed-up':>9}"
    )
    lines += [
        f"{each.label:{width}} {seconds_text(each.step_s):>10} {seconds_text(each.exposed_s):>10} {seconds_text(each.communication_s):>10} "
        f"{bytes_text(each.nbytes):>10} {_rounded(each.throughput):>14} {ratio_text(first.step_s / each.step_s):>9}"
        for each in here
    ]
    lines += ["", *TIME_ONLY]
    ranks = sorted({each.ranks for each in by_ranks})
    lines += ["", f"Share of the step that is computation, {first.gbit_per_s:g} Gbit/s, by ranks:"]
    lines.append(f"{'':{width}} " + " ".join(f"{P:>6}" for P in ranks))
    for label in dict.fromkeys(each.label for each in by_ranks):
        shares = [job.compute_s / each.step_s for each in by_ranks if each.label == label]
        lines.append(f"{label:{width}} " + " ".join(f"{100 * share:>5.1f}%" for share in shares))
    if chosen.assumed:
        lines += ["", f"Assumed, not published: {', '.join(chosen.assumed)}."]
    return lines


def _rounded(value: float) -> str:
    """Return three digits of the value, with thousands apart: 7,910,000."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else significant(value)


def _write(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another place") from error
