"""Compare the replicas of a training."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def on_all_ranks(tensors: Tensor | Iterable[Tensor]) -> bool:
    """Tell whether all ranks have the same bits. Collective."""
    flat = torch.cat([each.detach().reshape(-1) for each in ([tensors] if isinstance(tensors, Tensor) else tensors)])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(each, flat) for each in every)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
