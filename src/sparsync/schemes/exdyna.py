"""ExDyna: MiCRO with partitions that change size until all of them hold equally much (arXiv 2402.13781).

`published()` is the paper's algorithm: the vector consists of 1024 blocks, and neighbouring partitions out of balance hand each other
one block a step; selection is by MiCRO's scaled threshold. The plain setting sends equally many elements from every partition, which
needs no counts and no padding, and moves all boundaries at every step to where the partitions' smallest selected magnitudes, which
travel with the positions, become equal; in balance that is the selection of one threshold for all.

Differs from the paper and the authors' code: as MiCRO; and blocks are defined for every n, not only from 32768 elements on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsync.base.error_feedback import ByBucket
from sparsync.comm.plan import Given, all_gather_exchange, packet_tally
from sparsync.core import FOUND_INF, Bucket, Comm, Span, phase, raise_if_found_inf, spans
from sparsync.feedback import Accumulator, smallest_magnitude
from sparsync.schemes.micro import (
    EqualSpans,
    MiCRO,
    PlannedSelection,
    Selection,
    Selector,
    ThresholdScaling,
    ThresholdSelection,
    examine,
    partition_lengths,
)
from sparsync.selection.exclusive import Contiguous, apportion, budget, by_rank, relative_magnitudes, rotation, sketch
from sparsync.wire import decode_fixed_length, encode_fixed_length, fixed_length_nbytes

_LEVEL_NBYTES = 2
# Boundaries follow selections over at least this number of steps, and of elements of each partition.
_MEMORY_STEPS = 8
_MEMORY_COUNT = 32
BLOCKS = 1024  # ExDyna's; also the resolution of a Profile
_UPPER, _LOWER = 1.05, 0.95238  # ExDyna: a partition with more, or less, of the mean load is out of balance
_MASS = 1 << 40  # what the masses of a profile sum up to: integers, so that all ranks cut the same on any hardware
_FLOOR = 8  # a profile spreads 1/8 of its mass evenly, so that no partition is longer than 8 n/P


@dataclass
class ExDyna(MiCRO):
    """Send what MiCRO does, with partitions that change size until they hold equally much.

    Settings are MiCRO's; `rule="quotas"` stands for equal counts and free boundaries. Where any rank holds NaN or Inf, every gradient
    becomes NaN and nothing else changes; this travels on the first message.
    """

    name = "exdyna"

    def _selector(self) -> Selector:
        if self.rule == "quotas":
            return EqualCountSelection(self.density, self.dense, self.refresh, self.shared_state("profile", Profile))
        return ThresholdSelection(
            self.density,
            self.bug_compatible,
            self.shared_state("scaling", ThresholdScaling),
            RebalancedBlocks(self.shared_state("blocks", BlockLoads)),
        )


@dataclass
class BlockLoads:
    """What the published partitions of one bucket follow."""

    step: int = 0
    blocks: list[int] = field(default_factory=list)  # of each partition; empty before the first step
    counts: list[int] = field(default_factory=list)  # what each rank selected at the last step


@dataclass
class RebalancedBlocks(EqualSpans):
    """The paper's partitions: neighbours out of balance hand on a block at each step. All ranks know the counts, so all agree."""

    loads: ByBucket[BlockLoads]

    def spans(self, bucket: Bucket, P: int) -> Sequence[Span]:
        edges = block_edges(bucket.grad.numel())
        return block_spans(edges, self._blocks(self.loads.of(bucket, P), edges, P))

    def accept(self, bucket: Bucket, counts: Sequence[int]) -> None:
        loads = self.loads.of(bucket, len(counts))
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


@dataclass
class EqualCountSelection:
    """Equally many elements from each partition; boundaries move to where a profile of past selections has equal mass."""

    density: float
    dense: Sequence[str]
    refresh: float
    profiles: ByBucket[Profile]

    def select(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        n, P, t = bucket.grad.numel(), comm.size, bucket.step
        profile, values = self.profiles.of(bucket, P), acc.values
        with phase("select"):
            allowed = budget(self.density, bucket.layout, self.dense, self.refresh, t)
            cut = profile.cut(n, P, least=2 * -(-allowed.count // P))
            mine = examine(values, Contiguous(cut), allowed.known_index(acc.residual.device), comm.rank, t)
            if not acc.finite:
                mine.chunk.nan_to_num_()
            counts = _equal_counts(mine.free, allowed.open_count, t)
            own = mine.largest(acc.top_k_nonzero_of(mine.chunk, counts[comm.rank]), counts[comm.rank])
        with phase("encode"):
            positions = encode_fixed_length(own.index, mine.lengths[comm.rank])
            packet = torch.cat([_level(own.value, acc.finite).to(positions.device), positions])
        sizes = map(fixed_length_nbytes, counts, mine.lengths)
        packets = comm.all_gather(packet, [_LEVEL_NBYTES + size for size in sizes])
        # A host sync: all ranks need the levels.
        levels = [int(each[:_LEVEL_NBYTES].clone().view(torch.int16)) for each in packets]
        raise_if_found_inf(levels)
        with phase("decode"):
            selected = [
                decode_fixed_length(each[_LEVEL_NBYTES:], count, len(span)).long() + span.start
                for each, count, span in zip(packets, counts, by_rank(cut, t), strict=True)
            ]
            found = torch.cat(selected)

        def commit() -> None:
            memory = max(_MEMORY_STEPS, -(-_MEMORY_COUNT * P // allowed.count))
            profile.observe(found, counts, relative_magnitudes(levels), n, memory)

        return Selection(
            torch.cat([mine.known, found]),
            counts,
            smallest_magnitude(own.value),
            known=mine.known.numel(),
            details=partition_lengths(cut),
            commit=commit,
        )

    def planned(self, given: Given) -> PlannedSelection:
        """Return what the budget allows, in equal counts; partitions are taken to be equally long. Figures as MiCRO's."""
        n, P, t = given.n, given.P, given.step or 0
        allowed = budget(self.density, given.parameters, self.dense, self.refresh, t)
        lengths = given.by_rank("lengths") or by_rank([len(span) for span in spans(n, P)], t)
        counts = given.by_rank("selected") or _equal_counts(lengths, allowed.open_count, t)
        sizes = packet_tally(counts, lengths, lambda count, length: _LEVEL_NBYTES + fixed_length_nbytes(count, length))
        return PlannedSelection([all_gather_exchange(sizes)], allowed.count, max(lengths))


def _equal_counts(free: Sequence[int], total: int, step: int) -> list[int]:
    """Return how many of `total` elements each rank selects, of the `free[r]` it can choose from: equally many.

    What does not divide goes to other ranks every P steps, so that with fewer elements than ranks each rank selects in each partition
    once in P^2 steps.
    """
    P = len(free)
    first = step // P % P
    counts = apportion([1] * P, [*free[first:], *free[:first]], total)
    return [*counts[P - first :], *counts[: P - first]]


def _level(value: Tensor, finite: bool) -> Tensor:
    """Return the level of the smallest selected magnitude, or FOUND_INF, in 2 bytes."""
    level = sketch(value, [value.numel()]) if finite else torch.tensor([FOUND_INF])
    return level.to(torch.int16).view(torch.uint8)


def block_edges(n: int) -> list[int]:
    """Return the ends of ExDyna's blocks: 1024 of n // 1024 elements rounded down to a multiple of 32, the last one with the rest.

    Differs from the paper: below 32768 elements, where such a block would be empty, min(1024, n) near-equal blocks.
    """
    size = n // BLOCKS // 32 * 32
    if size == 0:
        return list(_edges(n, min(BLOCKS, n)))
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
