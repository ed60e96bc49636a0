"""What SparseLoCo and DeMo share: tiles of the parameters, the largest elements of each tile, and the mean of selections.

The sides of a tile are the largest divisors, up to 64, of its matrix's sides, so that all tiles of a matrix are equal. A vector is a
matrix of one row, and a tensor of more than two dimensions one of its first dimension and the rest. A parameter of unknown shape is cut
into tiles of 64 x 64; the remainder becomes two tiles: whole rows of 64, and the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsync import Comm, kernels
from sparsync.collectives.values import Quantizer
from sparsync.core import Divisor, ParameterSpan, phase
from sparsync.kernels.rounding import lacking
from sparsync.schemes import Span, Sparse
from sparsync.wire import decode_fixed_length, encode_fixed_length, fixed_length_nbytes

SIDE = 64
SIZE = SIDE * SIDE


@dataclass(frozen=True)
class Block:
    """A matrix of rows x columns elements from `start` on in the bucket, cut into tiles of `side` = (rows, columns)."""

    start: int
    rows: int
    columns: int
    side: tuple[int, int]

    def __len__(self) -> int:
        return self.rows * self.columns

    @property
    def tiles(self) -> int:
        return len(self) // (self.side[0] * self.side[1])

    def cut(self, x: Tensor) -> Tensor:
        """View this matrix in `x` [n] tile by tile: [high, wide, rows and columns of a tile]."""
        high, wide = self.side
        matrix = x[self.start : self.start + len(self)]
        return matrix.view(self.rows // high, high, self.columns // wide, wide).transpose(1, 2)


@dataclass(frozen=True)
class Group:
    """All tiles of one size, processed together: `span` is their place in the vector of `Tiles.take`."""

    side: tuple[int, int]
    blocks: tuple[Block, ...]
    span: Span

    @property
    def size(self) -> int:
        """The number of elements per tile."""
        return self.side[0] * self.side[1]

    def of(self, tiles: Tensor) -> Tensor:
        """View this group in `tiles` [n], [tiles, rows, columns]."""
        return self.span.of(tiles).view(-1, *self.side)

    def parts(self, tiles: Tensor) -> list[Tensor]:
        """View each block in `tiles` [n], as `Block.cut` shapes it."""
        parts = self.of(tiles).split([block.tiles for block in self.blocks])
        return [
            part.view(block.rows // self.side[0], -1, *self.side)
            for part, block in zip(parts, self.blocks, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of one layout. They form a vector of the bucket's n elements in another order, tile after tile."""

    groups: tuple[Group, ...]
    firsts: Tensor  # [groups] the start of each group in that vector
    sides: Tensor  # [groups, 2]
    numbers: Tensor  # [groups + 1] the number of each group's first tile, then the total
    starts: Tensor  # [tiles] the position in the bucket of each tile's first element
    strides: Tensor  # [tiles] the distance in the bucket between a tile's rows

    def take(self, x: Tensor) -> Tensor:
        """Copy the elements of `x` [n] tile after tile."""
        tiles = torch.empty_like(x)
        for group in self.groups:
            for block, part in zip(group.blocks, group.parts(tiles), strict=True):
                part.copy_(block.cut(x))
        return tiles

    def put_(self, x: Tensor, tiles: Tensor) -> None:
        """Write `tiles` [n] to their places in `x` [n]."""
        for group in self.groups:
            for block, part in zip(group.blocks, group.parts(tiles), strict=True):
                block.cut(x).copy_(part)

    def largest(self, tiles: Tensor, per_tile: int) -> Tensor:
        """Find the positions in `tiles` [n] of the `per_tile` elements of largest magnitude per tile: int64, ascending.

        A tile with no more elements returns all of them. NaN counts as largest.
        """
        found = [torch.empty(0, dtype=torch.int64, device=tiles.device)]
        for group in self.groups:
            index = group.of(tiles).flatten(1).abs().topk(min(per_tile, group.size), dim=1).indices
            first = torch.arange(group.span.start, group.span.stop, group.size, device=tiles.device)
            found.append((index + first[:, None]).flatten())
        return torch.cat(found).sort().values

    def places(self, index: Tensor) -> Tensor:
        """Map positions `index` [k] in the vector of tiles to the bucket, int64."""
        firsts, sides, numbers, starts, strides = (
            each.to(index.device) for each in (self.firsts, self.sides, self.numbers, self.starts, self.strides)
        )
        group = torch.searchsorted(firsts, index.long(), right=True) - 1
        rows, columns = sides[group].unbind(1)
        inside = index - firsts[group]
        tile = numbers[group] + inside // (rows * columns)
        return starts[tile] + inside % (rows * columns) // columns * strides[tile] + inside % columns


