"""The core types: spans, buckets, sparse vectors, costs, reports, the interface of a communicator, and the phases of a bucket.

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
from itertools import accumulate, pairwise
from numbers import Real
from types import TracebackType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import profiler

_FORMATS: dict[torch.dtype, Any] = {  # Any: a literal of memoryview's
    torch.int16: "h",
    torch.int32: "i",
    torch.int64: "q",
    torch.float32: "f",
    torch.float64: "d",
}


class Arriving:
    """A few numbers on their way from a device to the host, which reads them a step later."""

    def __init__(self, numbers: Tensor) -> None:
        """Begin to copy `numbers` [k], after the work that the device already has."""
        on_gpu = numbers.is_cuda
        host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=on_gpu)
        host.copy_(numbers, non_blocking=True)
        there = torch.cuda.current_stream(numbers.device).record_event() if on_gpu else None
        self._coming, self._read = (host, there), list[float]()

    def read(self) -> list[float]:
        """Return the numbers."""
        if (coming := self._coming) is not None:
            host, there = coming
            if there is not None:
                there.synchronize()
            self._read, self._coming = [float(each) for each in host.tolist()], None
        return self._read

    def __bool__(self) -> bool:
        """Return whether any number is not zero."""
        return any(self.read())

    def __float__(self) -> float:
        return float(bool(self))

    def __repr__(self) -> str:
        return repr(bool(self))

    def __reduce__(self) -> tuple[type[bool], tuple[bool]]:
        return bool, (bool(self),)


# Of a device: a tensor [], for whose number the host waits, or one that is arriving.
Detail = int | float | str | bool | Tensor | Arriving


@dataclass(frozen=True)
class Span:
    """The half-open range [start, stop) of positions in a flat vector."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def of(self, x: Tensor) -> Tensor:
        """Return the view of the one-dimensional `x` [n] on this span."""
        return x[self.start : self.stop]


@lru_cache(maxsize=256)
def spans(count: int, parts: int) -> tuple[Span, ...]:
    """Return `parts` adjacent spans that cover [0, count); the first `count mod parts` are one longer, some perhaps empty."""
    short, longer = divmod(count, parts)
    starts = [part * short + min(part, longer) for part in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(starts))


@dataclass(frozen=True)
class ParameterSpan:
    """Where the gradient of the parameter called `name` lies in its bucket."""

    name: str
    span: Span
    shape: tuple[int, ...] = ()  # of the parameter, if it is known


class Layout(tuple[ParameterSpan, ...]):
    """The parameters of a bucket, one after the other without gaps, as `laid_out` makes them; hashed once."""

    @cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type["Layout"], tuple[tuple[ParameterSpan, ...]]]:
        return type(self), (tuple(self),)  # another process has other hashes


