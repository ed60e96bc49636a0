"""CLT-k: at each step one rank, the leader, chooses the positions at which all ranks send (ScaleCom, Chen et al., arXiv 2104.11125).

The leader is rank t mod P. Its k largest elements give the positions, all ranks add up their values there, and all residuals become zero
there. Nothing grows with P. What is large elsewhere waits until its rank leads, or the leader finds it large, too.

`low_pass` is ScaleCom's filter, which steadies residuals where batches are large: m = m + beta (g - sent), where plain error feedback has
beta = 1. Below 1 mass is not conserved: a residual takes up beta of each gradient, and gives back beta of what was sent.

Differs from the paper: the broadcast is P-1 messages of the leader, not a tree; NaN and Inf are passed on without touching the residual.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from sparsync.base.error_feedback import ErrorFeedbackScheme, Update
from sparsync.base.forms import NOTHING, planned, quantized_work
from sparsync.collectives.exchange import all_gather
from sparsync.collectives.union_all_reduce import mean_at, mean_at_exchanges
from sparsync.comm.busiest import from_one_exchange
from sparsync.comm.plan import Given, Plan
from sparsync.core import Bucket, Comm, Sparse
from sparsync.feedback import Accumulator, Residuals
from sparsync.phases import phase
from sparsync.schemes.gathered_selections import values_or_nan
from sparsync.selection.density import check_density, count_for
from sparsync.wire import indices
from sparsync.wire.values import ValueCodec, Values, check_values


@dataclass
class CLTk(ErrorFeedbackScheme):
    """Send all ranks' values at the `density` * n positions that are largest on the leader, a rank in turn; the mean divides by P.

    Where any rank holds NaN or Inf, the mean is NaN on all ranks, and residuals stay as they were.
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
        quantizer = None if self.values == "float32" else ValueCodec(self.values)
        encode, decode = (NOTHING, NOTHING) if quantizer is None else quantized_work(k, P)
        return planned(
            given,
            [from_one_exchange(indices.fixed_length_nbytes(k, n), P), *mean_at_exchanges(k, given.dtype, P, quantizer)],
            self.residual_nbytes(given),
            select=(n, 1),
            encode=encode,
            decode=decode,
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, leader = bucket.grad.numel(), bucket.step % comm.size
        k = count_for(self.density, n)
        nbytes = [indices.fixed_length_nbytes(k, n) if rank == leader else 0 for rank in range(comm.size)]
        packet = torch.empty(0, dtype=torch.uint8, device=bucket.grad.device)
        if comm.rank == leader:
            packet = indices.encode_fixed_length(acc.top_k(k).index, n)
        chosen = all_gather(packet, nbytes, comm)[leader]
        with phase("decode"):
            index = indices.decode_fixed_length(chosen, k, n)
        quantizer = None if self.values == "float32" else ValueCodec(self.values)
        mean = mean_at(values_or_nan(acc), index, comm, quantizer)
        if self.low_pass < 1:
            _filter_(acc, mean.index, self.low_pass)
        errors = [] if mean.error is None else [Sparse(mean.index, self.low_pass * mean.error, n)]
        cleared = mean.index if self.low_pass == 1 else None
        return Update(Sparse(mean.index, mean.value, n), cleared, k, errors, {"leader": leader})


def _filter_(acc: Accumulator, sent: Tensor, beta: float) -> None:
    """Write m + beta (g - sent) to the values of `acc`, m being the residual before the step; everything is sent at `sent`."""
    m = acc.residual
    change = acc.values - m
    change[sent] = -m[sent].to(change.dtype)
    torch.add(m, change, alpha=beta, out=acc.values)
