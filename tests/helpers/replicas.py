"""Make and compare the replicas of a training."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 24))


def behind(wrapper: str, bare: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model behind "ddp", behind FSDP2 as replicas ("fsdp") or "shards", or "bare"; and arguments for `attach`."""
    if wrapper == "ddp":
        return DistributedDataParallel(bare), {}
    if wrapper == "shards":
        fully_shard(bare)
    if wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicas", "shards"))
        fully_shard(bare, mesh=mesh["shards"])
        return bare, {"options": sparsync.Options(replicate=mesh["replicas"])}
    return bare, {}


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def on_all_ranks(tensors: Tensor | Iterable[Tensor]) -> bool:
    """Tell whether all ranks have the same bits. Collective."""
    flat = torch.cat([each.detach().reshape(-1) for each in ([tensors] if isinstance(tensors, Tensor) else tensors)])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(each, flat) for each in every)


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
