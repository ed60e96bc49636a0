r"""A job for `sparsync compare`, which trains it with one scheme after the other on the ranks and links of your choice.

Run: sparsync compare --workload my_job.py:MyJob --ranks 4 --link 100mbit \
  --schemes dense,bf16,topk,exact_oktopk:values=int8 --steps 100
It runs unchanged, in two minutes on two cores; use --link none if links cannot be limited. Replace model, data and loss by yours; you may
delete `optimizer` and the methods after it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class MyJob:
    """Classify points in ten classes with a network of 1.1 million parameters. The fields are options: --option width=128."""

    batch_size: int = 32  # samples per rank
    width: int = 1000
    learning_rate: float = 0.05

    # The name of the number that `evaluate` returns, and whether "higher" or "lower" is better.
    metric = "accuracy"
    better = "higher"
    unit = "accuracy in percent"

    def model(self) -> nn.Module:
        """Make the model to train. torch's random numbers are seeded, so that all ranks begin with the same weights."""
        width = self.width
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(*layers)

    def batch(self, step: int, rank: int, ranks: int) -> dict[str, Tensor]:
        """Make the batch of rank `rank` of `ranks` in a step: anything that `loss` takes.

        With your data set: take its samples (step * ranks + rank) * batch_size and following, modulo their number. torch's random
        numbers are seeded by step and rank, so each rank draws different points, but the same ones for every scheme.
        """
        return _points(self.batch_size)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Compute the mean loss of the batch. Call `model` itself, which DistributedDataParallel wraps."""
        return cross_entropy(model(batch["point"]), batch["kind"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer; by default AdamW, with which steps(keep=0.5)/ should precede sparse schemes."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the schedule of the learning rate over a training of `steps` steps; by default it is constant."""
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def clip(self, model: nn.Module, factor: float) -> None:
        """Limit the reduced gradient. `factor` is above 1 if a rank clips its local gradient, which is longer than the mean."""
        nn.utils.clip_grad_norm_(model.parameters(), 10.0 * factor)

    def evaluate(self, model: nn.Module) -> float:
        """Compute the quality on held-out samples; by default the mean loss of batches at steps 1,000,000 and above."""
        torch.manual_seed(0)
        points = _points(1000)
        right = model(points["point"]).argmax(1) == points["kind"]
        return 100 * right.double().mean().item()


def _points(count: int) -> dict[str, Tensor]:
    kind = torch.randint(10, (count,))
    point = torch.randn(count, 64)
    point[:, :10] += 3 * nn.functional.one_hot(kind, 10)
    return {"point": point, "kind": kind}
