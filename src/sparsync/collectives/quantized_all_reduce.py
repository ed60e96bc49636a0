"""The mean over ranks of values that are quantized before they are sent, with what rounding drops known to one rank each.

Every rank owns one chunk of the values. It sends its share of the mean, value / P, of every other chunk to the chunk's owner; owners add
up what they receive and their own share, which is not rounded, and send the result to all. What a rank's first packets drop of its
values, and what an owner's packet drops of its sums, is that rank's error: added to its residual, no mass is lost. P times a decoded
value is exact in float32, where P < 512. All ranks decode the same bytes, so all get the same mean.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsync.comm.busiest import all_gather_exchange, near_equal, tally, to_owners_exchange
from sparsync.comm.cost import costs
from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.comm.plan import Exchange
from sparsync.core import Comm, Cost, spans
from sparsync.kernels.rounding import lacking, rounded
from sparsync.phases import phase


@runtime_checkable
class Quantizer(Protocol):
    """Bytes of values and back, of a length that their number determines; `wire.values.ValueCodec` is one."""

    def encode(self, value: Tensor) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, dtype: torch.dtype) -> int: ...


def quantized_all_reduce_exchanges(K: int, dtype: torch.dtype, P: int, quantizer: Quantizer) -> list[Exchange]:
    """Return the exchanges of `quantized_all_reduce`: each what its busiest rank sends."""
    sizes = tally(near_equal(K, P), lambda length: quantizer.nbytes(length, dtype))
    return [to_owners_exchange(sizes), all_gather_exchange(sizes)]


def quantized_all_reduce_cost(K: int, dtype: torch.dtype, P: int, rank: int, quantizer: Quantizer) -> Cost:
    """Return what `quantized_all_reduce` sends from this rank."""
    sizes = [quantizer.nbytes(len(chunk), dtype) for chunk in spans(K, P)]
    return all_to_all_cost(sizes, rank) + all_gather_cost(sizes[rank], P)


@costs(
    lambda _, value, comm, quantizer: quantized_all_reduce_cost(
        value.numel(), value.dtype, comm.size, comm.rank, quantizer
    )
)
def quantized_all_reduce(value: Tensor, comm: Comm, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Return the mean over ranks of `value` [K], and this rank's error, [K].

    Summed over ranks value = P * mean + error, up to the rounding of an error to the type of `value`.
    Steps: 2, an all-to-all and an all-gather
    Bytes sent per rank: the packets of all chunks but its own, then P-1 times the packet of its own
    """
    P, rank, dtype = comm.size, comm.rank, value.dtype
    chunks = spans(value.numel(), P)
    mine, lengths = chunks[rank], [len(chunk) for chunk in chunks]
    sizes = [quantizer.nbytes(length, dtype) for length in lengths]
    with phase("encode"):
        shares = value / P
        packets = [quantizer.encode(chunk.of(shares)) for owner, chunk in enumerate(chunks) if owner != rank]
        packets.insert(rank, value.new_empty(0, dtype=torch.uint8))
    received = comm.all_to_all(packets, [sizes[rank] if source != rank else 0 for source in range(P)])
    with phase("decode"):
        # float64, in which sums of a few quantized values are exact. What a rank owns it adds as it is.
        total = mine.of(value).to(torch.float64)
        for source, packet in enumerate(received):
            if source != rank:
                total.add_(quantizer.decode(packet, len(mine), dtype), alpha=P)
    with phase("encode"):
        packet = quantizer.encode(rounded(total / P, dtype))
    gathered = comm.all_gather(packet, sizes)
    with phase("decode"):
        decoded = [quantizer.decode(packet, length, dtype) for packet, length in zip(gathered, lengths, strict=True)]
        mean = torch.cat(decoded)
        error = torch.empty_like(value)
        for owner, chunk in enumerate(chunks):
            if owner == rank:
                chunk.of(error).copy_(total - P * chunk.of(mean).to(torch.float64))
            else:
                sent = quantizer.decode(packets[owner], len(chunk), dtype)
                chunk.of(error).copy_(lacking(chunk.of(value), sent, P))
    return mean, error
