"""The command of a study of trials: its options, the file of finished trials, and the part of a page that it writes."""

import argparse
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from sparsync_lab.cli_options import positive
from sparsync_lab.report.parts import replaced
from studies import parts

SHOWN = 300  # characters of what went wrong
_NOISE = re.compile(
    r"\[/[^]]*\] |Got the following error when running the callback: | This is typically caused by .*?GLHF! \S+"
)

Found = TypeVar("Found")


def options(name: str, about: str | None, counted: str, default: int) -> argparse.ArgumentParser:
    """Return the parser of a study that tries `default` times what is `counted`."""
    parser = parts.options(name, about, writes=False)
    add = parser.add_argument
    add(f"--{counted}", type=int, default=default, help=f"how many (default: {default})")
    add("--seed", type=int, default=0, help="of what is drawn (default: 0)")
    add("--only", type=_names, default=(), metavar="A,B", help="these alone, by the names that the tables have")
    add("--timeout", type=positive, default=3.0, metavar="S", help="of the library, for one operation (default: 3)")
    add("--page", type=Path, default=None, metavar="FILE.md", help=f"a page, of which the part {name} is written anew")
    add("--out", type=Path, default=Path(name), help=f"folder of finished trials (default: {name})")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(each for each in text.split(",") if each)


def check(page: Path | None, part: str) -> None:
    """Raise ValueError, before anything is tried, for a page without the part."""
    if page is not None:
        replaced(page, part, "")


def show(page: Path | None, part: str, command: Sequence[str], content: Sequence[str]) -> None:
    """Print the paragraphs below the command that found them, and write them into the page."""
    text = "\n\n".join([f"```text\n{shlex.join(['python', '-m', 'studies', *command])}\n```", *content])
    print(text)
    if page is not None:
        page.write_text(replaced(page, part, text))


def by_name(
    heads: Sequence[str],
    names: Mapping[str, str],
    found: Collection[Found],
    of: Callable[[Found], str],
    cells: Callable[[list[Found]], list[str]],
) -> str:
    """Return a table with a row for each name that occurs in `found`, and one for all."""
    rows: list[list[str]] = []
    for name, about in {**names, "all": ""}.items():
        these = [each for each in found if name in ("all", of(each))]
        if these:
            rows.append([f"{name}: {about}" if about else name, str(len(these)), *cells(these)])
    return f"By {heads[0]}:\n\n{parts.table(heads, rows)}"


def exceptions(lines: Sequence[str]) -> str:
    """Return a list of what did not end as it should, or that nothing did."""
    return "\n".join(["Exceptions:", "", *(f"- {plain(line)}" for line in lines)]) if lines else "No exceptions."


def short(why: str) -> str:
    """Return the first line of an error, without torch's source files and advice."""
    line = _NOISE.sub("", why.partition("\n")[0]).strip()
    return line if len(line) <= SHOWN else f"{line[: SHOWN - 3]}..."


def plain(line: str) -> str:
    """Return the line without what Markdown would read as markup."""
    return "".join(f"\\{each}" if each in "\\`*_<>[]|" else each for each in line)
