"""Exclusive partitions: every element is judged by one rank at each step, and the partitions go round the ranks.

`BlockCyclic` partitions, ours, are spread over the vector.
`Blocks` are ExDyna's: partitions made of small blocks that neighbours hand to each other (arXiv 2402.13781). `Profile` is ours: it
remembers where selected elements lie and cuts the vector so that every partition holds equally many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from sparsync.core import Span, spans

Part = TypeVar("Part")

BLOCKS = 1024  # ExDyna's; also the resolution of a Profile
UPPER, LOWER = 1.05, 0.95238  # ExDyna: a partition with more, or less, of the mean load is out of balance
_MASS = 1 << 40  # what the masses of a profile sum up to: integers, so that all ranks cut alike on any hardware
_FLOOR = 8  # a profile spreads 1/8 of its mass evenly, so that no partition is longer than 8 n/P


def turn(rank: int, step: int, P: int) -> int:
    """The partition that `rank` judges at `step`: each rank sees each partition once in P steps."""
    return (rank + step) % P


def by_rank(parts: Sequence[Part], step: int) -> list[Part]:
    """What belongs to the partition of each rank at `step`, in rank order, of what belongs to each partition."""
    return [parts[turn(rank, step, len(parts))] for rank in range(len(parts))]


@dataclass(frozen=True)
class BlockCyclic:
    """P partitions of [0, n) that are spread over the whole vector, so that each holds its share of every layer.

    The vector is dealt out in rows of a few adjacent elements: each group of P rows gives every partition one, in an order that is
    turned by a pseudo-random amount from group to group, or a matrix whose rows fit the groups would put each of its columns into one
    partition. What does not fill a group is split into P spans. Places count the elements of a partition in ascending order.
    """

    n: int
    P: int

    @property
    def row(self) -> int:
        """Elements a row: 32, a cache line or two, where that leaves 32 groups."""
        return max(1, min(32, self.n // (32 * self.P)))

    @property
    def groups(self) -> int:
        return self.n // (self.row * self.P)

    def lengths(self) -> list[int]:
        """The number of elements of each partition."""
        return [self.groups * self.row + len(span) for span in self._tails()]

    def of(self, x: Tensor, part: int) -> Tensor:
        """The elements of `x` [n] in partition `part`, copied."""
        rows, tail = self.groups * self.row, self._tails()[part]
        out = x.new_empty(rows + len(tail))
        chosen = _rows(self.groups, self.P, x.device)[part]
        torch.index_select(x[: rows * self.P].view(-1, self.row), 0, chosen, out=out[:rows].view(-1, self.row))
        out[rows:] = tail.of(x)
        return out

    def positions(self, part: int, place: Tensor) -> Tensor:
        """Where the elements at `place` of partition `part` stand in the vector, in the type of `place`."""
        starts = _starts(self.n, self.P, self.row, place.device)[part]
        group = torch.div(place, self.row, rounding_mode="floor")  # a tail is no longer than a row: one more group
        return starts.to(place.dtype)[group] + place - group * self.row

    def places(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The partition and the place in it of each `position` [k], int64."""
        group = position // (self.row * self.P)
        part = (position // self.row - _turns(group, self.P)) % self.P
        place = group * self.row + position % self.row
        starts = self._tail_starts(position.device)
        tail_part = torch.bucketize(position, starts, right=True) - 1
        tail_place = position - starts[tail_part.clamp(min=0)] + self.groups * self.row
        inside = group < self.groups
        return torch.where(inside, part, tail_part), torch.where(inside, place, tail_place)

    def _tails(self) -> list[Span]:
        inner = self.groups * self.row * self.P
        return [Span(span.start + inner, span.stop + inner) for span in spans(self.n - inner, self.P)]

    def _tail_starts(self, device: torch.device) -> Tensor:
        return torch.tensor([span.start for span in self._tails()], device=device)


@lru_cache(maxsize=1024)
def _starts(n: int, P: int, row: int, device: torch.device) -> Tensor:
    """Where each row of each partition begins, and its tail, int32 [P, groups + 1]."""
    inner = n // (row * P) * row * P
    tails = torch.tensor([span.start + inner for span in spans(n - inner, P)], dtype=torch.int32, device=device)
    return torch.cat([_rows(n // (row * P), P, device) * row, tails[:, None]], dim=1)


@lru_cache(maxsize=1024)
def _rows(groups: int, P: int, device: torch.device) -> Tensor:
    """Which row each group gives to each partition, int32 [P, groups]."""
    group = torch.arange(groups, device=device)
    part = torch.arange(P, device=device)[:, None]
    return (group * P + (part + _turns(group, P)) % P).to(torch.int32)


def _turns(group: Tensor, P: int) -> Tensor:
    return (group * 2654435761 >> 16) % P  # Knuth's multiplicative hash


def block_edges(n: int) -> list[int]:
    """The ends of ExDyna's blocks: 1024 of n // 1024 elements rounded down to a multiple of 32, the last one with the rest.

    Differs from the paper: below 32768 elements, where such a block would be empty, min(1024, n) near-equal blocks.
    """
    size = n // BLOCKS // 32 * 32
    if size == 0:
        return [0, *(span.stop for span in spans(n, min(BLOCKS, n)))]
    return [*range(0, BLOCKS * size, size), n]


def block_spans(edges: Sequence[int], blocks: Sequence[int]) -> list[Span]:
    """The partitions that hold `blocks[p]` adjacent blocks each."""
    ends = [0, *accumulate(blocks)]
    return [Span(edges[start], edges[stop]) for start, stop in pairwise(ends)]


def rebalanced(blocks: Sequence[int], loads: Sequence[int], union: int, edges: Sequence[int]) -> list[int]:
    """How many blocks each partition has after neighbours out of balance have handed one on, from left to right.

    `loads[p]` is how many elements partition p gave to the last union. A partition above the band next to one below it gives it a
    block, unless it would fall below a quarter of the mean number of blocks.
    """
    P, blocks, loads = len(blocks), list(blocks), list(loads)
    mean = union // P
    if mean == 0:  # fewer selected than ranks: nothing to balance
        return blocks
    fewest = (len(edges) - 1) / (4 * P)
    moved = int(edges[1] * (union / edges[-1]))  # what one block holds, by the mean density
    for left in range(P - 1):
        right = left + 1
        high, low = loads[left] / mean, loads[right] / mean
        if high > UPPER and low < LOWER:
            giver, taker = left, right
        elif high < LOWER and low > UPPER:
            giver, taker = right, left
        else:
            continue
        if blocks[giver] - 1 < fewest:
            continue
        blocks[giver] -= 1
        blocks[taker] += 1
        loads[giver] -= moved
        loads[taker] += moved
    return blocks


@dataclass
class Profile:
    """How much of what is worth sending lies in each block of the vector, smoothed over steps; the same on every rank.

    A fixed number of elements chosen in each partition says nothing about how partitions compare, so what was selected counts in
    proportion to the smallest magnitude selected beside it: a partition whose last choice is twice as large holds about twice as much.
    """

    steps: int = 0
    mass: list[int] = field(default_factory=list)  # of each block; empty: nothing seen yet

    def cut(self, n: int, P: int, least: int) -> list[Span]:
        """P partitions of equal mass and at least `least` elements each (fewer when n < P * least). Without mass: equal lengths."""
        if not self.mass or n < P:
            return list(spans(n, P))
        blocks = len(self.mass)
        edges = _edges(n, blocks)
        ends = [0, *accumulate(mass + _MASS // (_FLOOR * blocks) + 1 for mass in self.mass)]
        cuts, block = [0], 0
        for part in range(1, P):
            wanted = ends[-1] * part // P
            while ends[block + 1] <= wanted:
                block += 1
            length = edges[block + 1] - edges[block]
            cuts.append(edges[block] + (wanted - ends[block]) * length // (ends[block + 1] - ends[block]))
        return [Span(start, stop) for start, stop in pairwise(_spread([*cuts, n], min(least, n // P)))]

    def observe(self, index: Tensor, counts: Sequence[int], weights: Sequence[int], n: int, memory: int) -> None:
        """Adds a step: `index` [k_1 + k_2 + ...] holds the `counts[r]` positions chosen by rank r, each of mass `weights[r]`.

        What lies `memory` steps back counts 1/e.
        """
        blocks = min(BLOCKS, n)
        starts = torch.tensor(_edges(n, blocks)[:-1], device=index.device)
        repeats = torch.tensor(list(counts), device=index.device)
        weight = torch.tensor(list(weights), device=index.device).repeat_interleave(repeats)
        block = torch.bucketize(index, starts, right=True) - 1
        seen = torch.zeros(blocks, dtype=torch.int64, device=index.device).index_add_(0, block, weight).tolist()
        total = sum(seen)
        if total == 0:
            return
        share = [each * _MASS // total for each in seen]
        self.steps += 1
        rate = min(self.steps, memory)
        old = self.mass or share
        self.mass = [before + (now - before) // rate for before, now in zip(old, share, strict=True)]


@lru_cache(maxsize=1024)
def _edges(n: int, blocks: int) -> tuple[int, ...]:
    """Where the blocks of a profile begin, and where the last one ends."""
    return (0, *(span.stop for span in spans(n, blocks)))


def _spread(cuts: list[int], least: int) -> list[int]:
    """The ascending `cuts`, moved as little as it takes to leave at least `least` between neighbours; the outer ones stay."""
    cuts = list(cuts)
    for i in range(1, len(cuts) - 1):
        cuts[i] = max(cuts[i], cuts[i - 1] + least)
    for i in range(len(cuts) - 2, 0, -1):
        cuts[i] = min(cuts[i], cuts[i + 1] - least)
    return cuts
