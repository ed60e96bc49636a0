"""A job of your own with batch normalisation and batches that are dicts: which way does the stripe in a picture run?

Run: sparsync compare --workload examples/own_job_batchnorm.py:Stripes --ranks 2 --link none --schemes dense,topk --steps 30 --out results

It has neither an optimizer nor an `evaluate`: the optimizer is AdamW, and the quality is the mean loss of held-out batches. Running means
and variances are as under DistributedDataParallel: every rank evaluates with those of rank 0.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

SIZE = 8  # pixels of a side
NOISE = 0.5


class Classifier(nn.Module):
    """Two convolutions with batch normalisation, and a score for each of the two directions."""

    def __init__(self) -> None:
        super().__init__()
        first = (nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        second = (nn.Conv2d(32, 32, 3), nn.BatchNorm2d(32), nn.ReLU())
        self.features = nn.Sequential(*first, *second, nn.AdaptiveMaxPool2d(1))
        self.scores = nn.Linear(32, 2)

    def forward(self, picture: Tensor) -> Tensor:
        return self.scores(self.features(picture).flatten(1))


class Stripes:
    """Pictures of one bright row or column, with noise."""

    learning_rate = 0.01  # of AdamW

    def model(self) -> nn.Module:
        return Classifier()

    def batch(self, step: int, rank: int, ranks: int) -> dict[str, Tensor]:
        direction, place = torch.randint(2, (16,)), torch.randint(SIZE, (16,))
        picture = NOISE * torch.randn(16, 1, SIZE, SIZE)
        for each, column, where in zip(picture, direction.tolist(), place.tolist(), strict=True):
            each.select(2 if column else 1, where).add_(1.0)
        return {"picture": picture, "direction": direction}

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(model(batch["picture"]), batch["direction"])
