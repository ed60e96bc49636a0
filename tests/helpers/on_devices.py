"""Train on P ranks with tensors on a device, and record results on the CPU: the same bodies serve CUDA and the CPU.

Every body runs several cases and returns each one's record, or the traceback if it raised, so that a failing case does not hide the
others.
"""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import sparsync
from helpers.distributed import join_again
from helpers.known_gradients import noted
from sparsync import LocalSteps, Report
from sparsync.base.scheme import Scheme
from sparsync.core import generator
from sparsync.schemes import Dense, ExactMiCRO, ExactOkTopk, SkipReduce, TopK, TwoShot

TIMEOUT_S = 20.0  # for a rank that waits for another
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "dense ring": lambda: Dense(form="ring"),
    "topk": lambda: TopK(density=0.1),
    "topk bfloat16": lambda: TopK(density=0.1, values="bfloat16"),
    "exact_oktopk": lambda: ExactOkTopk(density=0.1),
    "exact_micro": lambda: ExactMiCRO(density=0.1),
    "skip_reduce": lambda: SkipReduce(skip=0.5, feedback=True),
    "two_shot int4": lambda: TwoShot(density=1.0, values="int4"),
    "two_shot sign": lambda: TwoShot(density=0.1, values="sign"),
}
COUNT, N = 12, 4099  # parameters with known gradients, and their elements: odd, so that slices are uneven
STEPS, OVERFLOWING = 6, 3
WIDTH, BATCH, SAVED_AT, LONG = 96, 32, 6, 12
DEEP, LAYERS, MANY = 256, 20, 20

# Key of the bucket, bytes and messages sent, bytes as stated, elements selected and in the union.
Cost = tuple[str, int, int, int, int, int]


@dataclass
class Record:
    """One rank's results of one case. Tensors are on the CPU."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    costs: list[Cost] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)


def each_case(cases: Mapping[str, Callable[[], Record]]) -> dict[str, Record | str]:
    """Record each case, or the traceback if it raised."""
    found: dict[str, Record | str] = {}
    for name, body in cases.items():
        print(f"rank {dist.get_rank()}: {name}", flush=True)  # identifies the case after a hang
        try:
            found[name] = body()
        except Exception:
            found[name] = traceback.format_exc()
    return found


def alone(backend: str | None) -> None:
    """Move this process to a one-rank group with this backend, replacing its current one."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]


def as_nodes(backend: str) -> None:
    """Move these ranks to a group with this backend. Each poses as a machine, so that NCCL accepts several on one GPU."""
    rank = dist.get_rank()
    os.environ |= {f"NCCL_{name}_DISABLE": "1" for name in ("P2P", "SHM", "IB")}
    os.environ |= {"NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo"}
    join_again(backend)


def costs(reports: Sequence[Report]) -> list[Cost]:
    return [
        (each.key, each.sent.nbytes, each.sent.messages, each.cost.nbytes, each.selected, each.union)
        for each in reports
        if each.sent is not None
    ]


