"""The core types: spans, buckets, sparse vectors, costs, reports, the communicator interface, and the phases of a bucket.

Nothing here communicates, selects or keeps state. Letters: P ranks, n elements of a bucket, k selected on one rank, K in the union.
"""

import hashlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from itertools import pairwise
from numbers import Real
from types import TracebackType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import profiler


class Arriving:
    """A few numbers that a device is copying to the host, which reads them a step later."""

    def __init__(self, numbers: Tensor) -> None:
        """Begin to copy `numbers` [k], after the work already queued on the device."""
        on_gpu = numbers.is_cuda
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=on_gpu)
        host.copy_(numbers, non_blocking=True)
        there = torch.cuda.current_stream(numbers.device).record_event() if on_gpu else None
        self._coming, self._read = (host, there), list[float]()

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        if (coming := self._coming) is not None:
            host, there = coming
            if there is not None:
                there.synchronize()
            self._read, self._coming = [float(number) for number in host.tolist()], None
        return self._read

    def __bool__(self) -> bool:
        """Return whether any number is non-zero."""
        return any(self.read())

    def __float__(self) -> float:
        return float(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (bool(self),)


# A number on a device is a tensor [], for which the host must wait, or Arriving.
Detail = int | float | str | bool | Tensor | Arriving


@dataclass(frozen=True)
class Span:
    """The half-open range [start, stop) of positions in a flat vector."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, x: Tensor) -> Tensor:
        """Return a view of this span of `x` [n]."""
        return x[self.start : self.stop]


@lru_cache(maxsize=256)
def spans(count: int, parts: int) -> tuple[Span, ...]:
    """Cut [0, count) into `parts` adjacent spans, perhaps empty; the first `count mod parts` are longer by one."""
    short, longer = divmod(count, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class ParameterSpan:
    """The position of the gradient of the parameter `name` in its bucket."""

    name: str
    span: Span
    shape: tuple[int, ...] = ()  # of the parameter, if it is known


class Layout(tuple[ParameterSpan, ...]):
    """The parameters of a bucket, adjacent and in order, as `laid_out` makes them. Caches its hash."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[tuple[ParameterSpan, ...]]]:
        return type(self), (tuple(self),)  # another process has other hashes


def laid_out(parameters: Iterable[tuple[str, int | Sequence[int]]]) -> Layout:
    """Lay out parameters one after the other, given names and shapes, or numbers of elements."""
    layout: list[ParameterSpan] = []
    start = 0
    for name, size in parameters:
        shape = () if isinstance(size, int) else tuple(size)
        stop = start + (size if isinstance(size, int) else math.prod(shape))
        layout.append(ParameterSpan(name, Span(start, stop), shape))
        start = stop
    return Layout(layout)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's name equals one of `patterns` or matches it as a shell pattern ("*.bias", "encoder.*")."""
    # Equality first: "[0]" in a name is not a pattern.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class SpanSet:
    """Some spans of a vector, handled as one shorter vector."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layout: Iterable[ParameterSpan]) -> "SpanSet":
        """Collect the spans of these parameters, neighbours merged."""
        return cls.joined(entry.span for entry in layout)

    @classmethod
    def joined(cls, spans: Iterable[Span]) -> "SpanSet":
        """Collect these spans in this order, neighbours merged."""
        merged: list[Span] = []
        for span in spans:
            if merged and merged[-1].stop == span.start:
                merged[-1] = Span(merged[-1].start, span.stop)
            else:
                merged.append(span)
        return cls(tuple(merged))

    def __len__(self) -> int:
        return sum(len(span) for span in self.spans)

    def part(self, wanted: Span) -> list[Span]:
        """Locate the elements `wanted` of the result of `take` in the vector."""
        located: list[Span] = []
        position = 0
        for span in self.spans:
            start, stop = max(wanted.start - position, 0), min(wanted.stop - position, len(span))
            if start < stop:
                located.append(Span(span.start + start, span.start + stop))
            position += len(span)
        return located

    def take(self, x: Tensor) -> Tensor:
        """Return these elements of `x`: a view if they are one span, else a copy."""
        if len(self.spans) == 1:
            return self.spans[0].of(x)
        return torch.cat([x[:0], *(span.of(x) for span in self.spans)])

    def put_(self, x: Tensor, taken: Tensor) -> None:
        """Write the result of `take`, perhaps changed, back to its place in `x`."""
        if len(self.spans) == 1 and taken.data_ptr() == self.spans[0].of(x).data_ptr():
            return
        if self.spans:
            parts = taken.split([len(span) for span in self.spans])
            torch._foreach_copy_([span.of(x) for span in self.spans], parts)  # pyright: ignore[reportPrivateImportUsage]


@dataclass
class Bucket:
    """A flat range of the gradient, which a scheme reads and overwrites with the result.

    `key`, `step` and `layout` are the same on every rank; before `Scheme.reduce` only `grad` differs.
    Without a layout the bucket counts as one parameter called `key`.
    Raises ValueError if `grad` is not one-dimensional, contiguous and floating, or if `layout` does not cover it.
    """

    key: str
    grad: Float[Tensor, " n"]
    step: int
    layout: tuple[ParameterSpan, ...] = ()
    skip: Tensor | None = None  # [1], for a scheme that heeds it; see Scheme.heeds_skip

    def __post_init__(self) -> None:
        self.key = str(self.key)
        if self.grad.dim() != 1 or not self.grad.is_contiguous() or not self.grad.is_floating_point():
            raise ValueError(
                f"the gradient of bucket {self.key!r} must be one-dimensional, contiguous and floating, got shape "
                f"{tuple(self.grad.shape)}, strides {self.grad.stride()}, {self.grad.dtype}; pass grad.flatten().contiguous()"
            )
        if not self.layout:
            self.layout = (ParameterSpan(self.key, Span(0, self.grad.numel())),)
        position = self.layout[-1].span.stop if isinstance(self.layout, Layout) else 0
        for entry in () if isinstance(self.layout, Layout) else self.layout:
            if entry.span.start != position or entry.span.stop < position:
                raise ValueError(
                    f"the layout of bucket {self.key!r} must cover its elements in order: parameter {entry.name!r} starts at "
                    f"{entry.span.start}, the one before it ends at {position}"
                )
            if entry.shape and math.prod(entry.shape) != len(entry.span):
                raise ValueError(
                    f"parameter {entry.name!r} of bucket {self.key!r} has {len(entry.span)} elements, which do not make the shape "
                    f"{entry.shape}"
                )
            position = entry.span.stop
        if position != self.grad.numel():
            raise ValueError(
                f"the layout of bucket {self.key!r} covers {position} elements, its gradient has {self.grad.numel()}"
            )


@dataclass(frozen=True)
class Sparse:
    """Some elements of a vector of `length` elements: `value[i]` is at position `index[i]`. Positions ascend strictly."""

    index: Int[Tensor, " k"]
    value: Float[Tensor, " k"]
    length: int


@dataclass(frozen=True)
class Rows:
    """A view of `length` elements of a vector, in rows of `row` adjacent elements; the last row may be shorter.

    Row i begins at position `starts[i]`; more starts than rows are allowed. A place is an index into the rows laid end to end.
    """

    starts: Int[Tensor, " rows"]  # int32
    row: int
    length: int


def count_for(density: float, n: int) -> int:
    """Compute k = density * n, rounded down, but at least 1 for a bucket that is not empty."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_one_of(name: str, value: object, kind: Any) -> None:  # Any: a Literal
    """Raise ValueError unless `value` of the setting `name` is allowed by the Literal `kind`."""
    if value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")


def check_density(density: object, name: str = "density") -> None:
    """Raise ValueError unless `density` of the setting `name` is a number with 0 < density <= 1."""
    if isinstance(density, bool) or not isinstance(density, Real):
        raise ValueError(
            f"{name} must be a number in (0, 1], the share of elements to send, got {density!r} of type {type(density).__name__}"
        )
    if not 0 < density <= 1:  # pyright: ignore[reportOperatorIssue]  # what is Real has an order
        raise ValueError(f"{name} must be in (0, 1], the share of elements to send, got {density}")


@dataclass(frozen=True)
class Cost:
    """The traffic of one rank: `steps` consecutive exchanges, `messages` and payload bytes leaving the rank.

    An exchange whose messages all leave at once is one step, to any number of ranks: an all_gather, an all_to_all, an exchange of lengths.
    In a ring every send needs the one before, so P-1 sends are P-1 steps. A step costs the latency of a link, whatever its size.
    Bytes exclude the transport's framing (Ethernet, IP, TCP). A message without payload is neither sent nor counted. Its
    exchange is still a step, because ranks wait if others have something to send.
    """

    steps: int = 0
    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.messages + other.messages, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Report:
    """The report of one reduction of one bucket at one step on one rank.

    `selected` is k, the number of elements that this rank selected; `union` is K, the number that any rank selected; `elements` is
    n. `cost` is the traffic that the scheme counted; `sent` is the integration's count, if any, and `wait_s` the seconds inside
    the communicator. `details` are specific to the scheme, e.g. SkipReduce's "skip" and "shift"; "overflow" says that the result has
    NaN or Inf. On a GPU it may be a tensor [] or Arriving: `bool` waits for it.
    """

    scheme: str
    key: str
    step: int
    elements: int
    selected: int
    union: int
    cost: Cost
    sent: Cost | None = None
    seconds: float | None = None  # the whole reduce, on the thread that ran it
    wait_s: float | None = None  # inside the communicator, a part of `seconds`
    phases: Mapping[str, float] = field(default_factory=dict)  # the parts of `seconds` by `phase`
    details: Mapping[str, Detail] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """K/n, and 1 for an empty bucket."""
        return self.union / self.elements if self.elements else 1.0


@runtime_checkable
class Comm(Protocol):
    """One rank's view of a group of P ranks. Every call except `send_recv` is collective, and blocks until its result is complete.

    All tensors are one-dimensional and contiguous, with the same dtype and device on all ranks. Results are read-only: a transport inside
    one process may hand the same tensor to every rank. `counts` are the numbers of elements by rank, if all ranks know them;
    without them every message carries its length in 8 bytes.
    Failures raise RuntimeError and name the ranks. All waits have a timeout.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send `out` to rank `to` while receiving from rank `source` into `into`; an empty tensor takes no message."""
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Gather every rank's `x`, in rank order; lengths may differ. Bytes sent per rank: (P-1) * nbytes(x)."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Send `parts[r]`, perhaps empty, to rank r. Return the received parts in rank order. Bytes sent per rank: all parts to others."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, with the same bits on every rank. Bytes sent per rank: 2 (P-1)/P * nbytes(x)."""
        ...


def sum_in_rank_order(addends: Sequence[Tensor]) -> Tensor:
    """Sum one or more tensors in the order given, for the same bits on every rank."""
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


def exact_divisor(x: Tensor, divisor: int) -> Tensor | int:
    """Return a divisor with which a GPU divides as the CPU does; by a plain number torch would multiply by the reciprocal.

    A divisor that the type of `x` cannot hold (above 256 for bfloat16, 2048 for float16) stays a number.
    """
    return x.new_full((), divisor) if x.is_cuda and divisor <= 2 / torch.finfo(x.dtype).eps else divisor


# Replaces a count or a magnitude, which are never negative, in a scheme's first message.
FOUND_INF = -1
# A mean divides a sum by the number of ranks whose element is in it, or by P.
Divisor = Literal["contributors", "ranks"]


class NonFiniteError(RuntimeError):
    """NaN or Inf on some rank. All ranks raise it, from the same messages, before writing anything."""


def or_found_inf(numbers: Tensor, finite: bool | Tensor) -> Tensor:
    """Return `numbers`, all replaced by FOUND_INF unless `finite`, which may be a tensor [] on their device."""
    if isinstance(finite, Tensor):
        return torch.where(finite, numbers, FOUND_INF)
    return numbers if finite else torch.full_like(numbers, FOUND_INF)


def raise_if_found_inf(received: Iterable[int]) -> None:
    """Raise NonFiniteError if any of the ranks' first numbers is FOUND_INF or otherwise negative."""
    if min(received) < 0:
        raise NonFiniteError("a rank's gradient holds NaN or Inf")


def add_note(error: BaseException, note: str) -> None:
    """Add a line below the error in tracebacks. Python 3.10 does not show it, but keeps it in `__notes__`."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # pyright: ignore[reportAttributeAccessIssue]


def digest(text: str) -> int:
    """Hash a text to 63 bits, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, key: str, step: int) -> torch.Generator:
    """Create a CPU random generator from (seed, key, step), so that all ranks draw the same numbers.

    Never use torch's global generator: drawing from it would change the model's random numbers (dropout, data order).
    """
    return torch.Generator().manual_seed(digest(f"{seed}/{key}/{step}"))


