"""ExDyna: MiCRO with partitions that change size until all of them hold equally much (arXiv 2402.13781).

The vector consists of 1024 blocks. At each step, neighbouring partitions out of balance hand each other one block. Selection is by
MiCRO's scaled threshold.

Differs from the paper and the authors' code: as MiCRO; and blocks are defined for every n, not only from 32768 elements on.
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
_UPPER, _LOWER = 1.05, 0.95238  # ExDyna: a partition with more, or less, of the mean load is out of balance


@dataclass(frozen=True)
class ExDyna(MiCRO):
    """Send what MiCRO does, with partitions that change size until they hold equally much.

    Settings are MiCRO's. Where any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes.
    """

    name = "exdyna"

    def partitions(self, state: State, bucket: Bucket, P: int) -> Sequence[Span]:
        """Return the partitions of this step. All ranks know the counts of the last one, so all agree."""
        edges = block_edges(bucket.grad.numel())
        return block_spans(edges, state.shared_state("blocks", BlockLoads, bucket, P).next(edges, P))

    def accept(self, state: State, bucket: Bucket, counts: Sequence[int]) -> None:
        loads = state.shared_state("blocks", BlockLoads, bucket, len(counts))
        loads.blocks = loads.next(block_edges(bucket.grad.numel()), len(counts))
        loads.counts = list(counts)
        loads.step += 1


@dataclass
class BlockLoads:
    """How many blocks each partition of one bucket has, and what was selected in them."""

    step: int = 0
    blocks: list[int] = field(default_factory=list)  # of each partition; empty before the first step
    counts: list[int] = field(default_factory=list)  # what each rank selected at the last step

    def next(self, edges: Sequence[int], P: int) -> list[int]:
        """Return how many blocks each partition has at this step."""
        if self.step == 0:
            return [len(span) for span in spans(len(edges) - 1, P)]
        by_partition = [0] * P
        for rank, count in enumerate(self.counts):
            by_partition[rotation(rank, self.step - 1, P)] = count
        return rebalanced(self.blocks, by_partition, sum(self.counts), edges)


def block_edges(n: int) -> list[int]:
    """Return the ends of ExDyna's blocks: 1024 of n // 1024 elements rounded down to a multiple of 32, the last one with the rest.

    Differs from the paper: below 32768 elements, where such a block would be empty, min(1024, n) near-equal blocks.
    """
    size = n // BLOCKS // 32 * 32
    if size == 0:
        return list(block_starts(n, min(BLOCKS, n)))
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
