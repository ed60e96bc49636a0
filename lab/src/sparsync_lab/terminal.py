"""Tables and text for a terminal of any width; without one, lines have 120 columns, or COLUMNS."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

WIDTH = 120  # columns, where there is no terminal, and of the longest line of text
NOTHING = "-"
_NAME = 0.4  # of the width: what a name may take on one line
_STYLES = {"bold": "1", "dim": "2", "yellow": "33", "black on yellow": "30;43", "bold white on red": "1;37;41"}


@dataclass(frozen=True)
class Table:
    """A title, a heading for each column and a row for each method. A cell may have several lines."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    # Headings of the columns that are left out first if there is no room; after them the last column.
    less: tuple[str, ...] = ()


def manner() -> tuple[int, bool, bool]:
    """Return how standard output is written: its width (without a terminal COLUMNS or 120), in colours or not, in ASCII alone or not."""
    encoding = (sys.stdout.encoding or "utf-8").lower()
    return shutil.get_terminal_size((WIDTH, 24)).columns, sys.stdout.isatty(), not encoding.startswith("utf")


def show(tables: Sequence[Table], above: Sequence[tuple[str, str]] = (), below: Sequence[tuple[str, str]] = ()) -> None:
    """Print the tables on standard output, in colours on a terminal; `above` and `below` them texts, each with its style."""
    print(lines_of(tables, above, below, *manner()))


def lines_of(
    tables: Sequence[Table],
    above: Sequence[tuple[str, str]] = (),
    below: Sequence[tuple[str, str]] = (),
    width: int = WIDTH,
    colour: bool = False,
    ascii_only: bool = False,
) -> str:
    """Return the tables as lines of text of at most `width` columns, with texts above and below them, each with its style.

    Columns that do not fit are left out, and named below their table. Names break between words, and only where they take much of the
    width.
    """
    lines: list[str] = []

    def write(text: str, style: str) -> None:
        for line in (part for whole in text.split("\n") for part in _filled(whole, min(width, WIDTH)).split("\n")):
            lines.append(f"\x1b[{_STYLES[style]}m{line}\x1b[0m" if colour and style and line else line)

    for text, style in above:
        write(text, style)
    for table in tables:
        write(table.title, "bold")
        kept, drawn = _fitted(table, width, "-" if ascii_only else "\u2500")
        lines += [*([""] if table.title else []), *drawn, ""]
        if left_out := [_one_line(head) for place, head in enumerate(table.heads) if place not in kept]:
            write(f" no room for: {', '.join(left_out)}\n", "dim")
    for text, style in below:
        write(text, style)
    return "\n".join(line.rstrip() for line in lines)


def _fitted(table: Table, width: int, rule: str) -> tuple[list[int], list[str]]:
    """Return the columns for which there is room, and the lines of the table with them."""
    kept, spare = list(range(len(table.heads))), [table.heads.index(head) for head in table.less]
    word = max((len(word) for row in table.rows for word in row[0].split()), default=1)
    whole, name = max(len(row[0]) for row in [table.heads, *table.rows]), max(word, int(_NAME * width))

    def drawn(name: int) -> list[str]:
        lines = _drawn(table, kept, name, rule)
        return lines if len(lines[0]) <= width else []

    while spare and not drawn(name):
        kept.remove(spare.pop(0))
    while len(kept) > 2 and not drawn(word):
        kept.pop()
    return kept, drawn(whole) or drawn(name) or _drawn(table, kept, word, rule)


def _drawn(table: Table, kept: Sequence[int], name: int, rule: str) -> list[str]:
    """Return the lines of a table: heads, a rule, rows. Names stand to the left and are at most `name` wide, numbers to the right."""

    def cut(row: tuple[str, ...]) -> list[list[str]]:
        return [(row[place] if place else _filled(row[0], name)).split("\n") for place in kept]

    cells = [cut(row) for row in [table.heads, *table.rows]]
    sizes = [max(len(line) for row in cells for line in row[at]) for at in range(len(kept))]
    lines = [
        "".join(f" {text:{'>' if at else '<'}{sizes[at]}} " for at, text in enumerate(texts))
        for row in cells
        for texts in zip_longest(*row, fillvalue="")
    ]
    lines.insert(max(map(len, cells[0])), rule * len(lines[0]))
    return lines


def wrapped(text: str, error: bool = False) -> str:
    """Return the text wrapped to the width of the terminal; unchanged if standard output or standard error is none."""
    stream = sys.stderr if error else sys.stdout
    if not stream.isatty():
        return text
    width = max(20, min(os.get_terminal_size(stream.fileno()).columns, WIDTH))
    return "\n".join(_filled(line, width) for line in text.splitlines())


def aligned(lines: Mapping[str, str]) -> str:
    """Return a name and its text on each line, the texts below each other and wrapped at the width of the terminal."""
    width, indent = max(20, min(manner()[0], WIDTH)), max(map(len, lines), default=0) + 2
    return "\n".join(_filled(f"{name:<{indent}}{text}", width, " " * indent) for name, text in lines.items())


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, max(width, 1), break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def markdown(table: Table, code: bool = True) -> str:
    """Return the table as Markdown, without its title; `code`: first cells are names of schemes."""
    lines = [[_one_line(head) for head in table.heads], ["---"] * len(table.heads)]
    lines += [[f"`{name}`" if code else name, *map(_one_line, cells)] for name, *cells in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.replace("-\n", "").split())