# The phases of a bucket, which a profiler shows and `recorded_phases` times. Time inside the communicator is not a phase:
# MeteredComm counts it. torch.profiler shows the thread that started it, and shows the thread that reduces DDP's buckets only with
# `_ExperimentalConfig(profile_all_threads=True)`.
Phase = Literal["accumulate", "select", "encode", "decode", "apply"]

# .ledger: the seconds of this thread's phases, .label: the name of their bucket; absent outside `recorded_phases`.
_THREAD = threading.local()


class phase:  # noqa: N801  # used as a function in a with statement; a generator would take three times as long
    """Name the block in torch's profiler, as "sparsync::select [bucket0]", and add its seconds to those of `recorded_phases`.

    On CUDA it counts the host's time only. The bucket's name appears only inside `recorded_phases`.
    """

    __slots__ = ("_began", "_name", "_shown")

    def __init__(self, name: Phase) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._shown = None
        if profiler._is_profiler_enabled:
            self._shown = profiler.record_function(f"sparsync::{self._name}{getattr(_THREAD, 'label', '')}")
            self._shown.__enter__()
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ledger: dict[str, float] | None = getattr(_THREAD, "ledger", None)
        if ledger is not None:
            ledger[self._name] = ledger.get(self._name, 0.0) + time.perf_counter() - self._began
        if self._shown is not None:
            self._shown.__exit__(kind, error, trace)


@contextmanager
def recorded_phases(bucket: str) -> Iterator[dict[str, float]]:
    """Record the seconds that this thread spends per phase, while the block runs. A profiler shows the bucket's name."""
    outer = getattr(_THREAD, "ledger", None), getattr(_THREAD, "label", "")
    _THREAD.ledger, _THREAD.label = {}, f" [{bucket}]"
    try:
        yield _THREAD.ledger
    finally:
        _THREAD.ledger, _THREAD.label = outer
