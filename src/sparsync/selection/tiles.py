"""Tiles of 64 x 64 elements that cover the matrices of a bucket, and the largest elements of each tile.

A tensor of more than one dimension counts as a matrix of its first one and the rest. Vectors, and parameters whose shape the bucket does
not tell, are rows of 64; what is left of them is a tile of one row. Where a matrix is no multiple of 64, its last tiles are smaller.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsync.core import ParameterSpan

SIDE = 64
SIZE = SIDE * SIDE


@dataclass(frozen=True)
class Block:
    """A matrix of rows x columns elements from `start` on, and its tiles, row by row, from number `first` on."""

    start: int
    rows: int
    columns: int
    first: int
    vector: bool  # rows are pieces of a vector, not of a matrix

    @property
    def high(self) -> int:
        """The number of tiles that lie one below the other."""
        return -(-self.rows // SIDE)

    @property
    def wide(self) -> int:
        """The number of tiles that lie beside each other."""
        return -(-self.columns // SIDE)

    def of(self, x: Tensor) -> Tensor:
        """Return the view of `x` [n] on this matrix, [rows, columns]."""
        return x[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)

    def tiles(self, tiles: Tensor) -> Tensor:
        """Return the view of `tiles` [count, 64, 64] on those of this matrix, [high, 64, wide, 64]."""
        own = tiles[self.first : self.first + self.high * self.wide]
        return own.view(self.high, self.wide, SIDE, SIDE).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one layout."""

    blocks: tuple[Block, ...]
    count: int
    rows: Tensor  # [count] how many rows each tile really has
    columns: Tensor  # [count]
    vector: Tensor  # [count] bool
    starts: Tensor  # [count] where its first element lies in the bucket
    strides: Tensor  # [count] from one of its rows to the next, in the bucket
    parameters: tuple[int, ...]  # the number of tiles of each parameter that has any

    def take(self, x: Tensor) -> Tensor:
        """Return the tiles of `x` [n], copied: [count, 64, 64], zero beyond the edges."""
        tiles = x.new_empty(self.count, SIDE, SIDE)
        for block in self.blocks:
            missing = (0, block.wide * SIDE - block.columns, 0, block.high * SIDE - block.rows)
            matrix = pad(block.of(x), missing) if any(missing) else block.of(x)
            block.tiles(tiles).copy_(matrix.view(block.high, SIDE, block.wide, SIDE))
        return tiles

    def put_(self, x: Tensor, tiles: Tensor) -> None:
        """Write `tiles` [count, 64, 64] to their places in `x` [n]; what lies beyond the edges is dropped."""
        for block in self.blocks:
            matrix = block.tiles(tiles).reshape(block.high * SIDE, block.wide * SIDE)
            block.of(x).copy_(matrix[: block.rows, : block.columns])

    def largest(self, tiles: Tensor, density: float) -> Tensor:
        """Return the positions in `tiles` of the share `density` of each tile of largest magnitude, rounded up: int64, ascending.

        NaN counts as largest. `counts` says how many they are in each tile.
        """
        counts = self.counts(density)
        if not self.count:
            return torch.empty(0, dtype=torch.int64, device=tiles.device)
        most = int(counts.max())
        found = tiles.view(-1, SIZE).abs().topk(most, dim=1).indices  # [count, most], the largest first
        found += SIZE * torch.arange(self.count, device=found.device)[:, None]
        if int(counts.min()) < most:
            found = found[torch.arange(most) < counts[:, None]]
        return found.flatten().sort().values

    def counts(self, density: float) -> Tensor:
        """Return how many elements of each tile `largest` finds, int64 [count]: at least one."""
        return (density * (self.rows * self.columns).double() - 1e-9).ceil().long().clamp(min=1)

    def parameter_counts(self, density: float) -> tuple[int, ...]:
        """Return how many elements of each parameter `largest` finds, for parameters that have any."""
        return tuple(int(part.sum()) for part in self.counts(density).split(list(self.parameters)))

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the positions `index` [k] lie in the bucket, int64, and which of them do: bool [k]; others are beyond an edge."""
        tile, inside = index.long() // SIZE, index.long() % SIZE
        row, column = inside // SIDE, inside % SIDE
        own = [each.to(index.device)[tile] for each in (self.starts, self.strides, self.rows, self.columns)]
        return own[0] + row * own[1] + column, (row < own[2]) & (column < own[3])


def selected_in_tiles(layout: Iterable[ParameterSpan], density: float) -> tuple[list[int], int]:
    """Return how many elements `Tiles.largest` finds in each parameter that has any, and the number of tiles: without making them."""
    counts: list[int] = []
    tiles = 0
    for entry in layout:
        kinds = [
            (high * wide, _share(density, rows * columns))
            for _, height, width, _ in _matrices(entry)
            for rows, high in _sides(height)
            for columns, wide in _sides(width)
        ]
        tiles += sum(number for number, _ in kinds)
        counts += [sum(number * each for number, each in kinds)] if kinds else []
    return counts, tiles


def _share(density: float, elements: int) -> int:
    return max(1, math.ceil(density * elements - 1e-9))


def _sides(length: int) -> list[tuple[int, int]]:
    """Return the sides of the tiles along an edge of this length, and how many tiles have each."""
    whole, rest = divmod(length, SIDE)
    return [(side, number) for side, number in ((SIDE, whole), (rest, 1)) if side * number]


@lru_cache(maxsize=256)
def tiles_of(layout: tuple[ParameterSpan, ...]) -> Tiles:
    """Return the tiles of a bucket with this layout."""
    blocks: list[Block] = []
    parameters: list[int] = []
    first = 0
    for entry in layout:
        before = first
        for start, rows, columns, vector in _matrices(entry):
            blocks.append(Block(start, rows, columns, first, vector))
            first += blocks[-1].high * blocks[-1].wide
        if first > before:
            parameters.append(first - before)
    every = [(block, i, j) for block in blocks for i in range(block.high) for j in range(block.wide)]
    return Tiles(
        tuple(blocks),
        first,
        _numbers(min(SIDE, block.rows - i * SIDE) for block, i, _ in every),
        _numbers(min(SIDE, block.columns - j * SIDE) for block, _, j in every),
        _numbers(block.vector for block, _, _ in every).bool(),
        _numbers(block.start + i * SIDE * block.columns + j * SIDE for block, i, j in every),
        _numbers(block.columns for block, _, _ in every),
        tuple(parameters),
    )


def _matrices(entry: ParameterSpan) -> list[tuple[int, int, int, bool]]:
    """Return the matrices of one parameter: (start, rows, columns, whether it is a vector)."""
    n, start = len(entry.span), entry.span.start
    if len(entry.shape) > 1 and n:
        return [(start, entry.shape[0], n // entry.shape[0], False)]
    whole = n // SIDE * SIDE
    pieces = [(start, whole // SIDE, SIDE, True), (start + whole, 1, n - whole, True)]
    return [piece for piece in pieces if piece[1] * piece[2]]


def _numbers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)
