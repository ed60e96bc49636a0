"""Gradients made for the sketch of the ratio of AdamW steps."""

import torch
from torch import Tensor

from sparsync.core import digest
from sparsync.kernels.step_reference import signs


def too_long_to_measure(step: int, block: int) -> Tensor:
    """The first block of a gradient, [block]: its square norm fits float32, and the square of its sketch in this step does not."""
    less = signs(block, digest(f"ratio/float32/cpu/0/{step}") % 2**32, torch.device("cpu"))
    return (1 - 2 * less.float()) * (1e38 / block) ** 0.5
