"""The limit of every selection, which no rank can know without sending everything: for comparison, not for use."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsync import Bucket, Comm, Report, Scheme, kernels
from sparsync.core import count_for


@dataclass
class Oracle(Scheme):
    """The largest elements of the mean of all ranks' accumulated gradients. Its report has no cost."""

    density: float = 0.01
    residual: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    name = "oracle"

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        mean = comm.all_reduce(bucket.grad.clone()) / comm.size
        acc = self.residual.get(bucket.key, torch.zeros_like(mean)) + mean
        largest = kernels.top_k(acc, count_for(self.density, acc.numel()))
        bucket.grad.zero_().index_copy_(0, largest.index.long(), largest.value)
        self.residual[bucket.key] = acc.index_fill_(0, largest.index.long(), 0.0)
        k = largest.index.numel()
        return self.report(bucket, selected=k, union=k)

    def rescale_residual(self, factors: Mapping[str, float]) -> None:
        """Multiply the whole residual by the factor of the first parameter: they are the same where one learning rate serves all."""
        for residual in self.residual.values():
            residual.mul_(next(iter(factors.values())))
