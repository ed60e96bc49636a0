"""Turns: a rotation of parts of a vector, for steps in which all ranks send the same elements."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.core import Span, spans
from sparsync.selection.exclusive import BlockCyclic, rotations


@dataclass(frozen=True)
class Turn:
    """The K elements of one turn: rows of every rank's region, and perhaps its tail. `of` puts them in the order of the ranks.

    The parts of the regions are as long as `spans(K, P)`.
    """

    n: int
    row: int
    numbers: Tensor  # int64 [P, rows], numbers of rows of the vector
    tails: Sequence[Span]  # by region, adjacent at the end of the vector; all empty in other turns

    def of(self, x: Tensor) -> Tensor:
        """Copy the elements of `x` [n] in this turn, [K]."""
        rows = self._rows(x).index_select(0, self.numbers.view(-1)).view(len(self.tails), self._whole)
        if not any(map(len, self.tails)):
            return rows.view(-1)
        return torch.cat([part for region, tail in zip(rows, self.tails, strict=True) for part in (region, tail.of(x))])

    def put_(self, x: Tensor, value: Tensor) -> None:
        """Write `value` [K] to the elements of `x` [n] in this turn: the inverse of `of`."""
        rows = value
        if any(map(len, self.tails)):
            parts = [chunk.of(value) for chunk in spans(value.numel(), len(self.tails))]
            rows = torch.cat([part[: self._whole] for part in parts])
            x[self.tails[0].start :] = torch.cat([part[self._whole :] for part in parts])
        self._rows(x).index_copy_(0, self.numbers.view(-1), rows.view(-1, self.row))

    @property
    def _whole(self) -> int:
        """The number of a region's elements in rows."""
        return self.numbers.shape[1] * self.row

    def _rows(self, x: Tensor) -> Tensor:
        return x[: self.n // self.row * self.row].view(-1, self.row)


@dataclass(frozen=True)
class Turns:
    """A partition of a vector of n elements on P ranks into at most `every` turns.

    The regions of the ranks are block-cyclic. The adjacent rows of a group, one per region, have the same turn, so that owners have
    equal load and an element keeps its owner. The order of turns rotates by a pseudo-random amount from group to group; otherwise a matrix
    whose rows fit them would have whole columns in one turn. It also rotates from round to round of steps; otherwise a bucket that is
    reduced in every second step would repeat the same turns. An element waits for its turn at most 2 `count` - 1 steps.
    """

    n: int
    P: int
    every: int

    @property
    def regions(self) -> BlockCyclic:
        """The regions of the ranks: whole rows, and a shorter or empty tail."""
        return BlockCyclic(self.n, self.P, 256)

    @property
    def count(self) -> int:
        """The number of turns: `every`, or fewer if the regions have fewer rows than that."""
        return max(1, min(self.every, self.regions.groups))

    def number(self, step: int) -> int:
        """Return the number of the turn at `step`."""
        return (step + rotations(step // self.count, self.count)) % self.count

    def length(self, step: int) -> int:
        """Return K, the number of elements of the turn at `step`: at least 1 unless the vector is empty."""
        regions, count, number = self.regions, self.count, self.number(step)
        # The tails count as one more group.
        rounds, place = divmod(regions.groups, count)
        first = rotations(rounds, count)
        groups = rounds + ((number - first) % count < place)
        tails = self.n - regions.groups * regions.row * self.P
        return groups * regions.row * self.P + tails * ((first + place) % count == number)

    def at(self, number: int, device: torch.device) -> Turn:
        """Build a turn by its number."""
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
        return Turn(self.n, regions.row, torch.stack(numbers), tails)
