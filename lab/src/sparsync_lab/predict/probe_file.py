"""A probe: measurements of a group of ranks, kept as a TOML file for people to read and edit.

`probing` measures it, `sparsync probe` writes it, and `probed.ProbedNetwork` predicts with it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Len
from pydantic import ConfigDict

from sparsync_lab.checked import checked
from sparsync_lab.predict.exchanges import MOST_RANKS, Kind
from sparsync_lab.toml import tomllib

FORMAT = 1
KernelKind = Literal["accumulate", "select", "encode", "decode", "apply"]

KINDS: tuple[Kind, ...] = get_args(Kind)
KERNELS: tuple[KernelKind, ...] = get_args(KernelKind)

Seconds = Annotated[float, Ge(0)]
Rate = Annotated[float, Gt(0)]
Count = Annotated[int, Ge(1), Le(2**63)]


class ProbeFileError(ValueError):
    """A file that is not a probe; the message names the place, what was found and what is expected."""


class _Record:
    """Base of the records: only the annotated types. Unknown fields, as of other versions, are ignored."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True)
class ProbedGroup(_Record):
    """The measured ranks, and what connects them."""

    ranks: Annotated[int, Ge(2), Le(MOST_RANKS)]
    backend: str  # "gloo" or "nccl"
    hosts: Count
    link: str  # what connects the ranks, for the reader
    device: Literal["cpu", "cuda"]  # of the tensors
    cores: Count  # available to rank 0
    torch: str  # version
    time: str  # ISO 8601
    kernels: str = ""  # their backend; files of earlier versions have none


@dataclass(frozen=True)
class Operation(_Record):
    """One exchange of all ranks, at one size. A repeat takes as long as its slowest rank."""

    kind: Kind
    nbytes: Annotated[int, Ge(0), Le(2**63)]  # payload that each rank sends, as Exchange.nbytes
    seconds: Seconds  # median over repeats
    p20_s: Seconds
    p80_s: Seconds


@dataclass(frozen=True)
class Latency(_Record):
    """The time of messages that carry almost nothing."""

    announce_s: Seconds  # added to a bucket's first exchange by comparing step, layout and scheme


@dataclass(frozen=True)
class Memory(_Record):
    """Memory bandwidth of the slowest rank, while all ranks of its host are busy."""

    bytes_per_s: Rate  # of the plain pass b += a in float32: 12 bytes an element


@dataclass(frozen=True)
class Kernel(_Record):
    """The time of one kind of work on the slowest rank: elements / elements_per_s + calls * fixed_s. Unknown kinds are ignored."""

    kind: str  # of KERNELS
    elements_per_s: Rate
    fixed_s: Seconds  # of each call


@dataclass(frozen=True)
class ReducedBucket(_Record):
    """The time of a bucket on the slowest rank, from before its announcement to its result, in a series of buckets."""

    elements: Count
    seconds: Rate  # median


@dataclass(frozen=True)
class SchemeTimes(_Record):
    """The times of buckets with one scheme: the processor time of a tiny one, and the total time of several sizes."""

    scheme: str  # as written for the probe
    fixed_s: Seconds  # of the reducing thread
    settings: str = ""  # all settings, with defaults, so that the spelling does not matter
    bucket: tuple[ReducedBucket, ...] = ()  # smallest first


@dataclass(frozen=True)
class ReadyBucket(_Record):
    """A bucket of DistributedDataParallel; buckets are listed in the order of becoming ready."""

    elements: Count
    ready_s: Seconds  # since the forward pass ended


@dataclass(frozen=True)
class Backward(_Record):
    """One training step of a model without communication. The loss belongs to the backward pass."""

    job: str
    forward_s: Seconds
    backward_s: Seconds
    optimizer_s: Seconds
    bucket: Annotated[tuple[ReadyBucket, ...], Len(1)]


@dataclass(frozen=True)
class Probe(_Record):
    """The content of one file."""

    group: ProbedGroup
    operation: tuple[Operation, ...]
    latency: Latency
    memory: Memory
    kernel: tuple[Kernel, ...]
    scheme: tuple[SchemeTimes, ...] = ()
    backward: Backward | None = None


_HEAD = """\
# Measured by `sparsync probe`. All figures may be edited; times are in seconds.
# They hold for this number of ranks only: the time of the smallest exchanges grows with it.
"""
_COMMENTS = {
    "operation": "nbytes: payload that each rank sends. seconds: median over repeats; each takes as long as its slowest rank.",
    "latency": "announce_s: what comparing step, layout and scheme adds to the first exchange of a bucket.",
    "memory": "The plain pass b += a in float32, all ranks at the same time; the slowest rank.",
    "kernel": "elements / elements_per_s + calls * fixed_s, all ranks at the same time; the slowest rank.",
    "scheme": "fixed_s: processor time of a tiny bucket, without waiting. seconds: the whole time of a bucket.",
    "backward": "A step without communication. ready_s counts from the end of the forward pass, and the loss is in it.",
}


def write(probe: Probe, path: Path) -> None:
    """Write the file. Raises RuntimeError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(probe), encoding="utf-8")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another file with --out") from error


def read(path: Path) -> Probe:
    """Read a probe from a file. Raises ProbeFileError that says what is wrong and where."""
    try:
        written = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeFileError(f"cannot read {path}: {error}; give a file that `sparsync probe` has written") from error
    try:
        return parse(written)
    except ProbeFileError as error:
        raise ProbeFileError(f"{path}: {error}") from None


def text(probe: Probe) -> str:
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
    """Parse a probe's text. Raises ProbeFileError."""
    try:
        plain = tomllib.loads(content)
    except (ValueError, RecursionError) as error:  # or endless digits, or endless nesting
        raise ProbeFileError(f"not TOML: {error}") from error
    found = plain.pop("format", None)
    if found != FORMAT:
        raise ProbeFileError(f"format must be {FORMAT}, got {found!r}; measure again with `sparsync probe`")
    try:
        return checked(Probe, plain)
    except ProbeFileError:
        raise
    except ValueError as error:
        raise ProbeFileError(f"{error}; edit it, or measure again with `sparsync probe`") from None


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
    """Quote a TOML basic string. Its escapes are JSON's, except for surrogates and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def rounded(value: int | float) -> float:
    """Round `value` to four significant digits, enough for readers."""
    return float(f"{value:.4g}")


def sizes(operations: Iterable[Operation], kind: str) -> list[Operation]:
    """Select the operations of one kind, smallest first."""
    return sorted((each for each in operations if each.kind == kind), key=lambda each: each.nbytes)


def never_slower(known: list[Operation]) -> list[Operation]:
    """Cap each time at those of larger exchanges: a small exchange that took longer was disturbed."""
    least, found = float("inf"), []
    for each in reversed(known):
        least = min(least, each.seconds)
        found.append(replace(each, seconds=least))
    return found[::-1]