def laid_out(parameters: Iterable[tuple[str, int | Sequence[int]]]) -> Layout:
    """Return the layout of parameters of these names and shapes, or numbers of elements, one after the other."""
    layout: list[ParameterSpan] = []
    start = 0
    for name, size in parameters:
        shape = () if isinstance(size, int) else tuple(size)
        stop = start + (size if isinstance(size, int) else math.prod(shape))
        layout.append(ParameterSpan(name, Span(start, stop), shape))
        start = stop
    return Layout(layout)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a parameter's name is one of `patterns`, or matches one as a shell pattern ("*.bias", "encoder.*")."""
    # Equality first: "[0]" in a name is no pattern.
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class SpanSet:
    """Some spans of a vector, handled as one shorter vector."""

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, layout: Iterable[ParameterSpan]) -> "SpanSet":
        """Return the spans of these parameters, neighbours merged."""
        return cls.joined(entry.span for entry in layout)

    @classmethod
    def joined(cls, spans: Iterable[Span]) -> "SpanSet":
        """Return these spans in this order, neighbours merged."""
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
        """Return where the elements `wanted`, counted as in the result of `take`, lie in the vector."""
        found: list[Span] = []
        position = 0
        for span in self.spans:
            start, stop = max(wanted.start - position, 0), min(wanted.stop - position, len(span))
            if start < stop:
                found.append(Span(span.start + start, span.start + stop))
            position += len(span)
        return found

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
    """A flat range of the gradient, which a scheme takes in and writes back.

    `key` names the bucket and is the same on every rank, as are `step` and `layout`; only `grad` differs before `Scheme.reduce`.
    Without a layout the whole bucket counts as one parameter called `key`.
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
    """Some elements of a vector of `length` elements: `value[i]` stands at position `index[i]`; positions ascend, none twice."""

    index: Int[Tensor, " k"]
    value: Float[Tensor, " k"]
    length: int


@dataclass(frozen=True)
class Rows:
    """Some elements of a vector where they are: `length` of them, in rows of `row` adjacent elements; the last row may be shorter.

    Row i begins at position `starts[i]`; more starts than rows are allowed. Places count the elements in the order of the rows.
    """

    starts: Int[Tensor, " rows"]  # int32
    row: int
    length: int


def count_for(density: float, n: int) -> int:
    """Return k = density * n rounded down, but at least one element of a bucket that has any."""
    return min(n, max(1, int(density * n + 1e-9)))


def check_one_of(name: str, value: object, kind: Any) -> None:  # Any: a Literal
    """Raise ValueError unless `value`, of the setting `name`, is one of those of the Literal `kind`."""
    if value not in get_args(kind):
        raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")


def check_density(density: object, name: str = "density") -> None:
    """Raise ValueError unless `density`, of the setting `name`, is a number with 0 < density <= 1."""
    if isinstance(density, bool) or not isinstance(density, Real):
        raise ValueError(
            f"{name} must be a number in (0, 1], the share of elements to send, got {density!r} of type {type(density).__name__}"
        )
    if not 0 < density <= 1:  # pyright: ignore[reportOperatorIssue]  # what is Real has an order
        raise ValueError(f"{name} must be in (0, 1], the share of elements to send, got {density}")


@dataclass(frozen=True)
class Cost:
    """What one rank sends: `steps` exchanges that wait for each other, `messages` and payload bytes leaving the rank.

    An exchange whose messages all leave at once is one step, to any number of ranks: an all_gather, an all_to_all, an exchange of lengths.
    P-1 sends that each need the one before are P-1 steps: a ring. Each step costs a link's latency, whatever its size.
    Payload only: framing by the transport (Ethernet, IP, TCP) comes on top. A message without payload is not sent and not counted. Its
    exchange still is a step, because ranks wait if others have something to send.
    """

    steps: int = 0
    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.messages + other.messages, self.nbytes + other.nbytes)


@dataclass(frozen=True)
class Report:
    """One reduction of one bucket at one step, seen from one rank.

    `selected` is k, the number of elements that this rank put in; `union` is K, the number of elements that any rank put in; `elements` is
    n. `cost` is what the scheme counted as sent; `sent` is what an integration counted around it, if any, and `wait_s` the seconds inside
    the communicator. `details` holds what only this scheme knows, e.g. SkipReduce's "skip" and "shift"; "overflow" says that the result has
    NaN or Inf. On a GPU that may be a tensor [], or may still be arriving: `bool` waits for it.
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
    phases: Mapping[str, float] = field(default_factory=dict)  # of `seconds`, those in each `phase`
    details: Mapping[str, Detail] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """K/n, and 1 for an empty bucket."""
        return self.union / self.elements if self.elements else 1.0


def reported(
    scheme: str,
    bucket: Bucket,
    cost: Cost,
    selected: int | None = None,
    union: int | None = None,
    details: Mapping[str, Detail] | None = None,
) -> Report:
    """Return the report of one reduction by the scheme of this name. See `Scheme.report`."""
    n = bucket.grad.numel()
    k, K = n if selected is None else selected, n if union is None else union
    return Report(scheme, bucket.key, bucket.step, n, k, K, cost, details=details or {})


@runtime_checkable
class Comm(Protocol):
    """One rank's view of a group of P ranks. Every call except `send_recv` is collective, and returns when its result is there.

    All tensors are one-dimensional and contiguous, of one dtype and device on all ranks. Results are for reading only: a transport inside
    one process may hand the same tensor to every rank. `counts` are the numbers of elements from each rank, if all ranks know them;
    without them each message brings its length, of 8 bytes.
    Failures raise RuntimeError and name the ranks; nothing waits without a timeout.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send `out` to rank `to` while `into` is filled with what rank `source` sends; an empty tensor takes no message."""
        ...

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        """Return every rank's `x`, in rank order; lengths may differ. Bytes sent per rank: (P-1) * nbytes(x)."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        """Send `parts[r]`, perhaps empty, to rank r, and return what arrives, in rank order. Bytes sent per rank: all but its own."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, the same bits on every rank. Bytes sent per rank: 2 (P-1)/P * nbytes(x)."""
        ...


