"""A job and schemes as a third party writes them, in a file outside the package. Tests name them by this file's path."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from sparsync import Bucket, Report, Scheme
from sparsync.core import Comm, generator
from sparsync.schemes import State
from sparsync_lab.workloads.base import Batch, Workload, bare, chunks, exactly_addable, seeded, share


@dataclass(frozen=True)
class LineFit(Workload):
    """Linear regression in `width` dimensions, with Workload's defaults for everything else."""

    width: int = 8
    batch_size: int = 16

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
        optimizer = SGD(model.parameters(), lr=0.1)
        return optimizer, ConstantLR(optimizer, factor=1.0)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        batch = self.batch(-1, 0, 0, 1)
        total, count = 0.0, 0
        with torch.no_grad():
            for chunk in chunks(self.batch_size, 5, rank, ranks):
                error = bare(model)(chunk.of(batch.input)) - chunk.of(batch.target)
                total += exactly_addable(error.square().flatten())
                count += len(chunk)
        return total, count

    def quality(self, total: float, count: int) -> float:
        return total / count


class HeavyBall(Scheme):
    """The mean with a momentum that halves at each step."""

    name = "heavy_ball"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        last = state.common_vector("last", bucket)
        last.mul_(0.5).add_(comm.all_reduce(bucket.grad.clone()) / comm.size)
        bucket.grad.copy_(last)
        return self.report(bucket)


class DeclaredHeavyBall(HeavyBall):
    """The same, declared to the job's optimizer."""

    has_momentum = True


@dataclass(frozen=True)
class Scaled(Scheme):
    """The mean of all ranks, times a factor."""

    factor: float = 1.0

    name = "scaled"

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        bucket.grad.copy_(comm.all_reduce(bucket.grad.clone()) * (self.factor / comm.size))
        return self.report(bucket)
