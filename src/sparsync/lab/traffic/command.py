"""The commands `sparsync traffic` and `sparsync gradients`: what they print, where it goes, and what a user watches meanwhile."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from sparsync.lab.extra import lab_extra
from sparsync.lab.traffic.observe import Record
from sparsync.lab.traffic.study import Study

STANDARD_OUTPUT = "-"


def traffic(study: Study, title: str, out: str | None, plot: Path | None, every: int) -> None:
    """Runs the study; JSON lines go to `out`, "-" for standard output, the picture to `plot`, and a table to the terminal."""
    if every < 1:
        raise ValueError(f"--every must be at least 1, got {every}")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot takes the name of a .png file, got {plot}")
    records: list[Record] = []
    with ExitStack() as stack:
        write = _writer(out, stack)
        for record in _watched(study):
            records.append(record)
            if record["step"] % every == 0:
                write(record)
        summaries = [study.summary(choice.label, records) for choice in study.schemes]
        for summary in summaries:
            write(summary)
    if plot is not None:
        from sparsync.lab.traffic.plot import picture

        _write(plot, picture(records, "What the schemes send, write and keep back", title))
    if out != STANDARD_OUTPUT:
        from sparsync.lab.traffic.table import as_text

        print(as_text(summaries, title, ascii_only="utf" not in (sys.stdout.encoding or "").lower()), end="")


def _writer(out: str | None, stack: ExitStack) -> Callable[[Record], None]:
    """What takes a record to where it is asked for."""
    if out is None:
        return lambda record: None
    if out == STANDARD_OUTPUT:
        return lambda record: print(json.dumps(record))
    try:
        file = stack.enter_context(Path(out).open("w"))  # noqa: SIM115  # the stack closes it
    except OSError as error:
        raise ValueError(f"--json: cannot write {out}: {error}; choose a folder that exists") from error
    return lambda record: print(json.dumps(record), file=file)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose a folder that exists") from error


def _watched(study: Study) -> Iterator[Record]:
    """The records, with a bar on standard error while it is a terminal."""
    records: Iterable[Record] = study.records()
    if not sys.stderr.isatty():
        yield from records
        return
    with lab_extra("rich"):
        from rich.console import Console
        from rich.progress import track
    total = study.steps * len(study.schemes)
    yield from track(records, "traffic", total=total, console=Console(stderr=True), transient=True)
