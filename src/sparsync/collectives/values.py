"""Collectives of values whose positions all ranks know: means at some positions, quantized means, differences of shards, a broadcast.

A quantized mean conserves the sum: every rank owns one chunk of the values. It sends its share of the mean, value / P, of every other chunk
to the owner; owners add the shares that they receive to their unrounded share, and send the result to all. The rounding errors of its
shares and of its chunk's sums are a rank's error; adding it to the residual conserves the sum. P times a decoded value is exact in float32
if P < 512. All ranks decode the same bytes, so all get the same mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from sparsync.core import (
    Comm,
    Span,
    Sparse,
    exact_divisor,
    or_found_inf,
    phase,
    raise_if_found_inf,
    spans,
    sum_in_rank_order,
)
from sparsync.kernels import operations as kernels
from sparsync.kernels.rounding import lacking, rounded

# The extra bytes allowed for sending values to all ranks at once: an Ethernet packet, 0.12 ms at 100 Mbit/s.
AT_ONCE_NBYTES = 1460


@runtime_checkable
class Quantizer(Protocol):
    """Encodes values as a packet whose length follows from their number, as `wire.ValueCodec` does."""

    @property
    def exact(self) -> bool: ...

    def encode(self, value: Tensor) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, dtype: torch.dtype) -> int: ...


@runtime_checkable
class ArrivedMean(Protocol):
    """An encoded mean over ranks, which is decoded when it is written."""

    @property
    def dtype(self) -> torch.dtype: ...

    def decoded(self) -> Tensor:
        """Decode the mean, [n]."""
        ...

    def write_(self, out: Tensor) -> None:
        """Write the mean to `out` [n], of the same type."""
        ...

    def fits(self, times: int) -> bool:
        """Return whether `times` the mean is finite everywhere, the same on all ranks."""
        ...


def mean_at(
    acc: Tensor, parts: Sequence[Tensor], comm: Comm, quantizer: Quantizer, at_once: bool = False
) -> tuple[Sparse, list[Sparse]]:
    """Average `acc` [n] over ranks at K positions. Return the means, the same on every rank, and this rank's rounding errors.

    The positions are in `parts`, which ascend and are disjoint. An exact quantizer has no errors. With `at_once`, every rank sends all
    its values to all others if that takes at most AT_ONCE_NBYTES more bytes; this saves an exchange and rounds once.
    Steps: an all-reduce; 2 if values are rounded; at once 1
    Bytes sent per rank: 2 (P-1)/P * K * bytes of a value, and its share of the quantizer's scales; at once (P-1) * K values
    """
    index = torch.cat([*parts])  # [K]
    n, K = acc.numel(), index.numel()
    value = kernels.gather(acc, index)  # [K]
    if at_once and takes_little_more(K, value.dtype, comm.size, quantizer):
        mean, error = _mean_at_once(value, comm, quantizer)
    elif quantizer.exact:
        mean, error = comm.all_reduce(value) / exact_divisor(value, comm.size), None
    else:
        mean, error = quantized_all_reduce_(value, comm, quantizer).decoded(), value
    errors = [] if error is None else [Sparse(index, error, n)]
    filled = [part for part in parts if part.numel()]
    if len(filled) < 2:
        return Sparse(index, mean, n), errors
    values = mean.split([part.numel() for part in filled])
    # Merged, because ascending positions are written in one pass.
    return kernels.merge([Sparse(part, value, n) for part, value in zip(filled, values, strict=True)]), errors


@dataclass(frozen=True)
class QuantizedMean:
    """An encoded mean over ranks: a packet per chunk, in rank order. It takes no other memory until it is decoded."""

    packets: Sequence[Tensor]
    quantizer: Quantizer
    length: int
    dtype: torch.dtype

    def decoded(self) -> Float[Tensor, " n"]:
        """Decode the mean."""
        out = self.packets[0].new_empty(self.length, dtype=self.dtype)
        self.write_(out)
        return out

    def write_(self, out: Float[Tensor, " n"]) -> None:
        """Write the mean to `out`, of the same type."""
        if self.kernel_bits is not None:
            kernels.write_mean_(out, None, None, self.packets, self.kernel_bits, 0)
            return
        for packet, chunk in self._chunks():
            chunk.of(out).copy_(self.quantizer.decode(packet, len(chunk), self.dtype))

    def fits(self, times: int) -> bool:
        """Return whether `times` the mean is finite everywhere, the same on all ranks."""
        if self.kernel_bits is not None:  # on a GPU a host sync
            lengths = [len(chunk) for _, chunk in self._chunks()]
            return bool(kernels.packets_fit(self.packets, lengths, self.kernel_bits, times))
        return all(
            kernels.all_finite(self.quantizer.decode(packet, len(chunk), self.dtype) * times)
            for packet, chunk in self._chunks()
        )

    @property
    def kernel_bits(self) -> int | None:
        """The bits of a value, if kernels read the packets; else None."""
        return _kernel_bits(self.quantizer, self.dtype)

    def _chunks(self) -> Iterator[tuple[Tensor, Span]]:
        return zip(self.packets, spans(self.length, len(self.packets)), strict=True)


def takes_little_more(K: int, dtype: torch.dtype, P: int, quantizer: Quantizer) -> bool:
    """Return whether sending K values to all ranks takes at most AT_ONCE_NBYTES more than chunks to owners and means to all."""
    chunk = quantizer.nbytes(-(-K // P), dtype)
    return (P - 1) * quantizer.nbytes(K, dtype) <= 2 * (P - 1) * chunk + AT_ONCE_NBYTES


def _mean_at_once(value: Tensor, comm: Comm, quantizer: Quantizer) -> tuple[Tensor, Tensor | None]:
    """Average `value` [K] over ranks. Return the mean and this rank's error, [K], which is None with an exact quantizer."""
    P, K, dtype = comm.size, value.numel(), value.dtype
    if quantizer.exact:
        return sum_in_rank_order(comm.all_gather(value, [K] * P)) / exact_divisor(value, P), None
    with phase("encode"):
        packet = quantizer.encode(value / exact_divisor(value, P))
    packets = comm.all_gather(packet, [packet.numel()] * P)
    with phase("decode"):
        total = value.new_zeros(K, dtype=torch.float64)  # sums of a few quantized values are exact in float64
        for received in packets:
            total.add_(quantizer.decode(received, K, dtype), alpha=P)
        mean = rounded(total / exact_divisor(total, P), dtype)
        error = lacking(value, quantizer.decode(packet, K, dtype), P)
        # The rounding errors of sums join the error of the chunk's owner.
        mine = spans(K, P)[comm.rank]
        mine.of(error).add_(lacking(mine.of(total), mine.of(mean), P).to(dtype))
    return mean, error


