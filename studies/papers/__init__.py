"""Measure what the abstracts of the five papers claim, claim by claim: docs/papers.md.

    .venv/bin/python -m studies papers skip_reduce,thesis,micro,exdyna,oktopk [--out FOLDER] [--print]

Finished measurements are kept in FOLDER, so an interrupted study resumes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsync_lab.workloads.store import written
from studies import parts

PAGE = "docs/papers.md"
SYSTEMS = {  # the function that measures each, and returns a Section
    "skip_reduce": "skip_reduce:section",
    "thesis": "thesis:section",
    "micro": "micro:micro",
    "exdyna": "micro:exdyna",
    "oktopk": "oktopk:section",
}


@dataclass(frozen=True)
class Claim:
    """A claim of an abstract, and the measurement beside it."""

    text: str  # in few words
    ours: str  # measured
    verdict: str  # "reproduced", "here it is X, because ...", or "needs ..."
    paper: str = "-"  # the paper's figure


@dataclass(frozen=True)
class Section:
    """The part of the page about one system: its claims, and the tables and remarks below."""

    claims: Sequence[Claim]
    below: str = ""


def main(argv: Sequence[str]) -> None:
    parser = parts.options("papers", __doc__)
    parser.add_argument("systems", metavar="SYSTEM,...", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--out", type=Path, default=Path("build/papers"), metavar="FOLDER", help="(default: build/papers)"
    )
    options = parser.parse_args(argv)
    systems = options.systems.split(",")
    if unknown := [each for each in systems if each not in SYSTEMS]:
        parser.error(f"unknown system {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    for system in systems:
        module, _, name = SYSTEMS[system].partition(":")
        section = getattr(import_module(f"studies.papers.{module}"), name)(options.out)
        parts.put(PAGE, system, page_part(system, section), options.print)


def page_part(system: str, section: Section) -> str:
    """Format a section of the page."""
    rows = [(each.text, each.paper, each.ours, each.verdict) for each in section.claims]
    table = parts.table(("claim", "paper", "here", "verdict"), rows)
    command = f"`python -m studies papers {system}`:"
    return "\n\n".join(part for part in (command, table, section.below) if part)


def kept(folder: Path, name: str, measure: Callable[[], Any]) -> Any:  # Any: JSON
    """Return the finished measurement in `folder`, or measure and keep it there."""
    file = folder / f"{name}.json"
    if not file.is_file():
        written(file, [(json.dumps(measure(), indent=1) + "\n").encode()])
    return json.loads(file.read_text("utf-8"))


def best_rate(rates: Sequence[float], end: Callable[[float], float]) -> float:
    """Find the rate with the lowest `end`; up to 9 are tried, each twice or half the outermost one, until the best is not at an edge."""
    tried = sorted(rates)
    while True:
        best = min(tried, key=end)
        if best not in (tried[0], tried[-1]) or len(tried) == 9:
            return best
        tried = sorted([*tried, best / 2 if best == tried[0] else 2 * best])
