"""Exclusive selection: at every step one rank examines an element, and the partitions rotate over the ranks.

Partitions are adjacent spans, as in the papers, or block-cyclic. A place is an index into the ascending elements of one partition. A
budget is the number of elements that a step sends, and `shares` computes how many of them are a partition's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.core import Rows, Span, spans
from sparsync.kernels import operations as kernels

Item = TypeVar("Item")
Numbers = TypeVar("Numbers", int, Tensor)
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


def budget(density: float, n: int, step: int) -> int:
    """Compute how many of `n` elements `step` sends: at least 1, unless there is none.

    Over many steps it averages exactly density * n per step, even if that is not a whole number (unless it is below 1).
    """
    share = _exact(density)
    count = share.numerator * n
    start, stop = count * step // share.denominator, count * (step + 1) // share.denominator
    return min(n, max(1, stop - start))


@lru_cache(maxsize=1024)
def _exact(share: float) -> Fraction:
    """Convert a float to the fraction that the user meant: 0.01 is 1/100."""
    return Fraction(share).limit_denominator(10**9)


@dataclass(frozen=True)
class Examined:
    """The partition that this rank examines."""

    rows: Rows
    lengths: list[int]  # elements of the partitions, in rank order

    def sampled(self, stride: int, turn: int) -> Self:
        """Take one of `stride` rows, a different one at every turn."""
        if stride == 1:
            return self
        rows = self.rows
        starts = rows.starts[turn % stride : rows.length // rows.row : stride].contiguous()
        return replace(self, rows=Rows(starts, rows.row, starts.numel() * rows.row))


def examine(partition: Contiguous | BlockCyclic, rank: int, step: int, device: torch.device) -> Examined:
    """Return the partition that `rank` examines at `step`."""
    lengths = partition.lengths()
    return Examined(partition.rows(rotation(rank, step, len(lengths)), device), by_rank(lengths, step))
