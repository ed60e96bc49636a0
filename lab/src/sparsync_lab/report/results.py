"""results.jsonl, the records of a comparison: one JSON object per line, appended as it happens, and read back whole.

Eight kinds of record, each a dataclass here: run, scheme, step, quality, meeting, fault, end, carried. One file holds any number of
runs, each under its own id. summary.py makes numbers from the records.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict

from sparsync_lab import regular_file
from sparsync_lab.checked import checked

FILE_NAME = "results.jsonl"


def _finite_or_not(value: object) -> object:
    """Return the float that a text stands for: strict JSON has no infinity or not-a-number."""
    return float(value) if isinstance(value, str) and value in ("inf", "-inf", "nan") else value


Number = Annotated[float, BeforeValidator(_finite_or_not)]


class _Record:
    """Base of all records. What later versions add is left out."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")


@dataclass(frozen=True)
class _Config(_Record):
    """What computations use of the settings of a run; others are shown as they are."""

    ranks: int
    link: str
    rate_bits_per_s: Number | None
    target: Number | None
    steps: int
    # One way between any two ranks; files of earlier versions have none.
    delay_s: Number = 0.0
    jitter_s: Number = 0.0


@dataclass(frozen=True)
class _Workload(_Record):
    """What computations use of the job of a run. `parameters`: how many, n of the dense gradient."""

    metric: str
    better: Literal["lower", "higher"]
    parameters: int


@dataclass(frozen=True)
class Run(_Record):
    """One start of the program: its settings, versions and machine. The first of its records in the file."""

    kind: ClassVar[str] = "run"
    run: str
    time: str  # ISO 8601
    command: tuple[str, ...]  # argv
    # Any: these four are JSON objects, shown as they are.
    config: Mapping[str, Any]  # at least _Config
    workload: Mapping[str, Any]  # at least _Workload
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    # True where the links were in fact rate-limited.
    limited: bool
    # A real network between the hosts of the run, in words; "" where all ranks were on one machine.
    network: str = ""

    def __post_init__(self) -> None:
        checked(_Config, self.config, "run record: config.")
        checked(_Workload, self.workload, "run record: workload.")
        if self.limited and not self.rate_bits_per_s:
            raise ValueError(
                f"config.rate_bits_per_s must be positive in a run over limited links, got {self.rate_bits_per_s}; "
                "write limited: false where the links had no limit"
            )

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
        """The backend of the kernels; "" in files of earlier versions."""
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
class SchemeStart(_Record):
    """One scheme begins to train, with one seed.

    `compute_s`: median step without communication, in the same run, up to the end of the slowest rank. `own_compute_s`: the same as a
    mean over the ranks, each up to its own end; None where it was not measured.
    """

    kind: ClassVar[str] = "scheme"
    run: str
    scheme: str  # the label in tables and pictures; the others are compared with "dense" and "bf16"
    config: Mapping[str, Any]  # Any: shown unchanged
    seed: int
    compute_s: Number
    own_compute_s: Number | None = None


@dataclass(frozen=True)
class StepRecord(_Record):
    """One training step. Bytes are means over the ranks; `interface_bytes` is None where ranks share an interface."""

    kind: ClassVar[str] = "step"
    run: str
    scheme: str
    seed: int
    step: int  # counted from 1
    loss: Number
    seconds: Number  # training time so far, evaluations excluded
    step_s: Number
    wait_s: Number  # inside the communicator
    reduce_s: Number  # inside the scheme, `wait_s` included
    sent_bytes: Number  # payload, as the communicator counted it
    interface_bytes: Number | None  # everything the network interface sent
    messages: Number
    union_density: Number
    # Of the time inside the scheme, without the communicator, that of each phase.
    accumulate_s: Number = 0.0
    select_s: Number = 0.0
    encode_s: Number = 0.0
    decode_s: Number = 0.0
    apply_s: Number = 0.0


@dataclass(frozen=True)
class Quality(_Record):
    """One evaluation, after `step` steps. `bytes`: those that the interface of a rank has sent so far; None as in StepRecord."""

    kind: ClassVar[str] = "quality"
    run: str
    scheme: str
    seed: int
    step: int  # the last one taken; 0 before the first
    seconds: Number
    bytes: Number | None
    value: Number


@dataclass(frozen=True)
class End(_Record):
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
class Carried(_Record):
    """The program that carried packets between ranks, where links had a delay: what it carried in the whole run, and its cost."""

    kind: ClassVar[str] = "carried"
    run: str
    packets: int
    nbytes: int
    processor_s: Number  # beside the ranks, on the same machine


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
    """The content of a results file. `notes` are sentences that every output must show."""

    path: Path
    runs: tuple[RunRecords, ...]
    notes: tuple[str, ...]


