"""Jobs as users write them: plain classes in a file outside the package. Tests name them by this file's path."""

import os
import time

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR


class Least:
    """The minimal job: the sum of four numbers."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def batch(self, step: int, rank: int, ranks: int) -> Tensor:
        return torch.randn(8, 4)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


class Undefined(Least):
    """A loss that is NaN from the first step on."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) * float("nan")


class Normalised:
    """A job with batch normalisation and just enough batches for six steps: a larger index is an error."""

    metric = "running mean"

    def __init__(self, samples: int = 6) -> None:
        self.samples = [{"x": torch.full((8, 4), 1.0 + step).cumsum(0), "name": "ones"} for step in range(samples)]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 1))

    def batch(self, step: int, rank: int, ranks: int) -> dict[str, object]:
        return {**self.samples[step], "nested": (self.samples[step]["x"] + rank, [ranks])}

    def loss(self, model: nn.Module, batch: dict) -> Tensor:
        return model(batch["nested"][0]).square().mean()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), lr=0.1)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)

    def evaluate(self, model: nn.Module) -> float:
        """Return a value that depends only on the running mean."""
        return float(dict(model.named_buffers())["1.running_mean"].sum())


class Unreadable(Least):
    """A sample that one rank cannot read."""

    def batch(self, step: int, rank: int, ranks: int) -> Tensor:
        if (step, rank) == (5, 1):
            raise OSError("no sample 5")
        return super().batch(step, rank, ranks)


class Leaving(Least):
    """A job in which one rank silently ends its process, as a library that calls exit may."""

    def batch(self, step: int, rank: int, ranks: int) -> Tensor:
        if (step, rank) == (5, 1):
            os._exit(0)
        return super().batch(step, rank, ranks)


class Hanging(Least):
    """A job in which one rank never finishes."""

    def batch(self, step: int, rank: int, ranks: int) -> Tensor:
        if (step, rank) == (5, 1):
            time.sleep(600)
        return super().batch(step, rank, ranks)
