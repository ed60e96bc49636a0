"""Exclusive selection: every element is examined by one rank at each step, and the partitions rotate over the ranks.

Three parts. Partitions: adjacent spans, as the papers have them, or block-cyclic ones, with one interface. The budget: how many elements a
step may send, and which of them all ranks know beforehand. Tail sketches: how many elements each partition sends, so that together they
are the asked number of the largest. Every rank sends at which magnitudes its partition holds a few agreed numbers of elements, its sample
points. From all ranks' sketches every rank finds the same common magnitude, and from it the same quotas. A sketch is free of any scale,
so no threshold is learnt. Only integers and correctly rounded operations, so that unlike machines agree too.

Magnitudes travel as levels: the upper bits of a float32, which order as the numbers do and are about their logarithm.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync.core import ParameterSpan, Rows, Span, matches, spans
from sparsync.kernels import operations as kernels

Item = TypeVar("Item")
DENSE_SHARE = 0.1  # of the budget, at most, for parameters that are sent whole
_FLOAT32_BITS = 31  # of a magnitude
_OCTAVE_BITS = 23  # 2^23 levels of 31 bits between a magnitude and its double
_TOP = 0x7F7FFFFF  # the largest finite float32
_TAIL = 2.0  # above the first sample point, twice the magnitude is taken to be reached by 2^-2 as many elements
_UNIT = 1 << 20  # estimates are added up in parts of an element
_TRIED = 216  # levels that are looked at at once: 216^4 is just above all levels of 31 bits


def rotation(rank: int, step: int, P: int) -> int:
    """Return the partition that `rank` examines at `step`: each rank sees each partition once in P steps."""
    return (rank + step) % P


def by_rank(items: Sequence[Item], step: int) -> list[Item]:
    """Return what belongs to the partition of each rank at `step`, in rank order, of what belongs to each partition."""
    return [items[rotation(rank, step, len(items))] for rank in range(len(items))]


@runtime_checkable
class Partition(Protocol):
    """P partitions of [0, n). Places count the elements of one partition in ascending order."""

    def lengths(self) -> list[int]:
        """Return the number of elements of each partition."""
        ...

    def of(self, x: Tensor, p: int) -> Tensor:
        """Return the elements of `x` [n] in partition `p`, copied."""
        ...

    def put_(self, x: Tensor, p: int, value: Tensor) -> None:
        """Write `value` to the elements of `x` [n] in partition `p`: the inverse of `of`."""
        ...

    def positions(self, p: int, place: Tensor) -> Tensor:
        """Return where the elements at `place` of partition `p` stand in the vector, in the type of `place`."""
        ...

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the partition and the place in it of each `position` [k], int64."""
        ...


@dataclass(frozen=True)
class Contiguous:
    """Adjacent spans that cover [0, n) in order."""

    spans: Sequence[Span]

    def lengths(self) -> list[int]:
        return [len(span) for span in self.spans]

    def of(self, x: Tensor, p: int) -> Tensor:
        return self.spans[p].of(x).clone()

    def put_(self, x: Tensor, p: int, value: Tensor) -> None:
        self.spans[p].of(x).copy_(value)

    def positions(self, p: int, place: Tensor) -> Tensor:
        return place + self.spans[p].start

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([span.start for span in self.spans], device=position.device)
        p = torch.bucketize(position, starts, right=True) - 1
        return p, position - starts[p]


