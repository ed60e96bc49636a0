"""attach on models under fully_shard over gloo: what is exact stays exact, residuals lose nothing, and what is sent is counted."""

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import sparsync
from helpers.distributed import in_turn, run
from helpers.fsdp_training import (
    SHAPES,
    TIMEOUT_S,
    Net,
    as_fsdp,
    backward,
    conserved,
    each_unit,
    everywhere,
    flat,
    gradients,
    inputs,
    made,
    mean,
    on,
    same,
    saved,
)
from helpers.overlapping import IN_ORDER, Overlapping
from sparsync.base.scheme import Scheme
from sparsync.schemes import Dense, ExactMiCRO, ExactOkTopk, OkTopk, SkipReduce, TopK
from sparsync.testing.world import same_bits

pytestmark = pytest.mark.distributed


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def accumulated_on_replicas() -> None:
    mesh = grid()
    for switch, scheme in (("set_requires_gradient_sync", TopK(density=1.0)), ("set_requires_all_reduce", Dense())):
        net = made(mesh["shard"])
        handle = on(net, scheme, replicate=mesh["replicate"])
        for step in range(2):
            net.zero_grad()
            for part in range(2):
                getattr(net, switch)(part == 1)
                net(inputs(2 * step + part)).backward()
            both = [mean(4, 2 * step), mean(4, 2 * step + 1)]
            assert same(gradients(net), {name: both[0][name] + both[1][name] for name in SHAPES})
        assert len(handle.reports()) == 8


def both_axes() -> None:
    mesh = grid()
    net = made(mesh["shard"])
    across = on(net, TopK(density=1.0), replicate=mesh["replicate"])
    inside = on(net, ExactOkTopk(density=1.0))
    assert same(backward(net, inputs(0)), mean(4, 0))
    assert [len(handle.reports()) for handle in (across, inside)] == [4, 4]


def two_axes() -> None:
    """With the whole mesh given to fully_shard, a scheme does what it does on mesh["replicate"], and nothing else changes."""
    mesh = grid()
    plain, apart, hybrid = made(mesh), made(mesh["shard"]), made(mesh)
    before = backward(hybrid, inputs(0))
    states = [_group(module).copy() for module in _units(hybrid)]
    assert sparsync.doctor(hybrid, ExactMiCRO(density=0.1)) == []
    a, b = on(apart, ExactMiCRO(density=0.1), replicate=mesh["replicate"]), on(hybrid, ExactMiCRO(density=0.1))
    for step in range(3):
        wanted, found = backward(apart, inputs(step)), backward(hybrid, inputs(step))
        assert all(same_bits(found[name], wanted[name]) for name in SHAPES)
    assert saved(b)["part"] == f"shard{mesh['shard'].get_local_rank()}of2"
    assert same(saved(b)["scheme"]["residual"], saved(a)["scheme"]["residual"])
    assert [report.sent for report in b.reports()] == [report.sent for report in a.reports()]
    placed = [[cast(DTensor, each).placements for each in net.parameters()] for net in (hybrid, plain)]
    assert placed[0] == placed[1]
    b.detach()
    for module, state in zip(_units(hybrid), states, strict=True):
        now = _group(module)
        assert all(now[name] is state[name] for name in ("mesh_info", "post_forward_mesh_info", "_all_reduce_hook"))
    assert same(backward(hybrid, inputs(0)), before)
    on(hybrid, TopK(density=1.0), replicate=mesh["replicate"], parameters="float32")
    assert same(backward(hybrid, inputs(0)), before)
    accumulated = made(mesh)
    on(accumulated, Dense())
    for part in range(2):
        as_fsdp(accumulated).set_requires_all_reduce(part == 1)
        accumulated(inputs(part)).backward()
    assert same(gradients(accumulated), {name: mean(4, 0)[name] + mean(4, 1)[name] for name in SHAPES})


def _group(module: FSDPModule) -> dict[str, Any]:
    return vars(module._get_fsdp_state()._fsdp_param_groups[0])


def detached() -> None:
    mesh = grid()
    net = made(mesh["shard"])
    before = backward(net, inputs(0))
    states = [_group(module).copy() for module in _units(net)]
    for options in ({}, {"replicate": mesh["replicate"]}):
        handle = on(net, ExactOkTopk(density=0.5), **options)
        backward(net, inputs(0))
        handle.detach()
        assert same(backward(net, inputs(0)), before)
        for module, state in zip(_units(net), states, strict=True):
            now = _group(module)
            for name in ("_reduce_scatter_comm", "_all_reduce_hook", "reduce_scatter_unused_params"):
                assert now[name] is state[name]
        assert len(handle.reports()) == 4
        assert handle.state_dict()["scheme"]["residual"].keys() == SHAPES.keys()
        assert "exact_oktopk" in str(handle.summary())
        with pytest.raises(RuntimeError, match="this handle is detached; attach again"):
            handle.set(density=0.25)


