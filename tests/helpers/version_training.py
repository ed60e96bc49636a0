"""Short trainings on 2 ranks for `make test-versions`, with imports that all supported versions of torch have."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import sparsync
from helpers.fsdp_training import SHAPES, Net, backward, everywhere, inputs, made, mean, on, same, saved
from sparsync import AdamWSteps, Bucket, Report
from sparsync.base.scheme import Scheme
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.handle import Handle
from sparsync.schemes import Dense, ExactMiCRO, State, TopK
from sparsync.testing.world import same_bits


def attached(net: Net, scheme: Scheme, **options: Any) -> tuple[Handle | None, str]:
    """Call attach; returns the handle, or the doctor's reason to refuse the model."""
    found = [
        finding for finding in sparsync.doctor(net, scheme, options=sparsync.Options(**options)) if finding.refused
    ]
    return (None, str(found[0])) if found else (on(net, scheme, **options), "")


def two_axes() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid, apart = made(mesh), made(mesh["shard"])
    handle, refused = attached(hybrid, ExactMiCRO(density=0.1))
    if handle is None:
        return refused
    other = on(apart, ExactMiCRO(density=0.1), replicate=mesh["replicate"])
    for step in range(3):
        found, wanted = backward(hybrid, inputs(step)), backward(apart, inputs(step))
        assert all(same_bits(found[name], wanted[name]) for name in SHAPES)
    assert same(saved(handle)["scheme"]["residual"], saved(other)["scheme"]["residual"])
    exact = made(mesh)
    on(exact, TopK(density=1.0))
    assert same(backward(exact, inputs(0)), mean(2, 0))
    return ""


def gathered() -> str:
    net = made()
    handle, refused = attached(net, Dense(), parameters="float32")
    if handle is None:
        return refused
    for step in range(2):
        assert same(backward(net, inputs(step)), mean(2, step))
    return ""


def unused() -> str:
    """Check that a parameter that no rank uses counts as zero, or that the doctor warns and the backward pass raises."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net = made(mesh["shard"])
    warned = [
        str(finding)
        for finding in sparsync.doctor(net, TopK(density=1.0), options=sparsync.Options(replicate=mesh["replicate"]))
    ]
    on(net, TopK(density=1.0), replicate=mesh["replicate"])
    try:
        backward(net, inputs(0, leave_out="first.bias"))
    except RuntimeError as error:
        assert "some got no gradient" in str(error)
        return warned[0]
    assert not warned
    return ""


class _Unlucky(Dense):
    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
        if (bucket.step, bucket.key, comm.rank) == (1, "middle", 1):
            raise ValueError("no luck today")
        return super().reduce(state, bucket, comm)


def failed() -> str:
    """Check that the step after one that fails on one rank is exact, if FSDP2 can continue."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    net: Any = made(mesh["shard"])  # Any: torch's stubs
    on(net, _Unlucky(), replicate=mesh["replicate"])
    for step in range(3):
        try:
            found = backward(net, inputs(step))
        except RuntimeError as error:
            assert (step, "failed on bucket" in str(error) or "was not reduced" in str(error)) == (1, True), error
            net.reset_iter_state()
        else:
            assert step != 1
            assert same(found, mean(2, step))
    return ""


def local_steps() -> str:
    return _trained(
        lambda model: LocalTraining(model, torch.optim.SGD(model.parameters(), 0.1), TopK(0.25), every=2, keep=0.0)
    )


def adamw_steps() -> str:
    return _trained(lambda model: AdamWSteps(model, torch.optim.AdamW(model.parameters(), 0.01), TopK(0.25), keep=0.0))


def _trained(steps_of: Callable[[nn.Module], Any]) -> str:
    """Train for 4 steps on each rank's own data, and check that the final parameters are equal."""
    torch.manual_seed(0)
    model = nn.Linear(16, 8)
    before = model.weight.detach().clone()
    steps = steps_of(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        if isinstance(steps, LocalTraining):
            steps.optimizers[0].step()
        steps.step()
    assert not torch.equal(model.weight, before)
    assert all(same_bits(*everywhere(parameter.detach())) for parameter in model.parameters())
    return ""
