"""Exclusive selection: at every step one rank examines an element, and the partitions rotate over the ranks.

Partitions are adjacent spans, as in the papers, or block-cyclic, with the same methods. A place is an index into the ascending elements
of one partition. A budget says how many elements a step may send, and which of them all ranks know beforehand. `shares` computes how many
elements a partition sends.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.core import ParameterSpan, Rows, Span, Sparse, matches, spans
from sparsync.kernels import operations as kernels

Item = TypeVar("Item")
Numbers = TypeVar("Numbers", int, Tensor)
DENSE_SHARE = 0.1  # the largest share of the budget for parameters that are sent whole
_ROW = 1024  # elements of a span's row, which fits the nearest cache during selection


def rotation(rank: int, step: int, P: int) -> int:
    """Return the partition that `rank` examines at `step`; in P steps a rank examines every partition once."""
    return (rank + step) % P


def by_rank(items: Sequence[Item], step: int) -> list[Item]:
    """Reorder the partitions' items by the rank that examines them at `step`."""
    return [items[rotation(rank, step, len(items))] for rank in range(len(items))]


@dataclass(frozen=True)
class Contiguous:
    """Adjacent spans that cover [0, n) in order."""

    spans: Sequence[Span]

    def lengths(self) -> list[int]:
        return [len(span) for span in self.spans]

    def rows(self, p: int, device: torch.device) -> Rows:
        span = self.spans[p]
        starts = torch.arange(span.start, span.stop, _ROW, dtype=torch.int32, device=device)
        return Rows(starts, _ROW, len(span))

    def positions(self, p: int, place: Tensor) -> Tensor:
        return place + self.spans[p].start

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        starts = torch.tensor([span.start for span in self.spans], device=position.device)
        p = torch.bucketize(position, starts, right=True) - 1
        return p, position - starts[p]


