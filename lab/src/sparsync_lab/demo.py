"""What `sparsync demo` shows: two comparisons that two cores finish within minutes, and one table of both."""

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.report.format import (
    behind_text,
    bytes_text,
    percent,
    place_text,
    quality_text,
    ratio_text,
    significant,
)
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import RunSummary, SchemeFigures, Spread, summarise
from sparsync_lab.report.tables import warnings
from sparsync_lab.terminal import NOTHING, Table, markdown, show, wrapped

PAGE = "summary.md"
PICTURE = "quality_over_time.png"


@dataclass(frozen=True)
class Half:
    """One comparison of the demo: the folder of its report, a title, the arguments of `sparsync compare`, and how long it takes."""

    folder: str
    title: str
    arguments: str
    takes: str = "minutes"


HALVES = (
    Half(
        "lstm",
        "A word-level language model (LSTM), trained by SGD",
        "--workload shakespeare-small --ranks 4 --link 100mbit --target 90 --steps 80 --eval-every 10 --seed 0 --schemes "
        "dense,bf16,default,bits=0.8,topk:density=0.01:values=int4,micro:density=0.01:values=int4",
        "two to three minutes",
    ),
    Half(
        "gpt",
        "A character-level transformer, trained by AdamW",
        "--workload gpt --ranks 4 --link 100mbit --target 15 --steps 120 --eval-every 10 --seed 0 --schemes "
        # PowerSGD's lowest rank that is level with dense here.
        "dense,bf16,powersgd:rank=16,default,bits=0.8",
        "three to four minutes",
    ),
)


def commands(out: Path, steps: int | None = None, halves: Sequence[Half] = HALVES) -> list[list[str]]:
    """Return the arguments of `sparsync` that run each half, with its results under `out`; `steps` replaces its number of steps."""
    more = [] if steps is None else ["--steps", str(steps)]
    return [["compare", *shlex.split(half.arguments), *more, "--out", str(out / half.folder)] for half in halves]


def before(out: Path, number: int, took_s: float | None, steps: int | None, halves: Sequence[Half] = HALVES) -> str:
    """Return the lines above half `number`, counted from 0: what has ended after `took_s` seconds, what comes, and how long it takes.

    `steps` replaces its number of steps; no time is known then.
    """
    half = halves[number]
    lines = [f"Next, {number + 1} of {len(halves)}: {half.title}; results go to {out / half.folder}."]
    if took_s is not None:
        ended = halves[number - 1]
        report = out / ended.folder / "report.html"
        lines.insert(0, f"Ended, {number} of {len(halves)}, after {_minutes(took_s)}: {ended.title}. Report: {report}")
    lines.append(f"It takes {half.takes} on two cores." if steps is None else f"Each training takes {steps} steps.")
    return "\n".join(lines)


def summary(out: Path, halves: Sequence[Half] = HALVES) -> Path:
    """Write one table of all halves from their results under `out` to summary.md there, print it with the paths, and return its path."""
    parts = [f"{PICTURE} of each half is its picture, and report.html the whole report.\n"]
    shown: list[Table] = []
    above: list[tuple[str, str]] = []
    for half in halves:
        found = summarise(read(out / half.folder).runs[-1])
        command = shlex.join(["sparsync", *found.run.command[1:]])
        title = f"{half.title}: {place_text(found.run)}"
        parts += [
            f"## {half.title}\n",
            f"```text\n{command}\n```\n",
            *(f"**{each.text} {each.why}**\n" for each in found.banners),
            markdown(table(title, found, lambda scheme: scheme.label)) + "\n",
            *(f"{note}\n" for note in found.notes),
        ]
        above += [(f"{half.folder}: {text}", style) for text, style in warnings(found)]
        above += [(f"{half.folder}: {note}", "yellow") for note in found.notes]
        shown.append(table(title, found, lambda scheme: scheme.name))
    page = out / PAGE
    page.write_text("\n".join(parts))
    show(shown, above)
    print(wrapped(f"Reports: {', '.join(str(out / half.folder / 'report.html') for half in halves)}"))
    print(f"Both tables, with the commands: {page}")
    return page


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"


def table(title: str, found: RunSummary, name: Callable[[SchemeFigures], str]) -> Table:
    """Return the table of a half, with `name` of each scheme."""
    run = found.run
    target = "\na target" if run.target is None else f"\nto {run.target:g}{percent(run)}"
    heads = (
        "scheme",
        "sent in\na step",
        "bits per\nparameter\nper step",
        "bits on\nthe inter-\nface",
        "step\ntime, ms",
        f"seconds{target}",
        "speed-up\nover bf16",
        f"{run.metric}\nat the end",
        "% behind\ndense",
    )
    rows = tuple((name(scheme), *_cells(found, scheme)) for scheme in found.schemes)
    return Table(title, heads, rows, less=(heads[1], heads[4], heads[3], heads[2]))


def _cells(found: RunSummary, scheme: SchemeFigures) -> Iterator[str]:
    yield _text(scheme.over_seeds("sent_bytes"), bytes_text)
    yield _text(scheme.over_seeds("bits"), significant)
    yield _text(scheme.over_seeds("interface_bits"), significant)
    yield _text(scheme.over_seeds("step_s"), lambda step_s: significant(1e3 * step_s))
    if scheme.exchanged_nothing:
        yield from (NOTHING, NOTHING, "exchanged nothing", NOTHING)
        return
    yield "not reached" if scheme.target_s is None else significant(scheme.target_s.median)
    ratio = scheme.speedup["bf16"]
    yield NOTHING if ratio is None or scheme.label == "bf16" else ratio_text(ratio.spread.median, ratio.bound)
    yield _text(scheme.over_seeds("quality"), lambda value: quality_text(found.run, value))
    yield NOTHING if scheme.label == "dense" else _range(scheme.behind_dense, behind_text)


def _range(spread: Spread | None, text: Callable[[float], str]) -> str:
    """Return the median, and where seeds differ the lowest and the highest."""
    shown = _text(spread, text)
    if spread is None or spread.low == spread.high or shown == NOTHING:
        return shown
    return f"{shown} ({text(spread.low)} to {text(spread.high)})"


def _text(spread: Spread | None, text: Callable[[float], str]) -> str:
    return NOTHING if spread is None or not math.isfinite(spread.median) else text(spread.median)
