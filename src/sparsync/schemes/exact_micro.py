"""MiCRO with exact counts: quotas from sketches of the partitions' tails replace the adaptive threshold. A variant of `micro`.

Rank r searches for large elements only in partition (t + r) mod P of its accumulated gradient. The positions of all ranks are
disjoint, and every rank sends its values at all of them. Unlike in the paper, partitions are block-cyclic, so that layers of different
scale load all ranks equally. With its positions a rank sends 6 bytes about the upper tail of its next partition. From these every
rank computes all ranks' counts of the next step: together exactly density * n, at every scale of the gradient.

A step waits for three exchanges: positions, values to the owners of chunks of the union, and their sums to all. If the union is small
enough to send all values to all ranks, the last two are one. Fewer are impossible: a rank cannot send a value before it knows that
another rank has selected the position.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.collectives.values import mean_at
from sparsync.core import (
    Bucket,
    Comm,
    Detail,
    ParameterSpan,
    Sparse,
    check_density,
    numbers_of,
    or_found_inf,
    phase,
    raise_if_found_inf,
)
from sparsync.feedback import Accumulator, Residuals
from sparsync.schemes.micro import padding
from sparsync.selection.exclusive import BlockCyclic, Budget, Examined, budget, by_rank, examine
from sparsync.selection.shares import equal_shares, quotas, sketch, smallest_of
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
    """The selection of all ranks; all but `threshold` is the same on every rank."""

    # [K] together: the positions that all ranks knew beforehand, then the selections by rank; int32, ascending inside a part.
    positions: Sequence[Tensor]
    counts: Sequence[int]  # numbers of selected positions, by rank
    threshold: float  # the smallest magnitude that this rank selected
    known: int = 0  # the number of positions that all ranks knew beforehand
    details: Mapping[str, Detail] = field(default_factory=dict)
    commit: Callable[[], None] = lambda: None  # as in Update


@dataclass(frozen=True)
class ExactMiCRO(ErrorFeedbackScheme):
    """Send all ranks' values at the positions where some rank's partition has its largest elements; the mean divides by P.

    If any rank holds NaN or Inf, which the first message tells, every gradient becomes NaN and nothing else changes.
    """

    density: float = 0.01  # share of the elements in the union of all ranks
    # Share of the budget for a window that cycles, e.g. 0.05: no element waits longer than 1/(refresh * density) steps.
    refresh: float = 0.0
    # Names or patterns of parameters that are sent whole while they fit a tenth of the budget, e.g. ["*bias", "*norm*"].
    dense: Sequence[str] = ()
    values: Values = "float32"  # format of values; rounding errors stay in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors

    name = "exact_micro"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if not 0 <= self.refresh <= 1:
            raise ValueError(f"refresh must be in [0, 1], the share of the budget that cycles, got {self.refresh}")
        if isinstance(self.dense, str):
            raise ValueError(f"dense takes a list of parameter names or patterns, got the string {self.dense!r}")

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        selection = self.select(state, acc, bucket, comm)
        mean, errors = mean_at(acc.values, selection.positions, comm, ValueCodec(self.values), at_once=True)
        return Update(
            mean,
            cleared=mean.index,
            selected=selection.counts[comm.rank] + selection.known,
            errors=errors,
            details={"threshold": selection.threshold, "padding": padding(selection.counts), **selection.details},
            commit=selection.commit,
        )

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        """Agree with the other ranks on the positions of this step. Raises NonFiniteError on all ranks.

        With its positions a rank sends a sketch of the partition that it examines at the next step, taken before the next gradient
        is added and before this step clears anything. A rank whose next partition is empty gets no quota for it.
        """
        P, rank, t = comm.size, comm.rank, bucket.step
        last = state.shared_state("sketches", Sketches, bucket, P)
        with phase("select"):
            partition, device = BlockCyclic(bucket.grad.numel(), P, ROW), acc.residual.device
            allowed, following = (self.budget(bucket.layout, step) for step in (t, t + 1))
            budgets = (allowed, following)
            mine, later = (examine(partition, budget, rank, t + i, device) for i, budget in enumerate(budgets))
            free, total = mine.free, allowed.open_count
            # Equally many on all ranks before there are sketches.
            counts = quotas(last.levels, last.points, free, total) if last.levels else equal_shares(free, total, t // P)
            stride = sample_stride(following, P)
            points = sample_points(later.free, following.open_count, stride)
            later = later.sampled(stride, t // P)
            sampled = [min(point // stride, later.rows.length) for point in points[rank]]
        selected, upper = largest_of(acc, [mine, later], [counts[rank], max(sampled)])
        with phase("select"):
            levels = or_found_inf(sketch(upper.value, sampled), acc.is_finite)
        heads, places = gather_positions(levels, selected.index, counts, mine.lengths, comm)
        with phase("decode"):
            positions = map(partition.positions, by_rank(range(P), t), places)
            positions = [mine.known, *positions]
            # A host sync: all ranks need the levels.
            received, (threshold,) = numbers_of(heads, smallest_of(selected.value))
        raise_if_found_inf(received)

        def commit() -> None:
            m = len(SAMPLE_POINTS)
            last.levels, last.points = [received[m * r : m * (r + 1)] for r in range(P)], points

        return Selection(positions, counts, threshold, known=mine.known.numel(), commit=commit)

    def budget(self, layout: Sequence[ParameterSpan], step: int) -> Budget:
        """Return the budget of `step`."""
        return budget(self.density, layout, self.dense, self.refresh, step)


@dataclass
class Sketches:
    """The tail sketches of the last step of one bucket, in rank order; empty before the first step."""

    levels: list[list[int]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)


def sample_stride(allowed: Budget, P: int) -> int:
    """Compute the stride of a sketch, which reads one of `stride` rows."""
    if allowed.known:  # known positions are excluded by their places in all rows
        return 1
    return max(1, min(_MOST_STRIDE, allowed.count // (P * _LEAST_SAMPLE)))


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


def largest_of(acc: Accumulator, examined: Sequence[Examined], counts: Sequence[int]) -> list[Sparse]:
    """Select the `counts[i]` largest elements of partition i, except known positions; return them by place."""
    wanted = [count + partition.taken.numel() for count, partition in zip(counts, examined, strict=True)]
    largest = acc.top_k_of_rows([partition.rows for partition in examined], wanted, "partition")
    return [partition.free_of(part, count) for partition, part, count in zip(examined, largest, counts, strict=True)]
