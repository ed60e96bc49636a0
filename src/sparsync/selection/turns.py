"""Turns: which elements take part in a step where all ranks send the same ones, so that all of them have had a turn after some steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.core import Span, spans
from sparsync.selection.exclusive import BlockCyclic, put_rows_, rotations, take_rows


@dataclass(frozen=True)
class Turn:
    """The elements of one turn: rows of each rank's region, and perhaps its tail. Taken, those of a region are adjacent, in rank order.

    The parts of the regions are as long as `spans(length, P)`.
    """

    n: int
    row: int
    numbers: Sequence[Tensor]  # int64, which rows of the vector, for each region
    tails: Sequence[Span]  # of each region

    @property
    def length(self) -> int:
        """K, the number of elements."""
        return sum(each.numel() * self.row for each in self.numbers) + sum(map(len, self.tails))

    def of(self, x: Tensor) -> Tensor:
        """Return the elements of `x` [n] in this turn, [K], copied."""
        out = x.new_empty(self.length)
        for numbers, tail, part in self._parts(out):
            take_rows(x, self.row, numbers, tail, part)
        return out

    def put_(self, x: Tensor, value: Tensor) -> None:
        """Write `value` [K] to the elements of `x` [n] in this turn: the inverse of `of`."""
        for numbers, tail, part in self._parts(value):
            put_rows_(x, self.row, numbers, tail, part)

    def _parts(self, taken: Tensor) -> Iterator[tuple[Tensor, Span, Tensor]]:
        """Return for each region which rows it has, its tail, and its part of `taken`."""
        chunks = spans(taken.numel(), len(self.numbers))
        return zip(self.numbers, self.tails, (chunk.of(taken) for chunk in chunks), strict=True)


@dataclass(frozen=True)
class Turns:
    """The turns of a vector of n elements on P ranks, at most `every`: each element is in one of them.

    The regions of the ranks are block-cyclic. A group of adjacent rows, one of each region, has its turn together, so that owners have
    equally much to do and an element keeps its owner. The order of turns rotates by a pseudo-random amount, or a matrix whose rows fit
    them would have whole columns in one turn. So it does from round to round of steps, or a bucket that is reduced in every second step
    would have the same turns again and again. An element waits for its turn at most 2 `count` - 1 steps.
    """

    n: int
    P: int
    every: int

    @property
    def regions(self) -> BlockCyclic:
        """The region of each rank: whole rows, and a tail that is shorter, or empty."""
        return BlockCyclic(self.n, self.P, 256)

    @property
    def count(self) -> int:
        """The number of turns: `every`, where that leaves a row of each region for each turn."""
        return max(1, min(self.every, self.regions.groups))

    def number(self, step: int) -> int:
        """Return which turn it is at `step`."""
        return (step + rotations(step // self.count, self.count)) % self.count

    def length(self, step: int) -> int:
        """Return K, the number of elements whose turn it is at `step`: at least one where there are any."""
        regions, count, number = self.regions, self.count, self.number(step)
        # The tails count as one more group.
        rounds, place = divmod(regions.groups, count)
        first = rotations(rounds, count)
        groups = rounds + ((number - first) % count < place)
        tails = self.n - regions.groups * regions.row * self.P
        return groups * regions.row * self.P + tails * ((first + place) % count == number)

    def at(self, number: int, device: torch.device) -> Turn:
        """Return the elements of a turn."""
        regions, count = self.regions, self.count
        rounds = torch.arange(regions.groups // count + 1, device=device)
        groups = rounds * count + (number - rotations(rounds, count)) % count
        whole = groups[groups < regions.groups]
        has_tails = bool((groups == regions.groups).any())
        numbers: list[Tensor] = []
        tails: list[Span] = []
        for p, length in enumerate(regions.lengths()):
            starts = regions.rows(p, device).starts
            numbers.append(starts[whole].long() // regions.row)
            start = int(starts[-1])
            tails.append(Span(start, start + (length - regions.groups * regions.row) * has_tails))
        return Turn(self.n, regions.row, numbers, tails)
