"""results.jsonl, the records of a comparison: one JSON object per line, appended as it happens, and read back whole.

There are five kinds of record: run, scheme, step, quality, end. A file holds any number of runs, told apart by their ids.
summary.py computes numbers from the records.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from sparsync_lab import json_lines

FILE_NAME = "results.jsonl"


@dataclass(frozen=True)
class Run:
    """One start of the program: its settings, versions and machine. The first record of a run."""

    kind: ClassVar[str] = "run"
    run: str
    time: str  # ISO 8601
    command: list[str]  # argv
    # Any: these four are JSON objects, shown unchanged.
    config: Mapping[str, Any]
    workload: Mapping[str, Any]  # at least "metric", "better" and "parameters"
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    # True if the links were in fact rate-limited.
    limited: bool
    # The real network between the hosts, in words; "" if all ranks were on one machine.
    network: str = ""

    @property
    def ranks(self) -> int:
        return self.config["ranks"]

    @property
    def rate_bits_per_s(self) -> float | None:
        rate = self.config["rate_bits_per_s"]
        return None if rate is None else float(rate)

    @property
    def delay_s(self) -> float:
        """The one-way delay between any two ranks, in addition to the transmission time."""
        return float(self.config.get("delay_s", 0.0))

    @property
    def jitter_s(self) -> float:
        return float(self.config.get("jitter_s", 0.0))

    @property
    def times_count(self) -> bool:
        """Whether the times are meaningful for a network: its links were limited or real."""
        return self.limited or bool(self.network)

    @property
    def kernels(self) -> str:
        return str(self.versions.get("kernels", ""))

    @property
    def target(self) -> float | None:
        """The quality to reach, in the unit of the metric; None without a target."""
        target = self.config["target"]
        return None if target is None else float(target)

    @property
    def metric(self) -> str:
        return self.workload["metric"]

    @property
    def lower_is_better(self) -> bool:
        return self.workload["better"] == "lower"


@dataclass(frozen=True)
class SchemeStart:
    """One scheme begins to train, with one seed.

    `compute_s`: the median step without communication, in the same run, until the slowest rank ends. `own_compute_s`: the same as a
    mean over the ranks, each until its own end; None if not measured.
    """

    kind: ClassVar[str] = "scheme"
    run: str
    scheme: str  # the label in tables and pictures; the others are compared with "dense" and "bf16"
    config: Mapping[str, Any]  # Any: shown unchanged
    seed: int
    compute_s: float
    own_compute_s: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """One training step. Bytes are means over the ranks; `interface_bytes` is None if ranks share an interface."""

    kind: ClassVar[str] = "step"
    run: str
    scheme: str
    seed: int
    step: int  # counted from 1
    loss: float
    seconds: float  # training time so far, evaluations excluded
    step_s: float
    wait_s: float  # inside the communicator
    reduce_s: float  # inside the scheme, including `wait_s`
    sent_bytes: float  # payload, as counted by the communicator
    interface_bytes: float | None  # everything sent by the network interface
    messages: float
    union_density: float


@dataclass(frozen=True)
class Quality:
    """One evaluation, after `step` steps."""

    kind: ClassVar[str] = "quality"
    run: str
    scheme: str
    seed: int
    step: int  # the last one taken; 0 before the first
    seconds: float
    value: float


@dataclass(frozen=True)
class End:
    """A scheme has stopped. `status`: "finished", or "failed: " and the reason.

    `exchanges`: those of local or AdamW steps that changed the weights; 0 if local steps ended before the first was due. `missed`:
    exchanges that were dropped or skipped.
    """

    kind: ClassVar[str] = "end"
    run: str
    scheme: str
    seed: int
    replicas_identical: bool | None  # None: not compared, as after a failure
    status: str
    exchanges: int | None = None  # None: gradients are reduced in every step, or unknown
    missed: int = 0


Record = Run | SchemeStart | StepRecord | Quality | End
KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (Run, SchemeStart, StepRecord, Quality, End)}


@dataclass
class Trace:
    """All records of one scheme with one seed, in file order."""

    start: SchemeStart
    steps: list[StepRecord]
    quality: list[Quality]
    end: End | None = None  # None: the run was interrupted


@dataclass
class RunRecords:
    """One run and its traces, in file order."""

    run: Run
    traces: dict[tuple[str, int], Trace]  # by scheme and seed


@dataclass(frozen=True)
class Results:
    """The runs of a results file, oldest first."""

    runs: tuple[RunRecords, ...]


def append(folder: Path, *records: Record) -> None:
    """Append the records to results.jsonl in `folder`, which is created if missing. Raises RuntimeError as `json_lines.append`."""
    json_lines.append(Path(folder) / FILE_NAME, *({"kind": each.kind, **_plain(vars(each))} for each in records))


def read(folder: Path) -> Results:
    """Read the runs in results.jsonl of `folder`. Records of unknown kind are ignored.

    An incomplete last line is ignored. Raises ValueError if there is no run, and as `json_lines.read`.
    """
    path, runs = Path(folder) / FILE_NAME, dict[str, RunRecords]()
    json_lines.read(path, lambda content: _add(runs, content), "record")
    if not runs:
        raise ValueError(f"{path} holds no run; give the folder a comparison wrote with --out")
    return Results(tuple(runs.values()))


def _add(runs: dict[str, RunRecords], content: dict[str, Any]) -> None:  # Any: JSON
    """Add the record of one line to its run."""
    kind = KINDS.get(content["kind"])
    if kind is None:
        return
    known = {each.name: _number(content[each.name]) for each in fields(kind) if each.name in content}
    record = kind(**known)
    if isinstance(record, Run):
        runs[record.run] = RunRecords(record, {})
        return
    run = runs[record.run]
    if isinstance(record, SchemeStart):
        run.traces[record.scheme, record.seed] = Trace(record, [], [])
        return
    trace = run.traces[record.scheme, record.seed]
    if isinstance(record, End):
        trace.end = record
    elif isinstance(record, StepRecord):
        trace.steps.append(record)
    else:
        trace.quality.append(record)


def _plain(value: Any) -> Any:  # Any: JSON
    """Convert to strict JSON, which lacks infinities and NaN: they become the strings "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _number(value: Any) -> Any:  # Any: JSON
    """Undo `_plain` for floats; return other values unchanged."""
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value
