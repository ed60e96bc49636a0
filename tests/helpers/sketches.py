"""Gradients made for the sketch of the ratio of AdamW steps."""

import torch
from torch import Tensor

from sparsync.core import generator


def too_long_to_measure(step: int, block: int) -> Tensor:
    """The first block of a gradient, [block]: its square norm fits float32, and the square of its sketch in this step does not."""
    drawn = torch.randint(0, 2, (256, block), generator=generator(0, "ratio/float32/cpu/0", step))
    return (2 * drawn[0] - 1) * (1e38 / block) ** 0.5
