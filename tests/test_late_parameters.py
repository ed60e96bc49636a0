"""FSDP2 reduces what is unfrozen after `attach`."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import sparsync
from helpers.distributed import case, run
from sparsync import Dense, SkipReduce

pytestmark = pytest.mark.distributed


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))


def step(model: nn.Module) -> None:
    model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()


def sharded(replicas: bool, unfrozen: bool) -> list[Tensor]:
    """The gradients of the second step of an FSDP2 model of which one parameter was unfrozen before it, or was trained from the start."""
    mesh = init_device_mesh("cpu", (2, 1) if replicas else (1, 2), mesh_dim_names=("replicate", "shard"))
    model = layers()
    model[1][0].bias.requires_grad_(not unfrozen)
    wrapped: Any = fully_shard(model, mesh=mesh if replicas else mesh["shard"])
    sparsync.attach(wrapped, Dense() if replicas else SkipReduce(0), options=sparsync.Options(timeout_s=20.0))
    step(wrapped)
    model[1][0].bias.requires_grad_(True)
    wrapped.zero_grad()
    step(wrapped)
    return [each.grad.full_tensor() for each in wrapped.parameters()]


def on_both_axes() -> None:
    for replicas in (True, False):
        with case(replicas):
            assert all(map(torch.equal, sharded(replicas, unfrozen=True), sharded(replicas, unfrozen=False)))


def test_a_parameter_that_is_unfrozen_between_steps_is_reduced_from_then_on() -> None:
    run(on_both_axes, 2)
