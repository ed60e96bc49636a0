"""The mean over ranks of values that are rounded before they are sent, so that what rounding takes away is known to one rank each.

Every rank owns one slice of the values. It sends its share of the mean, value / P, of every slice to the slice's owner; owners add up
what they read and send the result to all. What a rank's first packets do not tell of its values, and what an owner's packet does not
tell of its sums, is that rank's error: added to its residual, it loses no mass. P times what a packet tells is exact in float32, where
P < 512. All ranks read the same bytes, so all get the same mean.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.core import Comm, Cost, spans


@runtime_checkable
class Rounding(Protocol):
    """Bytes out of values and back, of a length that their number tells; `wire.values.ValueCodec` is one."""

    def encode(self, value: Tensor) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, dtype: torch.dtype) -> int: ...


@dataclass(frozen=True)
class Share:
    """What one rank puts into a mean: the packets, what a reader gets out of them, [k], and what is lost on this rank's value, [k]."""

    packets: list[Tensor]
    told: Tensor
    error: Tensor


def share(value: Tensor, lengths: list[int], P: int, codec: Rounding) -> Share:
    """`value` / P in packets of these lengths."""
    packets = [codec.encode(part) for part in (value / P).split(lengths)]
    told = [codec.decode(packet, count, value.dtype) for packet, count in zip(packets, lengths, strict=True)]
    told = torch.cat(told)
    return Share(packets, told, value - P * told)


def mean_rounded(value: Tensor, written: torch.dtype, comm: Comm, codec: Rounding) -> tuple[Tensor, Tensor]:
    """The mean over ranks of `value` [K] as the type `written` holds it, and the error of this rank, [K]: what the mean lacks of it.

    Summed over ranks value = P * mean + error, up to the rounding of an error to the type of `value`.
    Steps: 1, then P-1
    Bytes sent per rank: the packets of all slices but its own, then P-1 times the packet of its own
    """
    P = comm.size
    slices = spans(value.numel(), P)
    lengths = [len(each) for each in slices]
    own, mine = lengths[comm.rank], slices[comm.rank]
    sent = share(value, lengths, P, codec)
    arrived = comm.all_to_all(sent.packets, [codec.nbytes(own, value.dtype)] * P)
    total = torch.zeros_like(mine.of(value), dtype=torch.float64)  # in which sums of a few rounded values are exact
    for packet in arrived:  # in rank order
        total += codec.decode(packet, own, value.dtype)
    packets = comm.all_gather(
        codec.encode(total.to(value.dtype)), [codec.nbytes(count, value.dtype) for count in lengths]
    )
    parts = [codec.decode(packet, count, value.dtype) for packet, count in zip(packets, lengths, strict=True)]
    mean = torch.cat(parts).to(written).to(value.dtype)
    mine.of(sent.error).add_((P * (total - mine.of(mean))).to(value.dtype))
    return mean, sent.error


def mean_rounded_cost(K: int, dtype: torch.dtype, P: int, rank: int, codec: Rounding) -> Cost:
    """What `mean_rounded` sends from this rank."""
    sizes = [codec.nbytes(len(each), dtype) for each in spans(K, P)]
    return all_to_all_cost(sizes, rank) + all_gather_cost(sizes[rank], P)
