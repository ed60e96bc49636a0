"""What is trained only after a model was wrapped is not reduced, and is warned of, once."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, run
from sparsync import Dense, SkipReduce
from sparsync.runtime.dispatcher import LateParameters

pytestmark = pytest.mark.distributed


def layers() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))


def step(model: nn.Module) -> list[str]:
    """The warnings of a forward and a backward pass."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    return [str(each.message) for each in caught if "came to be trained" in str(each.message)]


def unfreeze(model: Any) -> None:
    model[1][0].bias.requires_grad_(True)


def add(model: Any) -> None:
    model[1].append(nn.Linear(4, 4, bias=False))


def replace(model: Any) -> None:
    model[2] = nn.Linear(4, 4, bias=False)


def replace_parameter(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros(4, 4))


CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "unfrozen": (unfreeze, "'1.0.bias'"),
    "added": (add, "'1.1.weight'"),
    "replaced": (replace, "'2.weight'"),
    "parameter": (replace_parameter, "'2.weight'"),
}


def attached(way: str, model: nn.Module) -> nn.Module:
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    if way == "attach":
        sparsync.attach(ddp, Dense())
    else:
        ddp.register_comm_hook(*sparsync.ddp_comm_hook(Dense(), model))
    return ddp


def behind_ddp() -> None:
    for way in ("attach", "hook"):
        for change, (make, name) in CHANGES.items():
            with case((way, change)):
                model = layers()
                model[1][0].bias.requires_grad_(False)
                ddp = attached(way, model)
                assert step(ddp) == step(ddp) == []
                make(model)
                (said,) = step(ddp)
                assert said.startswith(
                    f"{name} came to be trained after DistributedDataParallel had wrapped the model: nothing reduces"
                )
                assert said.endswith("; wrap the model again, and attach to it")
                assert step(ddp) == []
                model[0].weight.requires_grad_(False)
                assert step(ddp) == []
    before = layers()
    before[1][0].bias.requires_grad_(False)
    ddp = DistributedDataParallel(before)
    before[1][0].bias.requires_grad_(True)
    sparsync.attach(ddp, Dense())
    assert len(step(ddp)) == 1
    ignored = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(ignored, ["0.weight"])
    assert step(attached("attach", ignored)) == []


def test_what_ddp_does_not_reduce_is_warned_of_at_the_next_step_and_once() -> None:
    run(behind_ddp, 1)


def sharded(replicas: bool, unfrozen: bool) -> tuple[Any, list[Tensor]]:
    """The gradients of the second step of an FSDP2 model of which one parameter was unfrozen before it, or was trained from the start."""
    mesh = init_device_mesh("cpu", (2, 1) if replicas else (1, 2), mesh_dim_names=("replicate", "shard"))
    model = layers()
    model[1][0].bias.requires_grad_(not unfrozen)
    wrapped: Any = fully_shard(model, mesh=mesh if replicas else mesh["shard"])
    sparsync.attach(wrapped, Dense() if replicas else SkipReduce(0), options=sparsync.Options(timeout_s=20.0))
    assert step(wrapped) == []
    unfreeze(model)
    wrapped.zero_grad()
    assert step(wrapped) == []
    return wrapped, [each.grad.full_tensor() for each in wrapped.parameters()]


def behind_fsdp2() -> None:
    for replicas in (True, False):
        with case(replicas):
            _, wanted = sharded(replicas, unfrozen=False)
            model, found = sharded(replicas, unfrozen=True)
            assert all(map(torch.equal, found, wanted))
            model[1].append(nn.Linear(4, 4, bias=False))
            (said,) = step(model)
            assert said.startswith(
                "'1.1.weight' came to be trained after fully_shard was called on the model: nothing reduces"
            )
            assert step(model) == []


def test_fsdp2_reduces_what_is_unfrozen_and_what_it_never_saw_is_warned_of() -> None:
    run(behind_fsdp2, 2)


def test_nothing_is_looked_at_by_name_while_a_model_stays_as_it_is() -> None:
    model, asked = layers(), []

    def reduced(name: str, _: nn.Parameter) -> bool:
        asked.append(name)
        return True

    late = LateParameters(model)
    for _ in range(3):
        late.warn(reduced, "", "")
    assert asked == [name for name, _ in model.named_parameters()]
    model[0].bias.requires_grad_(False)
    late.warn(reduced, "", "")
    assert len(asked) == 6 + 5
    del model
    late.warn(reduced, "", "")
    assert len(asked) == 6 + 5
