"""The elements of one partition of a vector, for comparing."""

import torch
from torch import Tensor

from sparsync.selection.exclusive import BlockCyclic


def elements_of(partition: BlockCyclic, x: Tensor, p: int) -> Tensor:
    """Copy the elements of `x` [n] in partition `p`."""
    return x[partition.positions(p, torch.arange(partition.lengths()[p]))]
