"""A probe: what was measured of a group of ranks, as a file in TOML that a person can read and edit.

`probing` measures it, `sparsync probe` writes it, and `probed.ProbedNetwork` predicts with it. Nothing here imports torch.
"""

import json
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin

import tomllib

from sparsync.comm.plan import Kind

DEVICES = ("cpu", "cuda")
FORMAT = 1
HIGHEST = 2**63  # beyond every number in a file

KINDS: tuple[str, ...] = get_args(Kind)
KERNELS = ("accumulate", "select", "encode", "decode", "apply", "multiply", "transform")


class ProbeFileError(ValueError):
    """A file that is no probe; the message says where, what was found, and what belongs there."""


@dataclass(frozen=True)
class Group:
    """The ranks that were measured, and over what they talked."""

    ranks: int
    backend: str  # "gloo" or "nccl"
    hosts: int
    link: str  # what connects the ranks, for the reader
    device: str  # of the tensors, one of DEVICES
    cores: int  # that rank 0 may use
    torch: str  # version
    time: str  # ISO 8601


@dataclass(frozen=True)
class Operation:
    """One exchange of all ranks at once, at one size. Of each repeat the slowest rank counts."""

    kind: str  # one of KINDS
    nbytes: int  # payload that each rank sends, as Exchange.nbytes
    seconds: float  # median over repeats
    p20_s: float
    p80_s: float


@dataclass(frozen=True)
class Latency:
    """What messages cost that carry next to nothing."""

    round_trip_s: float  # there and back between two ranks, while the others do the same in pairs; the median pair
    slowest_round_trip_s: float  # the slowest pair
    per_message_s: float  # what one more message adds to an exchange
    messages_per_s: float  # that one rank sends, and receives, in an exchange of all with all
    announce_s: float  # what comparing step, layout and scheme adds to the first exchange of a bucket


@dataclass(frozen=True)
class Memory:
    """Memory of the slowest rank, while all ranks of its host are at work."""

    bytes_per_s: float  # of the plain pass b += a in float32: 12 bytes an element


@dataclass(frozen=True)
class Kernel:
    """The time of one kind of work on the slowest rank: elements / elements_per_s + calls * fixed_s."""

    kind: str  # one of KERNELS
    elements_per_s: float
    fixed_s: float  # of each call


@dataclass(frozen=True)
class ReducedBucket:
    """What reducing a bucket takes, from before its announcement to its result, where one follows the other; the slowest rank."""

    elements: int
    seconds: float  # median