def quantized_all_reduce_(
    value: Tensor, comm: Comm, quantizer: Quantizer, down: Quantizer | None = None, terms: Sequence[Tensor] = ()
) -> QuantizedMean:
    """Average `value` [K] over ranks, and replace `value` by this rank's error.

    With `terms`, a residual and a gradient, which may be `value`, it averages their sum, added in the same pass; the formats must have
    kernels. `quantizer` encodes shares for owners, and `down` the owners' sums; None: the same. Summed over ranks,
    value = P * mean + error, up to the rounding of errors to the type of `value`. If an exchange fails, `value` is
    undefined.
    Steps: 2, an all-to-all and an all-gather
    Bytes sent per rank: the packets of all other chunks, then P-1 times the packet of its chunk
    """
    P, rank, dtype, down = comm.size, comm.rank, value.dtype, down or quantizer
    chunks = spans(value.numel(), P)
    mine, lengths = chunks[rank], [len(chunk) for chunk in chunks]
    size, bits = quantizer.nbytes(len(mine), dtype), _kernel_bits(quantizer, dtype)
    with phase("encode"):
        if bits is not None:
            residual, gradients = (terms[0], terms[1:]) if terms else (value, ())
            given = gradients, [0] * len(gradients), [1.0] * len(gradients), None, None, 1, (), ()
            sent = kernels.encode_steps_(residual, *given, rank, P, bits, None, value)
            packets = list(
                sent.split([quantizer.nbytes(length, dtype) * (p != rank) for p, length in enumerate(lengths)])
            )
        else:
            packets = [_share_(chunk.of(value), quantizer, P) for owner, chunk in enumerate(chunks) if owner != rank]
            packets.insert(rank, value.new_empty(0, dtype=torch.uint8))
    received = comm.all_to_all(packets, [size if source != rank else 0 for source in range(P)])
    with phase("decode"):
        others = [packet for source, packet in enumerate(received) if source != rank]
        packet = _sum_(mine.of(value), others, quantizer, P, down)
    gathered = comm.all_gather(packet, [down.nbytes(length, dtype) for length in lengths])
    return QuantizedMean(gathered, down, value.numel(), dtype)


