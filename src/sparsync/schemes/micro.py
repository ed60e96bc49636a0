"""MiCRO: exclusive partitions that rotate over the ranks, so that the union of all selections is as large as asked (arXiv 2310.00967).

Rank r looks for large elements in partition (t + r) mod P of its own accumulated gradient only. The positions found by all ranks never
meet, and every rank sends its value at each of them.

`published()` is the paper's algorithm: adjacent partitions, and one threshold for all, scaled by a fixed factor a step until the union
has density * n elements. The plain setting replaces both. Its partitions are block-cyclic, so that layers of different scale load all
ranks alike. With its positions each rank sends 6 bytes about the upper tail of its next partition. From all of them every rank computes
how many elements each rank sends at the next step: exactly density * n together, at every scale of the gradient.

The plain setting waits for three exchanges a step: positions, values to the owners of chunks of the union, their sums to all. The last
two are one where the union is so small that all values can go to all ranks. Fewer are not possible: a value cannot leave a rank before
the rank knows that another one has selected its position.

Differs from the paper: residual and threshold are in units of the gradient, not of learning rate times gradient, as in the authors'
code. Differs from the authors' code: small buckets (n < P, density * n < 1) and P = 1 work; NaN and Inf are noticed; positions take 4
bytes, not 8; the threshold falls again where the union is up to 9 % too small. `bug_compatible=True` takes the last two differences back.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.collectives.values import exchange_counts, mean_at
from sparsync.core import (
    Bucket,
    Comm,
    Detail,
    ParameterSpan,
    Rows,
    Span,
    Sparse,
    check_density,
    check_one_of,
    count_for,
    numbers_of,
    or_found_inf,
    phase,
    raise_if_found_inf,
    spans,
)
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.selection.exclusive import BlockCyclic, Budget, Contiguous, budget, by_rank, rotation
from sparsync.selection.shares import equal_shares, quotas, sketch, smallest_of
from sparsync.wire import (
    ValueCodec,
    Values,
    check_values,
    decode_fixed_length,
    encode_fixed_length,
    fixed_length_nbytes,
)

Rule = Literal["quotas", "threshold"]
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


@runtime_checkable
class Selector(Protocol):
    """One way for the ranks to agree on positions, each looking in its own partition. Raises NonFiniteError on all ranks."""

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection: ...


@dataclass(frozen=True)
class MiCRO(ErrorFeedbackScheme):
    """Send all ranks' values at the positions that some rank found large in its partition; the mean divides by P.

    Where any rank holds NaN or Inf, every gradient becomes NaN and nothing else changes; this travels on the first message.
    """

    # Share of the elements in the union of all ranks; 0.001 in the authors' scripts.
    density: float = 0.01
    # Share of the budget for a window that cycles, e.g. 0.05: no element waits longer than 1/(refresh * density) steps.
    refresh: float = 0.0
    # Names or patterns of parameters that are sent whole while they fit a tenth of the budget, e.g. ["*bias", "*norm*"].
    dense: Sequence[str] = ()
    rule: Rule = "quotas"  # "quotas": exact counts; "threshold": the paper's
    bug_compatible: bool = False  # with "threshold": also the authors' unreached branch, and 8 bytes a position
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "micro"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if not 0 <= self.refresh <= 1:
            raise ValueError(f"refresh must be in [0, 1], the share of the budget that cycles, got {self.refresh}")
        if isinstance(self.dense, str):
            raise ValueError(f"dense takes a list of parameter names or patterns, got the string {self.dense!r}")
        check_one_of("rule", self.rule, Rule)
        if self.rule == "threshold" and (self.refresh or self.dense):
            raise ValueError(
                f'the published rule "threshold" knows no refresh and no dense parameters, got refresh={self.refresh}, '
                f"dense={tuple(self.dense)}; pass refresh=0, dense=(), or use published()"
            )
        if self.bug_compatible and self.rule != "threshold":
            raise ValueError('bug_compatible=True goes with rule="threshold"; use published(bug_compatible=True)')

    @classmethod
    def published(cls, density: float = 0.01, bug_compatible: bool = False) -> Self:
        """Return the paper's algorithm; with `bug_compatible`, step by step what the authors' program does with one flat vector.

        Each bucket has its own threshold: for theirs, one for the model, use one bucket.
        """
        return cls(density=density, rule="threshold", bug_compatible=bug_compatible)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        selection = self.selector.select(state, acc, bucket, comm)
        at_once = self.rule == "quotas"
        index = torch.cat([*selection.positions])  # [K]
        mean, errors = mean_at(acc.values, index, comm, ValueCodec(self.values), at_once)
        parts = [part for part in selection.positions if part.numel()]
        if len(parts) > 1:  # one pass writes what ascends
            values = mean.value.split([part.numel() for part in parts])
            mean = kernels.merge([Sparse(part, value, mean.length) for part, value in zip(parts, values, strict=True)])
        return Update(
            mean,
            cleared=mean.index,
            selected=selection.counts[comm.rank] + selection.known,
            errors=errors,
            details={"threshold": selection.threshold, "padding": padding(selection.counts), **selection.details},
            commit=selection.commit,
        )

    @property
    def selector(self) -> Selector:
        """The way in which the ranks agree on positions."""
        if self.rule == "quotas":
            return QuotaSelection(self.density, self.dense, self.refresh)
        return ThresholdSelection(self.density, self.bug_compatible, EqualSpans())


class EqualSpans:
    """MiCRO's partitions: of equal length, always the same. ExDyna's change with what was selected."""

    def spans(self, state: State, bucket: Bucket, P: int) -> Sequence[Span]:
        """Return the span of the vector that each of P partitions is at this step."""
        return spans(bucket.grad.numel(), P)

    def accept(self, state: State, bucket: Bucket, counts: Sequence[int]) -> None:
        """Take note of a step in which rank r selected `counts[r]` elements."""


@dataclass
class ThresholdScaling:
    """A threshold that grows or shrinks by a fixed factor a step, by how many elements the last union had.

    No message is needed: every rank knows K, the size of the last union. `step` counts the steps of this bucket.
    """

    step: int = 0
    threshold: float = 0.0
    union: int = 0  # K of the last step

    def next(self, k: int, bug_compatible: bool) -> float:
        """Return the threshold of this step for a wanted union of `k`; nothing changes before the step has ended.

        1/(2 sqrt(k)) at first; then, with q = K/k, times 1.005 for q > 1.1, 1.00125 for 1 < q <= 1.1, 0.9987 for 0.909 < q <= 1 and
        0.995 below. In the authors' code the third factor is never reached: the second applies down to 0.909.
        """
        if self.step == 0:
            return 1.0 / (2.0 * math.sqrt(k))
        q = self.union / k
        if q > 1.1:
            return self.threshold * 1.005
        if q > 0.909:
            return self.threshold * (1.00125 if q > 1.0 or bug_compatible else 0.9987)
        return self.threshold * 0.995


@dataclass(frozen=True)
class ThresholdSelection:
    """The paper's: each rank selects what reaches one threshold in its partition; counts and padded positions are gathered."""

    density: float
    bug_compatible: bool
    partitions: EqualSpans

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        n, P = bucket.grad.numel(), comm.size
        scaling = state.shared_state("scaling", ThresholdScaling, bucket, P)
        t, k = scaling.step, max(1, int(self.density * n)) if self.bug_compatible else count_for(self.density, n)
        partitions = self.partitions.spans(state, bucket, P)
        mine = partitions[rotation(comm.rank, t, P)]
        threshold = scaling.next(k, self.bug_compatible)
        # A host sync: how many there are depends on the data. Where there are none, one that moves with the step.
        index = acc.above(threshold, mine).index  # [k_r]
        if len(mine) and not index.numel():
            index = index.new_tensor([mine.start + t % len(mine)])
        counts = exchange_counts(index.numel(), acc.is_finite, comm, index.device)
        union = all_gather_padded(index.long() if self.bug_compatible else index, counts, comm)

        def commit() -> None:
            scaling.step, scaling.threshold, scaling.union = t + 1, threshold, sum(counts)
            self.partitions.accept(state, bucket, counts)

        return Selection(
            [each.to(torch.int32) for each in union],
            counts,
            threshold,
            details=partition_lengths(partitions),
            commit=commit,
        )


