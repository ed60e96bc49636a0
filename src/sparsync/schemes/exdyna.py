"""ExDyna: MiCRO with partitions that change size until all of them hold equally much (arXiv 2402.13781).

`published()` is the paper's algorithm: the vector consists of 1024 blocks, and neighbouring partitions out of balance hand each other
one block a step; selection is by MiCRO's scaled threshold. The plain setting sends equally many elements from every partition, which
needs no counts and no padding, and moves all boundaries at every step to where the partitions' smallest selected magnitudes, which
travel with the positions, become equal; in balance that is the selection of one threshold for all.

Differs from the paper and the authors' code: as MiCRO; and blocks are defined for every n, not only from 32768 elements on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsync.base.error_feedback import ByBucket
from sparsync.collectives.exchange import all_gather
from sparsync.comm.busiest import all_gather_exchange
from sparsync.comm.plan import Given
from sparsync.core import FOUND_INF, Bucket, Comm, Span, raise_if_found_inf, spans
from sparsync.feedback import Accumulator, smallest_magnitude
from sparsync.phases import phase
from sparsync.schemes.micro import (
    MiCRO,
    PlannedSelection,
    Selection,
    Selector,
    ThresholdSelection,
    examine,
    packets_of,
    partition_lengths,
)
from sparsync.selection.balance import Profile, block_edges, block_spans, rebalanced
from sparsync.selection.budget import budget
from sparsync.selection.partition import Contiguous, by_rank, rotation
from sparsync.selection.tail_sketch import apportion, levels_of, relative_magnitudes
from sparsync.selection.threshold import ThresholdScaling
from sparsync.wire import indices

_LEVEL_NBYTES = 2
# Boundaries follow what was selected over at least so many steps, and over so many elements of each partition.
_MEMORY_STEPS = 8
_MEMORY_COUNT = 32


@dataclass
class ExDyna(MiCRO):
    """Send all ranks' values at the positions that some rank found large in its partition; the mean divides by P.

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
class RebalancedBlocks:
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
            counts = apportion([1] * P, mine.free, allowed.open_count)
            own = mine.largest(acc.top_k_nonzero_of(mine.chunk, counts[comm.rank]), counts[comm.rank])
        with phase("encode"):
            positions = indices.encode_fixed_length(own.index, mine.lengths[comm.rank])
            packet = torch.cat([_level(own.value, acc.finite).to(positions.device), positions])
        sizes = map(indices.fixed_length_nbytes, counts, mine.lengths)
        packets = all_gather(packet, [_LEVEL_NBYTES + size for size in sizes], comm)
        # A host sync: all ranks need the levels.
        levels = [int(each[:_LEVEL_NBYTES].clone().view(torch.int16)) for each in packets]
        raise_if_found_inf(levels)
        with phase("decode"):
            selected = [
                indices.decode_fixed_length(each[_LEVEL_NBYTES:], count, len(span)).long() + span.start
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
        """Return what the budget allows, in equal counts; partitions are taken to be equally long, unless `given.lengths` says."""
        n, P, t = given.n, given.P, given.step or 0
        allowed = budget(self.density, given.parameters, self.dense, self.refresh, t)
        lengths = given.lengths or by_rank([len(span) for span in spans(n, P)], t)
        counts = given.selected or apportion([1] * P, lengths, allowed.open_count)
        sizes = packets_of(counts, lengths, _LEVEL_NBYTES)
        return PlannedSelection([all_gather_exchange(sizes)], allowed.count, max(lengths))


def _level(value: Tensor, finite: bool) -> Tensor:
    """Return the level of the smallest selected magnitude, or FOUND_INF, in 2 bytes."""
    smallest = value.abs().min().view(1) if value.numel() else value.new_zeros(1)
    level = levels_of(smallest) if finite else torch.tensor([FOUND_INF])
    return level.to(torch.int16).view(torch.uint8)