def selected_in_tiles(layout: Sequence[ParameterSpan], per_tile: int) -> list[int]:
    """Count the elements that `Tiles.largest` finds in each block, in the order of the vector of tiles, without building it."""
    blocks = [block for blocks in _by_side(tuple(layout)).values() for block in blocks]
    return [block.tiles * min(per_tile, block.side[0] * block.side[1]) for block in blocks]


@lru_cache(maxsize=256)
def tiles_of(layout: tuple[ParameterSpan, ...]) -> Tiles:
    """Cut a bucket with this layout into tiles."""
    groups: list[Group] = []
    every: list[tuple[int, int]] = []  # start and stride of each tile
    firsts, numbers = [0], [0]
    for side, blocks in _by_side(layout).items():
        groups.append(Group(side, tuple(blocks), Span(firsts[-1], firsts[-1] + sum(map(len, blocks)))))
        firsts.append(groups[-1].span.stop)
        every += [
            (block.start + i * block.columns + j, block.columns)
            for block in blocks
            for i in range(0, block.rows, side[0])
            for j in range(0, block.columns, side[1])
        ]
        numbers.append(len(every))
    starts, strides = zip(*every, strict=True) if every else ((), ())
    sides = torch.tensor([group.side for group in groups], dtype=torch.int64).view(-1, 2)
    firsts, numbers, starts, strides = (
        torch.tensor(each, dtype=torch.int64) for each in (firsts, numbers, starts, strides)
    )
    return Tiles(tuple(groups), firsts[:-1], sides, numbers, starts, strides)


@lru_cache(maxsize=256)
def _by_side(layout: tuple[ParameterSpan, ...]) -> dict[tuple[int, int], list[Block]]:
    """Group the blocks of all parameters by the size of their tiles."""
    found: dict[tuple[int, int], list[Block]] = {}
    for entry in layout:
        for block in _matrices(entry):
            found.setdefault(block.side, []).append(block)
    return found


def _matrices(entry: ParameterSpan) -> list[Block]:
    n, start = len(entry.span), entry.span.start
    if not n:
        return []
    if entry.shape:
        rows = entry.shape[0] if len(entry.shape) > 1 else 1
        return [Block(start, rows, n // rows, (_side(rows), _side(n // rows)))]
    high, rest = divmod(n, SIZE)
    rows, columns = divmod(rest, SIDE)
    whole, after = Block(start, SIDE * high, SIDE, (SIDE, SIDE)), start + SIZE * high
    parts = [whole, Block(after, rows, SIDE, (rows, SIDE)), Block(after + SIDE * rows, 1, columns, (1, columns))]
    return [part for part in parts if len(part)]


def _side(length: int) -> int:
    """Find the largest divisor of `length` up to 64."""
    return next(side for side in range(min(SIDE, length), 0, -1) if length % side == 0)


def mean_of_selections(own: Sparse, codec: Quantizer, divide_by: Divisor, comm: Comm) -> tuple[Sparse, Tensor]:
    """Compute the mean of all ranks' selections, which have equal sizes, and the rounding error of this rank's values, [k].

    "contributors" divides the sum at a position by the number of ranks that sent it, "ranks" by P.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of this rank's elements
    """
    k, n, dtype, P = own.index.numel(), own.length, own.value.dtype, comm.size
    head = fixed_length_nbytes(k, n)
    with phase("encode"):
        # Send rounded values as their share of the mean, value / P: multiplying by P is exact, unlike a mean of decoded values.
        values = codec.encode(own.value if codec.exact else own.value / P)
        packet = torch.cat([encode_fixed_length(own.index, n), values])
    packets = comm.all_gather(packet, [packet.numel()] * P)
    with phase("decode"):
        gathered = [
            Sparse(decode_fixed_length(each[:head], k, n), codec.decode(each[head:], k, dtype), n) for each in packets
        ]
        union = kernels.coalesce(gathered)  # in rank order, so the same bits on every rank
        share = 1 if codec.exact else P
        if divide_by == "ranks":
            mean = replace(union, value=union.value / P if codec.exact else union.value)
        else:
            senders = kernels.coalesce([replace(each, value=torch.ones_like(each.value)) for each in gathered])
            mean = replace(union, value=union.value * share / senders.value)
        return mean, lacking(own.value, codec.decode(values, k, dtype), share)


def check_per_tile(per_tile: object) -> None:
    """Raise ValueError unless `per_tile` is a positive integer."""
    if not isinstance(per_tile, int) or isinstance(per_tile, bool) or per_tile < 1:
        raise ValueError(
            f"per_tile must be a whole number of at least 1, what a rank sends of each tile, got {per_tile!r}"
        )
