"""The image classifiers: a small residual network and a multi-layer perceptron, for grey images of 28 x 28 pixels.

The residual network follows arXiv:1512.03385 (He et al.), with one block for each of 32, 64, 128 and 256 channels, and a
first convolution of stride 2. Population statistics of batch normalisation: arXiv:2105.07576 (Wu and Johnson), section 3.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

SIDE = 28
CLASSES = 10
CHANNELS = (32, 64, 128, 256)


def mlp() -> nn.Module:
    """Return a perceptron with two hidden layers of 1024."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, CLASSES),
    )


def resnet() -> nn.Module:
    """Return a residual network with a depth of nine convolutions, its first included, and a linear layer."""
    stem = CHANNELS[0]
    blocks = [
        ResidualBlock(taken, given, stride=1 if taken == given else 2)
        for taken, given in zip((stem, *CHANNELS), CHANNELS, strict=False)
    ]
    return nn.Sequential(
        _convolution(1, stem, stride=2),
        _normalisation(stem),
        nn.ReLU(),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(CHANNELS[-1], CLASSES),
    )


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, which is a projection where the shape changes."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _convolution(taken, given, stride),
            _normalisation(given),
            nn.ReLU(),
            _convolution(given, given, stride=1),
            _normalisation(given),
        )
        same = taken == given and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(taken, given, 1, stride, bias=False), _normalisation(given))
        )

    def forward(self, x: Float[Tensor, "images taken height width"]) -> Float[Tensor, "images given h w"]:
        return torch.relu(self.inner(x) + self.shortcut(x))


@contextmanager
def population_statistics(model: nn.Module, images: Float[Tensor, "images 1 28 28"]) -> Iterator[None]:
    """Let the batch normalisation of `model`, in evaluation mode, use the mean and variance over `images` until the block ends.

    Afterwards the model has no buffers, as before. A model without batch normalisation is unchanged.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    training = model.training
    try:
        if layers:
            for layer in layers:
                layer.track_running_stats = True
                layer.running_mean = torch.zeros(layer.num_features)
                layer.running_var = torch.ones(layer.num_features)
            with torch.no_grad():
                model.train()(images)  # momentum 1: the running statistics become those of this one batch
            model.train(training)
        yield
    finally:
        for layer in layers:
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None


def _convolution(taken: int, given: int, stride: int) -> nn.Module:
    return nn.Conv2d(taken, given, 3, stride, padding=1, bias=False)


def _normalisation(channels: int) -> nn.Module:
    """Return batch normalisation without running statistics.

    Running statistics are state without a gradient: those of each rank follow its own share, DistributedDataParallel overwrites
    them with rank 0's before each forward pass (a message per step that no scheme counts), and after the last step the replicas
    differ. Without them replicas with the same parameters are the same model. `population_statistics` computes the mean and variance
    for an evaluation from fixed images, so the accuracy is a function of the parameters alone, on any rank. In training every rank
    normalises over its own share, as is usual; so another number of ranks is not exactly the same training.
    """
    return nn.BatchNorm2d(channels, momentum=1.0, track_running_stats=False)
