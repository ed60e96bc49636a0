"""The command `sparsync traffic`: run several schemes on one stream of gradients, with a line per step, and a table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsync_lab.progress import Progress
from sparsync_lab.report.format import significant
from sparsync_lab.scheme_choice import SchemeChoice, check_labels, try_out
from sparsync_lab.terminal import NOTHING, Table, show
from sparsync_lab.traffic.observe import Observed, Record
from sparsync_lab.traffic.stream import Stream

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


def traffic(study: Study, title: str) -> None:
    """Run the study, and print its table."""
    shown = Progress("steps of all schemes", study.steps * len(study.schemes))
    records: list[Record] = []
    for record in study.records():
        records.append(record)
        shown.advance()
    show([_table([summary(records, choice.label) for choice in study.schemes], title)])


def summary(records: Sequence[Record], label: str) -> Record:
    """Compute means and extremes of one scheme over its settled steps."""
    records = [each for each in records if each["scheme"] == label]
    after = SETTLING if len(records) > SETTLING else min(1, len(records) - 1)
    settled = records[after:]
    off = [abs(each["union"] / each["asked"] - 1) for each in settled]
    nbytes = [sent for each in settled for sent in each["bytes"]]
    captured, xi = ([each[name] for each in settled if each[name] is not None] for name in ("captured", "xi"))
    return {
        "scheme": records[0]["scheme"],
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
    rows = tuple(
        (summary["scheme"], *(_cell(summary[name], unit) for _, name, unit in _COLUMNS)) for summary in summaries
    )
    heads = ("scheme", *(head for head, _, _ in _COLUMNS))
    about = f"{title}; after step {summaries[0]['after']}"
    return Table(about, heads, rows)


def _cell(value: int | float | None, unit: int | float) -> str:
    if isinstance(value, int) and unit == 1:
        return str(value)
    return NOTHING if value is None else significant(value / unit)
