"""TopkDSA: a sparse all-reduce over P equal regions that turns dense where the sums fill up (SparCML, arXiv 1802.08021).

Every rank sends its k largest elements to the owners of their regions, who add them up. Then all ranks gather all non-zero sums, or whole
regions if that is shorter. No selected element is dropped, so the result equals TopkA's, with fewer bytes if selections overlap; up to
P * k sums are non-zero.

Differs from the paper: top-k is over the whole bucket, not over groups of 512 elements; the reduce-scatter is one all-to-all, not log2 P
exchanges of halves, so only the all-gather turns dense; the learning rate is outside; and the message with the counts reveals NaN and Inf.
Positions take few bits in sparse packets, so by default it turns dense later than the paper: where they are as long as dense ones.
`dense_from=1/3` is the baseline of Ok-Topk's authors (arXiv 2201.07598).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync import Bucket, Comm, ErrorFeedbackScheme, kernels
from sparsync.collectives.sparse_allreduce import all_gather_elements, split_and_reduce_
from sparsync.collectives.values import exchange_counts
from sparsync.core import check_density, count_for, phase, spans
from sparsync.feedback import Residuals
from sparsync.kernels.rounding import lacking
from sparsync.schemes import Accumulator, Span, Sparse, State, Update
from sparsync.wire import Elements, ValueCodec, Values, check_values


@dataclass(frozen=True)
class TopKDSA(ErrorFeedbackScheme):
    """Send topk's sums by owners of regions, gathered dense where they fill up: SparCML (arXiv 1802.08021).

    The result is the sum over ranks of each rank's density * n largest elements, divided by P. NaN or Inf on any rank, or in a sum, makes
    every gradient NaN, and changes nothing else.
    """

    density: float = 0.01  # share of elements sent by each rank
    # Share of non-zero sums from which regions are gathered dense; None: if that is shorter.
    dense_from: float | None = None
    values: Values = "float32"  # format of sent values; rounding errors stay in a residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses its rounding errors

    name = "topk_dsa"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)
        if self.dense_from is not None and not 0 <= self.dense_from <= 1:
            raise ValueError(
                f"dense_from must be in [0, 1], a share of non-zero sums, got {self.dense_from}; None compares packets"
            )

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        n, P, codec = bucket.grad.numel(), comm.size, Elements(self.values)
        own = acc.top_k(count_for(self.density, n))  # [k]
        regions = spans(n, P)
        mine = regions[comm.rank]
        region = own.value.new_zeros(len(mine))
        reduced = split_and_reduce_(region, own, regions, comm, codec, counts_first=True)
        with phase("select"):
            sums = kernels.select_ge(region, 0.0)  # all non-zero ones
        finite = acc.finite and kernels.all_finite(region)
        held = exchange_counts(sums.index.numel(), finite, comm, region.device)
        if dense := self.gathers_dense(held, regions, region.dtype):
            mean, decoded = _gather_dense(region / P, regions, comm, ValueCodec(self.values))
            everywhere = torch.arange(mine.start, mine.stop, dtype=torch.int32, device=region.device)
            sums = Sparse(everywhere, region, n)
        else:
            sums = Sparse(sums.index + mine.start, sums.value, n)
            shares = replace(sums, value=sums.value / P)
            mean, decoded = all_gather_elements(shares, held, regions, comm, codec)
        errors = [] if reduced.error is None else [Sparse(own.index, reduced.error, n)]
        if not codec.exact:
            errors.append(replace(sums, value=lacking(sums.value, decoded, P)))
        return Update(mean, own.index, own.index.numel(), errors, {"dense": dense})

    def gathers_dense(self, held: Sequence[int], regions: Sequence[Span], dtype: torch.dtype) -> bool:
        """Decide whether to gather regions dense when ranks hold `held` non-zero sums; the same on all ranks."""
        if self.dense_from is not None:
            return sum(held) >= self.dense_from * regions[-1].stop
        codec, values = Elements(self.values), ValueCodec(self.values)
        sparse = sum(codec.nbytes(count, len(region), dtype) for count, region in zip(held, regions, strict=True))
        return sparse >= sum(values.nbytes(len(region), dtype) for region in regions)


def _gather_dense(region: Tensor, regions: Sequence[Span], comm: Comm, codec: ValueCodec) -> tuple[Sparse, Tensor]:
    """Gather the non-zero elements of all regions; also returns this rank's `region` as all ranks decode it."""
    dtype = region.dtype
    with phase("encode"):
        packet = codec.encode(region)
    packets = comm.all_gather(packet, [codec.nbytes(len(each), dtype) for each in regions])
    with phase("decode"):
        decoded = [codec.decode(each, len(place), dtype) for each, place in zip(packets, regions, strict=True)]
        return kernels.select_ge(torch.cat(decoded), 0.0), decoded[comm.rank]