@dataclass(frozen=True)
class SchemeTimes:
    """What buckets take with one scheme: the processor time of a tiny one, without waiting, and the whole time of some sizes."""

    scheme: str  # as it was written for the probe
    fixed_s: float  # of the thread that reduces
    settings: str = ""  # all of the scheme's, the defaults too: two ways to write one scheme are one
    bucket: tuple[ReducedBucket, ...] = ()  # the smallest first


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket of DistributedDataParallel, in the order in which they become ready."""

    elements: int
    ready_s: float  # since the forward pass ended


@dataclass(frozen=True)
class Backward:
    """One training step of a model without communication. The loss belongs to the backward pass."""

    job: str
    forward_s: float
    backward_s: float
    optimizer_s: float
    bucket: tuple[ReadyBucket, ...]


@dataclass(frozen=True)
class Probe:
    """Everything that one file holds."""

    group: Group
    operation: tuple[Operation, ...]
    latency: Latency
    memory: Memory
    kernel: tuple[Kernel, ...]
    scheme: tuple[SchemeTimes, ...] = ()
    backward: Backward | None = None

    def __post_init__(self) -> None:
        known: set[tuple[str, int]] = set()
        for each in self.operation:
            if each.kind not in KINDS:
                raise ProbeFileError(f"the kind of an operation must be one of {', '.join(KINDS)}, got {each.kind!r}")
            if (each.kind, each.nbytes) in known:
                raise ProbeFileError(f"{each.kind} of {each.nbytes} bytes is there twice; leave one out")
            known.add((each.kind, each.nbytes))
        for each in self.operation:
            if len(sizes(self.operation, each.kind)) == 1:
                raise ProbeFileError(
                    f"{each.kind} is there at one size only, {each.nbytes} bytes, from which no other can be told; give two sizes or more, "
                    "or measure again with `sparsync probe`"
                )
        for each in self.kernel:
            if each.kind not in KERNELS:
                raise ProbeFileError(f"the kind of a kernel must be one of {', '.join(KERNELS)}, got {each.kind!r}")
            if sum(other.kind == each.kind for other in self.kernel) > 1:
                raise ProbeFileError(f"the kernel {each.kind} is there twice; leave one out")
        labels = [each.scheme for each in self.scheme]
        for each in self.scheme:
            if labels.count(each.scheme) > 1:
                raise ProbeFileError(f"the scheme {each.scheme} is there twice; leave one out")
            if any(bucket.elements < 1 or bucket.seconds <= 0 for bucket in each.bucket):
                raise ProbeFileError(f"the buckets of {each.scheme} must have elements and seconds above 0")
            sizes_of = [bucket.elements for bucket in each.bucket]
            if sizes_of != sorted(set(sizes_of)):
                raise ProbeFileError(f"the buckets of {each.scheme} must go from few elements to many, got {sizes_of}")
        _check_group(self.group)
        if self.backward is not None:
            _check_buckets(self.backward)


def _check_group(group: Group) -> None:
    for name, least, cure in (
        ("ranks", 2, "of one rank nothing travels, so probe at least two"),
        ("hosts", 1, "give the number of machines that the ranks are on"),
        ("cores", 1, "give the number of cores that rank 0 may use"),
    ):
        value = getattr(group, name)
        if value < least:
            raise ProbeFileError(f"group.{name} must be at least {least}, got {value}; {cure}")
    if group.device not in DEVICES:
        raise ProbeFileError(
            f"group.device must be one of {', '.join(DEVICES)}, got {group.device!r}; give the one that the ranks compute on"
        )


def _check_buckets(backward: Backward) -> None:
    if not backward.bucket:
        raise ProbeFileError(
            "backward.bucket must be one or more tables [[backward.bucket]], got none; probe with --workload again, or leave [backward] out"
        )
    for number, each in enumerate(backward.bucket):
        if each.elements < 1:
            raise ProbeFileError(
                f"backward.bucket[{number}].elements must be at least 1, got {each.elements}; leave that bucket out"
            )


_HEAD = """\
# Measured by `sparsync probe`. All figures may be edited; times are in seconds.
# They hold for this number of ranks: what the smallest exchanges take is a fixed part that grows with it.
"""
_COMMENTS = {
    "operation": "nbytes: payload that each rank sends. seconds: median over repeats, of each of which the slowest rank counts.",
    "latency": "announce_s: what comparing step, layout and scheme adds to the first exchange of a bucket.",
    "memory": "The plain pass b += a in float32, all ranks at the same time; the slowest rank.",
    "kernel": "elements / elements_per_s + calls * fixed_s, all ranks at the same time; the slowest rank.",
    "scheme": "fixed_s: processor time of a tiny bucket, without waiting. seconds: what a bucket takes in all.",
    "backward": "A step without communication. ready_s counts from the end of the forward pass, and the loss is in it.",
}


def write(probe: Probe, path: Path) -> None:
    """Write the file. Raises RuntimeError where that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(probe), encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another file with --out") from error


