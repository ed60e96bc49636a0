"""TopkA: every rank sends its largest elements to all; the rest stays in its residual (Aji and Heafield, arXiv 1704.05021).

The selections of P ranks overlap little, so up to P * k elements of the result are set, and a rank receives (P-1) * k: both grow
with P. Differs from the paper: nothing of note; NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass
from typing import Self

import torch

from sparsync import kernels
from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.collectives.exchange import all_gather
from sparsync.core import Bucket, Comm, Sparse, spans
from sparsync.feedback import Accumulator, Residuals
from sparsync.phases import phase
from sparsync.selection.density import check_density, count_for
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values, check_values


@dataclass
class TopK(ErrorFeedbackScheme):
    """Send each rank's share `density` of its elements of largest magnitude to all; the mean divides their sum by P.

    Among equal magnitudes the elements that come first are sent. Where any rank's selection holds NaN or Inf, or the mean overflows the
    gradient's type, it shows in the gradient of every rank, so that a loss scaler finds it, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank sends; 0.001 to 0.01 in the literature
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "topk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the published algorithm is the exact one."""
        return cls(density=density)

    def count(self, bucket: Bucket) -> int:
        """Return how many elements each rank sends of this bucket at its step; the same on every rank."""
        return count_for(self.density, bucket.grad.numel())

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, P = bucket.grad.numel(), comm.size
        codec = ValueCodec(self.values)
        own = acc.top_k(self.count(bucket))  # [k]
        k, dtype, head = own.index.numel(), own.value.dtype, indices.fixed_length_nbytes(own.index.numel(), n)
        with phase("encode"):
            # Quantized values are sent as their share of the mean, value / P: times P it is exact, which a mean of decoded values is not.
            values = codec.encode(own.value if codec.exact else own.value / P)
            packet = torch.cat([indices.encode_fixed_length(own.index, n), values])
        packets = all_gather(packet, [packet.numel()] * P, comm)
        with phase("decode"):
            gathered = [
                Sparse(indices.decode_fixed_length(each[:head], k, n), codec.decode(each[head:], k, dtype), n)
                for each in packets
            ]
            # In rank order, so the same bits on every rank.
            union = kernels.coalesce(gathered)
        if codec.exact:
            return Update(Sparse(union.index, union.value.div_(P), n), cleared=own.index, selected=k)
        # What the gradient's type drops of the mean, each rank adds to its residual for one chunk of the union.
        mine = spans(union.value.numel(), P)[comm.rank]
        dropped = P * (mine.of(union.value) - mine.of(union.value.to(bucket.grad.dtype)))
        errors = [
            Sparse(own.index, own.value - P * codec.decode(values, k, dtype), n),
            Sparse(mine.of(union.index), dropped, n),
        ]
        return Update(union, cleared=own.index, selected=k, errors=errors)
