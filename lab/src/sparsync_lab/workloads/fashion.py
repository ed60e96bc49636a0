"""The image classification job: Fashion-MNIST with a small residual network or a multi-layer perceptron."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from sparsync.core import generator
from sparsync_lab.workloads import networks
from sparsync_lab.workloads.base import (
    Batch,
    Better,
    Workload,
    bare,
    chunks,
    device_of,
    evaluating,
    require_positive,
    seeded,
    share,
)
from sparsync_lab.workloads.fashion_images import SHA256, Images, images

NETWORKS = {"resnet": networks.resnet, "mlp": networks.mlp}
CHUNK = 125  # test images in one forward pass
POPULATION = 1024  # training images from which batch normalisation takes mean and variance in an evaluation
MEAN, DEVIATION = 0.2860, 0.3530  # of the pixels of the training images, in [0, 1]


@dataclass(frozen=True)
class Fashion(Workload):
    """Pictures of clothes of ten kinds, without augmentation.

    An epoch is a random order of the training images, cut into batches; images that do not fill a last batch are left out.
    The recipe of both networks is SGD with Nesterov momentum and one cycle of the learning rate (arXiv:1708.07120).
    """

    network: str = "resnet"  # or "mlp"
    batch_size: int = 128  # images in all, over all ranks
    learning_rate: float = 0.1  # the highest of the cycle
    momentum: float = 0.9
    weight_decay: float = 5e-4
    data: str = ""  # a folder with the four IDX files instead of the Debian package's, or the internet's

    name: ClassVar[str] = "fashion"
    metric: ClassVar[str] = "accuracy"
    better: ClassVar[Better] = "higher"
    unit: ClassVar[str] = "test accuracy in percent"

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ValueError(f"network must be {' or '.join(NETWORKS)}, got {self.network!r}")
        require_positive(batch_size=self.batch_size, learning_rate=self.learning_rate)
        if not 0 < self.momentum < 1:
            raise ValueError(f"momentum must be in (0, 1), as Nesterov's needs, got {self.momentum}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be 0 or above, got {self.weight_decay}")

    def prepare(self) -> None:
        count = len(self._images().training.classes)
        if self.batch_size > count:
            raise ValueError(f"a batch of {self.batch_size} images needs as many to train on, there are {count}")

    def model(self, seed: int) -> nn.Module:
        return seeded(NETWORKS[self.network], seed)

    def batch(self, seed: int, step: int, rank: int, ranks: int) -> Batch:
        own = share(self.batch_size, rank, ranks)
        training = self._images().training
        epoch, position = divmod(step, len(training.classes) // self.batch_size)
        order = _order(seed, epoch, len(training.classes))
        start = position * self.batch_size
        index = order[start + own.start : start + own.stop]
        return Batch(_pixels(training.images[index]), training.classes[index])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return cross_entropy(model(batch.input), batch.target)

    def optimizer(self, model: nn.Module, steps: int) -> tuple[Optimizer, LRScheduler]:
        require_positive(steps=steps)
        optimizer = SGD(
            model.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=True,
        )
        return optimizer, OneCycleLR(optimizer, max_lr=self.learning_rate, total_steps=steps, cycle_momentum=False)

    def evaluate(self, model: nn.Module, rank: int, ranks: int) -> tuple[float, int]:
        """Return how many of this rank's test images are classified correctly, and how many there are."""
        data = self._images()
        model = bare(model)
        device = device_of(model)
        population = _pixels(data.training.images[:POPULATION]).to(device)
        correct, count = 0, 0
        with evaluating(model), networks.population_statistics(model, population):
            for chunk in chunks(len(data.test.classes), CHUNK, rank, ranks):
                score = model(_pixels(chunk.of(data.test.images)).to(device))
                correct += int((score.argmax(1).cpu() == chunk.of(data.test.classes)).sum())
                count += len(chunk)
        return float(correct), count

    def quality(self, total: float, count: int) -> float:
        """Return the accuracy in percent."""
        require_positive(count=count)
        return 100 * total / count

    def describe(self) -> dict[str, Any]:
        data, described = self._images(), super().describe()
        del described["options"]["data"]
        found = {
            "source": data.source,
            "sha256": dict(data.sha256),
            "is_fashion_mnist": data.sha256 == SHA256,
            "images": {"training": len(data.training.classes), "test": len(data.test.classes)},
        }
        return {**described, "data": found}

    def _images(self) -> Images:
        return images(self.data)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Int[Tensor, " count"]:
    """Return the order of the training images in an epoch."""
    return torch.randperm(count, generator=generator(seed, "fashion/epoch", epoch))


def _pixels(image: UInt8[Tensor, "images 28 28"]) -> Float[Tensor, "images 1 28 28"]:
    return ((image.float() / 255 - MEAN) / DEVIATION).unsqueeze(1)
