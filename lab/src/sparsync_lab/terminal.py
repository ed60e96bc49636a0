"""Tables and text for a terminal of any width, drawn by rich; without one, lines have 120 columns, or COLUMNS."""

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 120  # columns, where there is no terminal, and of the longest line of text
NOTHING = "-"
_NAME = 0.4  # of the width: what a name may take on one line


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
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    lines = io.StringIO()
    console = Console(file=lines, width=width, force_terminal=colour, highlight=False, markup=False, emoji=False)
    unlimited = console.options.update(width=10_000)

    def drawn(table: Table, kept: Sequence[int], name: int) -> RichTable:
        frame = box.ASCII if ascii_only else box.SIMPLE_HEAD
        made = RichTable(box=frame, padding=(0, 1, 0, 0))
        for place in kept:
            # Names break between words, and numbers nowhere.
            justify, limit = ("right", None) if place else ("left", name)
            made.add_column(table.heads[place], justify=justify, overflow="fold", no_wrap=place > 0, max_width=limit)
        for row in table.rows:
            made.add_row(*(Text(row[place]) for place in kept))
        return made

    def fits(table: Table, kept: Sequence[int], name: int) -> bool:
        return Measurement.get(console, unlimited, drawn(table, kept, name)).maximum <= width

    def write(texts: Sequence[tuple[str, str]]) -> None:
        for text, style in texts:
            console.print(text, style=style, width=min(width, WIDTH))

    write(above)
    for table in tables:
        kept, out = list(range(len(table.heads))), list[int]()
        word = max((len(word) for row in table.rows for word in row[0].split()), default=1)
        name = max(word, int(_NAME * width))
        spare = [table.heads.index(head) for head in table.less]
        while spare and not fits(table, kept, name):
            out.append(spare.pop(0))
            kept.remove(out[-1])
        if not fits(table, kept, name):
            name = word
        while len(kept) > 2 and not fits(table, kept, name):
            out.append(kept.pop())
        if table.title:
            console.print(table.title, style="bold", width=min(width, WIDTH))
        console.print(drawn(table, kept, width if fits(table, kept, width) else name))
        if out:
            names = [_one_line(table.heads[place]) for place in sorted(out)]
            write([(f" no room for: {', '.join(names)}\n", "dim")])
    write(below)
    return "\n".join(line.rstrip() for line in lines.getvalue().splitlines())


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
