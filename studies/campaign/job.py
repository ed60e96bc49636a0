"""The job of the comparisons that a campaign disturbs: a line through points, which needs no data and takes microseconds a step."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from sparsync.core import generator
from sparsync_lab.workloads.base import Batch, Workload, bare, chunks, exactly_addable, seeded, share


@dataclass(frozen=True)
class CampaignFit(Workload):
    """Linear regression in `width` dimensions."""

    width: int = 64
    batch_size: int = 8

    metric: ClassVar[str] = "error"
    better: ClassVar = "lower"
    unit: ClassVar[str] = "mean squared error"

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: nn.Linear(self.width, 1), seed)

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        x = torch.randn(self.batch_size, self.width, generator=generator(seed, "points", step))
        own = share(self.batch_size, rank, ranks).of(x)
        return Batch(own, own.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch.input) - batch.target).square().mean()

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=0.01)
        return optimizer, ConstantLR(optimizer, factor=1.0)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        batch = self.batch(-1, 0, 0, 1)
        total, count = 0.0, 0
        with torch.no_grad():
            for chunk in chunks(self.batch_size, 4, rank, ranks):
                error = bare(model)(chunk.of(batch.input)) - chunk.of(batch.target)
                total += exactly_addable(error.square().flatten())
                count += len(chunk)
        return total, count

    def quality(self, total: float, count: int) -> float:
        return total / count