class Known(nn.Module):
    """Parameters whose gradients are exactly the inputs of `forward`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(N, device=device) for _ in range(COUNT))

    def forward(self, inputs: Tensor) -> Tensor:
        total = inputs.new_zeros(())
        for row, weight in zip(inputs, self.weights, strict=True):
            total = total + (weight * row).sum()
        return total

    def gradients(self) -> Tensor:
        found = [each.grad for each in self.weights]
        return torch.cat([each.cpu() for each in found if each is not None])


def known(rank: int, step: int) -> Tensor:
    """Draw the gradients of a rank at a step, [COUNT, N], on the CPU, so that they are the same on all devices."""
    return torch.randn(COUNT, N, generator=generator(rank, "known", step))


def means(device: str, wrapper: str, make: Callable[[], Scheme]) -> Record:
    """Reduce known gradients for some steps."""
    model, record, rank = Known(device), Record(), dist.get_rank()
    if wrapper == "ddp":
        called: nn.Module = DistributedDataParallel(model, bucket_cap_mb=3 * N * 4 / 2**20)
        handle: Any = sparsync.attach(called, make(), options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0.04))
    else:
        called = model
        handle = sparsync.GradientReducer(model, make(), options=sparsync.Options(timeout_s=TIMEOUT_S))
    for step in range(STEPS):
        model.zero_grad()
        called(known(rank, step).to(device)).backward()
        if wrapper != "ddp":
            handle.reduce()
        record.tensors[f"means of step {step}"] = model.gradients()
    for name, each in handle.state_dict()["scheme"].get("residual", {}).items():
        record.tensors[f"residual of {name}"] = each.cpu()
    record.costs = costs(handle.reports())
    handle.close()
    return record


def scaled(device: str, make: Callable[[], Scheme]) -> Record:
    """Train with a loss scaler through a step in which the last rank has an infinity."""
    model, record, rank = Known(device), Record(), dist.get_rank()
    ddp = DistributedDataParallel(model, bucket_cap_mb=3 * N * 4 / 2**20)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler(device, init_scale=2.0**6, growth_interval=3)
    handle = sparsync.attach(ddp, make(), scaler=scaler, options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=0))
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = known(rank, step)
        if step == OVERFLOWING and rank == dist.get_world_size() - 1:
            inputs[COUNT // 2, N // 2] = torch.inf
        scaler.scale(ddp(inputs.to(device))).backward()
        record.losses.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        record.tensors[f"weights after step {step}"] = torch.cat([each.detach().cpu() for each in model.weights])
    for name, each in handle.state_dict()["scheme"].get("residual", {}).items():
        record.tensors[f"residual of {name}"] = each.cpu()
    record.costs = costs(handle.reports())
    record.seen = [f"{each.step} {each.key}" for each in handle.reports() if each.details.get("overflow")]
    handle.close()
    return record


class Training:
    """A small net with a wrapper, and a suitable optimizer and exchange."""

    def __init__(self, device: str, wrapper: str, scheme: Scheme) -> None:
        torch.manual_seed(1)
        self.device, self.rank, self.steps = device, dist.get_rank(), 0
        layers = nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)
        self.net = nn.Sequential(*layers).to(device)
        self.model: Any = self.net  # Any: an FSDPModule, which torch does not type as a module
        self.exchanges_gradients = wrapper in ("ddp", "reducer", "fsdp2 replicas", "fsdp2 shards")
        options: dict[str, Any] = {"options": sparsync.Options(timeout_s=TIMEOUT_S)}
        if wrapper.startswith("ddp"):
            self.model = DistributedDataParallel(self.net, bucket_cap_mb=0.01)
        if wrapper.startswith("fsdp2"):
            mesh = _mesh(device, wrapper == "fsdp2 shards")
            for layer in layers:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer, mesh=mesh)
            self.model = fully_shard(self.net, mesh=mesh)
        parameters = list(self.net.parameters())
        self.optimizer: Optimizer = (
            torch.optim.SGD(parameters, lr=0.1) if self.exchanges_gradients else torch.optim.AdamW(parameters, lr=3e-3)
        )
        options["exchange"] = sparsync.Gradients() if self.exchanges_gradients else sparsync.Steps()
        if wrapper.startswith("local"):
            options["exchange"] = LocalSteps(every=3, delay=1 if wrapper == "local, in the background" else 0)
        self.handle: Any = sparsync.attach(self.model, scheme, optimizer=self.optimizer, **options)
        self.reduces = wrapper == "reducer"

    def step(self) -> None:
        x = torch.randn(BATCH, 16, generator=generator(self.rank, "batch", self.steps)).to(self.device)
        self.optimizer.zero_grad()
        self._loss(x).backward()
        if self.reduces:
            self.handle.reduce()
        self.optimizer.step()
        self.steps += 1

    def loss(self) -> float:
        """Compute the loss on a held-out batch."""
        x = torch.randn(256, 16, generator=generator(0, "evaluation", 0)).to(self.device)
        with torch.no_grad():
            return float(self._loss(x))

    def weights(self) -> Tensor:
        """Copy this rank's own weights to the CPU."""
        return torch.cat([_whole(each).detach().flatten().cpu() for each in self.net.parameters()])

    def common(self) -> Tensor:
        """Copy the weights that must be equal on all ranks."""
        if self.exchanges_gradients:
            return self.weights()
        with self.handle.averaged():
            return self.weights()

    def state(self) -> dict[str, Any]:
        state = {"handle": self.handle.state_dict(), "steps": self.steps}
        if self.exchanges_gradients:
            state |= {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        return deepcopy(state)

    def load(self, state: Mapping[str, Any]) -> None:
        if self.exchanges_gradients:
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])
        self.steps = state["steps"]

    def _loss(self, x: Tensor) -> Tensor:
        return (self.model(x) - x[:, :8].sin()).square().mean()


