"""Options, Markdown tables and parts of pages, for studies."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsync_lab.report.parts import replaced

ROOT = Path(__file__).parent.parent


def options(name: str, about: str | None, writes: bool = True) -> argparse.ArgumentParser:
    """Build the parser of a study; one that `writes` a part of a page can print it instead."""
    parser = argparse.ArgumentParser(
        prog=f"python -m studies {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if writes:
        parser.add_argument("--print", action="store_true", help="print the part of the page instead of writing it")
    return parser


def put(page: str, part: str, content: str, only_print: bool = False) -> None:
    """Write `content` as a part of the page, whose path is relative to the repository's root, or print it."""
    if only_print:
        print(content)
    else:
        (ROOT / page).write_text(replaced(ROOT / page, part, content))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table in Markdown."""
    return "\n".join(map(line, [heads, ["---"] * len(heads), *rows]))


def line(cells: Sequence[str]) -> str:
    """Format one line of a table."""
    return f"| {' | '.join(cells)} |"
