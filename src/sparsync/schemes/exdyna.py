"""ExDyna: MiCRO with partitions that change size until all of them hold equally much (arXiv 2402.13781).

`published()` is the paper's algorithm: the vector consists of 1024 blocks, and neighbouring partitions out of balance hand each other
one block a step; selection is by MiCRO's scaled threshold. The plain setting sends equally many elements from every partition, which
needs no counts and no padding, and moves all boundaries at every step to where the partitions' smallest selected magnitudes, which
travel with the positions, become equal; in balance that is the selection of one threshold for all.

Differs from the paper and the authors' code: as MiCRO; and blocks are defined for every n, not only from 32768 elements on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from sparsync.base.state import State
from sparsync.core import Bucket, Comm, Span, numbers_of, or_found_inf, phase, raise_if_found_inf, spans
from sparsync.feedback import Accumulator
from sparsync.schemes.micro import (
    EqualSpans,
    MiCRO,
    Selection,
    Selector,
    ThresholdSelection,
    examine,
    gather_positions,
    largest_of,
    partition_lengths,
)
from sparsync.selection.exclusive import Contiguous, budget, rotation
from sparsync.selection.shares import (
    Profile,
    before_blocks,
    block_starts,
    equal_shares,
    levels_of,
    profile_memory,
    relative_magnitudes,
    smallest_of,
)

BLOCKS = 1024  # ExDyna's
_UPPER, _LOWER = 1.05, 0.95238  # ExDyna: a partition with more, or less, of the mean load is out of balance


@dataclass(frozen=True)
class ExDyna(MiCRO):
    """Send what MiCRO does, with partitions that change size until they hold equally much.

    Settings are MiCRO's; `rule="quotas"` stands for equal counts and free boundaries. Where any rank holds NaN or Inf, every gradient
    becomes NaN and nothing else changes; this travels on the first message.
    """

    name = "exdyna"

    @property
    def selector(self) -> Selector:
        """The way in which the ranks agree on positions."""
        if self.rule == "quotas":
            return EqualCountSelection(self.density, self.dense, self.refresh)
        return ThresholdSelection(self.density, self.bug_compatible, RebalancedBlocks())


@dataclass
class BlockLoads:
    """What the published partitions of one bucket follow."""

    step: int = 0
    blocks: list[int] = field(default_factory=list)  # of each partition; empty before the first step
    counts: list[int] = field(default_factory=list)  # what each rank selected at the last step


class RebalancedBlocks(EqualSpans):
    """The paper's partitions: neighbours out of balance hand on a block at each step. All ranks know the counts, so all agree."""

    def spans(self, state: State, bucket: Bucket, P: int) -> Sequence[Span]:
        edges = block_edges(bucket.grad.numel())
        return block_spans(edges, self._blocks(state.shared_state("blocks", BlockLoads, bucket, P), edges, P))

    def accept(self, state: State, bucket: Bucket, counts: Sequence[int]) -> None:
        loads = state.shared_state("blocks", BlockLoads, bucket, len(counts))
        loads.blocks = self._blocks(loads, block_edges(bucket.grad.numel()), len(counts))
        loads.counts = list(counts)
        loads.step += 1

    def _blocks(self, loads: BlockLoads, edges: Sequence[int], P: int) -> list[int]:
        if loads.step == 0:
            return [len(span) for span in spans(len(edges) - 1, P)]
        by_partition = [0] * P
        for rank, count in enumerate(loads.counts):
            by_partition[rotation(rank, loads.step - 1, P)] = count
        return rebalanced(loads.blocks, by_partition, sum(loads.counts), edges)


@dataclass(frozen=True)
class EqualCountSelection:
    """Equally many elements from each partition; boundaries move to where a profile of past selections has equal mass."""

    density: float
    dense: Sequence[str]
    refresh: float

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        n, P, t = bucket.grad.numel(), comm.size, bucket.step
        profile = state.shared_state("profile", Profile, bucket, P)
        with phase("select"):
            allowed = budget(self.density, bucket.layout, self.dense, self.refresh, t)
            cut = profile.cut(n, P, least=2 * -(-allowed.count // P))
            mine = examine(Contiguous(cut), allowed, comm.rank, t, acc.residual.device)
            counts = equal_shares(mine.free, allowed.open_count, t // P)
        (own,) = largest_of(acc, [mine], [counts[comm.rank]])
        smallest = smallest_of(own.value)
        level = or_found_inf(levels_of(smallest), acc.is_finite)
        heads, places = gather_positions(level, own.index, counts, mine.lengths, comm)
        # In the order of the partitions, in which they ascend.
        ranks = [rotation(p, -t, P) for p in range(P)]
        with phase("decode"):
            found = torch.cat([places[rank] + span.start for rank, span in zip(ranks, cut, strict=True)])
            # A host sync: boundaries follow from it.
            levels, before, (threshold,) = numbers_of(heads, before_blocks(found, n), smallest)
        raise_if_found_inf(levels)

        def commit() -> None:
            weights = relative_magnitudes([levels[rank] for rank in ranks])
            profile.observe(before, [counts[rank] for rank in ranks], weights, profile_memory(allowed.count, P))

        return Selection(
            [mine.known, found],
            counts,
            threshold,
            known=mine.known.numel(),
            details=partition_lengths(cut),
            commit=commit,
        )


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
