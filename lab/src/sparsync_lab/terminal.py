"""Draw tables and text with rich for a terminal of any width; without a terminal, lines have 120 columns, or COLUMNS."""

import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 120  # columns without a terminal, and of the longest line of text
NOTHING = "-"


@dataclass(frozen=True)
class Table:
    """A title, a heading per column and a row per method. A cell may have several lines."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show(tables: Sequence[Table], above: Sequence[tuple[str, str]] = (), below: Sequence[tuple[str, str]] = ()) -> None:
    """Print the tables on standard output, in colours on a terminal, between the styled texts `above` and `below`."""
    print(lines_of(tables, above, below))


def lines_of(
    tables: Sequence[Table],
    above: Sequence[tuple[str, str]] = (),
    below: Sequence[tuple[str, str]] = (),
    width: int | None = None,
    colour: bool | None = None,
) -> str:
    """Draw the tables as lines of at most `width` columns, between the styled texts `above` and `below`.

    In a table without room the widest columns wrap. Width and colour are those of standard output unless given.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    width = width or _columns()
    console = Console(width=width, force_terminal=colour, highlight=False, markup=False, emoji=False)
    with console.capture() as drawn:
        for text, style in above:
            console.print(text, style=style, width=min(width, WIDTH))
        for table in tables:
            made = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for place, head in enumerate(table.heads):
                made.add_column(head, justify="right" if place else "left", overflow="fold")
            for row in table.rows:
                made.add_row(*map(Text, row))
            if table.title:
                console.print(table.title, style="bold", width=min(width, WIDTH))
            console.print(made)
        for text, style in below:
            console.print(text, style=style, width=min(width, WIDTH))
    return "\n".join(line.rstrip() for line in drawn.get().splitlines())


def wrapped(text: str, error: bool = False) -> str:
    """Wrap the text to the width of the terminal; return it unchanged if the stream is no terminal."""
    stream = sys.stderr if error else sys.stdout
    if not stream.isatty():
        return text
    width = max(20, min(os.get_terminal_size(stream.fileno()).columns, WIDTH))
    return "\n".join(_filled(line, width) for line in text.splitlines())


def aligned(lines: Mapping[str, str]) -> str:
    """Put each name and its text on a line, the texts aligned and wrapped to the width of the terminal."""
    width, indent = max(20, min(_columns(), WIDTH)), max(map(len, lines), default=0) + 2
    return "\n".join(_filled(f"{name:<{indent}}{text}", width, " " * indent) for name, text in lines.items())


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, max(width, 1), break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def markdown(table: Table, code: bool = True) -> str:
    """Format the table as Markdown, without its title; `code`: the first cells are names of schemes."""
    lines = [[_one_line(head) for head in table.heads], ["---"] * len(table.heads)]
    lines += [[f"`{name}`" if code else name, *map(_one_line, cells)] for name, *cells in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _columns() -> int:
    return shutil.get_terminal_size((WIDTH, 24)).columns


def _one_line(text: str) -> str:
    return " ".join(text.replace("-\n", "").split())
