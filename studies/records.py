"""Check the runs in docs/records.jsonl by the rules of docs/compare.md, and write the tables of that page.

    .venv/bin/python -m studies records [--print]

`examples/record.py` makes a run. A run that breaks a rule is refused with its line, and nothing is written.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsync_lab.checked import Checked, checked
from sparsync_lab.frontier.figures import within
from studies import parts

PAGE, PART, ROWS = "docs/compare.md", "records", "docs/records.jsonl"
FEWEST_SEEDS, LEVEL = 3, 0.01
FREE = {"learning_rate", "weight_decay", "clip_norm", "optimizer_name"}  # options of a job that any track leaves free
SHAKESPEARE = {
    "sha256": "93d1b7634835a511cfcbf25f9e9ee80d53c07420e39b7e937c623ece2e93ecdf",
    "characters": {"training": 4_804_378, "held_out": 252_861},
    "types": 84,
}


@dataclass(frozen=True)
class Track:
    """The common properties of a track's runs."""

    loss: float  # validation target, nats per item
    tokens: int  # per step, over all ranks
    job: dict[str, Any]  # Any: JSON, as `Workload.describe`


def _gpt(loss: float, width: int, layers: int, context: int, parameters: int) -> Track:
    options = {"width": width, "layers": layers, "heads": 4, "context": context, "batch_size": 16, "windows": 320}
    job = {"workload": "gpt", "metric": "perplexity", "options": options, "parameters": parameters, "data": SHAKESPEARE}
    return Track(loss, 16 * context, job)


TRACKS = {"gpt-tiny": _gpt(2.01, 64, 2, 32, 107_584), "gpt": _gpt(1.83, 128, 5, 64, 1_010_688)}


@dataclass(frozen=True)
class Run(Checked):
    """One training, a line of docs/records.jsonl, as `examples/record.py` writes it."""

    track: str
    job: dict[str, Any]  # Any: JSON, as `Workload.describe`; fixed by its track, but for the optimizer's options
    scheme: str
    settings: str  # all of the scheme's; empty: DDP's all-reduce
    exchange: str
    ranks: int
    optimizer: str
    rate: float  # factor on the job's rate
    schedule: str
    seed: int
    steps: int
    tokens: int  # over all ranks
    loss: float  # final validation loss, in nats
    bytes: float  # sent by a rank in the whole training, averaged over ranks
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
        """The properties that all runs of an entry share: all but the seed and the results."""
        what = (self.track, self.ranks, self.steps, self.scheme, self.settings, self.exchange, self.precision)
        options = json.dumps(self.job["options"], sort_keys=True)
        return (*what, options, self.optimizer, self.rate, self.schedule, self.who)


def main(argv: Sequence[str]) -> None:
    parser = parts.options("records", __doc__)
    options = parser.parse_args(argv)
    try:
        content = tables(read(parts.ROOT / ROWS))
    except ValueError as error:
        parser.error(str(error))
    parts.put(PAGE, PART, content, options.print)


