"""Every element of every rank in 8 bits or fewer, with error feedback: what rounding drops joins the next gradient (arXiv 1901.09847).

Each rank owns a chunk. Shares of the mean travel rounded to the owner of their chunk, which adds them up and sends the sum, rounded
again, to all. Both errors are known to one rank each and stay in its residual. LoCo (arXiv 2407.04480) and SDP4Bit (arXiv 2410.15526)
are rules of this kind with a residual in 8 bits or with rotations; neither is needed for conservation.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from typing_extensions import Self

from sparsync.base.error_feedback import DenseUpdate, ErrorFeedbackScheme
from sparsync.base.forms import planned, quantized_work
from sparsync.collectives.quantized_all_reduce import quantized_all_reduce, quantized_all_reduce_exchanges
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm
from sparsync.feedback import Accumulator, Residuals
from sparsync.wire.values import ValueCodec, Values

Bits = Literal["int8", "int4", "int3", "int8_stochastic", "int4_stochastic", "2bit", "sign"]


def planned_quantized(given: Given, values: Values, state_nbytes: int) -> Plan:
    """Return the plan of a quantized all-reduce of all elements with error feedback."""
    exchanges = quantized_all_reduce_exchanges(given.n, given.dtype, given.P, ValueCodec(values))
    encode, decode = quantized_work(given.n, given.P)
    return planned(given, exchanges, state_nbytes, encode=encode, decode=decode)


@dataclass
class Quantized(ErrorFeedbackScheme):
    """Write the mean of all elements, rounded twice on its way, and keep what both roundings dropped.

    Formats are those of `wire.values.ValueCodec`, with a scale for each block of 256. NaN and Inf show on every rank as NaN in their block.
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
        """Return the reduction in 4 bits: an eighth of the bytes of float32."""
        return cls("int4", residuals)

    @classmethod
    def published(cls, values: Bits = "int8") -> Self:
        """Return the same: error feedback as published, at both ends."""
        return cls(values)

    def planned(self, given: Given) -> Plan:
        return planned_quantized(given, self.values, self.residual_nbytes(given))

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> DenseUpdate:
        mean, error = quantized_all_reduce(acc.values, comm, ValueCodec(self.values))
        return DenseUpdate(mean, error)