def trained(device: str, wrapper: str, make: Callable[[], Scheme]) -> Record:
    """Train, and then resume a second time from a saved state."""
    training, record, state = Training(device, wrapper, make()), Record(), {}
    record.losses.append(training.loss())
    for step in range(LONG):
        if step == SAVED_AT:
            state = training.state()
        training.step()
        if training.exchanges_gradients:
            record.tensors[f"common weights after step {step}"] = training.common()
    record.losses.append(training.loss())
    record.tensors["common weights"], record.tensors["own weights"] = training.common(), training.weights()
    record.costs = costs(training.handle.reports())
    training.handle.close()
    again = Training(device, wrapper, make())
    again.load(state)
    for _ in range(SAVED_AT, LONG):
        again.step()
    record.tensors["common weights, continued"] = again.common()
    record.tensors["own weights, continued"] = again.weights()
    again.handle.close()
    return record


def deep(device: str, wrapper: str, make: Callable[[], Scheme], join_mb: float = 0.0, settled: bool = False) -> Record:
    """Train a net of many layers, each a bucket, most of which are reduced during the backward pass.

    `settled`: wait for all GPU streams before and after each bucket.
    """
    torch.manual_seed(2)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(DEEP, DEEP), nn.ReLU())]
    net = nn.Sequential(*layers).to(device)
    called: nn.Module = net
    if wrapper == "ddp":
        called = DistributedDataParallel(net, bucket_cap_mb=0.2)
        handle: Any = sparsync.attach(
            called, make(), options=sparsync.Options(timeout_s=TIMEOUT_S, join_mb=join_mb, dense_below=0)
        )
    else:
        handle = sparsync.GradientReducer(net, make(), options=sparsync.Options(timeout_s=TIMEOUT_S))
    if settled:
        noted(handle.state, lambda bucket: _settle(bucket.grad))
    optimizer, record = torch.optim.SGD(net.parameters(), lr=0.05), Record()
    for step in range(MANY):
        x = torch.randn(64, DEEP, generator=generator(dist.get_rank(), "deep", step)).to(device)
        optimizer.zero_grad()
        (called(x) - x).square().mean().backward()
        if wrapper != "ddp":
            handle.reduce()
        optimizer.step()
    record.tensors["weights"] = torch.cat([each.detach().flatten().cpu() for each in net.parameters()])
    record.seen = [f"{len({each.key for each in handle.reports()})} buckets"]
    handle.close()
    return record


def cases_of_means(device: str, wrapper: str, schemes: Sequence[str]) -> dict[str, Record | str]:
    return _on_both(device, schemes, lambda where, make: means(where, wrapper, make))


def cases_of_scaling(device: str, schemes: Sequence[str]) -> dict[str, Record | str]:
    return _on_both(device, schemes, scaled)


def _on_both(
    device: str, schemes: Sequence[str], reduce: Callable[[str, Callable[[], Scheme]], Record]
) -> dict[str, Record | str]:
    """Reduce the same gradients on the CPU and on `device`."""
    _repeatable()
    return each_case(
        {
            f"{name} on {where}": partial(reduce, where, SCHEMES[name])
            for name in schemes
            for where in dict.fromkeys(("cpu", device))
        }
    )