def read(path: Path) -> list[Run]:
    """Read and check the runs in a file. Raises ValueError that names the line of the first run that breaks a rule."""
    found: list[Run] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        where = f"{path.name}, line {number}"
        try:
            run: Run = checked(Run, json.loads(line))
            _check(run)
        except (ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{where}: {error}") from None
        if any((each.entry, each.seed) == (run.entry, run.seed) for each in found):
            raise ValueError(f"{where}: {run.scheme} has two runs with seed {run.seed}; give each run another seed")
        found.append(run)
    return found


def tables(runs: Iterable[Run]) -> str:
    """Format a table per track, by ranks, fewest bytes first. Raises ValueError for an entry that its runs do not prove."""
    entries: dict[tuple[Any, ...], list[Run]] = {}  # Any: as Run.entry
    for run in runs:
        entries.setdefault(run.entry, []).append(run)
    by_track: dict[str, list[list[Run]]] = {}
    for own in entries.values():
        _check_entry(own)
        by_track.setdefault(own[0].track, []).append(own)
    return "\n\n".join(_table(track, by_track.get(track, [])) for track in TRACKS)


def p_value(losses: Sequence[float], target: float) -> float:
    """Compute the probability of a mean at most that of `losses` if their expectation were `target`, by a one-sided t test.

    It is 1 for identical losses, whose spread is unknown.
    """
    mean, deviation = statistics.fmean(losses), statistics.stdev(losses)
    if deviation == 0:
        return 1.0
    return (1 - within((target - mean) / (deviation / math.sqrt(len(losses))), len(losses) - 1)) / 2


def _check(run: Run) -> None:
    """Raise ValueError for a run that breaks a rule."""
    if run.track not in TRACKS:
        raise ValueError(f"there is no track {run.track!r}; tracks are {', '.join(TRACKS)}")
    track = TRACKS[run.track]
    if different := _different(run.job, track.job):
        raise ValueError(
            f"{different} is fixed on track {run.track}; free are the exchange, the optimizer, its rates and their schedule"
        )
    for name, value, least in (("ranks", run.ranks, 2), ("steps", run.steps, 1), ("bytes", run.bytes, 1)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value:g}")
    parameters = track.job["parameters"]
    expected = {"tokens": track.tokens * run.steps, "bits": 8 * run.bytes / run.steps / parameters}
    if not run.settings:  # DDP without a scheme
        expected["bytes"] = 2 * (run.ranks - 1) / run.ranks * 4 * parameters * run.steps
    for name, value in expected.items():
        if not math.isclose(getattr(run, name), value, rel_tol=1e-6):
            raise ValueError(f"{name} must be {value:g} after {run.steps} steps, got {getattr(run, name):g}")


def _different(job: Mapping[str, Any], fixed: Mapping[str, Any], place: str = "job") -> str:  # Any: JSON
    """Describe the first difference from the fixed values; "" if there is none. The data's place and FREE options may differ."""
    for key in sorted({*job, *fixed} - {"source"} - FREE):
        mine, given = job.get(key), fixed.get(key)
        if isinstance(mine, dict) and isinstance(given, dict):
            if found := _different(mine, given, f"{place}.{key}"):
                return found
        elif mine != given:
            return f"{place}.{key} = {given!r}, and not {mine!r},"
    return ""


def _check_entry(runs: Sequence[Run]) -> None:
    """Raise ValueError unless enough runs prove that the mean loss is below the track's target."""
    first, target, losses = runs[0], TRACKS[runs[0].track].loss, [run.loss for run in runs]
    what = f"{first.track}, {first.scheme}, {first.steps} steps"
    if len(runs) < FEWEST_SEEDS:
        raise ValueError(f"{what}: at least {FEWEST_SEEDS} seeds are needed, got {len(runs)}")
    if len(set(losses)) < len(losses):
        raise ValueError(
            f"{what}: two runs have the same loss to the last digit, so one is a copy; train with each seed"
        )
    mean, p = statistics.fmean(losses), p_value(losses, target)
    if not p < LEVEL:
        raise ValueError(
            f"{what}: a mean loss of {mean:.4f} over {len(runs)} seeds must be below {target:g} with p < {LEVEL:g}, got p = {p:.2g}; "
            "train for more steps, or with more seeds"
        )


def _table(track: str, entries: Sequence[Sequence[Run]]) -> str:
    target = TRACKS[track].loss
    title = f"### {track}\n\nValidation loss {target:g} nats or lower.\n\n"
    if not entries:
        return f"{title}No entries yet."
    heads = (
        "method, precision, ranks, steps, bits per parameter per step, MB sent by a rank, mean loss, n, p, who, date"
    )
    ranked = sorted(entries, key=lambda runs: (runs[0].ranks, _mean(runs, "bytes")))
    return title + parts.table(heads.split(", "), map(_line, ranked))


def _line(runs: Sequence[Run]) -> list[str]:
    first, target = runs[0], TRACKS[runs[0].track].loss
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
    conditions = [first.precision, str(first.ranks), str(first.steps)]
    return [method, *conditions, *figures, f"{p:.1g}", who, max(run.date for run in runs)]


def _mean(runs: Sequence[Run], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs)