def all_gather_padded(index: Tensor, counts: Sequence[int], comm: Comm) -> list[Tensor]:
    """Return the selections of all ranks, in rank order; `counts[r]` is the length of rank r's. All are padded to the longest."""
    longest = max(counts)
    padded = torch.nn.functional.pad(index, (0, longest - index.numel()))
    gathered = comm.all_gather(padded, [longest] * comm.size)
    return [each[:count] for each, count in zip(gathered, counts, strict=True)]


def padding(counts: Sequence[int]) -> float:
    """Return f = P * max(k_r) / K, how much longer padded selections are than the selections; 1 when nothing is selected."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


def partition_lengths(partitions: Sequence[Span]) -> dict[str, Detail]:
    """Return what a report says about partitions."""
    lengths = [len(partition) for partition in partitions]
    return {"shortest_partition": min(lengths), "longest_partition": max(lengths)}


@dataclass
class Sketches:
    """The tail sketches that the ranks sent at the last step of one bucket, in rank order; empty before the first."""

    levels: list[list[int]] = field(default_factory=list)
    points: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class QuotaSelection:
    """Exact counts by tail sketches: together the ranks send the budget, each as many as its partition has of the largest.

    With its positions a rank sends a sketch of the partition that it examines at the next step, as it is before the next gradient and
    before what this step sends is cleared: a rank whose next partition is empty gets no quota for it.
    """

    density: float
    dense: Sequence[str]
    refresh: float

    def select(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Selection:
        P, rank, t = comm.size, comm.rank, bucket.step
        last = state.shared_state("sketches", Sketches, bucket, P)
        with phase("select"):
            partition, device = BlockCyclic(bucket.grad.numel(), P, ROW), acc.residual.device
            allowed, following = (self._budget(bucket.layout, step) for step in (t, t + 1))
            mine, later = (examine(partition, each, rank, t + i, device) for i, each in enumerate((allowed, following)))
            counts = self._counts(last, mine.free, allowed.open_count, t)
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

    def _budget(self, layout: Sequence[ParameterSpan], step: int) -> Budget:
        return budget(self.density, layout, self.dense, self.refresh, step)

    @staticmethod
    def _counts(last: Sketches, free: Sequence[int], total: int, step: int) -> list[int]:
        """Return how many elements each rank selects of the `free[r]` it can choose from: equally many before there are sketches."""
        P = len(free)
        return quotas(last.levels, last.points, free, total) if last.levels else equal_shares(free, total, step // P)


def sample_stride(allowed: Budget, P: int) -> int:
    """Return of how many rows a sketch looks at one."""
    if allowed.known:  # are left out by their places in all rows
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

    Rank r sends as many levels as this one, of which FOUND_INF says that it holds NaN or Inf, and `counts[r]` ascending positions inside
    [0, lengths[r]).
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


@dataclass(frozen=True)
class Examined:
    """The partition that this rank examines, without the positions that all ranks send anyway."""

    rows: Rows  # where its elements are
    known: Tensor  # positions that all ranks send anyway, int32
    taken: Tensor  # places of the known positions in it, ascending, int32
    lengths: list[int]  # of the partition of each rank, in rank order
    free: list[int]  # how many of these are not known

    def sampled(self, stride: int, turn: int) -> Self:
        """Return one of `stride` rows, others at each turn."""
        if stride == 1:
            return self
        rows = self.rows
        starts = rows.starts[turn % stride : rows.length // rows.row : stride].contiguous()
        return replace(self, rows=Rows(starts, rows.row, starts.numel() * rows.row))


def largest_of(acc: Accumulator, examined: Sequence[Examined], counts: Sequence[int]) -> list[Sparse]:
    """Return the `counts[i]` largest elements of each partition that are not known, by their places."""
    wanted = [count + each.taken.numel() for count, each in zip(counts, examined, strict=True)]
    found = acc.top_k_of_rows([each.rows for each in examined], wanted, "partition")
    return [_free(each, part, count) for each, part, count in zip(examined, found, counts, strict=True)]


def _free(examined: Examined, found: Sparse, count: int) -> Sparse:
    if not examined.taken.numel():
        return found
    free = ~kernels.isin(found.index, examined.taken)
    return largest(Sparse(found.index[free], found.value[free], found.length), count)


def examine(
    partition: Contiguous | BlockCyclic, allowed: Budget, rank: int, step: int, device: torch.device
) -> Examined:
    """Return what `rank` examines at `step`, outside the positions known to all."""
    lengths, known = partition.lengths(), allowed.known_index(device)
    mine = rotation(rank, step, len(lengths))
    rows, free, taken = partition.rows(mine, device), lengths, known
    if known.numel():
        p, place = partition.places(known)
        # A host sync: how much is sent depends on it.
        counts: list[int] = torch.bincount(p, minlength=len(lengths)).tolist()
        free = [length - count for length, count in zip(lengths, counts, strict=True)]
        taken = place[p == mine].to(torch.int32)
    return Examined(rows, known, taken, by_rank(lengths, step), by_rank(free, step))


def largest(found: Sparse, count: int) -> Sparse:
    """Return the `count` largest elements of `found`."""
    if count == found.index.numel():
        return found
    top = kernels.top_k(found.value, count)
    return Sparse(found.index[top.index], top.value, found.length)
