"""CLT-k: at each step one rank, the leader, chooses the positions at which all ranks send (ScaleCom, Chen et al., arXiv 2104.11125).

The leader is rank t mod P. Its k largest elements give the positions, all ranks add up their values there, and all residuals become zero
there. Nothing grows with P. What is large elsewhere waits until its rank leads, or the leader finds it large, too.

`low_pass` is ScaleCom's filter, which steadies residuals where batches are large: m = m + beta (g - sent), where plain error feedback has
beta = 1. Below 1 mass is not conserved: a residual takes up beta of each gradient, and gives back beta of what was sent.

Differs from the paper: the broadcast is P-1 messages of the leader, not a tree; NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Update
from sparsync.collectives.values import mean_at, mean_at_plan
from sparsync.comm.plan import Exchange, Given, Plan, planned
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


@dataclass
class CLTk(ErrorFeedbackScheme):
    """Send what CLT-k of ScaleCom selects: one rank in turn chooses the positions for all (arXiv 2104.11125).

    All ranks send their values at the `density` * n positions that are largest on this leader; the mean divides by P. Where any rank holds
    NaN or Inf, the mean is NaN on all ranks, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements that are sent, the same on all ranks
    low_pass: float = (
        1.0  # ScaleCom's beta, in (0, 1]; lower steadies residuals; 1 is plain error feedback, and conserves
    )
    values: Values = "float32"  # how values travel; what rounding drops stays in the residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "cltk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if not 0 < self.low_pass <= 1:
            raise ValueError(
                f"low_pass must be in (0, 1], the share of a gradient that joins the residual, got {self.low_pass}; 1 filters nothing"
            )

    @classmethod
    def published(cls, density: float = 0.01, low_pass: float = 1.0) -> Self:
        """Return the published algorithm, with its filter where `low_pass` is below 1."""
        return cls(density, low_pass)

    def planned(self, given: Given) -> Plan:
        n, P, k = given.n, given.P, count_for(self.density, given.n)
        mean = mean_at_plan(k, given.dtype, P, ValueCodec(self.values))
        return planned(
            given,
            [from_one_exchange(fixed_length_nbytes(k, n), P), *mean.exchanges],
            self.residual_nbytes(given),
            select=(n, 1),
            encode=mean.encode,
            decode=mean.decode,
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, leader = bucket.grad.numel(), bucket.step % comm.size
        k = count_for(self.density, n)
        nbytes = [fixed_length_nbytes(k, n) if rank == leader else 0 for rank in range(comm.size)]
        packet = torch.empty(0, dtype=torch.uint8, device=bucket.grad.device)
        if comm.rank == leader:
            packet = encode_fixed_length(acc.top_k(k).index, n)
        chosen = comm.all_gather(packet, nbytes)[leader]
        with phase("decode"):
            index = decode_fixed_length(chosen, k, n)
        mean, dropped = mean_at(_values_or_nan(acc), index, comm, ValueCodec(self.values))
        if self.low_pass < 1:
            _filter_(acc, mean.index, self.low_pass)
        errors = [replace(each, value=self.low_pass * each.value) for each in dropped]
        cleared = mean.index if self.low_pass == 1 else None
        return Update(mean, cleared, k, errors, {"leader": leader})


def _filter_(acc: Accumulator, sent: Tensor, beta: float) -> None:
    """Write m + beta (g - sent) to the values of `acc`, m being the residual before the step; everything is sent at `sent`."""
    m = acc.residual
    change = acc.values - m
    change[sent] = -m[sent].to(change.dtype)
    torch.add(m, change, alpha=beta, out=acc.values)


def from_one_exchange(nbytes: int, P: int) -> Exchange:
    """Return the exchange in which one rank sends the same to all others, which send nothing."""
    return Exchange("all_gather", (P - 1) * nbytes, P - 1 if nbytes else 0, 1 if P > 1 else 0, nbytes if P > 1 else 0)


def _values_or_nan(acc: Accumulator) -> Tensor:
    """Return the values of `acc`, [n], or only NaN where one is not finite: in any sum over ranks all of them see it."""
    return acc.values if acc.finite else torch.full_like(acc.values, torch.nan)
