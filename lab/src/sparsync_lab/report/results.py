"""results.jsonl, the records of a comparison: one JSON object per line, appended as it happens, and read back whole.

Six kinds of record, each a dataclass here: run, scheme, step, quality, end, carried. One file holds any number of runs, each under its
own id. summary.py makes numbers from the records.
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
    """One start of the program: its settings, versions and machine. The first of its records in the file."""

    kind: ClassVar[str] = "run"
    run: str
    time: str  # ISO 8601
    command: list[str]  # argv
    # Any: these four are JSON objects, shown as they are.
    config: Mapping[str, Any]
    workload: Mapping[str, Any]  # at least "metric", "better" and "parameters"
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    # True where the links were in fact rate-limited.
    limited: bool
    # A real network between the hosts of the run, in words; "" where all ranks were on one machine.
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
        """The one-way delay between any two ranks, beside the time in which their links carry the bytes."""
        return float(self.config.get("delay_s", 0.0))

    @property
    def jitter_s(self) -> float:
        return float(self.config.get("jitter_s", 0.0))

    @property
    def times_count(self) -> bool:
        """Whether the times say something about a network: its links were limited, or there was a real one."""
        return self.limited or bool(self.network)

    @property
    def kernels(self) -> str:
        """The backend of the kernels."""
        return str(self.versions.get("kernels", ""))

    @property
    def target(self) -> float | None:
        """The quality to reach, in the unit of the metric; None in a run without target."""
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

    `compute_s`: median step without communication, in the same run, up to the end of the slowest rank. `own_compute_s`: the same as a
    mean over the ranks, each up to its own end; None where it was not measured.
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
    """One training step. Bytes are means over the ranks; `interface_bytes` is None where ranks share an interface."""

    kind: ClassVar[str] = "step"
    run: str
    scheme: str
    seed: int
    step: int  # counted from 1
    loss: float
    seconds: float  # training time so far, evaluations excluded
    step_s: float
    wait_s: float  # inside the communicator
    reduce_s: float  # inside the scheme, `wait_s` included
    sent_bytes: float  # payload, as the communicator counted it
    interface_bytes: float | None  # everything the network interface sent
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
    """A scheme has stopped. `status`: "finished", or "failed: " and why.

    `exchanges`: those that changed the weights, of local steps and AdamW steps, 0 where local steps ended before the first was due;
    `missed`: those that were dropped or skipped.
    """

    kind: ClassVar[str] = "end"
    run: str
    scheme: str
    seed: int
    replicas_identical: bool | None  # None: not compared, as after a failure
    status: str
    exchanges: int | None = None  # None: gradients are reduced in every step, or it is not known
    missed: int = 0


@dataclass(frozen=True)
class Carried:
    """The program that carried packets between ranks, where links had a delay: what it carried in the whole run, and its cost."""

    kind: ClassVar[str] = "carried"
    run: str
    packets: int
    nbytes: int
    processor_s: float  # beside the ranks, on the same machine


Record = Run | SchemeStart | StepRecord | Quality | End | Carried
_KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (Run, SchemeStart, StepRecord, Quality, End, Carried)}


@dataclass
class Trace:
    """All records of one scheme with one seed, in the order of the file."""

    start: SchemeStart
    steps: list[StepRecord]
    quality: list[Quality]
    end: End | None = None  # None: the run was interrupted


@dataclass
class RunRecords:
    """One run and its traces, in the order of the file."""

    run: Run
    traces: dict[tuple[str, int], Trace]  # by scheme and seed
    carried: Carried | None = None


@dataclass(frozen=True)
class Results:
    """The runs of a results file, oldest first."""

    runs: tuple[RunRecords, ...]


def append(folder: Path, *records: Record) -> None:
    """Append the records to results.jsonl in `folder`, which is made where it is missing. Raises RuntimeError as `json_lines.append`."""
    json_lines.append(Path(folder) / FILE_NAME, *({"kind": each.kind, **_plain(vars(each))} for each in records))


def read(folder: Path) -> Results:
    """Return the runs in results.jsonl of `folder`. Records of unknown kind are ignored.

    A line that a crash broke off is left out. Raises ValueError where there is no run, and as `json_lines.read`.
    """
    path, runs = Path(folder) / FILE_NAME, dict[str, RunRecords]()
    json_lines.read(path, lambda content: _add(runs, content), "record")
    if not runs:
        raise ValueError(f"{path} holds no run; give the folder a comparison wrote with --out")
    return Results(tuple(runs.values()))


def _add(runs: dict[str, RunRecords], content: dict[str, Any]) -> None:  # Any: JSON
    """Add the record of one line to its run in `runs`."""
    kind = _KINDS.get(content["kind"])
    if kind is None:
        return
    known = {each.name: _number(content[each.name]) for each in fields(kind) if each.name in content}
    record = kind(**known)
    if isinstance(record, Run):
        runs[record.run] = RunRecords(record, {})
        return
    run = runs[record.run]
    if isinstance(record, Carried):
        run.carried = record
        return
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
    """Return the value as strict JSON, which has no infinity or not-a-number: they become the strings "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _number(value: Any) -> Any:  # Any: JSON
    """Return the float that a string of `_plain` stands for; any other value as it is."""
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value
