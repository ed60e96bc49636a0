"""The specification of rounding inside a quantized all-reduce, in plain torch: shares of a mean for owners, and sums of them.

The packets are those of `value_reference`. Other backends write the same bytes and the same errors, bit for bit.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sparsync.core import exact_divisor
from sparsync.kernels.value_reference import nan_packet, values_decode, values_encode

Encode = Callable[[Tensor, int], Tensor]
Decode = Callable[[Tensor, int, int], Tensor]


def reduce_shares_(
    value: Float[Tensor, " k"],
    packets: Sequence[Tensor],
    bits: int,
    P: int,
    bits_down: int,
    skip: Tensor | None = None,
) -> UInt8[Tensor, " nbytes"]:
    if skip is not None and bool(skip):
        return nan_packet(value.numel(), bits_down, value.device)
    return reduce_shares_by(values_encode, values_decode, value, packets, bits, P, bits_down)


def encode_share_by(encode: Encode, decode: Decode, value: Tensor, bits: int, P: int) -> Tensor:
    """Return the packet of value / P, and make `value` [k] what P times the decoded packet lacks of it, with these codecs."""
    packet = encode(value / exact_divisor(value, P), bits)
    received = decode(packet, value.numel(), bits)
    error = value - P * received
    # Where P times what was received is beyond float32, the difference may still be inside.
    error = torch.where(error.isfinite(), error, (value.double() - P * received.double()).to(value.dtype))
    value.copy_(error)
    return packet


def reduce_shares_by(
    encode: Encode, decode: Decode, value: Tensor, packets: Sequence[Tensor], bits: int, P: int, bits_down: int
) -> Tensor:
    """Do what `reduce_shares_` does with these codecs."""
    # float64, in which sums of a few quantized values are exact. A rank adds its own values unrounded.
    total = value.double()
    for packet in packets:
        total += P * decode(packet, value.numel(), bits).double()
    mean, largest = total / exact_divisor(total, P), torch.finfo(value.dtype).max
    mean = torch.where(mean.isfinite(), mean.clamp(-largest, largest), mean).to(value.dtype)
    packet = encode(mean, bits_down)
    value.copy_(total - P * decode(packet, value.numel(), bits_down).double())
    return packet
