"""The newest reports of a handle, their totals, and a summary as a table."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from typing_extensions import Self

from sparsync.core import Report

MAX_REPORTS = 10_000  # older ones are dropped, so that a long training does not fill the memory
_HEAD = ("scheme", "bucket", "elements", "steps", "bytes/step", "bits/element", "selected", "union", "rounds", "ms")
_PHASES = ("accumulate", "select", "encode", "exchange", "decode", "apply", "other")


@dataclass
class Totals:
    """Sums over the reports of one bucket, or of several."""

    reduced: int = 0  # reports
    elements: int = 0
    selected: int = 0
    union: int = 0
    nbytes: int = 0  # sent by this rank: as counted, else by the closed form
    rounds: int = 0
    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)  # seconds

    def add(self, report: Report) -> None:
        """Add a report."""
        n, nbytes, seconds = report.elements, (report.sent or report.cost).nbytes, report.seconds or 0.0
        spent = {**report.phases, "exchange": report.wait_s or 0.0}
        spent["other"] = max(0.0, seconds - sum(spent.values()))
        self += Totals(1, n, report.selected, report.union, nbytes, report.cost.steps, seconds, spent)

    def __iadd__(self, other: "Totals") -> Self:
        for each in fields(self):
            if each.name != "phases":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        for name, seconds in other.phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + seconds
        return self


class ReportLog:
    """The newest reports, until they are taken, and the totals of all reports, by scheme, bucket and elements."""

    def __init__(self) -> None:
        self._newest: deque[Report] = deque(maxlen=MAX_REPORTS)
        self.totals: dict[tuple[str, str, int], Totals] = {}
        self.steps = 0  # with anything reduced
        self._last: int | None = None

    def append(self, report: Report) -> None:
        self._newest.append(report)
        if report.step != self._last:
            self._last, self.steps = report.step, self.steps + 1
        self.totals.setdefault((report.scheme, report.key, report.elements), Totals()).add(report)

    def __iadd__(self, reports: Iterable[Report]) -> Self:
        for report in reports:
            self.append(report)
        return self

    def __iter__(self) -> Iterator[Report]:
        return iter(self._newest)

    def take(self) -> list[Report]:
        """Take the reports since the last call; totals stay."""
        taken = list(self._newest)
        self._newest.clear()
        return taken


@dataclass
class Hidden:
    """The time of reducing buckets, and the backward pass's wait for it, in seconds. On CUDA the times are the host's.

    DDP waits at the end of the backward pass, from the submission of the last bucket until it is reduced. An integration with waits of
    another kind calls `waited`, and these count instead.
    """

    reducing_s: float = 0.0
    _waited_s: float | None = None  # by integrations
    _before_s: float = 0.0  # at the end of earlier steps
    _step: int | None = None
    _step_s: float = 0.0  # reducing, in this step
    _tail_s: float = 0.0  # from the submission of its latest bucket until this was reduced
    _last_s: float = 0.0  # the end of the latest bucket

    def add(self, step: int, submitted_s: float, began_s: float, ended_s: float) -> None:
        """Add a bucket, in the order of submission."""
        if step != self._step:
            self._before_s, self._step, self._step_s = self._before_s + min(self._step_s, self._tail_s), step, 0.0
        spent_s = ended_s - max(began_s, self._last_s)  # overlaps count once
        self.reducing_s += spent_s
        self._step_s, self._tail_s, self._last_s = self._step_s + spent_s, ended_s - submitted_s, ended_s

    def waited(self, seconds: float) -> None:
        """Count a wait inside the backward pass."""
        self._waited_s = (self._waited_s or 0.0) + seconds

    @property
    def exposed_s(self) -> float:
        """The seconds that the backward pass waited."""
        waited_s = self._before_s + min(self._step_s, self._tail_s) if self._waited_s is None else self._waited_s
        return min(self.reducing_s, waited_s)

    @property
    def share(self) -> float | None:
        """The share of the reduction that the backward pass hid; None while nothing was reduced."""
        return 1 - self.exposed_s / self.reducing_s if self.reducing_s else None


@dataclass(frozen=True)
class Summary:
    """The reductions of one rank since its handle was made; `str` is a table of plain text.

    `rows` are by scheme, bucket and number of elements, because DDP's buckets change after the first steps. `parameters` is the number of
    trained elements of the model, 0 if not known. `hidden` is None if gradients are reduced after the backward pass.
    """

    rank: int
    ranks: int
    steps: int
    parameters: int
    rows: Mapping[tuple[str, str, int], Totals]
    hidden: Hidden | None

    @property
    def total(self) -> Totals:
        """The sums over all rows."""
        total = Totals()
        for each in self.rows.values():
            total += each
        return total

    def __str__(self) -> str:
        size = f", {self.parameters:,} trained parameters" if self.parameters else ""
        lines = [f"rank {self.rank} of {self.ranks}: {self.steps} steps{size}"]
        if not self.steps:
            return lines[0]
        rows: list[tuple[str, ...]] = [_HEAD]
        total = self.total
        for (scheme, key, elements), each in self.rows.items():
            rows.append((scheme, key, f"{elements:,}", *_columns(each, each.reduced)))
        rows.append(("all", "", f"{total.elements // self.steps:,}", *_columns(total, self.steps)))
        lines += [*_table(rows), "time by phase" + ("" if total.seconds else "; times were not measured")]
        for name in _PHASES if total.seconds else ():
            seconds = total.phases.get(name, 0.0)
            lines.append(f"  {name:<10} {1000 * seconds / self.steps:10.3f} ms/step {seconds / total.seconds:7.1%}")
        if self.hidden is None:
            lines.append("reduced after the backward pass, which hides none of it")
        elif self.hidden.share is not None:
            lines.append(
                f"the backward pass hid {self.hidden.share:.1%}: {1000 * self.hidden.reducing_s / self.steps:.3f} ms/step of reducing, "
                f"{1000 * self.hidden.exposed_s / self.steps:.3f} ms/step of waiting for it"
            )
        return "\n".join(lines)


def _columns(each: Totals, steps: int) -> tuple[str, ...]:
    """Format the columns of a row, per step."""
    elements = max(each.elements, 1)
    return (
        f"{steps}",
        f"{each.nbytes / steps:,.0f}",
        f"{8 * each.nbytes / elements:.3f}",
        f"{each.selected / elements:.5f}",
        f"{each.union / elements:.5f}",
        f"{each.rounds / steps:.1f}",
        f"{1000 * each.seconds / steps:.3f}",
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    form = "  ".join(f"{{:{'<' if column < 2 else '>'}{width}}}" for column, width in enumerate(widths))
    return [form.format(*row) for row in rows]
