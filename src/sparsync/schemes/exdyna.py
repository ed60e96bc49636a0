"""ExDyna: MiCRO with partitions that change size until their loads are equal (arXiv 2402.13781).

The vector consists of 1024 blocks. At every step, a partition passes one block to a neighbour if the two are out of balance. MiCRO's
scaled threshold selects.

Differs from the paper and the authors' code: as MiCRO does; and blocks are defined for every n, not only from 32768 elements on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from sparsync.base.state import State
from sparsync.core import Bucket, Span, spans
from sparsync.schemes.micro import MiCRO
from sparsync.selection.exclusive import rotation
from sparsync.selection.shares import block_starts

BLOCKS = 1024  # ExDyna's
_UPPER, _LOWER = 1.05, 0.95238  # ExDyna: outside this range, relative to the mean load, a partition is out of balance


@dataclass(frozen=True)
class ExDyna(MiCRO):
    """Send as MiCRO does, with partitions that change size until their loads are equal.

    The settings are MiCRO's. If any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes.
    """

    name = "exdyna"

    def partitions(self, state: State, bucket: Bucket, P: int) -> Sequence[Span]:
        """Compute the partitions of this step. All ranks know the counts of the last step, so all agree."""
        edges = block_edges(bucket.grad.numel())
        return block_spans(edges, state.shared_state("blocks", BlockLoads, bucket, P).next(edges, P))

    def accept(self, state: State, bucket: Bucket, counts: Sequence[int]) -> None:
        loads = state.shared_state("blocks", BlockLoads, bucket, len(counts))
        # Again what `partitions` has used: the counts are still those of the step before.
        loads.blocks = loads.next(block_edges(bucket.grad.numel()), len(counts))
        loads.counts = list(counts)
        loads.step += 1


@dataclass
class BlockLoads:
    """The numbers of blocks in the partitions of one bucket, and of elements selected there."""

    step: int = 0
    blocks: list[int] = field(default_factory=list)  # by partition; empty before the first step
    counts: list[int] = field(default_factory=list)  # elements selected at the last step, by rank

    def next(self, edges: Sequence[int], P: int) -> list[int]:
        """Compute the numbers of blocks by partition at this step."""
        if self.step == 0:
            return [len(span) for span in spans(len(edges) - 1, P)]
        by_partition = [0] * P
        for rank, count in enumerate(self.counts):
            by_partition[rotation(rank, self.step - 1, P)] = count
        return rebalanced(self.blocks, by_partition, sum(self.counts), edges)


def block_edges(n: int) -> list[int]:
    """Return the edges of ExDyna's 1024 blocks: n // 1024 elements, rounded down to a multiple of 32; the last one takes the rest.

    Differs from the paper: below 32768 elements, where such blocks would be empty, there are min(1024, n) near-equal blocks.
    """
    size = n // BLOCKS // 32 * 32
    if size == 0:
        return list(block_starts(n, min(BLOCKS, n)))
    return [*range(0, BLOCKS * size, size), n]


def block_spans(edges: Sequence[int], blocks: Sequence[int]) -> list[Span]:
    """Build partitions of `blocks[p]` adjacent blocks."""
    ends = [0, *accumulate(blocks)]
    return [Span(edges[start], edges[stop]) for start, stop in pairwise(ends)]


def rebalanced(blocks: Sequence[int], loads: Sequence[int], union: int, edges: Sequence[int]) -> list[int]:
    """Move one block between neighbours that are out of balance, from left to right; return the numbers of blocks by partition.

    `loads[p]` is how many elements partition p contributed to the last union. A partition above the range gives a block to a neighbour
    below it, unless the giver would fall below a quarter of the mean number of blocks.
    """
    P, blocks, loads = len(blocks), list(blocks), list(loads)
    mean = union // P
    if mean == 0:  # fewer selected than ranks: nothing to balance
        return blocks
    fewest = (len(edges) - 1) / (4 * P)
    moved = int(edges[1] * (union / edges[-1]))  # elements selected in one block at the mean density
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
