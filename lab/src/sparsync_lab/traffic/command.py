"""The command `sparsync traffic`: run several schemes on one stream of gradients, with a line per step, and a table."""

import json
import statistics
from collections.abc import Iterator, Sequence
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
SETTLING = 50  # first steps that a summary leaves out; only one if there are no more

_COLUMNS = (  # heading, name in a summary, unit
    ("density\nerror, %", "density_error_mean", 0.01),
    ("worst\nerror, %", "density_error_worst", 0.01),
    ("kB of\na rank", "bytes_mean", 1e3),
    ("most kB\nof a rank", "bytes_max", 1e3),
    ("bits per\nparameter\nper step", "bits_mean", 1.0),
    ("im-\nbalance", "imbalance_mean", 1.0),
    ("energy %\nwritten", "captured_mean", 0.01),
    ("xi", "xi_mean", 1.0),
    ("longest\nwait", "staleness_max", 1),
)


@dataclass(frozen=True)
class Study:
    """Schemes, a stream of gradients, and the number of steps. Raises ValueError if they do not fit together."""

    schemes: tuple[SchemeChoice, ...]
    stream: Stream
    steps: int

    def __post_init__(self) -> None:
        check_labels(self.schemes)
        for choice in self.schemes:
            if choice.local is not None:
                raise ValueError(f"schemes reduce gradients here, got {choice.label!r}; leave out the part before /")
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


def traffic(study: Study, title: str, out: str | None) -> None:
    """Run the study. JSON lines go to the file `out`, or for "-" to standard output; a table goes to the terminal."""
    records: list[Record] = []
    with ExitStack() as stack:
        file = None if out in (None, STANDARD_OUTPUT) else stack.enter_context(Path(out).open("w"))

        def write(record: Record) -> None:
            if out is not None:
                print(json.dumps(record), file=file)

        with progress("steps of all schemes", study.steps * len(study.schemes)) as shown:
            for record in study.records():
                records.append(record)
                write(record)
                shown.advance()
        summaries = [_summary([each for each in records if each["scheme"] == choice.label]) for choice in study.schemes]
        for summary in summaries:
            write(summary)
    if out != STANDARD_OUTPUT:
        show([_table(summaries, title)])


def _summary(records: Sequence[Record]) -> Record:
    """Compute means and extremes of one scheme over its settled steps."""
    after = SETTLING if len(records) > SETTLING else min(1, len(records) - 1)
    settled = records[after:]
    off = [abs(each["union"] / each["asked"] - 1) for each in settled]
    nbytes = [sent for each in settled for sent in each["bytes"]]
    captured, xi = ([each[name] for each in settled if each[name] is not None] for name in ("captured", "xi"))
    return {
        "kind": "summary",
        "scheme": records[0]["scheme"],
        "elements": records[0]["elements"],
        "asked": records[0]["asked"],
        "after": after,
        "density_error_mean": statistics.fmean(off),
        "density_error_worst": max(off),
        "bytes_mean": statistics.fmean(nbytes),
        "bytes_max": max(nbytes),
        "bits_mean": statistics.fmean(nbytes) * 8 / records[0]["elements"],
        "imbalance_mean": statistics.fmean(each["imbalance"] for each in settled),
        "captured_mean": statistics.fmean(captured) if captured else None,
        "xi_mean": statistics.fmean(xi) if xi else None,
        "staleness_max": max(each["staleness_max"] for each in settled),
    }


def _table(summaries: Sequence[Record], title: str) -> Table:
    names = short_labels([summary["scheme"] for summary in summaries])
    rows = tuple(
        (names[summary["scheme"]], *(_cell(summary[name], unit) for _, name, unit in _COLUMNS)) for summary in summaries
    )
    heads = ("scheme", *(head for head, _, _ in _COLUMNS))
    about = f"{title}; after step {summaries[0]['after']}"
    return Table(about, heads, rows, less=("most kB\nof a rank", "worst\nerror, %"))


def _cell(value: int | float | None, unit: int | float) -> str:
    if isinstance(value, int) and unit == 1:
        return str(value)
    return NOTHING if value is None else significant(value / unit)
