"""TwoShot: an all-reduce of the largest elements, or of all, in few bits and two exchanges.

Every rank owns a region of the vector. It sends each other region's largest elements, rounded, to the region's owner. The owner adds
them to all of its own elements, and sends the largest sums, rounded, to all. What a sender's rounding drops stays in the sender's
residual, and what the owner does not send in the owner's: no mass is lost. How many elements travel is known beforehand. Regions take
their rows from all over the vector in a hashed order, so that layers of different scale load all owners equally.

The two exchanges are those of SparseReduceScatter and all-gather in Ok-Topk (arXiv 2201.07598) and of a quantized all-reduce; the fixed
counts and the owner's residual are our own. Dividing by those who sent is SparseLoCo's mean (arXiv 2508.15706), taken at the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import Tensor

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme, Update, own_chunk
from sparsync.base.scheme import ReduceScatterScheme
from sparsync.base.state import State
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.comm.metered import MeteredComm
from sparsync.core import (
    Bucket,
    Comm,
    Detail,
    Divisor,
    Report,
    Rows,
    Span,
    Sparse,
    check_density,
    check_one_of,
    count_for,
    exact_divisor,
    phase,
)
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded
from sparsync.selection.exclusive import BlockCyclic
from sparsync.wire import Elements, ValueCodec, Values, check_values

_DOWN = ("density_down", "values_down")  # settings of the way down, None where it has those of the way up


@dataclass(frozen=True)
class TwoShot(ErrorFeedbackScheme):
    """Send the share `density` of each region to its owner, and the share `density_down` of the owner's sums to all.

    With density 1 both ways it is a quantized all-reduce of all elements; positions travel only where elements are left out. A rank sends
    about (P-1)/P * (density + density_down) * n elements in each step, whatever the gradients. Where any rank's gradient holds NaN or Inf,
    or the mean overflows the gradient's type, it shows in the gradient of every rank, and residuals stay as they were.

    The way down has settings because its errors weigh more. What is rounded or left out on the way up is one rank's, and is divided by P;
    on the way down it is missing in the mean itself. So at equal bytes more elements, or more bits, on the way down can be better:
    `TwoShot(0.03, "sign", density_down=0.13)`. With one rank nothing travels, and only the way down selects and rounds.

    `divide_by="contributors"`: the owner divides each sum by the number of ranks whose element is in it, of this step: those that sent it,
    and the owner. The bytes are the same. With density 1 everybody contributes, so nothing changes; below, what is written is longer than
    the mean, up to P times. The owner's residual loses the contributors times what is written: it keeps what the sum has beyond that,
    which is what rounding dropped, and whole the sums that are not sent. A sum that waits is divided by the contributors of the step in
    which it is sent, whoever sent to it before. So P times what is written + residuals is not what came in; a rollback returns to
    the residuals what they lost.
    """

    density: float = 0.05  # share of the elements that travels to owners
    values: Values = "int4"  # how values travel to owners; what rounding drops stays in the residuals
    density_down: float | None = None  # share of the owners' sums that travels to all; None: as `density`
    values_down: Values | None = None  # how the owners' sums travel to all; None: as `values`
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds
    decay: float = 1.0  # share of the residual that joins the next gradient; SparseLoCo has 0.95
    divide_by: Divisor = "ranks"  # "contributors": those whose element is in the sum; does not conserve what comes in

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

    def __repr__(self) -> str:
        """Return all settings but those of the way down that are left out, so that the fingerprints of saved states still match."""
        left_out = [name for name in _DOWN if getattr(self, name) is None]
        given = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in left_out}
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def heeds_skip(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        return self.divide_by == "ranks"

    @property
    def leaves_out(self) -> bool:
        """Whether elements are left out in either exchange."""
        return min(self.density, self._down[0]) < 1.0

    @property
    def whole_values(self) -> tuple[Values, Values] | None:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The formats up and down where nothing is left out."""
        return None if self.leaves_out else (self.values, self._down[1])

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update | DenseUpdate:
        if not self.leaves_out:
            mean = quantized_all_reduce_(acc.values, comm, ValueCodec(self.values), ValueCodec(self._down[1]))
            return DenseUpdate(mean, acc.values, bucket.grad.numel(), bucket.grad.numel())
        n, rank = bucket.grad.numel(), comm.rank
        up, down = (
            _regions_of(n, comm.size, *each, acc.residual.device, acc.dtype)
            for each in ((self.density, self.values), self._down)
        )
        packets, kept = scatter_top_k(acc, up, comm)
        divided = self.divide_by == "contributors" and self.density < 1  # else everybody contributes
        senders = torch.ones_like(acc.values) if divided else None
        add_(acc.values, packets, up, rank, senders)
        (top,) = acc.top_k_of_rows([down.rows[rank]], [down.counts[rank]], "sums")
        selected = sum(up.counts) - up.counts[rank] + up.rows[rank].length
        if senders is None:
            mean, error = gather(top, down, comm, comm.size)
            return Update(mean, None, selected, replaced=[*kept, error])
        contributors = kernels.gather(senders, kernels.locate(down.rows[rank], top.index))
        mean, _ = gather(replace(top, value=top.value / contributors), down, comm)
        # No residual holds a mean over contributors, so the owner keeps what the gradient's type drops of it.
        mean = [replace(part, value=part.value.to(bucket.grad.dtype)) for part in mean]
        own = mean[rank]
        error = Sparse(own.index, lacking(top.value, own.value, contributors), n)
        lost = Sparse(own.index, top.value - error.value, n)
        return Update(mean, None, selected, replaced=[*kept, error], lost=lost)

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and its own region, where it holds what all ranks have not sent."""
        residual = state.residual(bucket)
        if comm.size == 1 or not self.leaves_out:
            return residual, own_chunk(residual, comm)  # adjacent elements, because no position travels
        n, device, dtype = residual.numel(), residual.device, residual.dtype
        return residual, _regions_of(n, comm.size, *self._down, device, dtype).rows[comm.rank]

    def reduce_scatter_form(self) -> ReduceScatterScheme:
        if self.divide_by != "ranks":
            raise ValueError(
                f'two_shot with divide_by="{self.divide_by}" has no reduce-scatter; on a shard axis use divide_by="ranks"'
            )
        for name in _DOWN:
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"two_shot with {name}={value!r} has no reduce-scatter, which has the way up only; on a shard axis leave {name} out"
                )
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
    """The region of each rank, and what travels of it in one of the two exchanges; the same on all ranks."""

    n: int
    rows: Sequence[Rows]
    lengths: Sequence[int]
    counts: Sequence[int]  # how many elements of it travel
    nbytes: Sequence[int]  # of their packet
    codec: Elements


@lru_cache(maxsize=256)
def _regions_of(n: int, P: int, density: float, values: Values, device: torch.device, dtype: torch.dtype) -> _Regions:
    partition, codec = BlockCyclic(n, P), Elements(values)
    rows = [partition.rows(p, device) for p in range(P)]
    lengths = [each.length for each in rows]
    counts = [count_for(density, length) for length in lengths]
    nbytes = [codec.nbytes(count, length, dtype) for count, length in zip(counts, lengths, strict=True)]
    return _Regions(n, rows, lengths, counts, nbytes, codec)


def scatter_top_k(acc: Accumulator, regions: _Regions, comm: Comm) -> tuple[list[Tensor], list[Sparse]]:
    """Send the largest elements of each other region to its owner; return the packets for the own one, and what rounding drops."""
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
    """Add what other ranks sent of this rank's region to `values` [n], and one to `senders` [n], if given, where each did."""
    codec, sent = regions.codec, [packet for source, packet in enumerate(packets) if source != rank]
    others = len(sent)  # of which each sends the same of the own region
    counts, lengths = [regions.counts[rank]] * others, [regions.lengths[rank]] * others
    rows = [regions.rows[rank]] * others
    with phase("decode"):
        codec.add_each_(values, sent, counts, lengths, rows)
        if senders is not None:
            for part in codec.decode_each(sent, counts, lengths, values.dtype, rows, regions.n):
                kernels.scatter_add_(senders, replace(part, value=torch.ones_like(part.value)))


