"""MiCRO with exact counts: quotas from sketches of the partitions' tails in place of a learnt threshold. A variant of `micro`.

Rank r looks for large elements in partition (t + r) mod P of its accumulated gradient only. The positions found by all ranks never
meet, and every rank sends its value at each of them. Unlike in the paper, partitions are block-cyclic, so that layers of different scale
load all ranks equally. With its positions each rank sends 6 bytes about the upper tail of its next partition. From all of them every
rank computes how many elements each rank sends at the next step: exactly density * n together, at every scale of the gradient.

A step waits for three exchanges: positions, values to the owners of chunks of the union, their sums to all. The last two are one where
the union is so small that all values can go to all ranks. Fewer are not possible: a value cannot leave a rank before the rank knows that
another one has selected its position.
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

SAMPLE_POINTS = (0.25, 1.0, 2.0)  # of a tail sketch, times an equal share of the budget
LEVEL_NBYTES = 2
ROW = 128  # elements of a row of a partition in long vectors: shorter ones take longer to search
# A sketch looks at every row, or at one of so many where at least a number of elements is expected in those for an equal share.
_MOST_STRIDE = 16
_LEAST_SAMPLE = 512


@dataclass(frozen=True)
class Selection:
    """What all ranks selected together; every rank holds the same, but `threshold`."""

    # [K] together: those that all ranks knew beforehand, and each rank's; int32, ascending in each part.
    positions: Sequence[Tensor]
    counts: Sequence[int]  # how many of them each rank selected
    threshold: float  # this rank selected nothing smaller
    known: int = 0  # how many all ranks knew beforehand
    details: Mapping[str, Detail] = field(default_factory=dict)
    commit: Callable[[], None] = lambda: None  # as Update's


@dataclass(frozen=True)
class ExactMiCRO(ErrorFeedbackScheme):
    """Send all ranks' values at the positions that some rank found large in its partition; the mean divides by P.

    Where any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes; this travels on the first message.
    """

    density: float = 0.01  # share of the elements in the union of all ranks
    # Share of the budget for a window that cycles, e.g. 0.05: no element waits longer than 1/(refresh * density) steps.
    refresh: float = 0.0
    # Names or patterns of parameters that are sent whole while they fit a tenth of the budget, e.g. ["*bias", "*norm*"].
    dense: Sequence[str] = ()
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

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

        With its positions a rank sends a sketch of the partition that it examines at the next step, as it is before the next gradient
        and before what this step sends is cleared: a rank whose next partition is empty gets no quota for it.
        """
        P, rank, t = comm.size, comm.rank, bucket.step
        last = state.shared_state("sketches", Sketches, bucket, P)
        with phase("select"):
            partition, device = BlockCyclic(bucket.grad.numel(), P, ROW), acc.residual.device
            allowed, following = (self.budget(bucket.layout, step) for step in (t, t + 1))
            mine, later = (examine(partition, each, rank, t + i, device) for i, each in enumerate((allowed, following)))
            counts = _counts(last, mine.free, allowed.open_count, t)
            stride = sample_stride(following, P)
            points = sample_points(later.free, following.open_count, stride)
            later = later.sampled(stride, t // P)
            sampled = [min(point // stride, later.rows.length) for point in points[rank]]
        own, upper = largest_of(acc, [mine, later], [counts[rank], max(sampled)])
        with phase("select"):
            levels = or_found_inf(sketch(upper.value, sampled), acc.is_finite)
        heads, places = gather_positions(levels, own.index, counts, mine.lengths, comm)
        with phase("decode"):
            positions = map(partition.positions, by_rank(range(P), t), places)
            positions = [mine.known, *positions]
            # A host sync: all ranks need the levels.
            received, (threshold,) = numbers_of(heads, smallest_of(own.value))
        raise_if_found_inf(received)

        def commit() -> None:
            m = len(SAMPLE_POINTS)
            last.levels, last.points = [received[m * r : m * (r + 1)] for r in range(P)], points

        return Selection(positions, counts, threshold, known=mine.known.numel(), commit=commit)

    def budget(self, layout: Sequence[ParameterSpan], step: int) -> Budget:
        """Return what may be sent at `step`."""
        return budget(self.density, layout, self.dense, self.refresh, step)


@dataclass
class Sketches:
    """The tail sketches that the ranks sent at the last step of one bucket, in rank order; empty before the first."""

    levels: list[list[int]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)


def _counts(last: Sketches, free: Sequence[int], total: int, step: int) -> list[int]:
    """Return how many elements each rank selects of the `free[r]` it can choose from: equally many before there are sketches."""
    P = len(free)
    return quotas(last.levels, last.points, free, total) if last.levels else equal_shares(free, total, step // P)


def sample_stride(allowed: Budget, P: int) -> int:
    """Return the stride of a sketch, which looks at one of so many rows."""
    if allowed.known:  # known positions are left out by their places in all rows
        return 1
    return max(1, min(_MOST_STRIDE, allowed.count // (P * _LEAST_SAMPLE)))


def sample_points(free: Sequence[int], total: int, stride: int) -> list[list[int]]:
    """Return the sample points of each rank's sketch, multiples of `stride`, of the `free[r]` elements that it can choose from."""
    wanted = [max(1, int(total * point / len(free))) for point in SAMPLE_POINTS]
    return [[min(each, point) // stride * stride for point in wanted] for each in free]


def gather_positions(
    levels: Tensor, index: Tensor, counts: Sequence[int], lengths: Sequence[int], comm: Comm
) -> tuple[Tensor, list[Tensor]]:
    """Return the levels, int16, and the positions of every rank, both in rank order, on the device.

    All ranks send equally many levels; a level of FOUND_INF says that the rank holds NaN or Inf. Rank r sends `counts[r]` ascending
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
        return torch.cat([each[:head] for each in packets]).view(torch.int16), [
            index if source == rank else decode_fixed_length(each[head:], count, length)
            for source, (each, count, length) in enumerate(others)
        ]


def largest_of(acc: Accumulator, examined: Sequence[Examined], counts: Sequence[int]) -> list[Sparse]:
    """Return the `counts[i]` largest elements of each partition that are not known, by their places."""
    wanted = [count + each.taken.numel() for count, each in zip(counts, examined, strict=True)]
    found = acc.top_k_of_rows([each.rows for each in examined], wanted, "partition")
    return [each.free_of(part, count) for each, part, count in zip(examined, found, counts, strict=True)]
