r"""A job for `sparsync compare`: what you train, on the ranks and links of your choice, with one scheme after the other.

Run: sparsync compare --workload my_job.py:MyJob --ranks 4 --link 100mbit \
  --schemes dense,bf16,topk,exact_oktopk:values=int8 --steps 100
It runs unchanged, in two minutes on two cores; with --link none if links cannot be limited. Put your model, data and loss in place of
these; `optimizer` and what follows it may be deleted.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class MyJob:
    """Points in ten classes, told apart by a network of 1.1 million parameters. The fields are options: --option width=128."""

    batch_size: int = 32  # samples of one rank
    width: int = 1000
    learning_rate: float = 0.05

    # The name of the number that `evaluate` returns, and whether "higher" or "lower" is better.
    metric = "accuracy"
    better = "higher"
    unit = "accuracy in percent"

    def model(self) -> nn.Module:
        """Return the model to train. torch's random numbers are seeded, so that all ranks begin with the same weights."""
        width = self.width
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        return nn.Sequential(*layers)

    def batch(self, step: int, rank: int, ranks: int) -> dict[str, Tensor]:
        """Return what rank `rank` of `ranks` trains on in a step: anything that `loss` takes.

        With a data set of your own: its samples (step * ranks + rank) * batch_size and following, modulo their number. torch's random
        numbers are seeded by step and rank; so each rank draws different points, and the same ones for every scheme.
        """
        return _points(self.batch_size)

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss of the batch. Call the model itself: DistributedDataParallel is around it."""
        return cross_entropy(model(batch["point"]), batch["kind"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer. Without this method: AdamW; with it put steps(keep=0.5)/ in front of sparse schemes."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the schedule of the learning rate over a training of `steps` steps. Without this method it is constant."""
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def clip(self, model: nn.Module, factor: float) -> None:
        """Limit the reduced gradient. `factor` is above 1 where a rank clips its own gradient, which is longer than the mean."""
        nn.utils.clip_grad_norm_(model.parameters(), 10.0 * factor)

    def evaluate(self, model: nn.Module) -> float:
        """Return the quality on held-out samples. Without this method: the mean loss of batches at steps 1,000,000 and above."""
        torch.manual_seed(0)
        points = _points(1000)
        right = model(points["point"]).argmax(1) == points["kind"]
        return 100 * right.double().mean().item()


def _points(count: int) -> dict[str, Tensor]:
    kind = torch.randint(10, (count,))
    point = torch.randn(count, 64)
    point[:, :10] += 3 * nn.functional.one_hot(kind, 10)
    return {"point": point, "kind": kind}