def _share_(value: Tensor, quantizer: Quantizer, P: int) -> Tensor:
    """Encode a share of the mean, value / P, and replace `value` by the error of P times the packet."""
    packet = quantizer.encode(value / exact_divisor(value, P))
    value.copy_(lacking(value, quantizer.decode(packet, value.numel(), value.dtype), P))
    return packet


def _sum_(value: Tensor, packets: Sequence[Tensor], quantizer: Quantizer, P: int, down: Quantizer) -> Tensor:
    """Encode the mean of `value` and the shares in `packets`, and replace `value` by the error of P times the result."""
    bits, bits_down = (_kernel_bits(format, value.dtype) for format in (quantizer, down))
    if bits is not None and bits_down is not None:
        return kernels.reduce_shares_(value, packets, bits, P, bits_down)
    # Sums of a few quantized values are exact in float64. A rank adds its values unrounded.
    total = value.to(torch.float64)
    for packet in packets:
        total.add_(quantizer.decode(packet, value.numel(), value.dtype), alpha=P)
    packet = down.encode(rounded(total / exact_divisor(total, P), value.dtype))
    value.copy_(total.sub_(down.decode(packet, value.numel(), value.dtype), alpha=P))
    return packet


def _kernel_bits(quantizer: Quantizer, dtype: torch.dtype) -> int | None:
    """Return the bits of a format that has kernels, which support float32 only; else None."""
    return getattr(quantizer, "kernel_bits", None) if dtype == torch.float32 else None


def exchange_counts(count: int, finite: bool | Tensor, comm: Comm, device: torch.device) -> list[int]:
    """Gather the counts of all ranks. Raises NonFiniteError on all ranks if any is not `finite`.

    Steps: 1
    Bytes sent per rank: 8 (P-1)
    """
    local = or_found_inf(torch.tensor([count], dtype=torch.int64, device=device), finite)
    # A host sync: the sizes of the next buffers depend on it.
    counts: list[int] = torch.cat(comm.all_gather(local, [1] * comm.size)).tolist()
    raise_if_found_inf(counts)
    return counts


def gather_differences(shard: Float[Tensor, " m"], held: Float[Tensor, " n"], quantizer: Quantizer, comm: Comm) -> None:
    """Update `held` [P m] towards the shards, in place, with the same bits everywhere; chunk r estimates the shard of rank r.

    This is an all-gather of shards that change little between calls, such as parameters. Owners send rounded differences, and the next
    difference includes the rounding errors: error feedback without a residual, as in EF21 (arXiv:2106.05203) for gradients.
    ZeRO++ (arXiv:2306.10209) instead rounds the parameters themselves in every all-gather.

    An exact codec sends the shards themselves: `held` becomes an exact copy of them. Otherwise `held` must be the
    same on all ranks. NaN and Inf show on all ranks, in formats below 16 bits in their whole block of 256. A non-finite element
    counts as zero in the next call, so that it recovers when its owner does.

    Steps: 1
    Bytes sent per rank: (P-1) quantizer.nbytes(m)
    """
    m, wide = shard.numel(), torch.promote_types(shard.dtype, torch.float32)
    chunks = held.view(comm.size, m)
    with phase("encode"):
        if not quantizer.exact:
            held.nan_to_num_(0.0, 0.0, 0.0)
            shard = shard.to(wide) - chunks[comm.rank]
        packet = quantizer.encode(shard)
    received = comm.all_gather(packet, [packet.numel()] * comm.size)
    with phase("decode"):
        for chunk, theirs in zip(chunks, received, strict=True):
            decoded = quantizer.decode(theirs, m, shard.dtype)
            if quantizer.exact:
                chunk.copy_(decoded)
            else:
                chunk.add_(decoded)


def broadcast(x: Tensor, comm: Comm) -> Tensor:
    """Copy rank 0's `x` [n] to every rank; n and the type are the same on all ranks.

    Scatters chunks and gathers them, so that no rank sends the whole vector to all others.
    Steps: 2, a scatter and an all-gather
    Bytes sent per rank: (P-1)/P * nbytes(x), and the same again on rank 0
    """
    if comm.size == 1 or not x.numel():
        return x
    chunks = spans(x.numel(), comm.size)
    parts = [chunk.of(x) if comm.rank == 0 else x[:0] for chunk in chunks]
    received = comm.all_to_all(parts, [len(chunks[comm.rank]), *[0] * (comm.size - 1)])[0]
    return torch.cat(comm.all_gather(received.contiguous(), [len(chunk) for chunk in chunks]))
