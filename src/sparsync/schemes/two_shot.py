"""TwoShot: an all-reduce of the largest elements, or of all, in few bits and two exchanges.

Every rank owns a region of the vector. It sends the largest elements of every other region, rounded, to the region's owner. The owner adds
them to all of its elements there, and sends the largest sums, rounded, to all. Unsent elements and rounding errors stay in residuals. The
numbers of elements that travel are fixed. Regions take rows from the whole vector in a hashed order, so that all owners have equal load.

The exchanges are those of Ok-Topk (arXiv 2201.07598) and of a quantized all-reduce; fixed counts and the owner's residual are new here.
Dividing by the number of senders is SparseLoCo's mean (arXiv 2508.15706), computed by the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme, Update, own_chunk
from sparsync.base.scheme import ReduceScatterScheme
from sparsync.base.state import State
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.core import Bucket, Comm, Divisor, Rows, Sparse, check_density, check_one_of, count_for, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import Elements, ValueCodec, Values, check_values


@dataclass(frozen=True)
class TwoShot(ErrorFeedbackScheme):
    """Send the share `density` of every region to its owner, and the share `density_down` of the owner's sums to all.

    With density 1 both ways it is a quantized all-reduce of all elements; positions travel only if elements are left out. A rank sends
    about (P-1)/P * (density + density_down) * n elements per step, whatever the gradients. If any rank's gradient holds NaN or Inf,
    or the mean overflows the gradient's type, it shows in the gradient of every rank, and residuals do not change.

    An error on the way up affects one rank's share, and is divided by P; an error on the way down affects the mean itself. So at equal
    bytes, more elements or bits on the way down can be better. With one rank nothing travels, and only the way down selects and rounds.

    With `divide_by="contributors"` the owner divides a sum by the number of ranks whose element is in it at this step: the senders
    and the owner. The result then exceeds the mean by up to a factor of P. The owner's residual keeps the sum minus the number of
    contributors times the result, and all of the unsent sums. So P times the result + residuals is not conserved; a
    rollback restores the residuals. With density 1 every rank contributes, so nothing changes.
    """

    density: float = 0.05  # share of the elements that travels to owners
    values: Values = "int4"  # format of values to owners; rounding errors stay in the residuals
    density_down: float | None = None  # share of the owners' sums that travels to all; None: as `density`
    values_down: Values | None = None  # format of the owners' sums to all; None: as `values`
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors
    decay: float = 1.0  # share of the residual that joins the next gradient; SparseLoCo has 0.95
    divide_by: Divisor = "ranks"  # "contributors": the ranks whose element is in the sum; not conservative

    name = "two_shot"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if self.density_down is not None:
            check_density(self.density_down, "density_down")
        if self.values_down is not None:
            check_values(self.values_down, "values_down")
        check_one_of("divide_by", self.divide_by, Divisor)

    @property
    def heeds_skip(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.divide_by == "ranks"

    @property
    def leaves_out(self) -> bool:
        """Whether elements are left out in either exchange."""
        return min(self.density, self._down[0]) < 1.0

    @property
    def whole_values(self) -> tuple[Values, Values] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The formats up and down if nothing is left out."""
        return None if self.leaves_out else (self.values, self._down[1])

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update | DenseUpdate:
        if not self.leaves_out:
            mean = quantized_all_reduce_(acc.values, comm, ValueCodec(self.values), ValueCodec(self._down[1]))
            return DenseUpdate(mean, acc.values, bucket.grad.numel(), bucket.grad.numel())
        n, rank, both = bucket.grad.numel(), comm.rank, ((self.density, self.values), self._down)
        up, down = (_regions_of(n, comm.size, *way, acc.residual.device, acc.dtype) for way in both)
        packets, kept = scatter_top_k(acc, up, comm)
        # With density 1 every rank contributes.
        senders = torch.ones_like(acc.values) if self.divide_by == "contributors" and self.density < 1 else None
        add_(acc.values, packets, up, rank, senders)
        (top,) = acc.top_k_of_rows([down.rows[rank]], [down.counts[rank]], "sums")
        selected = sum(up.counts) - up.counts[rank] + up.rows[rank].length
        if senders is None:
            mean, error = gather(top, down, comm, comm.size)
            return Update(mean, None, selected, replaced=[*kept, error])
        contributors = kernels.gather(senders, kernels.locate(down.rows[rank], top.index))
        mean, _ = gather(replace(top, value=top.value / contributors), down, comm)
        # No residual holds a mean over contributors, so the owner keeps the rounding error of the gradient's type.
        mean = [replace(part, value=part.value.to(bucket.grad.dtype)) for part in mean]
        owned = mean[rank]
        error = Sparse(owned.index, lacking(top.value, owned.value, contributors), n)
        lost = Sparse(owned.index, top.value - error.value, n)
        return Update(mean, None, selected, replaced=[*kept, error], lost=lost)

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and the region that it owns, where it holds unsent sums over all ranks."""
        residual = state.residual(bucket)
        if comm.size == 1 or not self.leaves_out:
            return residual, own_chunk(residual, comm)  # adjacent elements, because no position travels
        regions = _regions_of(residual.numel(), comm.size, *self._down, residual.device, residual.dtype)
        return residual, regions.rows[comm.rank]

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        if self != replace(self, divide_by="ranks", density_down=None, values_down=None):
            raise ValueError(f"on a shard axis leave out density_down, values_down and divide_by, got {self}")
        from sparsync.schemes.sharded import TwoShotReduceScatter

        return TwoShotReduceScatter(self)

    @property
    def _down(self) -> tuple[float, Values]:
        """Density and values of the way down."""
        return (
            self.density if self.density_down is None else self.density_down,
            self.values if self.values_down is None else self.values_down,
        )


@dataclass(frozen=True)
class _Regions:
    """The regions by rank, and the packets of one of the two exchanges; the same on all ranks."""

    n: int
    rows: Sequence[Rows]
    lengths: Sequence[int]
    counts: Sequence[int]  # elements that travel
    nbytes: Sequence[int]  # packet sizes
    codec: Elements


@lru_cache(maxsize=256)
def _regions_of(n: int, P: int, density: float, values: Values, device: torch.device, dtype: torch.dtype) -> _Regions:
    partition, codec = BlockCyclic(n, P), Elements(values)
    rows = [partition.rows(p, device) for p in range(P)]
    lengths = [region.length for region in rows]
    counts = [count_for(density, length) for length in lengths]
    nbytes = [codec.nbytes(count, length, dtype) for count, length in zip(counts, lengths, strict=True)]
    return _Regions(n, rows, lengths, counts, nbytes, codec)


def scatter_top_k(acc: Accumulator, regions: _Regions, comm: Comm) -> tuple[list[Tensor], list[Sparse]]:
    """Send the largest elements of every other region to its owner. Return the packets received, and the rounding errors."""
    rank = comm.rank
    others = [p for p, length in enumerate(regions.lengths) if p != rank and length]
    rows = [regions.rows[p] for p in others]
    chosen = acc.top_k_of_rows(rows, [regions.counts[p] for p in others], "sent")
    with phase("encode"):
        encoded, dropped = regions.codec.encode_each(chosen, rows=rows, n=regions.n)
        packets = [torch.empty(0, dtype=torch.uint8, device=acc.residual.device)] * comm.size
        for p, packet in zip(others, encoded, strict=True):
            packets[p] = packet
    return comm.all_to_all(packets, [(source != rank) * regions.nbytes[rank] for source in range(comm.size)]), dropped


def add_(values: Tensor, packets: Sequence[Tensor], regions: _Regions, rank: int, senders: Tensor | None) -> None:
    """Add other ranks' packets for this rank's region to `values` [n], and count the senders by element in `senders` [n], if given."""
    codec, sent = regions.codec, [packet for source, packet in enumerate(packets) if source != rank]
    counts, lengths = [regions.counts[rank]] * len(sent), [regions.lengths[rank]] * len(sent)
    rows = [regions.rows[rank]] * len(sent)
    with phase("decode"):
        codec.add_each_(values, sent, counts, lengths, rows)
        if senders is not None:
            for part in codec.decode_each(sent, counts, lengths, values.dtype, rows, regions.n):
                kernels.scatter_add_(senders, replace(part, value=torch.ones_like(part.value)))


def gather(part: Sparse, regions: _Regions, comm: Comm, divisor: int = 1) -> tuple[list[Sparse], Sparse]:
    """Send `part` of this rank's region, divided by `divisor`, to all. Return the parts of all regions, and this rank's rounding errors.

    Divides before encoding: a decoded value times its divisor is exact, whereas a mean of decoded values is not.
    """
    rows, n, codec = regions.rows, regions.n, regions.codec
    with phase("encode"):
        packets, dropped = codec.encode_each([part], divisor, [rows[comm.rank]], n)
    packets = comm.all_gather(packets[0], regions.nbytes)
    with phase("decode"):
        return codec.decode_each(packets, regions.counts, regions.lengths, part.value.dtype, rows, n), dropped[0]
