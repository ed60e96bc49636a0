"""Top-k with a union all-reduce: every rank sends its value at each position that some rank selected.

The top-k baseline that MiCRO (arXiv 2310.00967) and ExDyna (arXiv 2402.13781) are compared with. The ranks gather positions, and add up
what all of them hold there; so more is sent than was selected, and residuals are empty on the whole union, on every rank. The union
grows with the number of ranks, up to P * k.

Differs from the authors' code: positions travel in the shortest code, not in 8 bytes each; a bucket below 1/density elements sends one;
NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass

import torch
from typing_extensions import Self

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.forms import NOTHING, planned, quantized_work, union_of
from sparsync.collectives.exchange import all_gather
from sparsync.collectives.union_all_reduce import mean_at, mean_at_exchanges
from sparsync.comm.busiest import all_gather_exchange
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Sparse
from sparsync.feedback import Accumulator, Residuals
from sparsync.phases import phase
from sparsync.schemes.gathered_selections import values_or_nan
from sparsync.selection.density import check_density, count_for
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values, check_values


@dataclass
class TopKUnion(ErrorFeedbackScheme):
    """Send all ranks' values at the union of each rank's `density` * n largest elements; the mean divides by P.

    Where any rank holds NaN or Inf, the mean is NaN on all ranks, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank selects; the union is up to P times as large
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "topk_union"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the authors' rule is the exact one."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        n, P, k = given.n, given.P, count_for(self.density, given.n)
        union = union_of(given, k)
        quantizer = None if self.values == "float32" else ValueCodec(self.values)
        encode, decode = (NOTHING, NOTHING) if quantizer is None else quantized_work(union, P)
        positions = all_gather_exchange({indices.fixed_length_nbytes(k, n): P})
        return planned(
            given,
            [positions, *mean_at_exchanges(union, given.dtype, P, quantizer)],
            self.residual_nbytes(given),
            select=(n, 1),
            encode=encode,
            decode=decode,
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n = bucket.grad.numel()
        own = acc.top_k(count_for(self.density, n)).index  # [k]
        with phase("encode"):
            packet = indices.encode_fixed_length(own, n)
        packets = all_gather(packet, [packet.numel()] * comm.size, comm)
        with phase("decode"):
            union = torch.cat([indices.decode_fixed_length(each, own.numel(), n) for each in packets]).unique()  # [K]
        quantizer = None if self.values == "float32" else ValueCodec(self.values)
        mean = mean_at(values_or_nan(acc), union, comm, quantizer)
        errors = [] if mean.error is None else [Sparse(mean.index, mean.error, n)]
        return Update(Sparse(mean.index, mean.value, n), cleared=mean.index, selected=own.numel(), errors=errors)
