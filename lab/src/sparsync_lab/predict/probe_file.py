"""A probe: measurements of a group of ranks, kept as a TOML file for people to read and edit.

`probing` measures it, `sparsync probe` writes it, and `ProbedNetwork` predicts with it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Len
from pydantic import ConfigDict

from sparsync_lab import writable
from sparsync_lab.checked import checked
from sparsync_lab.predict.exchanges import MOST_RANKS, Exchange, Kind
from sparsync_lab.toml import tomllib

FORMAT = 1
FAR = 32  # times the largest measured exchange of a kind; a prediction beyond is a guess
KernelKind = Literal["accumulate", "select", "encode", "decode", "apply"]

KINDS: tuple[Kind, ...] = get_args(Kind)
KERNELS: tuple[KernelKind, ...] = get_args(KernelKind)

Seconds = Annotated[float, Ge(0)]
Rate = Annotated[float, Gt(0)]
Count = Annotated[int, Ge(1), Le(2**63)]


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
    writable.write(path, text(probe))


def read(path: Path) -> Probe:
    """Read a probe from a file. Raises ValueError that says what is wrong and where."""
    try:
        return parse(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; edit it, or measure again with `sparsync probe`") from None


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
    """Parse a probe's text. Raises ValueError."""
    plain = tomllib.loads(content)
    found = plain.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"format must be {FORMAT}, got {found!r}")
    return checked(Probe, plain)


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
        # TOML's escapes are JSON's, except for surrogates and DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    short = f"{value:g}"  # 6.586e+08, not 658600000.0
    return short if isinstance(value, float) and float(short) == value else repr(value)


def rounded(value: int | float) -> float:
    """Round `value` to four significant digits, enough for readers."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class ProbedNetwork:
    """The group of `probe`, for the measured number of ranks.

    The time of an exchange is interpolated among the measured ones of its kind: linearly between two sizes, constant below the smallest,
    at the rate of the two largest above them, and never longer than for more bytes. The greater of a rank's sent and received bytes counts.
    More rounds than the measured operation has take the time of several operations, each with its share of the bytes.
    Peers other than the measured ones (send_recv: the next in a ring) are assumed to be as fast.
    """

    probe: Probe

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Predict the time of this exchange; 0 for P = 1.

        Raises ValueError for a number of ranks that was not measured, and for a kind that the probe lacks.
        """
        if P == 1:
            return 0.0
        known, times, nbytes = self._looked_up(exchange, P)
        return times * _interpolated(known, nbytes)

    def is_far(self, exchange: Exchange, P: int) -> bool:
        """Tell whether this exchange is far larger than the measured ones of its kind. Raises ValueError as `seconds`."""
        known, _, nbytes = self._looked_up(exchange, P)
        return nbytes > FAR * known[-1].nbytes

    def _looked_up(self, exchange: Exchange, P: int) -> tuple[list[Operation], float, float]:
        """Look up the measured operations of the exchange's kind, smallest first, the number of them it takes, and the bytes of each."""
        measured = self.probe.group.ranks
        if measured != P:
            raise ValueError(
                f"the probe has {measured} ranks and does not predict {P}; run `sparsync probe` with {P} ranks"
            )
        known = _never_slower(each for each in self.probe.operation if each.kind == exchange.kind)
        if not known:
            raise ValueError(f"the probe has no [[operation]] of kind {exchange.kind!r}; run `sparsync probe` again")
        inside = 2 * (P - 1) if exchange.kind == "all_reduce" else 1  # rounds of the measured operation
        times = max(1.0, exchange.rounds / inside)
        return known, times, max(exchange.nbytes, exchange.received) / times


def _interpolated(known: list[Operation], nbytes: int | float) -> float:
    """Interpolate the seconds of `nbytes`; `known` has at least one size, in ascending order."""
    if nbytes <= known[0].nbytes or len(known) == 1:
        return known[0].seconds
    low, high = next(((a, b) for a, b in pairwise(known) if nbytes <= b.nbytes), (known[-2], known[-1]))
    if nbytes == high.nbytes:
        return high.seconds
    slope = (high.seconds - low.seconds) / (high.nbytes - low.nbytes)
    return (
        low.seconds + slope * (nbytes - low.nbytes)
        if nbytes < high.nbytes
        else high.seconds + slope * (nbytes - high.nbytes)
    )


def _never_slower(known: Iterable[Operation]) -> list[Operation]:
    """Sort by size, and cap each time at those of larger exchanges: a small exchange that took longer was disturbed."""
    least, found = float("inf"), []
    for each in sorted(known, key=lambda each: -each.nbytes):
        least = min(least, each.seconds)
        found.append(replace(each, seconds=least))
    return found[::-1]
