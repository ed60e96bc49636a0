"""What `sparsync demo` shows: two comparisons that two cores finish within minutes, and one table of both.

docs/measuring.md has the reasons for their sizes.
"""

import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync.lab.report.format import (
    banner,
    behind_text,
    bytes_text,
    place_text,
    quality_text,
    ratio_text,
    significant,
    target_text,
)
from sparsync.lab.report.results import read
from sparsync.lab.report.summary import SchemeFigures, Spread, Summary, summarise
from sparsync.lab.report.tables import NOTHING, Table, lines_of

PAGE = "summary.md"
PICTURE = "quality_over_time.png"


@dataclass(frozen=True)
class Half:
    """One comparison of the demo: the folder of its report, a title, and the arguments of `sparsync compare`."""

    folder: str
    title: str
    arguments: str


HALVES = (
    Half(
        "lstm",
        "A language model by words (LSTM), trained by SGD",
        "--workload shakespeare-small --ranks 4 --link 100mbit --target 80 --steps 120 --eval-every 20 --seed 0 --schemes "
        # topk at 1 %; then the same density; then as many bytes as topk sends.
        "dense,bf16,topk:density=0.01:values=int4,"
        "oktopk:density=0.01:values=int4,two_shot:density=0.01:values=int4,"
        "oktopk:density=0.023:values=int4,two_shot:density=0.022:values=int4",
    ),
    Half(
        "gpt",
        "A transformer by characters, trained by AdamW",
        "--workload gpt --ranks 4 --link 100mbit --target 15 --steps 120 --eval-every 10 --seed 0 --schemes "
        "dense,bf16,powersgd,topk:density=0.01:values=int4,adamw_steps(keep=0.2)/two_shot:density=0.07:values=sign",
    ),
)


def commands(out: Path, steps: int | None = None, halves: Sequence[Half] = HALVES) -> list[list[str]]:
    """Return the arguments of `sparsync` that run each half, with its results under `out`; `steps`: in place of its own."""
    more = [] if steps is None else ["--steps", str(steps)]
    return [["compare", *shlex.split(half.arguments), *more, "--out", str(out / half.folder)] for half in halves]


def summary(out: Path, halves: Sequence[Half] = HALVES) -> Path:
    """Print one table of all halves from their results under `out`, write it to summary.md there, and return its path."""
    parts, pictures = [f"{PICTURE} of each half is its picture, and report.html the whole report.\n"], []
    shown: list[Table] = []
    above: list[tuple[str, str]] = []
    for half in halves:
        found = summarise(read(out / half.folder).runs[-1])
        command = shlex.join(["sparsync", *found.run.command[1:]])
        warning = banner(found.run)
        table = _table(f"{half.title}: {place_text(found.run)}", found)
        notes = [*([f"**{warning}**"] if warning else []), *found.notes]
        parts += [
            f"## {half.title}\n",
            f"```text\n{command}\n```\n",
            _markdown(table),
            *(f"{note}\n" for note in notes),
        ]
        above += [(f"!!! {half.folder}: {note} !!!", "bold red") for note in notes]
        shown.append(table)
        pictures.append(str(out / half.folder / PICTURE))
    ascii_only = not (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    page = out / PAGE
    page.write_text("\n".join(parts))
    print(lines_of(shown, above, colour=sys.stdout.isatty(), ascii_only=ascii_only))
    print(f"Pictures: {', '.join(pictures)}")
    print(f"Summary: {page}")
    return page


def _table(title: str, found: Summary) -> Table:
    run = found.run
    target = "no target" if run.target is None else target_text(run)
    heads = (
        "scheme",
        "a rank sends\nin a step",
        "bits per parameter\nand step",
        "ms of\na step",
        f"seconds to\n{target}",
        "as fast\nas bf16",
    )
    rows = tuple((scheme.label, *_cells(found, scheme)) for scheme in found.schemes)
    return Table(title, (*heads, f"{run.metric}\nat the end", "% behind\ndense"), rows)


def _cells(found: Summary, scheme: SchemeFigures) -> Iterator[str]:
    yield _text(scheme.over_seeds("sent_bytes"), bytes_text)
    yield _text(scheme.over_seeds("bits"), significant)
    yield _text(scheme.over_seeds("step_s"), lambda step_s: significant(1e3 * step_s))
    yield "not reached" if scheme.target_s is None else significant(scheme.target_s.median)
    ratio = scheme.speedup["bf16"]
    yield NOTHING if ratio is None or scheme.label == "bf16" else ratio_text(ratio.spread.median, ratio.bound)
    yield _text(scheme.over_seeds("quality"), lambda value: quality_text(found.run, value))
    yield NOTHING if scheme.label == "dense" else _text(scheme.behind_dense, behind_text)


def _text(spread: Spread | None, text: Callable[[float], str]) -> str:
    return NOTHING if spread is None or not math.isfinite(spread.median) else text(spread.median)


def _markdown(table: Table) -> str:
    heads = [head.replace("\n", " ") for head in table.heads]
    rows = [[f"`{label}`", *cells] for label, *cells in table.rows]
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
