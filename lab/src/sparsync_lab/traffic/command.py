"""The commands `sparsync traffic` and `sparsync gradients`: their output, its destination, and the progress bar."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from sparsync_lab.labels import short_labels
from sparsync_lab.progress import progress
from sparsync_lab.report.format import significant
from sparsync_lab.terminal import NOTHING, Table, show
from sparsync_lab.traffic.observe import Record
from sparsync_lab.traffic.study import Study

STANDARD_OUTPUT = "-"

_COLUMNS = (  # heading, name of the value in a window, and its unit
    ("density\nerror, %", "density_error_mean", 0.01),
    ("worst\nerror, %", "density_error_worst", 0.01),
    ("kB of\na rank", "bytes_mean", 1e3),
    ("most kB\nof a rank", "bytes_max", 1e3),
    ("bits per\nparameter\nper step", "bits_mean", 1.0),
    ("im-\nbalance", "imbalance_mean", 1.0),
    ("energy %\nwritten", "captured_mean", 0.01),
    ("longest\nwait", "staleness_max", 1),
)


def traffic(study: Study, title: str, out: str | None, plot: Path | None, every: int) -> None:
    """Run the study: JSON lines go to `out`, "-" for standard output, the picture to `plot`, and a table to the terminal."""
    if every < 1:
        raise ValueError(f"--every must be at least 1, got {every}")
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot takes the name of a .png file, got {plot}")
    records: list[Record] = []
    with ExitStack() as stack:
        write = _writer(out, stack)
        for record in _with_progress(study):
            records.append(record)
            if record["step"] % every == 0:
                write(record)
        summaries = [study.summary(choice.label, records) for choice in study.schemes]
        for summary in summaries:
            write(summary)
    if plot is not None:
        from sparsync_lab.traffic.plot import picture

        _write_bytes(plot, picture(records, "What the schemes send, write and leave in the residual", title))
    if out != STANDARD_OUTPUT:
        show([table(summaries, title)])


def table(summaries: Sequence[Record], title: str) -> Table:
    """Return a table with a row for each scheme, over the steps after the first 50, or after the first where there are no more."""
    start = "after_50" if summaries[0]["after_50"] else "after_1"
    names = short_labels([summary["scheme"] for summary in summaries])
    rows = tuple(
        (
            names[summary["scheme"]],
            *(_cell((summary[start] or {}).get(name), unit) for _, name, unit in _COLUMNS),
        )
        for summary in summaries
    )
    heads = ("scheme", *(head for head, _, _ in _COLUMNS))
    return Table(
        f"{title}; after step {start.removeprefix('after_')}",
        heads,
        rows,
        less=("most kB\nof a rank", "worst\nerror, %"),
    )


def _writer(out: str | None, stack: ExitStack) -> Callable[[Record], None]:
    """Return the function that writes a record to its destination."""
    if out is None:
        return lambda record: None
    if out == STANDARD_OUTPUT:
        return lambda record: print(json.dumps(record))
    try:
        file = stack.enter_context(Path(out).open("w"))  # noqa: SIM115  # the stack closes it
    except OSError as error:
        raise ValueError(f"--json: cannot write {out}: {error}; choose a folder that exists") from error
    return lambda record: print(json.dumps(record), file=file)


def _write_bytes(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error}; choose a folder that exists") from error


def _with_progress(study: Study) -> Iterator[Record]:
    """Yield the records, and show how many there are."""
    with progress("steps of all schemes", study.steps * len(study.schemes)) as shown:
        for record in study.records():
            yield record
            shown.advance()


def _cell(value: int | float | None, unit: int | float) -> str:
    if isinstance(value, int) and unit == 1:
        return str(value)
    return NOTHING if value is None else significant(value / unit)
