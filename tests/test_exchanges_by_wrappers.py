"""Steps behind every wrapper: the same common weights, what is not trained stays, what is set is adopted or refused, and runs go on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from helpers.fsdp_training import same
from helpers.replicas import on_all_ranks
from helpers.resized import check_resized
from sparsync import Steps
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed

WIDTH, BATCH = 96, 8
STEPS, SAVED, FROZEN_FROM, LOADED_AT = 8, 5, 3, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.later, self.last = nn.Linear(16, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.frozen, self.unused = nn.Linear(16, 16).requires_grad_(False), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.later(self.first(self.frozen(x)).tanh()).tanh())


def sharded(net: Net, shards: int) -> Any:  # Any: an FSDPModule, which torch does not type as a module
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    for layer in (net.first, net.later, net.last):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


@dataclass(frozen=True)
class Wrapper:
    wrap: Callable[[Net], Any]  # Any: a module, or a function that torch.compile made
    shards: int = 1


def bare(net: Net) -> nn.Module:
    return net


def ddp(net: Net) -> nn.Module:
    return DistributedDataParallel(net, find_unused_parameters=True)


def compiled(net: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(net, backend="eager")


WRAPPERS = {
    "ddp": Wrapper(ddp),
    "compiled_ddp": Wrapper(lambda net: compiled(ddp(net))),
    "compiled": Wrapper(compiled),
    "fsdp2": Wrapper(partial(sharded, shards=1)),
    "hsdp": Wrapper(partial(sharded, shards=2), shards=2),
}


class WrappedTraining:
    """A loop of plain torch behind a wrapper, from whose state dict the common weights are read."""

    def __init__(self, wrapper: Wrapper) -> None:
        self.net = Net()
        self.model = wrapper.wrap(self.net)
        self.optimizer = torch.optim.AdamW(
            [each for each in self.net.parameters() if each.requires_grad], lr=3e-3, weight_decay=0.1
        )
        scheme = TwoShot(density=0.07, values="sign")
        options = sparsync.Options(timeout_s=60)
        self.handle: Any = sparsync.attach(self.model, scheme, optimizer=self.optimizer, options=options)
        assert self.handle.exchange == Steps()

    def step(self, number: int) -> None:
        if number == FROZEN_FROM:
            for each in self.net.later.parameters():
                each.requires_grad_(False).grad = None
        if number == LOADED_AT:
            self.net.load_state_dict({name: each + 0.5 for name, each in self.net.state_dict().items()})
        x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
        (self.model(x) - x[:, :8].sin()).square().mean().backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def common(self) -> dict[str, Tensor]:
        saved: dict[str, Any] = dict(self.net.state_dict())  # Any: a DTensor, where the model is sharded
        return {name: whole(each) for name, each in saved.items()}

    def residual(self) -> dict[str, Tensor]:
        return {name: each.clone() for name, each in self.handle.state_dict()["scheme"]["residual"].items()}


def whole(tensor: Any) -> Tensor:  # Any: as above
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Return the layers that differ."""
    return {name.partition(".")[0] for name, each in before.items() if not torch.equal(each, after[name])}


def lived(name: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train, save and go on; return the common weights and the residual that were saved."""
    wrapper = WRAPPERS[name]
    training, before = WrappedTraining(wrapper), Net().state_dict()
    reference = WrappedTraining(Wrapper(bare)) if wrapper.shards == 1 else None
    seen: list[dict[str, Tensor]] = []
    saved: tuple[Any, ...] = ()
    for number in range(STEPS):
        if number == SAVED:
            sparsync.checkpoint.save(training.handle, folder)
            saved = training.common(), training.residual()
        training.step(number)
        seen.append(training.common())
        with case(f"step {number}"):
            assert on_all_ranks(seen[-1].values())
            if reference is not None:
                reference.step(number)
                assert same(seen[-1], reference.common())
    with case("what is frozen or unused stays, and all else moves"):
        assert moved(before, seen[FROZEN_FROM - 1]) == {"first", "later", "last"}
        assert moved(seen[FROZEN_FROM - 1], seen[LOADED_AT - 1]) == {"first", "last"}
        assert moved(seen[LOADED_AT], seen[-1]) == {"first", "last"}
    with case("what was loaded is what is trained"):
        distance = max(float((each - 0.5 - seen[LOADED_AT - 1][key]).abs().max()) for key, each in seen[-1].items())
        assert distance < 0.1
    with case("less than a bit, by what was sent as by what was stated"):
        reports = training.handle.reports()
        assert all(each.sent.nbytes == each.cost.nbytes for each in reports)
        trained = sum(each.numel() for key, each in before.items() if not key.startswith("frozen")) / wrapper.shards
        bits = 8 * sum(each.sent.nbytes for each in reports) / (trained * STEPS)
        assert bits == pytest.approx(training.handle.stats()["bits"], rel=0.02)  # shards are padded
        assert bits < 1
    with case("goes on to the same bits"):
        again = WrappedTraining(Wrapper(bare) if wrapper.wrap is ddp else wrapper)
        for each in again.net.later.parameters():
            each.requires_grad_(False)
        sparsync.checkpoint.load(again.handle, folder)
        assert same(again.common(), saved[0])
        for number in range(SAVED, STEPS):
            again.step(number)
        assert same(again.common(), seen[-1])
    with case("what is set in one copy alone is refused"):
        with torch.no_grad():
            for each in again.net.first.parameters() if dist.get_rank() < wrapper.shards else ():
                each.mul_(2.0)
        with pytest.raises(RuntimeError, match="weights"):
            again.step(STEPS)
    return saved


def taken_over(name: str, folder: Path, common: dict[str, Tensor]) -> dict[str, Tensor]:
    """Go on with another number of ranks; return the residual that was loaded."""
    training = WrappedTraining(WRAPPERS[name])
    for each in training.net.later.parameters():
        each.requires_grad_(False)
    assert sparsync.checkpoint.load(training.handle, folder) == SAVED
    assert same(training.common(), common)
    residual = training.residual()
    for number in range(SAVED, STEPS):
        training.step(number)
        assert on_all_ranks(training.common().values())
    assert moved(common, training.common()) >= {"first", "last"}
    return residual


@pytest.mark.parametrize(
    "name", ["ddp", *(pytest.param(each, marks=pytest.mark.slow) for each in WRAPPERS if each != "ddp")]
)
def test_behind_every_wrapper_steps_are_those_of_the_bare_module_and_go_on_with_any_number_of_ranks(
    name: str, tmp_path: Path
) -> None:
    shards = WRAPPERS[name].shards
    before = run(lived, 2 * shards, name=name, folder=tmp_path)
    after = run(taken_over, 3 * shards, name=name, folder=tmp_path, common=before[0][0])
    for shard in range(shards):
        old, new = [each for _, each in before[shard::shards]], after[shard::shards]
        for key, each in old[0].items():
            check_resized([each, old[1][key]], [one.get(key) for one in new], key)
