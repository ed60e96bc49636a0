"""Make gradients for the sketch of the ratio of AdamW steps."""

import torch
from torch import Tensor

from sparsync.core import digest
from sparsync.kernels.step_reference import signs


def too_long_to_measure(step: int, block: int) -> Tensor:
    """Make the first block of a gradient, [block], whose square norm fits float32 while its sketch's square in this step overflows."""
    less = signs(block, digest(f"ratio/float32/cpu/0/{step}") % 2**32, torch.device("cpu"))
    return (1 - 2 * less.float()) * (1e38 / block) ** 0.5
