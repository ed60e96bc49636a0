"""Checks the runs in docs/records.jsonl by the rules of docs/records.md, and writes the tables of that page.

    .venv/bin/python -m studies records [--print]

`examples/record.py` makes a run. A run that breaks a rule is refused, with its line, and nothing is written.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from sparsync_lab.checked import Checked, checked
from studies import parts

PAGE, PART, ROWS = "docs/records.md", "records", "docs/records.jsonl"
FEWEST_SEEDS, LEVEL = 3, 0.01
TARGETS: dict[str, float | None] = {  # track -> the fixed validation loss, in nats per item; None: not fixed yet
    "gpt-tiny": 2.12,
    "gpt": 1.83,
    "code-86m": None,
}


@dataclass(frozen=True)
class Run(Checked):
    """One training, a line of docs/records.jsonl, as `examples/record.py` writes it."""

    track: str
    job: dict[str, Any]  # Any: JSON; the architecture, the data and the batch, which a track fixes
    scheme: str
    settings: str  # all of the scheme's; empty: the all-reduce of DDP itself
    exchange: str
    ranks: int
    optimizer: str
    rate: float  # times the job's own learning rate
    schedule: str
    seed: int
    steps: int
    tokens: int  # over all ranks
    loss: float  # of the validation at the end, in nats
    bytes: float  # sent by a rank in the whole training, a mean over ranks
    bits: float  # the same per parameter per step
    curve: tuple[tuple[int, float, float], ...]  # (steps, loss, bytes so far)
    who: str
    date: str
    device: str
    precision: str
    seconds: float
    versions: dict[str, Any]  # Any: texts, and None

    @property
    def entry(self) -> tuple[str | int | float, ...]:
        """What the runs of one entry have in common: all but the seed and what came out."""
        what = (self.track, self.ranks, self.steps, self.scheme, self.settings, self.exchange)
        return (*what, self.optimizer, self.rate, self.schedule, self.who)


def main(argv: Sequence[str]) -> None:
    parser = parts.options("records", __doc__)
    options = parser.parse_args(argv)
    try:
        content = tables(read(parts.ROOT / ROWS))
    except ValueError as error:
        parser.error(str(error))
    parts.put(PAGE, PART, content, options.print)


def read(path: Path) -> list[Run]:
    """Return the runs in a file, each by the rules. Raises ValueError that names the line of the first one that breaks a rule."""
    found: list[Run] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        where = f"{path.name}, line {number}"
        try:
            run: Run = checked(Run, json.loads(line))
            _check(run, next((each for each in found if each.track == run.track), run))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if any((each.entry, each.seed) == (run.entry, run.seed) for each in found):
            raise ValueError(f"{where}: {run.scheme} has two runs with seed {run.seed}; give each run another seed")
        found.append(run)
    return found


def tables(runs: Iterable[Run]) -> str:
    """Return a table for each track, the fewest bytes first. Raises ValueError for an entry whose runs do not show that it is a record."""
    entries: dict[tuple[Any, ...], list[Run]] = {}  # Any: as Run.entry
    for run in runs:
        entries.setdefault(run.entry, []).append(run)
    by_track: dict[str, list[list[Run]]] = {}
    for own in entries.values():
        _check_entry(own)
        by_track.setdefault(own[0].track, []).append(own)
    return "\n\n".join(_table(track, by_track.get(track, [])) for track in TARGETS)


def p_value(losses: Sequence[float], target: float) -> float:
    """Return the probability of a mean as low as that of `losses`, or lower, if their expectation were `target`: a one-sided t test.

    For losses that are all the same it is 0 below the target, and 1 elsewhere.
    """
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    if deviation == 0:
        return 0.0 if mean < target else 1.0
    return (1 - _within((target - mean) / (deviation / math.sqrt(len(losses))), len(losses) - 1)) / 2


def _within(t: float, freedom: int) -> float:
    """Return the probability that |T| < t, negative for t < 0, of Student's T: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    odd = freedom % 2
    total, term = 0.0, math.cos(angle) if odd else 1.0
    for power in range(odd, freedom - 1, 2):  # of the cosine
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def _check(run: Run, first: Run) -> None:
    """Raise ValueError for a run that breaks a rule; `first` is the first one of its track."""
    if run.track not in TARGETS:
        raise ValueError(f"there is no track {run.track!r}; tracks are {', '.join(TARGETS)}")
    if TARGETS[run.track] is None:
        raise ValueError(f"the loss of track {run.track} is not fixed yet; it takes no runs")
    if different := _different(run.job, first.job):
        raise ValueError(
            f"{different} is fixed on track {run.track}; only the exchange, the rate and the schedule are free"
        )
    each_step = first.tokens / first.steps
    for name, value, expected in (
        ("tokens", run.tokens, each_step * run.steps),
        ("bits", run.bits, 8 * run.bytes / run.steps / run.job["parameters"]),
    ):
        if not math.isclose(value, expected, rel_tol=1e-6):
            raise ValueError(f"{name} must be {expected:g} after {run.steps} steps, got {value:g}")
    steps = [each for each, *_ in run.curve]
    if not steps or steps != sorted(set(steps)) or run.curve[-1] != (run.steps, run.loss, run.bytes):
        raise ValueError(f"curve must ascend, and end with {[run.steps, run.loss, run.bytes]}, got {run.curve[-1:]}")
    try:
        date.fromisoformat(run.date)
    except ValueError:
        raise ValueError(f"date must be as 2026-01-31, got {run.date!r}") from None


