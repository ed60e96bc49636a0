"""Values on the wire: as they are, in 16 bits, or quantized to 8, 4, 3, 2 or 1 bits with a scale or two for each block of 256.

The sender knows what the receiver decodes: decode(encode(x)). The difference belongs into the residual. In every format but float32 a
decoded value has at most 15 significant bits, so it and its multiples by small integers are exact in float32. Rounding makes no
infinities: a finite value beyond the largest number of its format becomes that.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sparsync.kernels import codecs
from sparsync.kernels.rounding import rounded

Values = Literal[
    "float32", "bfloat16", "float16", "int8", "int4", "int3", "int8_stochastic", "int4_stochastic", "2bit", "sign"
]
_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {"int8": 8, "int4": 4, "int3": 3, "int8_stochastic": 8, "int4_stochastic": 4, "2bit": 2, "sign": 1}
_MEANS = ("2bit", "sign")


@dataclass(frozen=True)
class ValueCodec:
    """One format of values.

    "float32"                   values as they are, float64 ones too
    "bfloat16", "float16"       16 bits; at most 3.39e38 and 65504
    "int8", "int4", "int3"      value / scale rounded to nearest, the scale being that of the block's greatest magnitude, which is 127,
                                7 or -4 times the scale; in int3 the scale has a sign
    "int8_stochastic", "int4_stochastic"
                                rounded up or down at random, right on average; what is drawn is a function of the values, so that the
                                same values make the same packet, in every run and after every resume
    "2bit"                      the sign, and whether the magnitude is above the block's mean; decoded as the mean of those that are, or
                                of those that are not
    "sign"                      the sign, the scale being the block's mean magnitude

    NaN and Inf pass in the float formats. In the others their block of 256 is decoded as NaN.
    """

    format: Values = "float32"

    def __post_init__(self) -> None:
        check_values(self.format)

    @property
    def exact(self) -> bool:
        """Return whether decoding gives back exactly what was encoded."""
        return self.format == "float32"

    def nbytes(self, k: int, dtype: torch.dtype) -> int:
        """Return the bytes of `k` values of `dtype`."""
        if self.exact:
            return k * dtype.itemsize
        return codecs.values_nbytes(k, _BITS[self.format]) if self.format in _BITS else 2 * k

    def encode(self, value: Float[Tensor, " k"]) -> UInt8[Tensor, " nbytes"]:
        """Return the packet of `value`."""
        if self.exact:
            return value.contiguous().view(torch.uint8)
        if self.format in _FLOATS:
            return rounded(value, _FLOATS[self.format]).contiguous().view(torch.uint8)
        value = rounded(value, torch.float32)
        if self.format in _MEANS:
            return codecs.means_encode(value, _BITS[self.format])
        noise = _noise(value) if self.format.endswith("_stochastic") else None
        return codecs.scaled_encode(value, _BITS[self.format], noise)

    def decode(self, packet: UInt8[Tensor, " nbytes"], k: int, dtype: torch.dtype) -> Float[Tensor, " k"]:
        """Return the `k` values of a packet in `dtype`. Raises RuntimeError when the packet has another length."""
        if packet.numel() != self.nbytes(k, dtype):
            raise RuntimeError(
                f"{k} values as {self.format} take {self.nbytes(k, dtype)} bytes, the packet has {packet.numel()}; "
                "sender and receiver must agree on format and count"
            )
        if self.exact:
            return packet.clone().view(dtype)
        if self.format in _FLOATS:
            return packet.clone().view(_FLOATS[self.format]).to(dtype)
        if self.format in _MEANS:
            return codecs.means_decode(packet, k, _BITS[self.format]).to(dtype)
        return codecs.scaled_decode(packet, k, _BITS[self.format]).to(dtype)


def _noise(value: Tensor) -> Tensor:
    """Return uniform numbers in [0, 1), [k], from a generator seeded with the bits of the values."""
    # A host sync on CUDA. The sum of integers is the same in any order.
    seed = int(value.contiguous().view(torch.int32).sum(dtype=torch.int64))
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(value.numel(), generator=generator, dtype=torch.float32, device="cpu").to(value.device)


def check_values(values: str) -> None:
    """Raise ValueError unless `values` names a format of values."""
    if values not in get_args(Values):
        raise ValueError(f"values must be one of {', '.join(get_args(Values))}, got {values!r}")