def _units(net: Net) -> list[FSDPModule]:
    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def overflow_on_replicas() -> None:
    mesh = grid()
    net = made(mesh["shard"])
    handle = on(net, ExactOkTopk(density=0.1), replicate=mesh["replicate"])
    backward(net, inputs(0))
    before = handle.state_dict()["scheme"]["residual"]
    bad = inputs(1)
    if dist.get_rank() == 1:
        bad["last.bias"][0] = torch.nan  # of shard 0
    found = backward(net, bad)
    assert same_bits(*everywhere(flat(found).nan_to_num(99.0), mesh["replicate"].get_group()))
    assert found["last.bias"][:4].isnan().all()
    assert found["last.bias"][4:].isfinite().all()
    after = handle.state_dict()["scheme"]["residual"]
    if mesh["shard"].get_local_rank() == 0:
        assert all(torch.equal(after[name], before[name]) for name in ("last.bias", "last.weight"))
    assert backward(net, inputs(2))["last.bias"].isfinite().all()


@pytest.mark.slow
def test_on_several_axes_nothing_is_lost_replicas_stay_the_same_and_a_handle_is_detached() -> None:
    run(in_turn, 4, parts=(overflow_on_replicas, accumulated_on_replicas, both_axes, two_axes, detached))


def sharded_along_columns() -> None:
    """The residual of a parameter is in its own order, however it is cut."""
    net = made(shard_placement_fn=lambda parameter: Shard(1) if parameter.shape == (6, 2) else None)
    handle = on(net, ExactOkTopk(density=0.1))
    conserved(handle, net, 3)
    state = saved(handle)
    handle.load_state_dict(state)
    again = saved(handle)["scheme"]["residual"]
    assert same(again, state["scheme"]["residual"])
    assert {name: part.numel() for name, part in again.items()} == {
        name: torch.Size(SHAPES[name]).numel() for name in SHAPES
    }


def overlapping() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net, scheme, given = made(mesh["shard"]), Overlapping("last"), inputs(0)
    given["first.weight"].requires_grad_().register_hook(scheme.first_layer)
    on(net, scheme, replicate=mesh["replicate"])
    assert same(backward(net, given), mean(2, 0))
    assert scheme.events == IN_ORDER


def divided_otherwise() -> None:
    premultiplied = made()
    on(premultiplied, Dense())
    each_unit(premultiplied, lambda unit: unit.set_gradient_divide_factor(3.0))
    with pytest.raises(ValueError, match=r"asked for .* in module .* set_force_sum_reduction_for_comms\(True\)"):
        backward(premultiplied, inputs(0))


def refused(words: str, net: Any, scheme: Scheme, error: type[Exception], **options: Any) -> None:  # Any: torch's stubs
    """The doctor finds it, and attach refuses it with the same words."""
    given = sparsync.Options(timeout_s=TIMEOUT_S, **options)
    assert words in str(sparsync.doctor(net, scheme, options=given)[0])
    with pytest.raises(error, match=words.replace("(", r"\(").replace(")", r"\)")):
        sparsync.attach(net, scheme, options=given)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net, single, copied = made(), made(mesh["shard"]), Net()
    replicate(copied, mesh=mesh["replicate"])
    refused("exact_micro has no reduce-scatter", net, ExactMiCRO(), ValueError)
    refused("MixedPrecisionPolicy", net, Dense.bf16(), ValueError)
    refused("oktopk has no reduce-scatter", net, OkTopk(), ValueError)
    refused("node_size must be 1 on a shard axis, got 2", net, SkipReduce(node_size=2), ValueError)
    refused("use fully_shard over a mesh of two axes", replicate(Net(), mesh=mesh["replicate"]), TopK(), RuntimeError)
    refused("the shard axis has 1 rank", single, SkipReduce(), ValueError)
    refused("with HSDP leave it out", made(mesh), TopK(), ValueError, replicate=mesh["shard"])
    mixed = Net()
    fully_shard(mixed.first, mesh=mesh)
    refused("are sharded over different meshes", fully_shard(mixed, mesh=mesh["shard"]), TopK(), RuntimeError)
    refused("which shares only this rank", net, TopK(), ValueError, replicate=mesh["replicate"])
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["shard"], [Shard(0)]))
    parallel.bias = nn.Parameter(distribute_tensor(torch.ones(4), mesh["shard"], [Shard(0)]))
    refused("tensor parallelism", fully_shard(parallel, mesh=mesh["replicate"]), Dense(), RuntimeError)
    on(net, Dense())
    with pytest.raises(ValueError, match="call detach"):
        on(net, Dense())
    apart = made(mesh["shard"])
    with torch.no_grad():
        next(apart.parameters()).to_local()[0, 0] += dist.get_rank()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError, match=r"ranks must agree, but rank . has weights 'scale' .*same checkpoint"):
        on(apart, TopK(), replicate=mesh["replicate"])


@pytest.mark.slow
def test_failures_reach_every_rank_and_what_cannot_work_is_refused_with_its_cure() -> None:
    run(in_turn, 2, parts=(divided_otherwise, sharded_along_columns, overlapping, refusals))
