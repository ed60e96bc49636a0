"""Every element of every rank in 8 bits or fewer, with error feedback: what rounding drops joins the next gradient (arXiv 1901.09847).

Each rank owns a chunk. Shares of the mean travel rounded to the owner of their chunk, which adds them up and sends the sum, rounded
again, to all. Both errors are known to one rank each and stay in its residual. LoCo (arXiv 2407.04480) and SDP4Bit (arXiv 2410.15526)
are rules of this kind with a residual in 8 bits or with rotations; neither is needed for conservation.
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
    """Write the mean of all elements, rounded twice on its way, and keep what both roundings dropped.

    Formats are those of `wire.ValueCodec`, with a scale for each block of 256. NaN and Inf show on every rank as NaN in their block.
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
        """Return the reduction in 4 bits: an eighth of the bytes of float32, with error feedback."""
        return cls("int4", residuals)

    def unsent(self, state: State, bucket: Bucket, comm: Comm) -> tuple[Tensor, Rows | None]:
        """Return this rank's residual, [n], and its own chunk, where it holds what rounding dropped of all ranks' sum."""
        residual = state.residual(bucket)
        return residual, own_chunk(residual, comm)

    @property
    def whole_values(self) -> tuple[Values, Values]:  # pyright: ignore[reportIncompatibleVariableOverride]  # nobody sets it
        """The same format up and down."""
        return self.values, self.values

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        mean = quantized_all_reduce_(acc.values, comm, ValueCodec(self.values))
        return DenseUpdate(mean, acc.values)