def sum_in_rank_order(addends: Sequence[Tensor]) -> Tensor:
    """Return the sum of at least one tensor, added in the order given: the same bits on every rank."""
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


def exact_divisor(x: Tensor, divisor: int) -> Tensor | int:
    """Return the divisor that gives the bits of the CPU: on a GPU torch multiplies by the reciprocal of a plain number.

    A divisor that the type of `x` cannot hold, above 256 for bfloat16 and 2048 for float16, stays a number.
    """
    return x.new_full((), divisor) if x.is_cuda and divisor <= 2 / torch.finfo(x.dtype).eps else divisor


# Takes the place of a count or a magnitude, which are never negative, in a scheme's first message.
FOUND_INF = -1
# Of a sum: the number of ranks whose element is in it, or P.
Divisor = Literal["contributors", "ranks"]


class NonFiniteError(RuntimeError):
    """NaN or Inf on some rank. Raised on all ranks, from what all of them received; nothing was written."""


def or_found_inf(numbers: Tensor, finite: bool | Tensor) -> Tensor:
    """Return `numbers`, or FOUND_INF in the place of each if not `finite`, which may be a tensor [] on their device."""
    if isinstance(finite, Tensor):
        return torch.where(finite, numbers, FOUND_INF)
    return numbers if finite else torch.full_like(numbers, FOUND_INF)


def numbers_of(*vectors: Tensor) -> list[list[Any]]:  # Any: int or float, by the type of a vector
    """Return the numbers in some vectors, each of one of five types. A host sync: one copy for all of them."""
    flat = memoryview(bytes(torch.cat([each.view(-1).view(torch.uint8) for each in vectors]).tolist()))
    ends = accumulate(each.nbytes for each in vectors)
    return [
        flat[end - each.nbytes : end].cast(_FORMATS[each.dtype]).tolist()
        for each, end in zip(vectors, ends, strict=True)
    ]


def raise_if_found_inf(received: Iterable[int]) -> None:
    """Raise NonFiniteError when any rank sent FOUND_INF, or any other negative number, in place of its first number."""
    if min(received) < 0:
        raise NonFiniteError("a rank's gradient holds NaN or Inf")


def add_note(error: BaseException, note: str) -> None:
    """Add a line that tracebacks show below the error; those of Python 3.10 do not, which keeps it in `__notes__` alone."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # pyright: ignore[reportAttributeAccessIssue]


def digest(text: str) -> int:
    """Return a number of 63 bits that depends only on the text, and differs between texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, key: str, step: int) -> torch.Generator:
    """Return a CPU random generator that depends only on (seed, key, step), and so is the same on every rank.

    Never torch's global generator: drawing from it would change what the model draws (dropout, data order).
    """
    return torch.Generator().manual_seed(digest(f"{seed}/{key}/{step}"))


# The phases of a bucket: a profiler sees each, and the seconds in each can be recorded. Time inside the communicator is no phase:
# MeteredComm counts it. torch.profiler sees the thread that started it, and the thread that reduces DDP's buckets only with
# `_ExperimentalConfig(profile_all_threads=True)`.
Phase = Literal["accumulate", "select", "encode", "decode", "apply"]

# .ledger: the dict that this thread's phases are added to, .label: their bucket's name; absent outside `recorded_phases`.
_THREAD = threading.local()


class phase:  # noqa: N801  # used as a function in a with statement; a generator would take three times as long
    """Name the block in torch's profiler, as "sparsync::select [bucket0]", and add its seconds to those of `recorded_phases`.

    On CUDA the time is the host's only. The bucket's name is there inside `recorded_phases` only.
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
    """Return the seconds this thread spends in each phase, filled in while the block runs; a profiler sees the bucket's name."""
    outer = getattr(_THREAD, "ledger", None), getattr(_THREAD, "label", "")
    _THREAD.ledger, _THREAD.label = {}, f" [{bucket}]"
    try:
        yield _THREAD.ledger
    finally:
        _THREAD.ledger, _THREAD.label = outer