@dataclass(frozen=True)
class BlockCyclic:
    """P partitions spread over the whole vector, so that every layer has elements in all of them.

    The vector is cut into rows of a few adjacent elements. A group of P rows gives one to every partition. A pseudo-random amount rotates
    their order in a group; otherwise a matrix whose rows fit the groups would have whole columns in one partition.
    The elements after the last full group are split into P spans.
    """

    n: int
    P: int
    longest: int = 32  # elements of a row, if that leaves 1024 groups

    @property
    def row(self) -> int:
        """Elements of a row: 32, a cache line or two, if that leaves 32 groups; `longest` in long vectors."""
        if self.n >= 1024 * self.P * self.longest:
            return self.longest
        return max(1, min(32, self.n // (32 * self.P)))

    @property
    def groups(self) -> int:
        return self.n // (self.row * self.P)

    def lengths(self) -> list[int]:
        """Return the numbers of elements by partition."""
        return [self.groups * self.row + len(span) for span in self._tails()]

    def rows(self, p: int, device: torch.device) -> Rows:
        """Return the rows of partition `p`."""
        return _rows_of(self, device)[p]

    def positions(self, p: int, place: Tensor) -> Tensor:
        """Convert places in partition `p` to positions in the vector, of the same type."""
        return kernels.locate(self.rows(p, place.device), place)

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Convert positions [k] to partitions and places in them, int64."""
        position = position.long()
        group = position // (self.row * self.P)
        p = (position // self.row - rotations(group, self.P)) % self.P
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
    """Return the rows of all partitions. A tail is at most as long as a row, so it counts as one more row."""
    P, row = partition.P, partition.row
    group, p = torch.arange(partition.groups, device=device), torch.arange(P, device=device)[:, None]
    rows = ((group * P + (p + rotations(group, P)) % P) * row).to(torch.int32)
    tails = torch.tensor([[span.start] for span in partition._tails()], dtype=torch.int32, device=device)
    starts = torch.cat([rows, tails], dim=1)
    return [Rows(begins, row, length) for begins, length in zip(starts, partition.lengths(), strict=True)]


def rotations(group: Numbers, P: int) -> Numbers:
    """Return the pseudo-random rotation, in [0, P-1], of a group; the same on all ranks."""
    return (group * 2654435761 >> 16) % P  # Knuth's multiplicative hash


@dataclass(frozen=True)
class Budget:
    """The `count` elements that a step sends, including `known`, disjoint ascending spans that need no index."""

    count: int
    known: tuple[Span, ...]

    @property
    def known_count(self) -> int:
        return sum(len(span) for span in self.known)

    @property
    def open_count(self) -> int:
        """The number of elements still to be selected."""
        return self.count - self.known_count

    def known_index(self, device: torch.device) -> Tensor:
        """Return the known positions, ascending, int32."""
        parts = [torch.arange(span.start, span.stop, dtype=torch.int32, device=device) for span in self.known]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=device)


def budget(density: float, layout: Sequence[ParameterSpan], dense: Iterable[str], refresh: float, step: int) -> Budget:
    """Compute the budget of `step` for a `density` of the elements of `layout`: at least 1 element of a bucket that is not empty.

    Over many steps it averages exactly density * n per step, even if that is not a whole number (unless it is below 1).
    Parameters whose names match `dense` are sent whole, the smallest first, while they take at most DENSE_SHARE of the budget.
    A window takes the share `refresh` of the budget and cycles through the vector, so no element waits longer than
    1/(refresh * density) + 1 steps.
    """
    n = layout[-1].span.stop
    start, stop = _share(_exact(density), n, step)
    count = min(n, max(1, stop - start))
    dense, known = tuple(dense), list[Span]()
    if refresh:
        start, stop = _share(_exact(refresh) * _exact(density), n, step)
        length, start = min(stop - start, count), start % n
        known = [Span(start, min(start + length, n)), Span(0, max(0, start + length - n))]
    if dense:
        known += _exempt(tuple(layout), dense, int(DENSE_SHARE * density * n))
    return Budget(count, _fitting(known, count))


@lru_cache(maxsize=1024)
def _exempt(layout: tuple[ParameterSpan, ...], patterns: tuple[str, ...], left: int) -> tuple[Span, ...]:
    """Choose the spans of the smallest matching parameters with at most `left` elements together."""
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
    """Convert a float to the fraction that the user meant: 0.01 is 1/100."""
    return Fraction(share).limit_denominator(10**9)


def _share(share: Fraction, n: int, step: int) -> tuple[int, int]:
    """Compute start and stop of this step's part, when `share` * n elements per step follow each other without gaps."""
    count = share.numerator * n
    return count * step // share.denominator, count * (step + 1) // share.denominator


def _fitting(wanted: list[Span], count: int) -> tuple[Span, ...]:
    """Merge the spans `wanted`, ascending; drop the last ones while they have more than `count` elements."""
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


@dataclass(frozen=True)
class Examined:
    """The partition that this rank examines, and the positions that all ranks send anyway."""

    rows: Rows
    known: Tensor  # positions that all ranks send anyway, int32
    taken: Tensor  # places of the known positions in this partition, ascending, int32
    lengths: list[int]  # elements of the partitions, in rank order
    free: list[int]  # elements of the partitions that are not known, in rank order

    def sampled(self, stride: int, turn: int) -> Self:
        """Take one of `stride` rows, a different one at every turn."""
        if stride == 1:
            return self
        rows = self.rows
        starts = rows.starts[turn % stride : rows.length // rows.row : stride].contiguous()
        return replace(self, rows=Rows(starts, rows.row, starts.numel() * rows.row))

    def free_of(self, part: Sparse, count: int) -> Sparse:
        """Select the `count` largest elements of `part` that are not known."""
        if not self.taken.numel():
            return part
        free = ~kernels.isin(part.index, self.taken)
        part = Sparse(part.index[free], part.value[free], part.length)
        if count == part.index.numel():
            return part
        top = kernels.top_k(part.value, count)
        return Sparse(part.index[top.index], top.value, part.length)


def examine(
    partition: Contiguous | BlockCyclic, allowed: Budget, rank: int, step: int, device: torch.device
) -> Examined:
    """Return the partition that `rank` examines at `step`, and the positions known to all."""
    lengths, known = partition.lengths(), allowed.known_index(device)
    mine = rotation(rank, step, len(lengths))
    rows, free, taken = partition.rows(mine, device), lengths, known
    if known.numel():
        p, place = partition.places(known)
        # A host sync: packet sizes depend on it.
        counts: list[int] = torch.bincount(p, minlength=len(lengths)).tolist()
        free = [length - count for length, count in zip(lengths, counts, strict=True)]
        taken = place[p == mine].to(torch.int32)
    return Examined(rows, known, taken, by_rank(lengths, step), by_rank(free, step))