def _different(job: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "job") -> str:  # Any: JSON
    """Return the first thing that is not as fixed, with both values; "" where all is. The place of the data may differ."""
    for key in sorted({*job, *fixed} - {"source"}):
        mine, given = job.get(key), fixed.get(key)
        if isinstance(mine, dict) and isinstance(given, dict):
            if found := _different(mine, given, f"{place}.{key}"):
                return found
        elif mine != given:
            return f"{place}.{key} = {given!r}, and not {mine!r},"
    return ""


def _check_entry(runs: Sequence[Run]) -> None:
    """Raise ValueError unless enough runs show that the mean loss is below the target of their track."""
    first, target, losses = runs[0], TARGETS[runs[0].track], [run.loss for run in runs]
    what = f"{first.track}, {first.scheme}, {first.steps} steps"
    if len(runs) < FEWEST_SEEDS:
        raise ValueError(f"{what}: at least {FEWEST_SEEDS} seeds are needed, got {len(runs)}")
    assert target is not None  # as `read` has checked
    mean, p = statistics.fmean(losses), p_value(losses, target)
    if not p < LEVEL:
        raise ValueError(
            f"{what}: a mean loss of {mean:.4f} over {len(runs)} seeds must be below {target:g} with p < {LEVEL:g}, got p = {p:.2g}; "
            "train for more steps, or with more seeds"
        )


def _table(track: str, entries: Sequence[Sequence[Run]]) -> str:
    target = TARGETS[track]
    title = f"### {track}\n\n"
    if target is None:
        return f"{title}The loss of this track is not fixed yet."
    title += f"Validation loss {target:g} nats or lower.\n\n"
    if not entries:
        return f"{title}No entries yet."
    heads = (
        "method",
        "ranks",
        "steps",
        "bits per parameter per step",
        "MB sent by a rank",
        "mean loss",
        "n",
        "p",
        "who",
        "date",
    )
    return title + parts.table(heads, map(_line, sorted(entries, key=lambda runs: _mean(runs, "bytes"))))


def _line(runs: Sequence[Run]) -> list[str]:
    first, target = runs[0], TARGETS[runs[0].track]
    assert target is not None
    p = p_value([run.loss for run in runs], target)
    exchange = first.exchange.partition("(")[0].lower()
    method = (
        f"{first.optimizer}, `{first.scheme}`" + (f", {exchange}" if first.settings else "") + f", rate {first.rate:g}"
    )
    figures = [
        f"{_mean(runs, 'bits'):.3g}",
        f"{_mean(runs, 'bytes') / 1e6:.4g}",
        f"{_mean(runs, 'loss'):.4f}",
        str(len(runs)),
    ]
    who = first.who.replace("|", "\\|")
    return [method, str(first.ranks), str(first.steps), *figures, f"{p:.1g}", who, max(run.date for run in runs)]


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs)