@dataclass(frozen=True)
class BlockCyclic:
    """P partitions that are spread over the whole vector, so that each holds its share of every layer.

    The vector is cut into rows of a few adjacent elements: each group of P rows gives every partition one. Their order rotates by a
    pseudo-random amount from group to group, or a matrix whose rows fit the groups would put each of its columns into one partition.
    What does not fill a group is split into P spans.
    """

    n: int
    P: int

    @property
    def row(self) -> int:
        """Elements of a row: 32, a cache line or two, where that leaves 32 groups."""
        return max(1, min(32, self.n // (32 * self.P)))

    @property
    def groups(self) -> int:
        return self.n // (self.row * self.P)

    def lengths(self) -> list[int]:
        return [self.groups * self.row + len(span) for span in self._tails()]

    def length_counts(self) -> dict[int, int]:
        """Return how many partitions have each length."""
        whole = self.groups * self.row
        short, longer = divmod(self.n - whole * self.P, self.P)
        counts = {whole + short + 1: longer, whole + short: self.P - longer}
        return {length: count for length, count in counts.items() if count}

    def of(self, x: Tensor, p: int) -> Tensor:
        rows, tail = self.groups * self.row, self._tails()[p]
        out = x.new_empty(rows + len(tail))
        chosen = _rows(self.groups, self.P, x.device)[p]
        torch.index_select(x[: rows * self.P].view(-1, self.row), 0, chosen, out=out[:rows].view(-1, self.row))
        out[rows:] = tail.of(x)
        return out

    def put_(self, x: Tensor, p: int, value: Tensor) -> None:
        rows, tail = self.groups * self.row, self._tails()[p]
        chosen = _rows(self.groups, self.P, x.device)[p]
        x[: rows * self.P].view(-1, self.row).index_copy_(0, chosen.long(), value[:rows].view(-1, self.row))
        tail.of(x).copy_(value[rows:])

    def rows(self, p: int, device: torch.device) -> Rows:
        """Return where the elements of partition `p` are."""
        return _rows_of(self, device)[p]

    def positions(self, p: int, place: Tensor) -> Tensor:
        return kernels.locate(self.rows(p, place.device), place)

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        group = position // (self.row * self.P)
        p = (position // self.row - _rotations(group, self.P)) % self.P
        place = group * self.row + position % self.row
        starts = torch.tensor([span.start for span in self._tails()], device=position.device)
        tail_p = torch.bucketize(position, starts, right=True) - 1
        tail_place = position - starts[tail_p.clamp(min=0)] + self.groups * self.row
        inside = group < self.groups
        return torch.where(inside, p, tail_p), torch.where(inside, place, tail_place)

    def _tails(self) -> list[Span]:
        inner = self.groups * self.row * self.P
        return [Span(span.start + inner, span.stop + inner) for span in spans(self.n - inner, self.P)]


@lru_cache(maxsize=1024)
def _rows_of(partition: BlockCyclic, device: torch.device) -> list[Rows]:
    """Return where the elements of each partition are."""
    starts = _starts(partition.n, partition.P, partition.row, device)
    # A tail is no longer than a row: one more of them.
    return [Rows(each, partition.row, length) for each, length in zip(starts, partition.lengths(), strict=True)]


@lru_cache(maxsize=1024)
def _starts(n: int, P: int, row: int, device: torch.device) -> Tensor:
    """Return where each row of each partition begins, and its tail, int32 [P, groups + 1]."""
    inner = n // (row * P) * row * P
    tails = torch.tensor([span.start + inner for span in spans(n - inner, P)], dtype=torch.int32, device=device)
    return torch.cat([_rows(n // (row * P), P, device) * row, tails[:, None]], dim=1)


@lru_cache(maxsize=1024)
def _rows(groups: int, P: int, device: torch.device) -> Tensor:
    """Return which row each group gives to each partition, int32 [P, groups]."""
    group = torch.arange(groups, device=device)
    p = torch.arange(P, device=device)[:, None]
    return (group * P + (p + _rotations(group, P)) % P).to(torch.int32)


def _rotations(group: Tensor, P: int) -> Tensor:
    return (group * 2654435761 >> 16) % P  # Knuth's multiplicative hash


@dataclass(frozen=True)
class Budget:
    """`count` elements are sent at this step; those in `known`, disjoint ascending spans, need no index."""

    count: int
    known: tuple[Span, ...]

    @property
    def known_count(self) -> int:
        return sum(len(span) for span in self.known)

    @property
    def open_count(self) -> int:
        """How many are still to be selected."""
        return self.count - self.known_count

    def known_index(self, device: torch.device) -> Tensor:
        """Return the known positions, ascending, int64."""
        parts = [torch.arange(span.start, span.stop, device=device) for span in self.known]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def budget(density: float, layout: Sequence[ParameterSpan], dense: Iterable[str], refresh: float, step: int) -> Budget:
    """Return what `density` of the elements of `layout` allows at `step`: at least 1 element of a bucket that has any.

    Over many steps exactly density * n a step are sent, also where that is not a whole number (but below 1).
    Parameters whose names match `dense` are sent whole, the smallest first, as long as they take at most DENSE_SHARE of the budget.
    A window takes the share `refresh` of the budget and cycles through the vector, so no element waits longer than 1/(refresh * density)
    steps, and one step more for rounding.
    """
    n = layout[-1].span.stop
    start, stop = _share(density, n, step)
    count = min(n, max(1, stop - start))
    exempt = _exempt(tuple(layout), tuple(dense), int(DENSE_SHARE * density * n))
    start, stop = _share(_exact(refresh) * _exact(density), n, step)
    stop = min(stop, start + count)
    return Budget(count, _fitting([*_wrapped(start, stop, n), *exempt], count))


@lru_cache(maxsize=1024)
def _exempt(layout: tuple[ParameterSpan, ...], patterns: tuple[str, ...], left: int) -> tuple[Span, ...]:
    """Return the spans of the smallest parameters that match, as long as they have `left` elements together."""
    exempt: list[Span] = []
    for entry in sorted(
        (entry for entry in layout if matches(entry.name, patterns)), key=lambda entry: len(entry.span)
    ):
        if len(entry.span) > left:
            break
        left -= len(entry.span)
        exempt.append(entry.span)
    return tuple(exempt)


@lru_cache(maxsize=1024)
def _exact(share: float | Fraction) -> Fraction:
    """Return the fraction that was meant: 0.01 is 1/100."""
    return Fraction(share).limit_denominator(10**9)


def _share(share: float | Fraction, n: int, step: int) -> tuple[int, int]:
    """Return where the share of step `step` starts and stops when `share` * n elements a step follow each other without gaps."""
    each = _exact(share) * n
    return int(each * step), int(each * (step + 1))


def _wrapped(start: int, stop: int, n: int) -> list[Span]:
    length, start = stop - start, start % n
    if start + length <= n:
        return [Span(start, start + length)]
    return [Span(start, n), Span(0, start + length - n)]


def _fitting(wanted: list[Span], count: int) -> tuple[Span, ...]:
    """Return the union of `wanted`, spans merged and ascending; the last wanted are dropped while it has more than `count` elements."""
    while True:
        merged = _merged(wanted)
        if sum(len(span) for span in merged) <= count:
            return merged
        wanted = wanted[:-1]


def _merged(wanted: Iterable[Span]) -> tuple[Span, ...]:
    merged: list[Span] = []
    for span in sorted((span for span in wanted if len(span)), key=lambda span: span.start):
        if merged and span.start <= merged[-1].stop:
            merged[-1] = Span(merged[-1].start, max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return tuple(merged)


def relative_magnitudes(levels: Sequence[int]) -> list[int]:
    """Return the magnitudes at `levels` of 15 bits in units of 2^-16 of the largest, rounded down; all 1 when that is 0."""
    words = torch.tensor(levels, dtype=torch.int32, device="cpu") << (_FLOAT32_BITS - 15)
    magnitude = words.view(torch.float32).to(torch.float64)
    largest = magnitude.max()
    return (magnitude / largest * 65536).to(torch.int64).tolist() if largest > 0 else [1] * len(levels)


def sketch(largest: Float[Tensor, " m"], counts: Sequence[int], bits: int = 15) -> Int[Tensor, " points"]:
    """Return the level that `counts[j]` elements of a partition reach or exceed, for each of the ascending counts; 0 for a count of 0.

    A level is the upper `bits` of a magnitude as a float32 without its sign; what exceeds float32 counts as its largest. `largest`
    holds the largest elements of the partition, in any order: max(counts) of them, or all that are not zero.
    """
    smallest: list[Tensor] = []
    for count in reversed(counts):  # each is among those of the next larger count
        if 0 < count < largest.numel():
            largest = kernels.top_k(largest, count).value
        reached = 0 < count <= largest.numel()
        smallest.insert(0, largest.abs().min() if reached else largest.new_zeros(()))
    limit = torch.finfo(torch.float32).max
    words = torch.stack(smallest).clamp(max=limit).to(torch.float32).view(torch.int32)
    return words >> (_FLOAT32_BITS - bits)


def quotas(
    levels: Int[Tensor, "P points"], counts: Sequence[Sequence[int]], limits: Sequence[int], total: int, bits: int = 15
) -> list[int]:
    """Return how many elements each partition sends, `total` together: as many as it holds above the level common to all.

    Row p of `levels` is the sketch of partition p at its sample points `counts[p]`; `limits[p]` is how many elements it has to choose
    from. Raises ValueError when these are less than `total` together.
    """
    # A host sync: the lengths of the next messages depend on it.
    reached = levels.cpu().to(torch.float64)  # [P, points], descending
    points = _logarithm(torch.tensor([list(each) for each in counts], dtype=torch.float64, device="cpu"))
    limit = torch.tensor(list(limits), dtype=torch.float64, device="cpu")
    octave = float(1 << (_OCTAVE_BITS - (_FLOAT32_BITS - bits)))
    # The highest level that enough elements reach lies in [low, high).
    low, high = 0, (_TOP >> (_FLOAT32_BITS - bits)) + 1
    while high - low > 1:
        step = -(-(high - low) // _TRIED)
        tried = range(low, high, step)
        # Whole numbers, whose sums are exact in whatever order. Fewer elements reach a higher level.
        above = (_reaching(tried, reached, points, limit, octave) * _UNIT).to(torch.int64).sum(1)
        enough = int((above >= total * _UNIT).sum())
        low, high = tried[max(0, enough - 1)], min(high, tried[max(0, enough - 1)] + step)
    weights = _reaching([low], reached, points, limit, octave)[0].tolist()
    return apportion([int(weight * 1024) for weight in weights], limits, total)


def apportion(weights: Sequence[int], limits: Sequence[int], total: int) -> list[int]:
    """Return `total` in shares proportional to `weights`, at most `limits[p]` for p; what rounding leaves goes to the largest remainders.

    Of equal remainders the first are served. Where no weight is left, in proportion to the limits.
    Raises ValueError when the limits are less than `total` together.
    """
    if sum(limits) < total:
        raise ValueError(f"{total} elements do not fit into {sum(limits)} free places")
    given = [0] * len(limits)
    open_places = [p for p in range(len(limits)) if limits[p]]
    while total and open_places:
        share = weights if any(weights[p] for p in open_places) else limits
        whole = sum(share[p] for p in open_places)
        full = [p for p in open_places if total * share[p] >= limits[p] * whole]
        if not full:
            return _filled(given, {p: (total * share[p], whole) for p in open_places}, total)
        for p in full:
            given[p] = limits[p]
            total -= limits[p]
        open_places = [p for p in open_places if p not in full]
    return given


def _filled(given: list[int], wanted: Mapping[int, tuple[int, int]], total: int) -> list[int]:
    """Return `given` with the fractions `wanted` filled in, rounded so that they sum to `total`."""
    for p, (numerator, whole) in wanted.items():
        given[p] = numerator // whole
    left = total - sum(given[p] for p in wanted)
    for p in sorted(wanted, key=lambda p: (-(wanted[p][0] % wanted[p][1]), p))[:left]:
        given[p] += 1
    return given


def _reaching(asked: Sequence[int], levels: Tensor, points: Tensor, limit: Tensor, octave: float) -> Tensor:
    """Return about how many elements of each partition reach each level asked for, [asked, P].

    Straight lines through the sample points, in logarithms.
    """
    level = torch.tensor(asked, dtype=torch.float64, device="cpu")[:, None]
    passed = (levels >= level[:, :, None]).sum(2)  # [asked, P]: sample points at or above the level
    left = (passed - 1).clamp(0, levels.shape[1] - 2)
    p = torch.arange(levels.shape[0], device="cpu")
    upper, lower = levels[p, left], levels[p, left + 1]
    few, many = points[p, left], points[p, left + 1]
    inside = few + (upper - level) * (many - few) / (upper - lower).clamp(min=0.5)
    above = few - (level - upper) / octave * _TAIL
    below = torch.maximum(inside, many)
    at = torch.where(passed == 0, above, torch.where(passed == levels.shape[1], below, inside))
    return torch.minimum(_exponential(at), limit)


def _logarithm(x: Tensor) -> Tensor:
    """Return the logarithm to base 2, by a straight line between powers of two: exact arithmetic, unlike log. About -127 for 0."""
    return x.to(torch.float32).view(torch.int32).to(torch.float64) / 2**23 - 127.0


def _exponential(x: Tensor) -> Tensor:
    """Return the inverse of `_logarithm`."""
    return ((x.clamp(-127.0, 127.0) + 127.0) * 2**23).to(torch.int32).view(torch.float32).to(torch.float64)
