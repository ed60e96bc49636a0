"""Trainings whose `Steps` or `LocalSteps` are compared: a bare module, DDP, FSDP2 replicas, and LocalTraining."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from helpers.ddp_training import COUNT, TIMEOUT_S, N
from helpers.known_gradients import KnownGradients, row
from helpers.replicas import local
from integrations.situations import Tied, Words
from integrations.table import refusals
from sparsync import AdamWSteps, Options, Steps, attach
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining

BUCKET_MB = 2e-3  # the model has four buckets
EVERY = 2  # steps between exchanges of LocalTraining


@dataclass
class StepsSeen:
    """The record of one rank."""

    own: list[dict[str, Tensor]] = field(default_factory=list)  # weights by step
    common: list[dict[str, Tensor]] = field(default_factory=list)
    residual: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)


class SteppedTraining:
    """A training of KnownGradients on this rank, without a wrapper; `comm` is a LocalWorld's, else ranks are processes."""

    def __init__(
        self,
        id: str,
        comm: Comm | None = None,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        model: Any = None,  # KnownGradients, or what has its methods
        **settings: Any,
    ) -> None:
        self.model = model or KnownGradients(COUNT, N, dtype)
        self.forward: Any = self.model  # or its compiled version
        self.rank = dist.get_rank(group) if comm is None else comm.rank
        self.scheme = row(id).make()
        self.seen = StepsSeen()
        with refusals():
            self.steps = self.made(
                {"bucket_mb": BUCKET_MB, "comm": comm, "group": group, "timeout_s": TIMEOUT_S} | settings
            )

    def made(self, settings: dict[str, Any]) -> AdamWSteps | LocalTraining:
        raise NotImplementedError

    def take(self, scaler: GradScaler | None = None) -> None:
        """Take a step with the existing gradients."""
        raise NotImplementedError

    def take_nothing(self) -> None:
        """Take a step on a rank without data."""
        self.steps.step()

    def step(self, inputs: Any = None) -> None:  # Any: the model's input; None: a rank without data
        self.accumulate([] if inputs is None else [inputs])

    def accumulate(self, parts: Sequence[Any]) -> None:
        self.model.zero_grad()
        for number, part in enumerate(parts, 1):
            with self.waiting() if number < len(parts) else nullcontext():
                self.forward(part).backward()
        self.take() if parts else self.take_nothing()
        self.record()

    def waiting(self) -> AbstractContextManager[None]:
        """Return the context for all but the last backward pass of a step."""
        return nullcontext()

    def record(self) -> None:
        self.seen.own.append(self.weights())
        with self.steps.averaged():
            self.seen.common.append(self.weights())
        residual = self.steps.state.state_dict().get("residual", {})
        self.seen.residual.append({name: residual[name].clone() for name in sorted(residual)})

    def weights(self) -> dict[str, Tensor]:
        return {name: local(each.detach()).flatten().clone() for name, each in self.model.named_parameters()}

    def done(self) -> StepsSeen:
        return self.seen


class ByAdamW(SteppedTraining):
    """Trains through `attach` on a bare module in a plain torch loop; in a LocalWorld through AdamWSteps."""

    optimizer: torch.optim.AdamW

    def made(self, settings: dict[str, Any]) -> AdamWSteps:
        options: dict[str, Any] = {"block": 16, "measure_every": 2, "bucket_mb": settings.pop("bucket_mb")}
        comm, group, wrapping = settings.pop("comm"), settings.pop("group"), settings.pop("wrapping", {})
        if comm is None:
            self.forward = self.wrapped(group, **wrapping)
            settings["group"] = group if type(self) is ByAdamW else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.125, weight_decay=0.5)
        if comm is not None:
            return AdamWSteps(self.model, self.optimizer, self.scheme, comm=comm, **options, **settings)
        rest = {name: settings.pop(name) for name in ("group", "scaler") if name in settings}
        exchange, given = Steps(**options), Options(**settings)
        steps = attach(self.forward, self.scheme, optimizer=self.optimizer, exchange=exchange, options=given, **rest)
        assert isinstance(steps, AdamWSteps)
        return steps

    def wrapped(self, group: dist.ProcessGroup | None) -> nn.Module:
        return self.model

    def take(self, scaler: GradScaler | None = None) -> None:
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)

    def take_nothing(self) -> None:
        self.take()


class UnderDdp(ByAdamW):
    def wrapped(self, group: dist.ProcessGroup | None, **wrapping: Any) -> nn.Module:  # Any: DDP's arguments
        return DistributedDataParallel(self.model, process_group=group, **wrapping)

    def waiting(self) -> AbstractContextManager[None]:
        return self.forward.no_sync() if isinstance(self.forward, DistributedDataParallel) else nullcontext()


class ByReplicas(ByAdamW):
    """Trains with one shard per replica, and a unit per pair of parameters."""

    def wrapped(
        self, group: dist.ProcessGroup | None
    ) -> Any:  # Any: an FSDPModule, which torch does not type as a module
        ranks = list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(-1, 1), mesh_dim_names=("replicate", "shard"))
        if isinstance(self.model, Tied):  # FSDP2 needs shared parameters in one unit
            return fully_shard(self.model, mesh=mesh)
        for pair in self.model.children():
            pair.forward = partial(_of_pair, pair)
            fully_shard(pair, mesh=mesh)
        self.model.forward = partial(_of_pairs, self.model)
        return fully_shard(self.model, mesh=mesh)


def _of_pair(pair: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    parts = [(pair.get_parameter(name) * x).sum() for name, x in inputs.items()]
    return torch.stack(parts).sum()


def _of_pairs(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Compute the model's output by a forward pass of each pair with requested gradients."""
    total = torch.zeros(())
    for name, pair in model.named_children():
        if own := {key.removeprefix(f"{name}."): x for key, x in inputs.items() if key.startswith(f"{name}.")}:
            total = total + pair(own)
    return total


class Locally(SteppedTraining):
    def made(self, settings: dict[str, Any]) -> LocalTraining:
        settings.pop("scaler", None)
        settings.pop("wrapping", None)
        self.optimizer: Optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=0.125)  # torch's AdamW takes no sparse gradients
            if isinstance(self.model, Words)
            else torch.optim.AdamW(self.model.parameters(), lr=0.125, weight_decay=0.5, eps=1e-3)  # not 0 in float16
        )
        return LocalTraining(self.model, self.optimizer, self.scheme, **{"every": EVERY, **settings})

    def take(self, scaler: GradScaler | None = None) -> None:
        self.optimizer.step() if scaler is None else scaler.step(self.optimizer)
        self.steps.step()
