"""The limit of every selection, for comparison only: no rank can know it without sending everything."""

from dataclasses import dataclass

from sparsync import Bucket, Comm, Report, Scheme, kernels
from sparsync.core import count_for
from sparsync.schemes import State


@dataclass(frozen=True)
class Oracle(Scheme):
    """Select the largest elements of the mean of all ranks' accumulated gradients. The report has no cost."""

    density: float = 0.01
    name = "oracle"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        mean, residual = comm.all_reduce(bucket.grad.clone()) / comm.size, state.residual(bucket)
        acc = residual + mean
        largest = kernels.top_k(acc, count_for(self.density, acc.numel()))
        bucket.grad.zero_().index_copy_(0, largest.index.long(), largest.value)
        residual.copy_(acc.index_fill_(0, largest.index.long(), 0.0))
        k = largest.index.numel()
        return self.report(bucket, selected=k, union=k)