def append(folder: Path, *records: Record) -> None:
    """Append the records to results.jsonl in `folder`, which is created if necessary, and flush the file.

    A line that an earlier run left unfinished is closed first, so that it damages no other line.
    Raises RuntimeError when the folder or the file cannot be written.
    """
    text = "".join(json.dumps(_as_json(record), allow_nan=False) + "\n" for record in records)
    path = Path(folder) / FILE_NAME
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                text = text if file.read(1) == b"\n" else "\n" + text
            file.write(text.encode())
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error


def read(folder: Path) -> Results:
    """Return the runs in results.jsonl of `folder`, oldest first.

    A line that breaks off is left out, with a note, where a crash can have caused it: at the end, or before the next run.
    Records of unknown kind are ignored. Raises ValueError, with the line's number, for any other line that is not a valid record.
    """
    path = Path(folder) / FILE_NAME
    try:
        lines = regular_file.content(path).split(b"\n")
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; give the folder a comparison wrote with --out"
        ) from error
    runs: dict[str, RunRecords] = {}
    notes: list[str] = []
    for number, data in _parsed(path, lines, notes):
        try:
            _add(runs, data)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not runs:
        raise ValueError(f"{path} holds no run; give the folder a comparison wrote with --out")
    return Results(path, tuple(runs.values()), tuple(notes))


def _parsed(path: Path, lines: Sequence[bytes], notes: list[str]) -> Iterator[tuple[int, object]]:
    """Yield line numbers and JSON values; add a note for each line that breaks off where a crash can have caused it."""
    broken: int | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        data = _json(line)
        is_run = isinstance(data, dict) and data.get("kind") == Run.kind
        if broken is not None and not is_run:
            raise ValueError(_not_json(path, broken))
        if broken is not None:
            notes.append(_broken_off(broken))
        broken = number if data is None else None
        if data is not None:
            yield number, data
    if broken is not None:
        # A file without one whole line was never a results file.
        if not any(_json(line) for line in lines[: broken - 1]):
            raise ValueError(_not_json(path, broken))
        notes.append(_broken_off(broken))


def _json(line: bytes) -> object:
    """Return the value, or None for invalid JSON (and for null, which is not a record either)."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _broken_off(number: int) -> str:
    return (
        f"Line {number} of {FILE_NAME} breaks off: the run was interrupted while it was written. The line is left out."
    )


def _not_json(path: Path, number: int) -> str:
    return f"{path}, line {number}: not a JSON object, and not where a run can have broken off; is this a results file?"


def _add(runs: dict[str, RunRecords], data: object) -> None:
    """Add the record of one line to its run in `runs`."""
    if not isinstance(data, dict) or not isinstance(data.get("kind"), str):
        raise ValueError("a record must be a JSON object with a 'kind'")
    if data["kind"] not in _KINDS:
        return
    known = {key: value for key, value in data.items() if key != "kind"}
    record = checked(_KINDS[data["kind"]], known, f"{data['kind']} record: ")
    if isinstance(record, Run):
        if record.run in runs:
            raise ValueError(f"run {record.run!r} begins a second time; every run needs its own id")
        runs[record.run] = RunRecords(record, {})
        return
    if record.run not in runs:
        raise ValueError(f"{record.kind} record of run {record.run!r}, which has no run record before it")
    if isinstance(record, Carried):
        runs[record.run].carried = record
        return
    traces = runs[record.run].traces
    key = (record.scheme, record.seed)
    if isinstance(record, SchemeStart):
        if key in traces:
            raise ValueError(f"scheme {record.scheme!r} with seed {record.seed} begins a second time in one run")
        traces[key] = Trace(record, [], [])
        return
    if key not in traces:
        raise ValueError(
            f"{record.kind} record of scheme {key[0]!r}, seed {key[1]}, which has no scheme record before it"
        )
    _extend(traces[key], record)


def _extend(trace: Trace, record: StepRecord | Quality | End) -> None:
    if trace.end is not None:
        raise ValueError(f"{record.kind} record of scheme {record.scheme!r}, seed {record.seed}, after its end record")
    if isinstance(record, End):
        trace.end = record
        return
    earlier = trace.steps if isinstance(record, StepRecord) else trace.quality
    if earlier and record.step <= earlier[-1].step:
        raise ValueError(f"{record.kind} records must ascend by step: {record.step} after {earlier[-1].step}")
    if isinstance(record, StepRecord):
        trace.steps.append(record)
    else:
        trace.quality.append(record)


def _as_json(record: Record) -> dict[str, Any]:  # Any: JSON
    return {"kind": record.kind, **{each.name: _plain(getattr(record, each.name)) for each in fields(record)}}


def _plain(value: Any) -> Any:  # Any: JSON
    """Return the value as strict JSON, which has no infinity or not-a-number: they become the strings "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