def gather(own: Sparse, regions: _Regions, comm: Comm, divisor: int = 1) -> tuple[list[Sparse], Sparse]:
    """Send elements of the own region, divided by `divisor`, to all; return those of each region, and what rounding drops of the own.

    Divided before: times its divisor a decoded value is exact, which a mean of decoded values is not.
    """
    rank, rows, n, codec = comm.rank, regions.rows, regions.n, regions.codec
    with phase("encode"):
        packets, dropped = codec.encode_each([own], divisor, [rows[rank]], n)
    packets = comm.all_gather(packets[0], regions.nbytes)
    with phase("decode"):
        return codec.decode_each(packets, regions.counts, regions.lengths, own.value.dtype, rows, n), dropped[0]


@dataclass(frozen=True)
class TwoShotReduceScatter(ReduceScatterScheme):
    """The way up only, with the chunks as regions: each rank sends the share `density` of every other chunk.

    Of its own chunk everything counts, at no cost. What is not sent stays in a residual of the whole gradient on each rank. Conserved is
    the sum of residuals over ranks + P x the mean. Where any rank's gradient holds NaN or Inf, all ranks get NaN and residuals stay as they
    were; a sum that overflows at its owner is NaN there only.
    """

    config: TwoShot
    name = "two_shot"

    @property
    def residuals(self) -> Residuals:
        """The precision of the residual."""
        return self.config.residuals

    @property
    def decay(self) -> float:
        """The share of the residual that joins the next gradient."""
        return self.config.decay

    def reduce_scatter(self, state: State, bucket: Bucket, out: Tensor, comm: Comm, average: bool) -> Report:
        n, P, m = bucket.grad.numel(), comm.size, out.numel()
        acc = state.accumulate(bucket)
        own, codec, dtype = Span(comm.rank * m, (comm.rank + 1) * m), Elements(self.config.values), acc.values.dtype
        chunks, count = [Span(owner * m, (owner + 1) * m) for owner in range(P)], count_for(self.config.density, m)
        others = [owner for owner in range(P) if owner != comm.rank]
        chosen = [acc.top_k_of(chunks[owner].of(acc.values), count, "sent") for owner in others]
        if not acc.finite:
            # So that every owner learns of it without another message.
            chosen = [Sparse(each.index, torch.full_like(each.value, torch.nan), m) for each in chosen]
        packets = [codec.encode(each) for each in chosen]
        packets.insert(comm.rank, packets[0].new_empty(0) if packets else torch.empty(0, dtype=torch.uint8))
        region, size = own.of(acc.values).clone(), codec.nbytes(count, m, dtype)
        comm = MeteredComm(comm)
        received = comm.all_to_all(packets, [size if source != comm.rank else 0 for source in range(P)])
        for source, packet in enumerate(received):
            if source != comm.rank:
                kernels.scatter_add_(region, codec.decode(packet, count, m, dtype))
        share = P if average else 1
        out.copy_(rounded(region / exact_divisor(region, share), out.dtype))
        if not acc.finite or not kernels.all_finite(out):
            return self.found_inf(bucket, out, comm.sent)
        with phase("apply"):
            acc.keep()
            for owner, each in zip(others, chosen, strict=True):
                error = each.value - codec.decode_values(packets[owner], count, m, dtype)
                kernels.put_(chunks[owner].of(acc.residual), each.index, error.to(acc.residual.dtype))
            # What rounding to its type drops.
            own.of(acc.residual).copy_(lacking(region, out, share))
        details: dict[str, Detail] = {"overflow": False}
        return Report(self.name, bucket.key, bucket.step, n, count * (P - 1) + m, n, comm.sent, details=details)