def read(path: Path) -> Probe:
    """Return the probe in a file. Raises ProbeFileError where it is none, with what is wrong and where."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeFileError(f"cannot read {path}: {error}; give a file that `sparsync probe` has written") from error
    try:
        return parse(content)
    except ProbeFileError as error:
        raise ProbeFileError(f"{path}: {error}") from None


def text(probe: Probe) -> str:
    """Return the content of the file."""
    lines = [_HEAD, f"format = {FORMAT}", ""]
    for field in fields(probe):
        value = getattr(probe, field.name)
        tables = value if isinstance(value, tuple) else () if value is None else (value,)
        if tables:
            lines += [f"# {_COMMENTS[field.name]}"] if field.name in _COMMENTS else []
        for table in tables:
            lines += _table(field.name, table, isinstance(value, tuple))
    return "\n".join(lines)


def parse(content: str) -> Probe:
    """Return the probe that `text` has written. Raises ProbeFileError."""
    try:
        plain = tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise ProbeFileError(f"not TOML: {error}") from error
    found = plain.pop("format", None)
    if found != FORMAT:
        raise ProbeFileError(f"format must be {FORMAT}, got {found!r}; measure again with `sparsync probe`")
    return _record(Probe, plain, "")


def _table(name: str, record: Any, several: bool) -> list[str]:  # Any: one of the dataclasses above
    lines, inner = [f"[[{name}]]" if several else f"[{name}]"], []
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, tuple):
            inner += [line for each in value for line in _table(f"{name}.{field.name}", each, several=True)]
        else:
            lines.append(f"{field.name} = {_plain(value)}")
    return [*lines, "", *inner]


def _plain(value: str | int | float) -> str:
    if isinstance(value, str):
        return _quoted(value)
    short = f"{value:g}"  # 6.586e+08, not 658600000.0
    return short if isinstance(value, float) and float(short) == value else repr(value)


def _quoted(value: str) -> str:
    """Return a TOML basic string. Its escapes are those of JSON, but surrogates, and DEL needs one, too."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _record(kind: type, plain: object, where: str) -> Any:  # Any: a `kind`
    """Return the dataclass `kind` of a TOML table. `where` is its name in the file, for errors."""
    if not isinstance(plain, Mapping):
        raise ProbeFileError(f"{where} must be a table, got {plain!r}")
    known = {field.name: field for field in fields(kind)}
    unknown = next((key for key in plain if key not in known), None)
    if unknown is not None:
        raise ProbeFileError(f"{where or 'the file'} has an unknown entry {unknown!r}; known are {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, field in known.items():
        place = f"{where}.{name}" if where else name
        optional = field.default is not MISSING
        if name not in plain:
            if not optional:
                raise ProbeFileError(f"{place} is missing")
            continue
        values[name] = _value(field.type, plain[name], place)
    return kind(**values)


def _value(
    kind: Any, value: object, where: str
) -> Any:  # Any: an annotation of the dataclasses above, and such a value
    if isinstance(kind, types.UnionType):
        kind = next(each for each in get_args(kind) if each is not types.NoneType)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ProbeFileError(f"{where} must be tables [[{where}]], got {value!r}")
        return tuple(_record(get_args(kind)[0], each, f"{where}[{number}]") for number, each in enumerate(value))
    if kind is str:
        if not isinstance(value, str):
            raise ProbeFileError(f"{where} must be a text, got {value!r}")
        return value
    if kind is int or kind is float:
        return _number(kind is int, value, where)
    return _record(kind, value, where)


def _number(whole: bool, value: Any, where: str) -> int | float:  # Any: TOML
    kinds = int if whole else (int, float)
    rate = where.endswith("_per_s")
    in_range = isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value < HIGHEST and (value or not rate)
    if not in_range:
        least = "above 0" if rate else "of at least 0"
        raise ProbeFileError(f"{where} must be a {'whole ' if whole else ''}number {least}, got {value!r}")
    return int(value) if whole else float(value)


def rounded(value: int | float) -> float:
    """Return `value` to four significant digits, as many as a person reads."""
    return float(f"{value:.4g}")


def sizes(operations: Iterable[Operation], kind: str) -> list[Operation]:
    """Return the operations of one kind, the smallest first."""
    return sorted((each for each in operations if each.kind == kind), key=lambda each: each.nbytes)


def never_slower(known: list[Operation]) -> list[Operation]:
    """Return `known` with none slower than a larger one: a small exchange that took longer was disturbed, or the first."""
    least, found = float("inf"), []
    for each in reversed(known):
        least = min(least, each.seconds)
        found.append(replace(each, seconds=least))
    return found[::-1]
