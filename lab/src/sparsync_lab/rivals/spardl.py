"""SparDL: a sparse reduce-scatter and all-gather of 2 ceil(log2 P) rounds that keep k elements all the way (arXiv 2304.00737).

The vector is cut into P blocks, of which k/P elements each may travel. Spar-reduce-scatter sums block b on rank b, and cuts it to its k/P
largest sums before every hop; Bruck's all-gather sends what is left to all. So traffic is 4k (P-1)/P words at most, at any P. Global
residual collection: at positions of the result, a rank's residual holds what this rank cut off on the way; elsewhere, its own acc.

Differs from the paper: one team (no Spar-all-gather between teams); k is met exactly, also where density * n < P, by blocks that take
turns; the learning rate is outside; NaN and Inf reach all ranks, and leave residuals untouched. Differs from the authors' code: the
reduce-scatter has ceil(log2 P) rounds, as in the paper, not P-1.
"""

from dataclasses import dataclass, replace

import torch
from typing_extensions import Self

from sparsync import Accumulator, Bucket, Comm, ErrorFeedbackScheme, Sparse, Update
from sparsync.comm.plan import NOTHING, Given, Plan, planned, plus
from sparsync.core import check_density, count_for, spans
from sparsync.feedback import Residuals
from sparsync.kernels.rounding import lacking
from sparsync.selection.exclusive import by_rank
from sparsync.selection.shares import apportion
from sparsync.wire import Elements, Values, check_values
from sparsync_lab.rivals.gtopk import of_survivors
from sparsync_lab.rivals.spar_reduce_scatter import (
    all_gather_blocks,
    bruck_all_gather_exchanges,
    spar_reduce_scatter,
    spar_reduce_scatter_exchanges,
)


@dataclass
class SparDL(ErrorFeedbackScheme):
    """Send sparse blocks by a reduce-scatter and an all-gather of 2 log2 P rounds: SparDL (arXiv 2304.00737).

    What is written are about the density * n / P largest sums of each of P blocks over what the ranks selected, divided by P. Where any
    rank holds NaN or Inf, it shows in the gradient of every rank, and residuals stay as they were.
    """

    density: float = 0.01  # share of elements each rank selects, and share in the result
    values: Values = "float32"  # how values travel, rounded at every hop; what rounding drops stays in a residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses what it rounds

    name = "spardl"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    @classmethod
    def published(cls, density: float = 0.01) -> Self:
        """Return the same: the published algorithm with one team."""
        return cls(density=density)

    def planned(self, given: Given) -> Plan:
        n, P, k, codec = given.n, given.P, count_for(self.density, given.n), Elements(self.values)
        lengths = [len(place) for place in spans(n, P)]
        counts = _block_counts(k, lengths, given.step or 0)
        pairs = list(zip(counts, lengths, strict=True))
        nbytes = {pair: codec.nbytes(*pair, given.dtype) for pair in set(pairs)}
        sizes = [nbytes[pair] for pair in pairs]
        sent, own = k - min(counts), max(counts)
        rounding = NOTHING if codec.exact else (sent, P - 1)
        return planned(
            given,
            [*spar_reduce_scatter_exchanges(sizes), *bruck_all_gather_exchanges(sizes)],
            self.residual_nbytes(given),
            select=(n + 2 * sent, 2 * P),
            passes_to_select=n,
            encode=(sent + own, P),
            decode=plus((sent, P - 1), (k, P), rounding),
        )

    def step(self, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, P, codec, x = bucket.grad.numel(), comm.size, Elements(self.values), acc.values
        places = spans(n, P)
        counts = _block_counts(count_for(self.density, n), [len(place) for place in places], bucket.step)
        blocks = [acc.top_k_of(place.of(x), count, "block") for place, count in zip(places, counts, strict=True)]
        if not acc.finite:
            blocks = [replace(block, value=torch.full_like(block.value, torch.nan)) for block in blocks]
        index = torch.cat([block.index + place.start for block, place in zip(blocks, places, strict=True)])
        own = Sparse(index, torch.cat([block.value for block in blocks]), n)
        sums, dropped = spar_reduce_scatter(blocks, counts, places, comm, codec)
        mean, decoded = all_gather_blocks(replace(sums, value=sums.value / P), counts, places, comm, codec)
        if not codec.exact:
            dropped.append(Sparse(sums.index + places[comm.rank].start, lacking(sums.value, decoded, P), n))
        return of_survivors(own, mean, dropped)


def _block_counts(k: int, lengths: list[int], step: int) -> list[int]:
    """Return `k` in equal shares for the blocks of these lengths; the blocks that get one more take turns."""
    P = len(lengths)
    shares = apportion([1] * P, by_rank(lengths, step), k)
    return by_rank(shares, P - step % P)
