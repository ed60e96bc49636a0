"""Quantized all-reduce of every element in 8 bits or fewer with error feedback: rounding errors join the next gradient (arXiv 1901.09847).

Every rank owns a chunk. Ranks send rounded shares of the mean to the owner of the chunk, which adds them up and sends the sum, rounded
again, to all. Sender and owner keep their rounding errors in their residuals. LoCo (arXiv 2407.04480) and SDP4Bit (arXiv 2410.15526)
are methods of this kind with an 8-bit residual or rotations; conservation needs neither.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from typing_extensions import Self

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme, own_chunk
from sparsync.base.state import State
from sparsync.collectives.values import quantized_all_reduce_
from sparsync.core import Bucket, Comm, Rows
from sparsync.feedback import Accumulator, Residuals
from sparsync.wire import ValueCodec, Values

Bits = Literal["int8", "int4", "int3", "ternary", "sign"]


@dataclass(frozen=True)
class Quantized(ErrorFeedbackScheme):
    """Write the mean of all elements, rounded twice on its way, and keep both rounding errors.

    `wire.ValueCodec` describes the formats, with one scale per block of 256. NaN and Inf show on every rank as NaN in their block.
    """

    values: Bits = "int8"
    residuals: Residuals = "float32"
    decay: float = 1.0  # share of the residual that joins the next gradient

    name = "quantized"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.values not in get_args(Bits):
            raise ValueError(
                f"values must be one of {', '.join(get_args(Bits))}, got {self.values!r}; for 16 bits there is Dense.bf16()"
            )

    @classmethod
    def int4(cls, residuals: Residuals = "float32") -> Self:
        """Reduce in 4 bits, an eighth of the bytes of float32, with error feedback."""
        return cls("int4", residuals)

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and the chunk that it owns, where it holds the rounding errors of sums over all ranks."""
        residual = state.residual(bucket)
        return residual, own_chunk(residual, comm)

    @property
    def whole_values(self) -> tuple[Values, Values]:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The same format up and down."""
        return self.values, self.values

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        mean = quantized_all_reduce_(acc.values, comm, ValueCodec(self.values))
        return DenseUpdate(mean, acc.values)
