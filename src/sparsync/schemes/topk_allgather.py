"""TopkA: every rank sends its largest elements to all, and keeps the rest for later (Aji and Heafield, arXiv 1704.05021).

The selections of P ranks overlap little, so up to P * k elements of the result are set, and a rank receives (P-1) * k: both grow
with P. Differs from the paper: nothing of note; a poisoned bucket (NaN or Inf) is passed on without touching the residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.base.error_feedback import Keeping
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Bucket, Comm, Cost, Report, Sparse, spans
from sparsync.feedback import Accumulated, ErrorFeedback, Residuals, check_residuals, state_from
from sparsync.phases import phase
from sparsync.selection.topk import WARM, check_density, count_for
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values, check_values


@dataclass
class TopK(Keeping):
    """Each rank's share `density` of its elements of largest magnitude, summed and divided by P; the rest stays in the residual.

    Among equal magnitudes the elements that come first are sent. Where any rank's selection holds NaN or Inf, or the mean overflows the
    gradient's type, every rank writes it into the gradient, so that a loss scaler finds it, and leaves its residual as it was.
    """

    name = "topk"

    density: float = 0.01  # share of elements each rank sends; 0.001 to 0.01 in the literature
    values: Values = "float32"  # how values travel; what rounding takes away stays in the residual
    residuals: Residuals = (
        "float32"  # what residuals are kept in; "bfloat16" halves their memory and loses what it rounds away
    )
    _feedback: ErrorFeedback = field(default_factory=ErrorFeedback, init=False, repr=False, compare=False)
    _bounds: dict[str, float] = field(default_factory=dict, init=False, repr=False, compare=False)  # by bucket: guesses

    def __post_init__(self) -> None:
        check_density(self.density)
        check_values(self.values)
        check_residuals(self.residuals)
        self._feedback.precision = self.residuals

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """The same: the published algorithm is the exact one."""
        return cls(density=density)

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        n, P = bucket.grad.numel(), comm.size
        k = count_for(self.density, n)
        terms = self._feedback.terms(bucket, comm.rank)
        residual, bound = terms.residual, self._bounds.get(bucket.key)
        with phase("select"):
            own, finite = kernels.accumulate_top_k(terms.wide, terms.narrow, k, terms.acc, bound)  # [k]
        parts, error, cost = self._exchange(own, comm)
        with phase("decode"):
            union = kernels.coalesce(parts)  # in rank order, the same bits on every rank
            mean = union.value if self._rounds else union.value.div_(P)
            written = mean.to(bucket.grad.dtype)
        finite_mean = kernels.all_finite(written)  # a host sync; the same bits on all ranks, so all decide alike
        with phase("apply"):
            if finite_mean:
                Accumulated(terms.acc, residual, finite).keep(bucket)
                kernels.put_(residual, own.index, error)
                if self._rounds:  # what the gradient's type does not hold of the mean, each rank keeps for a slice
                    mine = spans(mean.numel(), P)[comm.rank]
                    lost = P * (mine.of(mean) - mine.of(written))
                    kernels.scatter_add_(residual, Sparse(mine.of(union.index), lost, n))
                self._bounds[bucket.key] = WARM * float(own.value.abs().min()) if k else 0.0
            else:
                bucket.grad.zero_()
            kernels.put_(bucket.grad, union.index, written)
        return Report(
            self.name, bucket.key, bucket.step, n, k, mean.numel(), cost, details={"overflow": not finite_mean}
        )

    @property
    def _rounds(self) -> bool:
        return self.values != "float32"

    def _exchange(self, own: Sparse, comm: Comm) -> tuple[list[Sparse], Tensor, Cost]:
        """What all ranks sent, in rank order, what was lost on `own` values, [k], and the cost.

        Rounded values are sent as their share of the mean, value / P: times P it is exact, which a mean of what was sent is not.
        """
        k, n, dtype = own.index.numel(), own.length, own.value.dtype
        codec, head = ValueCodec(self.values), indices.fixed_length_nbytes(own.index.numel(), own.length)
        with phase("encode"):
            packet = codec.encode(own.value / comm.size if self._rounds else own.value)
            error = torch.zeros_like(own.value)
            if self._rounds:
                error = own.value - comm.size * codec.decode(packet, k, dtype)
            packet = torch.cat([indices.encode_fixed_length(own.index, n), packet])
        packets = comm.all_gather(packet, [packet.numel()] * comm.size)  # k and n tell the length: none is exchanged
        with phase("decode"):
            places = [indices.decode_fixed_length(each[:head], k, n) for each in packets]
            values = [codec.decode(each[head:], k, dtype) for each in packets]
        parts = [Sparse(place, value, n) for place, value in zip(places, values, strict=True)]
        return parts, error, all_gather_cost(head + codec.nbytes(k, dtype), comm.size)

    def reset_shared_state(self) -> None:
        """Ranks hold nothing alike."""

    @property
    def _kept(self) -> ErrorFeedback:
        return self._feedback

    def state_dict(self) -> dict[str, Any]:  # Any: as the protocol
        return {"residual": self._feedback.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._feedback.load_state_dict(state_from(state, "residual", "TopK"))
