"""Draw tables and text with rich for a terminal of any width; without a terminal, lines have 120 columns, or COLUMNS."""

import io
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH = 120  # columns without a terminal, and of the longest line of text
NOTHING = "-"
_NAME = 0.4  # share of the width that a name may take on one line


@dataclass(frozen=True)
class Table:
    """A title, a heading per column and a row per method. A cell may have several lines."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    # Headings of the columns to drop first if there is no room; then the last columns are dropped.
    less: tuple[str, ...] = ()


def manner() -> tuple[int, bool, bool]:
    """Find out how to write standard output: its width (COLUMNS or 120 without a terminal), in colours or not, in ASCII only or not."""
    encoding = (sys.stdout.encoding or "utf-8").lower()
    return shutil.get_terminal_size((WIDTH, 24)).columns, sys.stdout.isatty(), not encoding.startswith("utf")


def show(tables: Sequence[Table], above: Sequence[tuple[str, str]] = (), below: Sequence[tuple[str, str]] = ()) -> None:
    """Print the tables on standard output, in colours on a terminal, between the styled texts `above` and `below`."""
    print(lines_of(tables, above, below, *manner()))


def lines_of(
    tables: Sequence[Table],
    above: Sequence[tuple[str, str]] = (),
    below: Sequence[tuple[str, str]] = (),
    width: int = WIDTH,
    colour: bool = False,
    ascii_only: bool = False,
) -> str:
    """Draw the tables as lines of at most `width` columns, between the styled texts `above` and `below`.

    Columns that do not fit are dropped, and named below their table. Names wrap between words, and only if they take much of the width.
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
            # Names wrap between words; numbers never do.
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
    """Wrap the text to the width of the terminal; return it unchanged if the stream is no terminal."""
    stream = sys.stderr if error else sys.stdout
    if not stream.isatty():
        return text
    width = max(20, min(os.get_terminal_size(stream.fileno()).columns, WIDTH))
    return "\n".join(_filled(line, width) for line in text.splitlines())


def aligned(lines: Mapping[str, str]) -> str:
    """Put each name and its text on a line, the texts aligned and wrapped to the width of the terminal."""
    width, indent = max(20, min(manner()[0], WIDTH)), max(map(len, lines), default=0) + 2
    return "\n".join(_filled(f"{name:<{indent}}{text}", width, " " * indent) for name, text in lines.items())


def _filled(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, max(width, 1), break_on_hyphens=False, break_long_words=False, subsequent_indent=indent)


def markdown(table: Table, code: bool = True) -> str:
    """Format the table as Markdown, without its title; `code`: the first cells are names of schemes."""
    lines = [[_one_line(head) for head in table.heads], ["---"] * len(table.heads)]
    lines += [[f"`{name}`" if code else name, *map(_one_line, cells)] for name, *cells in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _one_line(text: str) -> str:
    return " ".join(text.replace("-\n", "").split())
