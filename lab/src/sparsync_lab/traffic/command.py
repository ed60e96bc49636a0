"""The command `sparsync traffic`: several schemes side by side on one stream of gradients, a line for each step, and a table."""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sparsync_lab.labels import short_labels
from sparsync_lab.progress import progress
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, try_out
from sparsync_lab.terminal import NOTHING, Table, show
from sparsync_lab.traffic.observe import Observed, Record
from sparsync_lab.traffic.stream import Stream

STANDARD_OUTPUT = "-"
WINDOWS = {"after_1": 1, "after_50": 50}  # the steps a summary leaves out at the start

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


@dataclass(frozen=True)
class Study:
    """Schemes, a stream of gradients, and the number of steps. Raises ValueError where they do not fit together."""

    schemes: tuple[SchemeChoice, ...]
    stream: Stream
    steps: int

    def __post_init__(self) -> None:
        check_labels(self.schemes)
        for choice in self.schemes:
            if choice.local is not None:
                raise ValueError(f"schemes reduce gradients here, got {choice.label!r}; leave out local_steps(...)/")
            try_out(choice, self.stream.ranks)

    @property
    def elements(self) -> int:
        return self.stream.layout[-1].span.stop

    def records(self) -> Iterator[Record]:
        """Yield a record for each step and scheme, step by step."""
        observed = [Observed(choice, self.stream.ranks, self.stream.layout) for choice in self.schemes]
        for step in range(self.steps):
            gradients = self.stream.gradients(step)
            for each in observed:
                yield each.reduce(step, gradients)

    def summary(self, label: str, records: Sequence[Record]) -> Record:
        """Return the summary of one scheme: over all steps but the first, and but the first 50."""
        mine = [record for record in records if record["scheme"] == label]
        about = {"ranks": self.stream.ranks, "elements": self.elements, "asked": mine[0]["asked"], "steps": len(mine)}
        windows = {name: _window(mine[start:]) for name, start in WINDOWS.items()}
        return {"kind": "summary", "scheme": label, **about, **windows}


def traffic(study: Study, title: str, out: str | None) -> None:
    """Run the study: JSON lines go to `out`, "-" for standard output, and a table to the terminal."""
    records: list[Record] = []
    with ExitStack() as stack:
        write = _writer(out, stack)
        with progress("steps of all schemes", study.steps * len(study.schemes)) as shown:
            for record in study.records():
                records.append(record)
                write(record)
                shown.advance()
        summaries = [study.summary(choice.label, records) for choice in study.schemes]
        for summary in summaries:
            write(summary)
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


def _window(records: Sequence[Record]) -> Record | None:
    """Return means and extremes over some steps; None over none."""
    if not records:
        return None
    off = [abs(record["union"] / record["asked"] - 1) for record in records if record["asked"]]
    nbytes = [each for record in records for each in record["bytes"]]
    return {
        "density_mean": statistics.fmean(record["density"] for record in records),
        "density_error_mean": statistics.fmean(off) if off else None,
        "density_error_worst": max(off, default=None),
        "bytes_mean": statistics.fmean(nbytes),
        "bytes_max": max(nbytes),
        "bits_mean": statistics.fmean(nbytes) * 8 / records[0]["elements"],
        "messages_max": max(each for record in records for each in record["messages"]),
        "padding_mean": _mean(records, "padding"),
        "imbalance_mean": _mean(records, "imbalance"),
        "error_mean": _mean(records, "error"),
        "captured_mean": _mean(records, "captured"),
        "best_mean": _mean(records, "best"),
        "residual_norm_last": records[-1]["residual_norm"],
        "staleness_max": max(record["staleness_max"] for record in records),
    }


def _mean(records: Sequence[Record], name: str) -> float | None:
    """Return the mean over the steps that have a value; None where none has."""
    found = [record[name] for record in records if record[name] is not None]
    return statistics.fmean(found) if found else None


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


def _cell(value: int | float | None, unit: int | float) -> str:
    if isinstance(value, int) and unit == 1:
        return str(value)
    return NOTHING if value is None else significant(value / unit)
