"""TopkA: every rank sends its largest elements to all; the rest stays in its residual (Aji and Heafield, arXiv 1704.05021).

The selections of P ranks overlap little, so up to P * k elements of the result are set, and a rank receives (P-1) * k: both grow
with P. Differs from the paper: nothing of note; NaN and Inf are passed on without touching the residual.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.state import State
from sparsync.core import Bucket, Comm, Detail, Sparse, check_density, count_for, exact_divisor, phase
from sparsync.feedback import Accumulator, Residuals
from sparsync.kernels import operations as kernels
from sparsync.wire import Elements, Values, check_values


@dataclass(frozen=True)
class TopK(ErrorFeedbackScheme):
    """Send each rank's share `density` of its elements of largest magnitude to all; the mean divides their sum by P.

    Among equal magnitudes the elements that come first are sent. Where any rank's selection holds NaN or Inf, or the mean overflows the
    gradient's type, it shows in the gradient of every rank, so that a loss scaler finds it, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank sends; 0.001 to 0.01 in the literature
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "topk"
    may_send_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    def count(self, bucket: Bucket) -> int:
        """Return how many elements each rank sends of this bucket at its step; the same on every rank."""
        return count_for(self.density, bucket.grad.numel())

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        own = acc.top_k(self.count(bucket))  # [k]
        return gather_selections(own, [own.index.numel()] * comm.size, self.values, bucket, comm)


def gather_selections(
    own: Sparse,
    counts: Sequence[int],
    values: Values,
    bucket: Bucket,
    comm: Comm,
    details: Mapping[str, Detail] | None = None,
    commit: Callable[[], None] = lambda: None,
) -> Update:
    """Return the update in which the mean is the sum of all ranks' selections divided by P, and each rank clears its own.

    `counts[r]`, how many elements rank r selected, are known to all; `values` says how values travel.
    Exchanges: one all-gather. Bytes sent per rank: P-1 times the packet of its selection.
    """
    n, P, dtype, k = bucket.grad.numel(), comm.size, own.value.dtype, own.index.numel()
    codec = Elements(values)
    with phase("encode"):
        # Quantized values are sent as their share of the mean, value / P: times P it is exact, which a mean of decoded values is not.
        packets, errors = codec.encode_each([own], 1 if codec.exact else P)
    packets = comm.all_gather(packets[0], [codec.nbytes(count, n, dtype) for count in counts])
    with phase("decode"):
        # In rank order, so the same bits on every rank.
        mean = kernels.coalesce(codec.decode_each(packets, counts, [n] * P, dtype))
    if codec.exact:
        mean, errors = Sparse(mean.index, mean.value.div_(exact_divisor(mean.value, P)), n), []
    return Update(mean, own.index, k, errors, details or {}, commit)
