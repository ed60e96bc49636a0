"""A model under fully_shard with known gradients, small whole numbers, and ways to observe it from outside."""

import io
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

import sparsync
from helpers.known_gradients import whole_numbers
from sparsync.base.scheme import Scheme
from sparsync.runtime.handle import AttachedHandle, Handle

TIMEOUT_S = 120.0  # longer than any working step, even on a busy machine
Inputs = Mapping[str, Tensor]


class Layer(nn.Module):
    """Two parameters whose rows do not divide evenly among ranks; the gradient of each is exactly its input."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.called = name
        self.weight = nn.Parameter(torch.ones(5, 3, dtype=dtype))
        self.bias = nn.Parameter(torch.ones(7, dtype=dtype))

    def forward(self, total: Tensor, inputs: Inputs) -> Tensor:
        for name, parameter in self.named_parameters():
            if f"{self.called}.{name}" in inputs:
                total = total + (parameter * inputs[f"{self.called}.{name}"]).sum()
        return total


class Net(nn.Module):
    """Three layers, each its own FSDP unit, and a parameter of the root."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.middle, self.last = (Layer(name, dtype) for name in ("first", "middle", "last"))
        self.scale = nn.Parameter(torch.ones(6, 2, dtype=dtype))

    def forward(self, inputs: Inputs) -> Tensor:
        total = (self.scale * inputs["scale"]).sum()
        for layer in (self.first, self.middle, self.last):
            total = layer(total, inputs)
        return total

    def inputs(self, rank: int, step: int) -> dict[str, Tensor]:
        return {name: known(rank, step, name) for name in SHAPES}


SHAPES = {name: tuple(parameter.shape) for name, parameter in Net().named_parameters()}
COUNT = sum(parameter.numel() for parameter in Net().parameters())
KEYS = ("(root)", "first", "middle", "last")


def made(mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.float32, **options: Any) -> Net:
    """Shard the model over `mesh`; None is all ranks."""
    net = Net(dtype)
    for module in (net.first, net.middle, net.last, net):
        fully_shard(module, mesh=mesh, **options)
    return net


def known(rank: int, step: int, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw the gradient of a parameter on a rank of the world at a step."""
    shape = SHAPES[name]
    return whole_numbers(int(torch.Size(shape).numel()), rank, step, name).view(shape).to(dtype)


def inputs(step: int, dtype: torch.dtype = torch.float32, leave_out: str = "") -> dict[str, Tensor]:
    """Make the inputs that give this rank `known` gradients; a parameter that is left out gets none."""
    return {name: known(dist.get_rank(), step, name, dtype) for name in SHAPES if name != leave_out}


def backward(net: Net, given: Inputs) -> dict[str, Tensor]:
    """Run one backward pass, and return the whole gradients by name."""
    net.zero_grad()
    net(given).backward()
    return gradients(net)


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """Gather each parameter's whole gradient from its shards, all in one message; DTensor would send one for each."""
    grads = {name: cast(DTensor, each.grad) for name, each in net.named_parameters() if each.grad is not None}
    if not grads:
        return {}
    mesh = next(iter(grads.values())).device_mesh  # its last axis has the shards
    padded, cut = [], []
    for grad in grads.values():
        dim = cast(Shard, grad.placements[-1]).dim
        own, room = grad.to_local(), list(grad.shape)
        room[dim] = -(-room[dim] // mesh.size(mesh.ndim - 1))
        padded.append(own.new_zeros(room))
        padded[-1].narrow(dim, 0, own.shape[dim]).copy_(own)
        cut.append((dim, grad.shape[dim]))
    every = everywhere(torch.cat([each.flatten() for each in padded]), mesh.get_group(mesh.ndim - 1))
    shards = zip(*(each.split([part.numel() for part in padded]) for each in every), strict=True)
    return {
        name: torch.cat([shard.view_as(part) for shard in parts], dim).narrow(dim, 0, length).to(part.dtype)
        for name, part, (dim, length), parts in zip(grads, padded, cut, shards, strict=True)  # of several types
    }


def mean(ranks: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Average `known` over the first `ranks` ranks of the world."""
    return {name: torch.stack([known(r, step, name, dtype) for r in range(ranks)]).sum(0) / ranks for name in SHAPES}


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Tell whether both have the same names and values."""
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all in the order of their names."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def everywhere(x: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Gather this tensor from every rank of the group."""
    found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, x.contiguous(), group=group)
    return found


def as_fsdp(net: nn.Module) -> FSDPModule:
    """Cast the module to the type that fully_shard gave it."""
    assert isinstance(net, FSDPModule)
    return net


def each_unit(net: nn.Module, do: Callable[[FSDPModule], None]) -> None:
    """Call `do` with each sharded module."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            do(module)


def on(net: Net, scheme: Scheme, optimizer: Any = None, scaler: Any = None, **options: Any) -> AttachedHandle:
    """Call attach with a timeout for tests; `options` are those of Options."""
    given = sparsync.Options(**{"timeout_s": TIMEOUT_S, **options})
    handle = sparsync.attach(net, scheme, optimizer=optimizer, scaler=scaler, options=given)
    assert isinstance(handle, AttachedHandle)
    return handle


def conserved(handle: Handle, net: Net, steps: int) -> None:
    """Check that residuals + P x written gradients = gradients so far, summed over ranks."""
    P = dist.get_world_size()
    came, written = torch.zeros(COUNT), torch.zeros(COUNT)
    for step in range(steps):
        came += flat({name: sum((known(r, step, name) for r in range(P)), torch.zeros(())) for name in SHAPES})
        written += P * flat(backward(net, inputs(step)))
        kept = flat(handle.state_dict()["scheme"]["residual"])
        assert torch.equal(sum(everywhere(kept), torch.zeros(COUNT)) + written, came)
    assert all(report.sent == report.cost for report in handle.reports())


def saved(handle: Handle) -> dict[str, Any]:
    """Save and reload the handle's checkpoint."""
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)
