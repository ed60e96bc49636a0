"""The mean over ranks of values that are quantized before they are sent, with what rounding drops known to one rank each.

Every rank owns one chunk of the values. It sends its share of the mean, value / P, of every chunk to the chunk's owner; owners add up
what they receive and send the result to all. What a rank's first packets drop of its values, and what an owner's packet drops of its
sums, is that rank's error: added to its residual, no mass is lost. P times a decoded value is exact in float32, where P < 512. All
ranks decode the same bytes, so all get the same mean.
"""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsync.comm.cost import costs
from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.core import Comm, Cost, spans


@runtime_checkable
class Quantizer(Protocol):
    """Bytes of values and back, of a length that their number determines; `wire.values.ValueCodec` is one."""

    def encode(self, value: Tensor) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, dtype: torch.dtype) -> int: ...


def quantized_all_reduce_cost(K: int, dtype: torch.dtype, P: int, rank: int, quantizer: Quantizer) -> Cost:
    """Return what `quantized_all_reduce` sends from this rank."""
    sizes = [quantizer.nbytes(len(chunk), dtype) for chunk in spans(K, P)]
    return all_to_all_cost(sizes, rank) + all_gather_cost(sizes[rank], P)


@costs(
    lambda _, value, written, comm, quantizer: quantized_all_reduce_cost(
        value.numel(), value.dtype, comm.size, comm.rank, quantizer
    )
)
def quantized_all_reduce(
    value: Tensor, written: torch.dtype, comm: Comm, quantizer: Quantizer
) -> tuple[Tensor, Tensor]:
    """Return the mean over ranks of `value` [K], as the type `written` holds it, and this rank's error, [K].

    Summed over ranks value = P * mean + error, up to the rounding of an error to the type of `value`.
    Steps: 1, then P-1
    Bytes sent per rank: the packets of all chunks but its own, then P-1 times the packet of its own
    """
    P, dtype = comm.size, value.dtype
    chunks = spans(value.numel(), P)
    mine, lengths = chunks[comm.rank], [len(chunk) for chunk in chunks]
    sizes = [quantizer.nbytes(length, dtype) for length in lengths]
    packets = [quantizer.encode(chunk) for chunk in (value / P).split(lengths)]
    received = comm.all_to_all(packets, [sizes[comm.rank]] * P)
    # float64, in which sums of a few quantized values are exact.
    total = torch.zeros_like(mine.of(value), dtype=torch.float64)
    for packet in received:
        total += quantizer.decode(packet, len(mine), dtype)
    gathered = comm.all_gather(quantizer.encode(total.to(dtype)), sizes)
    decoded = [quantizer.decode(packet, length, dtype) for packet, length in zip(gathered, lengths, strict=True)]
    mean = torch.cat(decoded).to(written).to(dtype)
    shares = [quantizer.decode(packet, length, dtype) for packet, length in zip(packets, lengths, strict=True)]
    error = value - P * torch.cat(shares)
    mine.of(error).add_((P * (total - mine.of(mean))).to(dtype))
    return mean, error
