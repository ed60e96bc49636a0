"""A tiny training on one rank with each integration, for a trial to disturb."""

import ctypes
import gc
import hashlib
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from sparsync import Scheme, schemes
from sparsync.comm import GroupComm
from sparsync.core import generator
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.handle import Handle
from studies.campaign.trials import ALL, SCHEMES, Trial

WIDTH = 32
BATCH = 4
BUCKET_MB = 0.004  # so that DDP has two buckets
RATE, OTHER_RATE = 0.01, 0.02
CHECK_EVERY = 5  # steps, so that weights are compared after every moment at which others are loaded
LAYER = "first"  # the layer that faults freeze
SETTLED = 2  # steps until work in progress at the freeze is applied
CHILD_S = 20  # for a forked child to end
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


class WrongResultError(Exception):
    """The training ended with a wrong result."""


class RankTraining(Protocol):
    """The training in the loop of a rank."""

    @property
    def handle(self) -> Handle | None:
        """The handle of the integration; None for plain collectives."""
        ...

    def step(self, number: int) -> None: ...

    def digest(self) -> str:
        """Compute a digest that must be the same on all ranks. Raises WrongResultError."""
        ...


class Model(nn.Module):
    """Two layers of the same shape, in the given order; `outputs` shortens the second one."""

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
        odd = rank == trial.victim  # the rank that may differ
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
        self._after: Callable[[], object] | None = None  # instead of, or after, the optimizer's step
        self._frozen: dict[str, Tensor] | None = None  # the layer's weights, once they must stay the same
        self._loaded: dict[str, tuple[Tensor, Tensor]] = {}  # previous and loaded weights
        self._child = 0  # the forked process
        # Any: arguments of each integration
        self._options: Any = {"timeout_s": timeout_s, "check_weights_every": CHECK_EVERY}
        getattr(self, f"_{trial.integration.removesuffix('_delayed')}")()

    def step(self, number: int) -> None:
        if number == self.trial.step + SETTLED and not self._layer()[0][1].requires_grad:
            self._frozen = {name: each.clone() for name, each in self._common_weights(self._layer())}
        self.optimizer.zero_grad()
        x = torch.randn(BATCH, WIDTH, generator=generator(self.trial.seed, f"rank{self.rank}", number)).to(self.dtype)
        if self.trial.fault == "nan" and (number, self.rank) == (self.trial.step, self.trial.victim):
            x[0, 0] = float(self.trial.detail)
        out = self.model(x)
        (out - x[:, : out.shape[1]]).square().sum().backward()
        self._reduce()
        # Exchanges of weights or steps detect non-finite values themselves.
        if self.trial.fault != "nan" or "steps" in self.trial.integration or self._all_finite():
            self.optimizer.step()
        if self._after is not None:
            self._after()

    def change(self) -> None:
        """Apply the fault's change on this rank."""
        if self.trial.fault == "other_rate":
            self.optimizer.param_groups[0]["lr"] = OTHER_RATE
        elif self.trial.fault == "frozen":
            for _, parameter in self._layer():
                parameter.requires_grad_(False).grad = None
        else:
            self._load_others()

    def fork(self) -> None:
        """Fork a child that collects the handle and everything that refers to it."""
        handle = weakref.ref(self.handle)
        self._child = os.fork()
        if self._child == 0:
            # The child must end with the rank, and in any case.
            ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            signal.alarm(CHILD_S)
            vars(self).clear()
            gc.collect()
            os._exit(handle() is not None)

    def state(self) -> Any:  # Any: as Handle.state_dict
        """Save a checkpoint of this rank."""
        assert self.handle is not None
        weights = {name: _local(each.detach()).clone() for name, each in self.model.named_parameters()}
        return deepcopy((weights, self.optimizer.state_dict(), self.handle.state_dict()))

    def load(self, state: Any) -> None:  # Any: as `state`
        """Resume from a checkpoint."""
        assert self.handle is not None
        weights, optimizer, handle = state
        if hasattr(self.model, "reset_iter_state"):
            self.model.reset_iter_state()  # pyright: ignore[reportCallIssue]  # FSDP2's
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                _local(each).copy_(weights[name])
        self.optimizer.load_state_dict(optimizer)
        self.handle.load_state_dict(handle)

    def digest(self) -> str:
        self._finish()
        self._check()
        digest = hashlib.sha256()
        for name, own in self._common_weights(sorted(self.model.named_parameters())):
            if not own.isfinite().all():
                raise WrongResultError(f"the training has ended with NaN or Inf in {name!r}")
            digest.update(own.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return f"rank{self.rank}/" * (self.trial.integration == "fsdp_shard") + digest.hexdigest()[:16]

    def _check(self) -> None:
        """Raise WrongResultError if a frozen layer has moved, loaded weights were lost, or a forked child failed."""
        for name, own in self._common_weights(self._layer()):
            if self._frozen is not None and not torch.equal(own, self._frozen[name]):
                raise WrongResultError(f"{name} has moved, although it is frozen")
        for name, own in self._common_weights(list(self.model.named_parameters())):
            if name in self._loaded:
                before, loaded = ((own - each).norm() for each in self._loaded[name])
                if loaded >= before:
                    raise WrongResultError(
                        f"the weights {name} that were loaded on all ranks are lost: these are nearer to those before"
                    )
        if self._child:
            deadline = time.monotonic() + CHILD_S
            while (ended := os.waitpid(self._child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ended[0] != self._child or ended[1]:
                raise WrongResultError(f"the forked child did not end as it should: {ended or 'it hangs'}")

    def _load_others(self) -> None:
        """Load the weights of another seed."""
        other = dict(Model(self.trial.seed + 1, swapped=False, outputs=WIDTH).named_parameters())
        with torch.no_grad():
            for name, each in self.model.named_parameters():
                before, new = _local(each).clone(), other[name.removeprefix("module.")]
                if self.trial.integration == "fsdp_shard":
                    new = new.chunk(self.trial.ranks)[self.rank]
                _local(each).copy_(new)
                if self.trial.detail == ALL:
                    self._loaded[name] = before, new.detach().clone()

    def _layer(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.model.named_parameters() if f"{LAYER}." in name]

    def _common_weights(self, named: list[tuple[str, nn.Parameter]]) -> list[tuple[str, Tensor]]:
        with self.common():
            return [(name, _local(each.detach()).clone()) for name, each in named]

    def _groups(self) -> Any:  # Any: what an optimizer takes
        """Group the parameters; for `other_groups` into two groups with different rates, swapped on one rank."""
        if self.trial.fault != "other_groups":
            return self.model.parameters()
        names = ["first", "second"]
        if self.rank == self.trial.victim:
            names.reverse()
        rates = (RATE, OTHER_RATE)
        return [
            {"params": list(self.model.get_submodule(name).parameters()), "lr": rate}
            for name, rate in zip(names, rates, strict=True)
        ]

    def _made_optimizer(self) -> torch.optim.Optimizer:
        made = torch.optim.AdamW if self.trial.integration.startswith("steps") else torch.optim.SGD
        return made(self._groups(), lr=RATE)

    def _all_finite(self) -> bool:
        """Tell whether the gradients of all ranks are finite, as a loss scaler does."""
        bad = torch.zeros(1)
        for parameter in self.model.parameters():
            if parameter.grad is not None and not _local(parameter.grad).isfinite().all():
                bad += 1
        if self.trial.integration == "fsdp_shard":
            dist.all_reduce(bad)
        return not bad.item()

    def _attach(self, model: nn.Module, exchange: sparsync.Steps | None = None, **more: Any) -> Any:  # Any: of Options
        """Attach to a model that may be wrapped."""
        options = sparsync.Options(**self._options, **more)
        return sparsync.attach(model, self.scheme, optimizer=self.optimizer, exchange=exchange, options=options)

    def _wrap(self) -> nn.Module:
        """Wrap the model in DistributedDataParallel."""
        # Skip torch's comparison of the models, which costs another wait; the seed makes the weights equal.
        # Without find_unused_parameters, DDP would wait for the gradients of a layer that is frozen later.
        self.optimizer = self._made_optimizer()
        unused = self.trial.fault == "frozen"
        self.model = DistributedDataParallel(
            self.model, bucket_cap_mb=BUCKET_MB, init_sync=False, find_unused_parameters=unused
        )
        return self.model

    def _ddp(self) -> None:
        self.handle = self._attach(self._wrap(), join_mb=0, dense_below=0)

    def _reducer(self) -> None:
        self.optimizer = self._made_optimizer()
        reducer = sparsync.GradientReducer(
            self.model, self.scheme, optimizer=self.optimizer, options=sparsync.Options(**self._options)
        )
        self.handle, self._reduce = reducer, reducer.reduce

    def _local_steps(self) -> None:
        self.optimizer = self._made_optimizer()
        delay = int(self.trial.integration.endswith("_delayed"))
        steps = LocalTraining(self.model, self.optimizer, self.scheme, every=2, delay=delay, **self._options)
        self.handle, self._after, self._finish, self.common = steps, steps.step, steps.flush, steps.averaged

    def _steps(self) -> None:
        self.optimizer = self._made_optimizer()
        self._attach_steps(self.model)

    def _steps_ddp(self) -> None:
        self._attach_steps(self._wrap())

    def _steps_fsdp(self) -> None:
        self._attach_steps(self.model, replicate=self._shard_in_copies())

    def _attach_steps(self, model: nn.Module, **options: Any) -> None:  # Any: of Options
        handle = self._attach(model, sparsync.Steps(), **options)
        self.handle, self.common = handle, handle.averaged

    def _fsdp_replicate(self) -> None:
        replicas = self._shard_in_copies()
        self.handle = self._attach(self.model, replicate=replicas)

    def _fsdp_shard(self) -> None:
        self._shard(init_device_mesh("cpu", (self.trial.ranks,)))
        self.handle = self._attach(self.model)

    def _shard_in_copies(self) -> DeviceMesh:
        """Shard the model over one rank, and return the axis of the replicas."""
        mesh = init_device_mesh("cpu", (self.trial.ranks, 1), mesh_dim_names=("replicate", "shard"))
        self._shard(mesh["shard"])
        return mesh["replicate"]

    def _shard(self, mesh: DeviceMesh) -> None:
        for module in (self.model.get_submodule("first"), self.model.get_submodule("second"), self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = self._made_optimizer()


def _local(x: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor unchanged."""
    return x.to_local() if hasattr(x, "to_local") else x  # pyright: ignore[reportAttributeAccessIssue]


class CollectivesTraining:
    """Makes each call of a communicator once per step, and checks the result."""

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


def training(trial: Trial, rank: int, timeout_s: float) -> RankTraining:
    """Make the training of a trial on this rank. Collective over the default group."""
    made = CollectivesTraining if trial.integration == "collectives" else ModelTraining
    return made(trial, rank, timeout_s)
