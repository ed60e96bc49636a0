"""Top-k with a union all-reduce: every rank sends its value at each position that some rank selected.

The top-k baseline that MiCRO (arXiv 2310.00967) and ExDyna (arXiv 2402.13781) are compared with. The ranks gather positions, and add up
what all of them hold there; so more is sent than was selected, and residuals are empty on the whole union, on every rank. The union
grows with the number of ranks, up to P * k.

Differs from the authors' code: positions travel in the shortest code, not in 8 bytes each; a bucket below 1/density elements sends one;
NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Update
from sparsync.collectives.values import mean_at, mean_at_plan
from sparsync.comm.plan import Given, Plan, all_gather_exchange, planned
from sparsync.core import check_density, count_for, phase
from sparsync.feedback import Residuals
from sparsync.wire import (
    ValueCodec,
    Values,
    check_values,
    decode_fixed_length,
    encode_fixed_length,
    fixed_length_nbytes,
)

# Unions of partly equal gradients grow about as K = k P^0.6, as drawn by `sparsync traffic`; P for unrelated ones.
UNION_EXPONENT = 0.6


@dataclass
class TopKUnion(ErrorFeedbackScheme):
    """Send all ranks' values at the union of their largest elements (the top-k baseline of arXiv 2310.00967).

    Each rank selects its `density` * n largest; the mean divides by P. Where any rank holds NaN or Inf, the mean is NaN on all ranks, and
    residuals stay as they were.
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
        mean = mean_at_plan(union, given.dtype, P, ValueCodec(self.values))
        positions = all_gather_exchange({fixed_length_nbytes(k, n): P})
        return planned(
            given,
            [positions, *mean.exchanges],
            self.residual_nbytes(given),
            select=(n, 1),
            encode=mean.encode,
            decode=mean.decode,
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n = bucket.grad.numel()
        own = acc.top_k(count_for(self.density, n)).index  # [k]
        with phase("encode"):
            packet = encode_fixed_length(own, n)
        packets = comm.all_gather(packet, [packet.numel()] * comm.size)
        with phase("decode"):
            union = torch.cat([decode_fixed_length(each, own.numel(), n) for each in packets]).unique()  # [K]
        mean, errors = mean_at(values_or_nan(acc), union, comm, ValueCodec(self.values))
        return Update(mean, cleared=mean.index, selected=own.numel(), errors=errors)


def union_of(given: Given, k: int) -> int:
    """Return K where each rank selects `k` elements of all n by itself: as given, or estimated."""
    estimate = min(given.n, round(k * given.P**UNION_EXPONENT))
    return given.figures.get("union", estimate)


def values_or_nan(acc: Accumulator) -> Tensor:
    """Return the values of `acc`, [n], or only NaN where one is not finite: in any sum over ranks all of them see it."""
    return acc.values if acc.finite else torch.full_like(acc.values, torch.nan)