def cases_of_training(device: str, wrapper: str, schemes: Sequence[str], backend: str = "") -> dict[str, Record | str]:
    """Train with each scheme; `backend`: alone, in a group with this backend."""
    _repeatable()
    if backend:
        alone(None if backend == "default" else backend)
    return each_case({name: lambda name=name: trained(device, wrapper, SCHEMES[name]) for name in schemes})


def cases_between_nodes(device: str, wrapper: str, schemes: Sequence[str], backend: str) -> dict[str, Record | str]:
    """Train with each scheme, in a group with this backend."""
    _repeatable()
    as_nodes(backend)
    return each_case({name: lambda name=name: trained(device, wrapper, SCHEMES[name]) for name in schemes})


def cases_of_closing(device: str, backend: str) -> dict[str, Record | str]:
    """Exchange AdamW steps by default, and close while the GPU may be several steps behind, or once it has caught up."""
    _repeatable()
    as_nodes(backend)

    def train(settled: bool) -> Record:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        handle: Any = sparsync.attach(net, optimizer=optimizer, options=sparsync.Options(timeout_s=TIMEOUT_S))
        batches = [torch.randn(BATCH, 16, generator=generator(dist.get_rank(), "batch", step)) for step in range(LONG)]
        for x in [batch.to(device) for batch in batches]:
            optimizer.zero_grad()
            (net(x) - x[:, :8].sin()).square().mean().backward()
            optimizer.step()
        record = Record()
        if settled:
            with handle.averaged():
                record.tensors["common weights"] = torch.cat(
                    [each.detach().flatten().cpu() for each in net.parameters()]
                )
        handle.close()
        record.tensors["own weights"] = torch.cat([each.detach().flatten().cpu() for each in net.parameters()])
        return record

    return each_case({"settled": lambda: train(True), "at once": lambda: train(False)})


def cases_of_overlap(device: str, scheme: str) -> dict[str, Record | str]:
    """Train twice with overlapping buckets, and once with buckets that wait for the whole GPU."""
    _repeatable()
    make = SCHEMES[scheme]
    cases: dict[str, Callable[[], Record]] = {
        "first": lambda: deep(device, "ddp", make),
        "again": lambda: deep(device, "ddp", make),
        "settled": lambda: deep(device, "ddp", make, settled=True),
        "joined": lambda: deep(device, "ddp", make, join_mb=1.0),
        "joined, settled": lambda: deep(device, "ddp", make, join_mb=1.0, settled=True),
    }
    if scheme == "dense":
        cases["reducer"] = lambda: deep(device, "reducer", make)
    return each_case(cases)


def refused_shards(device: str) -> str:
    """Return the error of `attach` for a shard axis of one rank."""
    alone("nccl" if device == "cuda" else "gloo")
    try:
        Training(device, "fsdp2 shards", TwoShot(density=0.1))
    except ValueError as error:
        return str(error)
    return ""


def _mesh(device: str, shards: bool) -> DeviceMesh:
    P = dist.get_world_size()
    if shards:
        # Use the existing group: torch gives a one-axis mesh NCCL even if the group uses gloo.
        group = dist.group.WORLD
        assert group is not None
        return DeviceMesh.from_group(group, device)
    return init_device_mesh(device, (P, 1), mesh_dim_names=("replicate", "shard"))


def _repeatable() -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def _settle(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _whole(tensor: Any) -> Tensor:  # Any: a DTensor, or a plain Tensor
    """Gather the whole tensor. `full_tensor()` over gloo ended the process if the shards were on a GPU (torch 2.11)."""
    if not isinstance(tensor, DTensor):
        return tensor
    own, parts = tensor.to_local().detach().cpu(), [torch.empty(0)] * dist.get_world_size()
    if tensor.numel() == own.numel():
        return own
    dist.all_gather_object(parts, own)
    return torch.cat(parts)
