"""MiCRO with exact counts: quotas from sketches of the partitions' tails replace the adaptive threshold. A variant of `micro`.

Rank r searches for large elements only in partition (t + r) mod P of its accumulated gradient. The positions of all ranks are
disjoint, and every rank sends its values at all of them. Unlike in the paper, partitions are block-cyclic, so that layers of different
scale load all ranks equally. With its positions a rank sends 6 bytes about the upper tail of its next partition. From these every
rank computes all ranks' counts of the next step: together exactly density * n, at every scale of the gradient.

A step waits for three exchanges: positions, values to the owners of chunks of the union, and their sums to all. If the union is small
enough to send all values to all ranks, the last two are one. Fewer are impossible: a rank cannot send a value before it knows that
another rank has selected the position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.collectives.values import mean_at
from sparsync.core import Bucket, Comm, check_density, or_found_inf, phase, raise_if_found_inf
from sparsync.feedback import Accumulator, Residuals
from sparsync.selection.exclusive import BlockCyclic, budget, by_rank, examine
from sparsync.selection.shares import equal_shares, quotas, sketch
from sparsync.wire import (
    ValueCodec,
    Values,
    check_values,
    decode_fixed_length,
    encode_fixed_length,
    fixed_length_nbytes,
)

SAMPLE_POINTS = (0.25, 1.0, 2.0)  # of a tail sketch, in units of an equal share of the budget
LEVEL_NBYTES = 2
ROW = 128  # elements of a partition's row in long vectors: shorter rows take longer to search
# A sketch reads every row, or one of up to _MOST_STRIDE rows if an equal share is expected to have _LEAST_SAMPLE elements in those.
_MOST_STRIDE = 16
_LEAST_SAMPLE = 512


@dataclass(frozen=True)
class Selection:
    """The selection of all ranks, the same on every rank."""

    # [K] together: the selections by rank; int32, ascending inside a part.
    positions: Sequence[Tensor]
    counts: Sequence[int]  # numbers of selected positions, by rank
    commit: Callable[[], None] = lambda: None  # as in Update


@dataclass(frozen=True)
class ExactMiCRO(ErrorFeedbackScheme):
    """Send all ranks' values at the positions where some rank's partition has its largest elements; the mean divides by P.

    If any rank holds NaN or Inf, which the first message tells, every gradient becomes NaN and nothing else changes.
    """

    density: float = 0.01  # share of the elements in the union of all ranks
    values: Values = "float32"  # format of values; rounding errors stay in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors

    name = "exact_micro"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        selection = self.select(state, acc, bucket, comm)
        mean, errors = mean_at(acc.values, selection.positions, comm, ValueCodec(self.values), at_once=True)
        return Update(
            mean, cleared=mean.index, selected=selection.counts[comm.rank], errors=errors, commit=selection.commit
        )

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        """Agree with the other ranks on the positions of this step. Raises NonFiniteError on all ranks.

        With its positions a rank sends a sketch of the partition that it examines at the next step, taken before the next gradient
        is added and before this step clears anything. A rank whose next partition is empty gets no quota for it.
        """
        P, rank, t = comm.size, comm.rank, bucket.step
        last = state.shared_state("sketches", Sketches, bucket, P)
        with phase("select"):
            n, device = bucket.grad.numel(), acc.residual.device
            partition = BlockCyclic(n, P, ROW)
            total, following = (budget(self.density, n, step) for step in (t, t + 1))
            mine, later = (examine(partition, rank, step, device) for step in (t, t + 1))
            free = mine.lengths
            # Equally many on all ranks before there are sketches.
            counts = quotas(last.levels, last.points, free, total) if last.levels else equal_shares(free, total, t // P)
            stride = sample_stride(following, P)
            points = sample_points(later.lengths, following, stride)
            later = later.sampled(stride, t // P)
            sampled = [min(point // stride, later.rows.length) for point in points[rank]]
        selected, upper = acc.top_k_of_rows([mine.rows, later.rows], [counts[rank], max(sampled)], "partition")
        with phase("select"):
            levels = or_found_inf(sketch(upper.value, sampled), acc.is_finite)
        heads, places = gather_positions(levels, selected.index, counts, mine.lengths, comm)
        with phase("decode"):
            positions = list(map(partition.positions, by_rank(range(P), t), places))
            # A host sync: all ranks need the levels.
            received = heads.tolist()
        raise_if_found_inf(received)

        def commit() -> None:
            m = len(SAMPLE_POINTS)
            last.levels, last.points = [received[m * r : m * (r + 1)] for r in range(P)], points

        return Selection(positions, counts, commit)


@dataclass
class Sketches:
    """The tail sketches of the last step of one bucket, in rank order; empty before the first step."""

    levels: list[list[int]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)


def sample_stride(total: int, P: int) -> int:
    """Compute the stride of a sketch for a budget of `total` elements; the sketch reads one of `stride` rows."""
    return max(1, min(_MOST_STRIDE, total // (P * _LEAST_SAMPLE)))


def sample_points(free: Sequence[int], total: int, stride: int) -> list[list[int]]:
    """Compute the sample points, multiples of `stride`, of the ranks' sketches; rank r can choose from `free[r]` elements."""
    wanted = [max(1, int(total * point / len(free))) for point in SAMPLE_POINTS]
    return [[min(count, point) // stride * stride for point in wanted] for count in free]


def gather_positions(
    levels: Tensor, index: Tensor, counts: Sequence[int], lengths: Sequence[int], comm: Comm
) -> tuple[Tensor, list[Tensor]]:
    """Gather the levels, int16, and the positions of all ranks, both in rank order, on the device.

    All ranks send equally many levels; FOUND_INF as a level means that the rank holds NaN or Inf. Rank r sends `counts[r]` ascending
    positions inside [0, lengths[r]).
    Steps: 1
    Bytes sent per rank: (P-1) (2 bytes a level, and the packet of its positions)
    """
    head, rank = LEVEL_NBYTES * levels.numel(), comm.rank
    with phase("encode"):
        packet = torch.cat([levels.to(torch.int16).view(torch.uint8), encode_fixed_length(index, lengths[rank])])
    packets = comm.all_gather(packet, [head + size for size in map(fixed_length_nbytes, counts, lengths)])
    with phase("decode"):
        others = zip(packets, counts, lengths, strict=True)
        return torch.cat([packet[:head] for packet in packets]).view(torch.int16), [
            index if source == rank else decode_fixed_length(packet[head:], count, length)
            for source, (packet, count, length) in enumerate(others)
        ]
