"""A job of your own for `sparsync compare`: a small network that learns a sum of sines, on data made by the job itself.

Run: sparsync compare --workload examples/own_job.py:MyJob --ranks 2 --link none --schemes dense,topk --steps 50 --seed 0 --out results
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss


@dataclass(frozen=True)
class MyJob:
    """Ten inputs, one output. A job needs `model`, `batch` and `loss`; the fields are options: --option width=256."""

    batch_size: int = 16  # samples of one rank
    width: int = 128
    learning_rate: float = 0.05

    metric = "error"  # what `evaluate` returns; the lower the better, unless better = "higher"

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(10, self.width), nn.Tanh(), nn.Linear(self.width, 1))

    def batch(self, step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
        return _samples(self.batch_size)  # torch's random numbers are seeded by step and rank

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(model(x), y)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def evaluate(self, model: nn.Module) -> float:
        torch.manual_seed(0)
        x, y = _samples(512)
        return mse_loss(model(x), y).item()


def _samples(count: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, 10)
    return x, x.sin().sum(1, keepdim=True)
