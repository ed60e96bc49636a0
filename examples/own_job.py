"""A job of your own for `sparsync compare`: a small network that learns a sum of sines, on data made by the job itself.

Run: sparsync compare --workload examples/own_job.py:MyJob --ranks 2 --link none --schemes dense,topk --steps 50 --seed 0 --out results
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from sparsync.core import generator
from sparsync.lab.workloads.base import (
    Batch,
    Better,
    Workload,
    bare,
    chunks,
    evaluating,
    exactly_addable,
    seeded,
    share,
)

VALIDATION = 512  # samples


@dataclass(frozen=True)
class MyJob(Workload):
    """Ten inputs, one output; the options below are those of `--option batch_size=64`."""

    batch_size: int = 32  # samples in all, over all ranks
    width: int = 64
    learning_rate: float = 0.05

    name: ClassVar[str] = "my-job"
    metric: ClassVar[str] = "error"  # pyright: ignore[reportIncompatibleVariableOverride]
    better: ClassVar[Better] = "lower"
    unit: ClassVar[str] = "validation mean squared error"

    def model(self, seed: int) -> nn.Module:
        return seeded(lambda: nn.Sequential(nn.Linear(10, self.width), nn.Tanh(), nn.Linear(self.width, 1)), seed)

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        own = share(self.batch_size, rank, ranks)
        x = torch.randn(self.batch_size, 10, generator=generator(seed, "my-job/batch", step))[own.start : own.stop]
        return Batch(x, _target(x))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return mse_loss(model(batch.input), batch.target)

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        optimizer = SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)
        return optimizer, ConstantLR(optimizer, factor=1.0)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        x = torch.randn(VALIDATION, 10, generator=generator(0, "my-job/validation", 0))
        total, count = 0.0, 0
        with evaluating(model):
            for chunk in chunks(VALIDATION, 64, rank, ranks):
                own = x[chunk.start : chunk.stop]
                total += exactly_addable((bare(model)(own) - _target(own)).square().flatten())
                count += len(own)
        return total, count

    def quality(self, total: float, count: int) -> float:
        return total / count


def _target(x: Tensor) -> Tensor:
    return x.sin().sum(1, keepdim=True)
