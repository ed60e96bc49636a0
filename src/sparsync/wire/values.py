"""Values on the wire: as they are, in 16 bits, or in few bits with a scale for each block of 256.

What the receiver will read is known to the sender: decode(encode(x)). The difference belongs into the residual. In every format but
float32 what is decoded has at most 15 significant bits, so it and its multiples by small integers are exact in float32.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from sparsync.kernels import codecs

Values = Literal["float32", "bfloat16", "float16", "int8", "int4", "int8_stochastic", "int4_stochastic"]  # a scheme's
Format = Literal["float32", "bfloat16", "float16", "int8", "int4", "int8_stochastic", "int4_stochastic", "sign"]
_FLOATS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BITS = {"int8": 8, "int4": 4, "int8_stochastic": 8, "int4_stochastic": 4, "sign": 1}


@dataclass(frozen=True)
class ValueCodec:
    """One format. "float32" leaves values as they are, float64 ones too; NaN and Inf pass in the float formats, as NaN for their block
    of 256 in the others. "float16" makes Inf of what is above 65504. The stochastic ones round up or down at random, right on average;
    what is drawn is a function of the values, so that the same values make the same packet, in every run and after every resume."""

    format: Format = "float32"

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise ValueError(f"values are sent as one of {', '.join(get_args(Format))}, got {self.format!r}")

    @property
    def exact(self) -> bool:
        """Whether what is decoded is what was encoded."""
        return self.format == "float32"

    def nbytes(self, k: int, dtype: torch.dtype) -> int:
        """The bytes of `k` values of `dtype`."""
        if self.exact:
            return k * dtype.itemsize
        return codecs.scaled_nbytes(k, _BITS[self.format]) if self.format in _BITS else 2 * k

    def encode(self, value: Float[Tensor, " k"]) -> UInt8[Tensor, " nbytes"]:
        """The packet."""
        if self.exact:
            return value.contiguous().view(torch.uint8)
        if self.format in _FLOATS:
            return value.to(_FLOATS[self.format]).contiguous().view(torch.uint8)
        value = value.to(torch.float32)
        if self.format == "sign":
            return codecs.sign_encode(value)
        noise = _noise(value) if self.format.endswith("_stochastic") else None
        return codecs.scaled_encode(value, _BITS[self.format], noise)

    def decode(self, packet: UInt8[Tensor, " nbytes"], k: int, dtype: torch.dtype) -> Float[Tensor, " k"]:
        """What the `k` values of a packet stand for, in `dtype`. Raises RuntimeError when the packet has another length."""
        if packet.numel() != self.nbytes(k, dtype):
            raise RuntimeError(
                f"{k} values as {self.format} take {self.nbytes(k, dtype)} bytes, the packet has {packet.numel()}; "
                "sender and receiver must agree on format and count"
            )
        if self.exact:
            return packet.clone().view(dtype)
        if self.format in _FLOATS:
            return packet.clone().view(_FLOATS[self.format]).to(dtype)
        decoded = (
            codecs.sign_decode(packet, k)
            if self.format == "sign"
            else codecs.scaled_decode(packet, k, _BITS[self.format])
        )
        return decoded.to(dtype)


def _noise(value: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), [k], that other values would not draw."""
    seed = int(value.contiguous().view(torch.int32).sum(dtype=torch.int64))  # a host sync on CUDA; exact in any order
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.rand(value.numel(), generator=generator, dtype=torch.float32, device="cpu").to(value.device)


def check_values(values: str) -> None:
    """Raises ValueError for what is no way to send values."""
    if values not in get_args(Values):
        raise ValueError(f"values must be one of {', '.join(get_args(Values))}, got {values!r}")
