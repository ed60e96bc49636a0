"""Partitions that change size until they hold equally much: ExDyna's blocks (arXiv 2402.13781), and a profile of our own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsync.core import Span, spans

BLOCKS = 1024  # ExDyna's; also the resolution of a Profile
_UPPER, _LOWER = 1.05, 0.95238  # ExDyna: a partition with more, or less, of the mean load is out of balance
_MASS = 1 << 40  # what the masses of a profile sum up to: integers, so that all ranks cut the same on any hardware
_FLOOR = 8  # a profile spreads 1/8 of its mass evenly, so that no partition is longer than 8 n/P


def block_edges(n: int) -> list[int]:
    """Return the ends of ExDyna's blocks: 1024 of n // 1024 elements rounded down to a multiple of 32, the last one with the rest.

    Differs from the paper: below 32768 elements, where such a block would be empty, min(1024, n) near-equal blocks.
    """
    size = n // BLOCKS // 32 * 32
    if size == 0:
        return [0, *(span.stop for span in spans(n, min(BLOCKS, n)))]
    return [*range(0, BLOCKS * size, size), n]


def block_spans(edges: Sequence[int], blocks: Sequence[int]) -> list[Span]:
    """Return the partitions that hold `blocks[p]` adjacent blocks each."""
    ends = [0, *accumulate(blocks)]
    return [Span(edges[start], edges[stop]) for start, stop in pairwise(ends)]


def rebalanced(blocks: Sequence[int], loads: Sequence[int], union: int, edges: Sequence[int]) -> list[int]:
    """Return how many blocks each partition has after neighbours out of balance have handed one on, from left to right.

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
        if high > _UPPER and low < _LOWER:
            giver, taker = left, right
        elif high < _LOWER and low > _UPPER:
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
        """Return P partitions of equal mass and at least `least` elements each (fewer when n < P * least). Without mass: equal lengths."""
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
        """Add a step: `index` [k_1 + k_2 + ...] holds the `counts[r]` positions chosen by rank r, each of mass `weights[r]`.

        A step `memory` steps back counts 1/e.
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
    """Return where the blocks of a profile begin, and where the last one ends."""
    return (0, *(span.stop for span in spans(n, blocks)))


def _spread(cuts: list[int], least: int) -> list[int]:
    """Return the ascending `cuts`, moved as little as it takes to leave at least `least` between neighbours; the outer ones stay."""
    cuts = list(cuts)
    for i in range(1, len(cuts) - 1):
        cuts[i] = max(cuts[i], cuts[i - 1] + least)
    for i in range(len(cuts) - 2, 0, -1):
        cuts[i] = min(cuts[i], cuts[i + 1] - least)
    return cuts
