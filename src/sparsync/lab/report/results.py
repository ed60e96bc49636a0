"""results.jsonl, the records of a comparison: one JSON object per line, appended as it happens, and read back whole.

Five kinds of record, each a dataclass here: run, scheme, step, quality, end. One file holds any number of runs, each
under its own id. summary.py makes numbers from the records.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

FILE_NAME = "results.jsonl"


@dataclass(frozen=True)
class Run:
    """One start of the program: its settings, versions and machine. The first of its records in the file."""

    kind: ClassVar[str] = "run"
    run: str
    time: str  # ISO 8601
    command: tuple[str, ...]  # argv
    # Any: these four are JSON objects, shown as they are; the entries used in computations are checked below.
    config: Mapping[str, Any]  # at least: ranks, link, rate_bits_per_s, target, steps
    # At least: metric, better ("lower" or "higher"), parameters (how many: n of the dense gradient).
    workload: Mapping[str, Any]
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    # True where the links were in fact rate-limited.
    limited: bool
    # A real network between the hosts of the run, in words; "" where all ranks were on one machine.
    network: str = ""

    def __post_init__(self) -> None:
        for where, key, convert in (
            ("config", "ranks", _integer),
            ("config", "link", _text),
            ("config", "rate_bits_per_s", _optional(_number)),
            ("config", "target", _optional(_number)),
            ("config", "steps", _integer),
            ("workload", "metric", _text),
            ("workload", "better", _text),
            ("workload", "parameters", _integer),
        ):
            _checked(f"run record: {where}[{key!r}]", getattr(self, where), key, convert)
        if self.workload["better"] not in ("lower", "higher"):
            raise ValueError(f"workload['better'] must be 'lower' or 'higher', got {self.workload['better']!r}")
        if self.limited and not self.rate_bits_per_s:
            raise ValueError(
                f"config['rate_bits_per_s'] must be positive in a run over limited links, got {self.rate_bits_per_s}; "
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
    def times_count(self) -> bool:
        """Whether the times say something about a network: its links were limited, or there was a real one."""
        return self.limited or bool(self.network)

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
    config: Mapping[str, Any]  # Any: shown as it is
    seed: int
    compute_s: float
    own_compute_s: float | None = None


@dataclass(frozen=True)
class Step:
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
    # Of the time inside the scheme, without the communicator, that of each phase.
    accumulate_s: float = 0.0
    select_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    apply_s: float = 0.0


@dataclass(frozen=True)
class Quality:
    """One evaluation, after `step` steps. `bytes`: those that the interface of a rank has sent so far; None as in Step."""

    kind: ClassVar[str] = "quality"
    run: str
    scheme: str
    seed: int
    step: int  # the last one taken; 0 before the first
    seconds: float
    bytes: float | None
    value: float


@dataclass(frozen=True)
class End:
    """A scheme has stopped. `status`: "finished", or "failed: " and why."""

    kind: ClassVar[str] = "end"
    run: str
    scheme: str
    seed: int
    replicas_identical: bool | None  # None: not compared, as after a failure
    status: str


Record = Run | SchemeStart | Step | Quality | End
_KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in (Run, SchemeStart, Step, Quality, End)}


@dataclass
class Trace:
    """All records of one scheme with one seed, in the order of the file."""

    start: SchemeStart
    steps: list[Step]
    quality: list[Quality]
    end: End | None = None  # None: the run was interrupted


@dataclass
class RunRecords:
    """One run and its traces, in the order of the file."""

    run: Run
    traces: dict[tuple[str, int], Trace]  # by scheme and seed


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
        lines = path.read_bytes().split(b"\n")
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
    except ValueError:
        return None


def _broken_off(number: int) -> str:
    return (
        f"Line {number} of {FILE_NAME} breaks off: the run was interrupted while it was written. The line is left out."
    )


def _not_json(path: Path, number: int) -> str:
    return f"{path}, line {number}: not a JSON object, and not where a run can have broken off; is this a results file?"


def _add(runs: dict[str, RunRecords], data: object) -> None:
    """Add the record of one line to its run in `runs`."""
    if not isinstance(data, dict) or "kind" not in data:
        raise ValueError("a record must be a JSON object with a 'kind'")
    if data["kind"] not in _KINDS:
        return
    record = _from_json(_KINDS[data["kind"]], data)
    if isinstance(record, Run):
        if record.run in runs:
            raise ValueError(f"run {record.run!r} begins a second time; every run needs its own id")
        runs[record.run] = RunRecords(record, {})
        return
    if record.run not in runs:
        raise ValueError(f"{record.kind} record of run {record.run!r}, which has no run record before it")
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


def _extend(trace: Trace, record: Step | Quality | End) -> None:
    if trace.end is not None:
        raise ValueError(f"{record.kind} record of scheme {record.scheme!r}, seed {record.seed}, after its end record")
    if isinstance(record, End):
        trace.end = record
        return
    earlier = trace.steps if isinstance(record, Step) else trace.quality
    if earlier and record.step <= earlier[-1].step:
        raise ValueError(f"{record.kind} records must ascend by step: {record.step} after {earlier[-1].step}")
    if isinstance(record, Step):
        trace.steps.append(record)
    else:
        trace.quality.append(record)


def _as_json(record: Record) -> dict[str, Any]:  # Any: JSON
    return {"kind": record.kind, **{field.name: _plain(getattr(record, field.name)) for field in fields(record)}}


def _plain(value: Any) -> Any:  # Any: JSON
    """Return the value as strict JSON, which has no infinity or not-a-number: they become the strings "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _from_json(kind: type[Record], data: Mapping[str, Any]) -> Record:
    """Return the record; a field that the line lacks has its default where it has one."""
    return kind(
        **{
            field.name: _checked(f"{kind.kind} record: {field.name!r}", data, field.name, _CONVERT[field.type])
            for field in fields(kind)
            if field.name in data or field.default is MISSING
        }
    )


def _checked(what: str, data: Mapping[str, Any], key: str, convert: Callable[[Any], Any]) -> Any:
    if key not in data:
        raise ValueError(f"{what} is missing")
    try:
        return convert(data[key])
    except TypeError as error:
        raise ValueError(f"{what} must be {error}, got {data[key]!r}") from None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise TypeError("a string")


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("true or false")


def _integer(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise TypeError("a whole number")


def _number(value: Any) -> float:
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise TypeError("a number")


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise TypeError("a list of strings")


def _object(value: Any) -> Mapping[str, Any]:
    if isinstance(value, dict):
        return value
    raise TypeError("a JSON object")


def _optional(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


# By annotation, so that the fields of a record define all checks.
_CONVERT: dict[Any, Callable[[Any], Any]] = {
    str: _text,
    bool: _truth,
    bool | None: _optional(_truth),
    int: _integer,
    float: _number,
    float | None: _optional(_number),
    tuple[str, ...]: _texts,
    Mapping[str, Any]: _object,
}
