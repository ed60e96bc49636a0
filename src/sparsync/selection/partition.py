"""Exclusive partitions: every element is examined by one rank at each step, and the partitions rotate over the ranks.

Two forms with one interface: adjacent spans, as the papers have them, and block-cyclic ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.core import Rows, Span, spans

Item = TypeVar("Item")


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
        starts = self._tail_starts(position.device)
        tail_p = torch.bucketize(position, starts, right=True) - 1
        tail_place = position - starts[tail_p.clamp(min=0)] + self.groups * self.row
        inside = group < self.groups
        return torch.where(inside, p, tail_p), torch.where(inside, place, tail_place)

    def _tails(self) -> list[Span]:
        inner = self.groups * self.row * self.P
        return [Span(span.start + inner, span.stop + inner) for span in spans(self.n - inner, self.P)]

    def _tail_starts(self, device: torch.device) -> Tensor:
        return torch.tensor([span.start for span in self._tails()], device=device)


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
