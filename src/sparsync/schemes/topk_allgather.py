"""TopkA: every rank sends its largest elements to all; the rest stays in its residual (Aji and Heafield, arXiv 1704.05021).

The selections of P ranks overlap little, so up to P * k elements of the result are non-zero, and a rank receives (P-1) * k: both grow
with P. Differs from the paper: NaN and Inf pass through without changing the residual.
"""

from dataclasses import dataclass

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.core import Bucket, Comm, Sparse, check_density, count_for, exact_divisor, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.wire import Elements, Values, check_values


@dataclass(frozen=True)
class TopK(ErrorFeedbackScheme):
    """Send this rank's share `density` of elements of largest magnitude to all ranks; the mean divides their sum by P.

    Of equal magnitudes the first elements are sent. If any rank's selection holds NaN or Inf, or the mean overflows the gradient's
    type, it shows in the gradient of every rank, so that a loss scaler finds it, and residuals do not change.
    """

    density: float = 0.01  # share of elements that a rank sends; 0.001 to 0.01 in the literature
    values: Values = "float32"  # format of values; rounding errors stay in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses their rounding errors

    name = "topk"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    def count(self, bucket: Bucket) -> int:
        """Return how many elements every rank sends of this bucket at its step."""
        return count_for(self.density, bucket.grad.numel())

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        selected, P, codec = acc.top_k(self.count(bucket)), comm.size, Elements(self.values)  # [k]
        n, k = bucket.grad.numel(), selected.index.numel()
        with phase("encode"):
            # Quantized values are sent divided by P: P times a decoded share is exact, whereas a mean of decoded values is not.
            packets, errors = codec.encode_each([selected], 1 if codec.exact else P)
        packets = comm.all_gather(packets[0], [codec.nbytes(k, n, selected.value.dtype)] * P)
        with phase("decode"):
            # In rank order, for the same bits on every rank.
            mean = kernels.coalesce(codec.decode_each(packets, [k] * P, [n] * P, selected.value.dtype))
        if codec.exact:
            mean, errors = Sparse(mean.index, mean.value.div_(exact_divisor(mean.value, P)), n), []
        return Update(mean, selected.index, k, errors)
