"""A tiny training behind each integration, on one rank: what a trial disturbs."""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import schemes
from sparsync.base.scheme import Scheme
from sparsync.comm.group import GroupComm
from sparsync.core import generator
from sparsync.integrations.handle import Handle
from sparsync.lab.campaign.trials import SCHEMES, Trial

WIDTH = 32
BATCH = 4
BUCKET_MB = 0.004  # so that DDP has two buckets


class Training(Protocol):
    """What the loop of a rank needs."""

    @property
    def handle(self) -> Handle | None:
        """What the integration returned; None for plain collectives."""
        ...

    def step(self, number: int) -> None: ...

    def digest(self) -> str:
        """Return a digest of what must be the same on all ranks; "" where nothing is. Raises RuntimeError where it is not finite."""
        ...


class Model(nn.Module):
    """Two layers of the same shape, in the order given; `outputs` makes the second one shorter."""

    def __init__(self, seed: int, swapped: bool, outputs: int) -> None:
        super().__init__()
        for name in ("second", "first") if swapped else ("first", "second"):
            self.add_module(name, nn.Linear(WIDTH, outputs if name == "second" else WIDTH))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator(seed, name, 0)) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("second")(torch.tanh(self.get_submodule("first")(x)))


class ModelTraining:
    """The training of a Model behind one integration."""

    handle: Handle | None

    def __init__(self, trial: Trial, rank: int, timeout_s: float) -> None:
        self.trial, self.rank = trial, rank
        odd = rank == trial.victim  # the rank that differs, if any does
        model = Model(
            trial.seed,
            swapped=odd and trial.fault == "other_order",
            outputs=WIDTH // 2 if odd and trial.fault == "other_sizes" else WIDTH,
        )
        self.dtype = torch.bfloat16 if odd and trial.fault == "other_dtype" else torch.float32
        self.model: nn.Module = model.to(self.dtype)
        settings = SCHEMES[trial.scheme][odd and trial.fault == "other_settings"]
        self.scheme: Scheme = schemes.get(trial.scheme, **settings)
        self.common: Callable[[], AbstractContextManager[None]] = nullcontext
        self._finish: Callable[[], object] = lambda: None
        self._reduce: Callable[[], object] = lambda: None
        self._after: Callable[[], object] | None = None  # in place of, or after, the optimizer's step
        getattr(self, f"_{trial.integration.removesuffix('_delayed')}")(timeout_s)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, generator=generator(self.trial.seed, f"rank{self.rank}", number)).to(self.dtype)
        if self.trial.fault == "nan" and (number, self.rank) == (self.trial.step, self.trial.victim):
            x[0, 0] = float(self.trial.detail)
        out = self.model(x)
        (out - x[:, : out.shape[1]]).square().sum().backward()
        self._reduce()
        if self.trial.integration.startswith(("local_steps", "adamw_steps")):
            if self.trial.integration != "adamw_steps":
                self.optimizer.step()
        elif self.trial.fault != "nan" or self._all_finite():
            self.optimizer.step()
        if self._after is not None:
            self._after()

    def digest(self) -> str:
        self._finish()
        digest = hashlib.sha256()
        with self.common():
            for name, parameter in sorted(self.model.named_parameters()):
                own = _local(parameter.detach())
                if not own.isfinite().all():
                    raise RuntimeError(f"the training has ended with NaN or Inf in {name!r}")
                digest.update(own.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return f"rank{self.rank}/" * (self.trial.integration == "fsdp_shard") + digest.hexdigest()[:16]

    def _all_finite(self) -> bool:
        """Return what a loss scaler finds: whether the gradients of all ranks are finite."""
        bad = torch.zeros(1)
        for parameter in self.model.parameters():
            if parameter.grad is not None and not _local(parameter.grad).isfinite().all():
                bad += 1
        if self.trial.integration == "fsdp_shard":
            dist.all_reduce(bad)
        return not bad.item()

    def _ddp(self, timeout_s: float) -> None:
        # Without torch's own comparison of the models, which costs a wait of its own; the weights are the same by their seed.
        ddp = DistributedDataParallel(self.model, bucket_cap_mb=BUCKET_MB, init_sync=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.handle = sparsync.attach(
            ddp, self.scheme, optimizer=self.optimizer, timeout_s=timeout_s, join_mb=0, dense_below=0
        )
        self.model = ddp

    def _reducer(self, timeout_s: float) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        reducer = sparsync.GradientReducer(self.model, self.scheme, optimizer=self.optimizer, timeout_s=timeout_s)
        self.handle, self._reduce = reducer, reducer.reduce

    def _local_steps(self, timeout_s: float) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        delay = int(self.trial.integration.endswith("_delayed"))
        steps = sparsync.LocalSteps(self.model, self.optimizer, self.scheme, every=2, delay=delay, timeout_s=timeout_s)
        self.handle, self._after, self._finish, self.common = steps, steps.step, steps.exchange, steps.averaged

    def _adamw_steps(self, timeout_s: float) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        steps = sparsync.AdamWSteps(self.model, self.optimizer, self.scheme, timeout_s=timeout_s)
        self.handle, self._after, self.common = steps, steps.step, steps.averaged

    def _fsdp_replicate(self, timeout_s: float) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (self.trial.ranks, 1), mesh_dim_names=("replicate", "shard"))
        self._sharded(mesh["shard"])
        self.handle = sparsync.attach(
            self.model, self.scheme, replicate=mesh["replicate"], optimizer=self.optimizer, timeout_s=timeout_s
        )

    def _fsdp_shard(self, timeout_s: float) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._sharded(init_device_mesh("cpu", (self.trial.ranks,)))
        self.handle = sparsync.attach(self.model, self.scheme, optimizer=self.optimizer, timeout_s=timeout_s)

    def _sharded(self, mesh: Any) -> None:  # Any: a DeviceMesh, whose module is loaded where it is used
        from torch.distributed.fsdp import fully_shard

        for module in (self.model.get_submodule("first"), self.model.get_submodule("second"), self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x  # pyright: ignore[reportAttributeAccessIssue]


class CollectivesTraining:
    """Each call of a communicator once in a step, and a check of what it returned."""

    handle = None

    def __init__(self, trial: Trial, rank: int, timeout_s: float) -> None:
        self.comm, self.digests = GroupComm.private(timeout_s=timeout_s), hashlib.sha256()

    def step(self, number: int) -> None:
        comm, P = self.comm, self.comm.size
        own = torch.full((8,), float(comm.rank + number))
        total = comm.all_reduce(own)
        rows = comm.all_gather(own[: comm.rank + 1])
        parts = comm.all_to_all([own[:other] for other in range(1, P + 1)])
        into = torch.empty(8)
        comm.send_recv(own, (comm.rank + 1) % P, into, (comm.rank - 1) % P)
        right = bool((total == sum(range(P)) + P * number).all())
        right &= all(bool((row == other + number).all()) and len(row) == other + 1 for other, row in enumerate(rows))
        right &= all(bool((part == other + number).all()) for other, part in enumerate(parts))
        if not (right and bool((into == (comm.rank - 1) % P + number).all())):
            raise AssertionError(f"a collective of step {number} has returned something else than was sent")
        self.digests.update(torch.cat([total, *rows]).numpy().tobytes())

    def digest(self) -> str:
        return self.digests.hexdigest()[:16]


def training(trial: Trial, rank: int, timeout_s: float) -> Training:
    """Return the training of a trial on this rank. Collective over the default group."""
    made = CollectivesTraining if trial.integration == "collectives" else ModelTraining
    return made(trial, rank, timeout_s)
