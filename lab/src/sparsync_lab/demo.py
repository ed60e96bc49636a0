"""What `sparsync demo` shows: two comparisons that two cores finish within minutes, and one table of both."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.report.choice import sentences
from sparsync_lab.report.format import place_text
from sparsync_lab.report.results import read
from sparsync_lab.report.summary import summarise
from sparsync_lab.report.tables import reached, warnings
from sparsync_lab.terminal import Table, markdown, show, wrapped

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
        title = f"{half.title}: {place_text(found.run)}"
        said = " ".join(sentences(found))
        parts += [
            f"## {half.title}\n",
            f"```text\n{shlex.join(['sparsync', *found.run.command[1:]])}\n```\n",
            *(f"**{each.text} {each.why}**\n" for each in found.banners),
            f"{said}\n",
            markdown(reached(found, title, lambda scheme: scheme.label)) + "\n",
            *(f"{note}\n" for note in found.notes),
        ]
        above += [(f"{half.folder}: {text}", style) for text, style in warnings(found)]
        above += [(f"{half.folder}: {note}", "yellow") for note in found.notes]
        above.append((f"{half.folder}: {said}", "bold"))
        shown.append(reached(found, title))
    page = out / PAGE
    page.write_text("\n".join(parts))
    show(shown, above)
    print(wrapped(f"Reports: {', '.join(str(out / half.folder / 'report.html') for half in halves)}"))
    print(f"Both tables, with the commands: {page}")
    return page


def _minutes(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d} min"
