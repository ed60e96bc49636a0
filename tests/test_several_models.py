"""Several models that one optimizer trains, such as a network and the encoder of its input: attached together, or each by itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import sparsync
from helpers.distributed import case, run
from sparsync import Gradients, LocalSteps, Steps
from sparsync.attached import checkpoint
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed
SIGNS, INT4 = {"density": 1.0, "values": "sign"}, {"density": 1.0, "values": "int4"}


class Both(nn.Module):
    """An encoder and a network as one module."""

    def __init__(self, encoder: nn.Module, network: nn.Module) -> None:
        super().__init__()
        self.encoder, self.network = encoder, network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self.encoder(x))


def parts() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12)), nn.Sequential(
        nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)
    )


def train(models: list[nn.Module], optimizer: Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        for model in models:
            x = model(x)
        x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(modules: Any) -> list[Tensor]:
    """What `state_dict` shows: common weights."""
    return [value.clone() for each in modules for value in each.state_dict().values()]


def together(folder: Path) -> dict[str, list[list[Tensor]]]:
    found: dict[str, list[list[Tensor]]] = {}
    for exchange in (Steps(), LocalSteps(every=2, keep=0.5)):
        for wrap in (DistributedDataParallel, lambda bare: bare)[: 2 if isinstance(exchange, Steps) else 1]:
            encoder, network = parts()
            wrapped: list[nn.Module] = [wrap(encoder), wrap(network)]
            optimizer = AdamW([*encoder.parameters(), *network.parameters()], lr=0.01)
            handle: Any = sparsync.attach(wrapped, TwoShot(**SIGNS), exchange=exchange, optimizer=optimizer)
            train(wrapped, optimizer, 4)
            seen = [weights(parts) for parts in ([encoder, network], wrapped)]
            where = folder / f"{type(exchange).__name__}{len(found)}"
            checkpoint.save(handle, where)
            train(wrapped, optimizer, 2, first=4)
            last = weights([encoder, network])
            dist.barrier()
            if isinstance(exchange, Steps):  # local steps need the optimizers' states too
                checkpoint.load(handle, where)
                train(wrapped, optimizer, 2, first=4)
                assert all(map(torch.equal, weights([encoder, network]), last))
            with case("one of them goes back"), pytest.warns(UserWarning, match="of the model was loaded after step"):
                network.load_state_dict({key: 2 * value for key, value in network.state_dict().items()})
                train(wrapped, optimizer, 2, first=6)
            handle.detach()

            encoder, network = parts()
            whole = Both(encoder, network)
            called = wrap(whole)
            optimizer = AdamW(whole.parameters(), lr=0.01)
            alone: Any = sparsync.attach(called, TwoShot(**SIGNS), exchange=exchange, optimizer=optimizer)
            train([called], optimizer, 4)
            seen.append(weights([whole]))
            train([called], optimizer, 2, first=4)
            seen += [last, weights([whole])]
            alone.detach()
            found[where.name] = seen
    return found


def apart() -> list[Tensor]:
    """Gradients of each model by itself, with one optimizer of both."""
    encoder, network = parts()
    wrapped: list[nn.Module] = [DistributedDataParallel(encoder), DistributedDataParallel(network)]
    optimizer = AdamW([*encoder.parameters(), *network.parameters()], lr=0.01)
    with (
        case("what is said where one is attached for steps"),
        pytest.raises(ValueError, match=r"attach\(\[model, other\]"),
    ):
        sparsync.attach(wrapped[0], TwoShot(**SIGNS), optimizer=optimizer, exchange=Steps())
    with case("gradients"), pytest.raises(ValueError, match=r"attach each model by itself, with the same optimizer"):
        sparsync.attach(wrapped, TwoShot(**INT4), optimizer=optimizer)
    with case("one bare"), pytest.raises(ValueError, match="wrap all of them with the same process_group=, or none"):
        sparsync.attach([wrapped[0], network], TwoShot(**SIGNS), optimizer=optimizer)
    with case("sharded"), pytest.raises(ValueError, match="make those of fully_shard parts of one module"):
        sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
        sparsync.attach([sharded, wrapped[0]], TwoShot(**SIGNS), optimizer=optimizer)  # pyright: ignore[reportArgumentType]
    assert sparsync.doctor(wrapped, TwoShot(**SIGNS), optimizer=optimizer) == []
    handles = [sparsync.attach(each, TwoShot(**INT4), optimizer=optimizer, exchange=Gradients()) for each in wrapped]
    train(wrapped, optimizer, 3)
    assert [each.summary().steps for each in handles] == [3, 3]  # pyright: ignore[reportAttributeAccessIssue]
    return [each.detach().clone() for each in [*encoder.parameters(), *network.parameters()]]


def test_two_models_attached_together_train_as_one_that_holds_both_and_gradients_go_one_by_one(tmp_path: Path) -> None:
    for name, (mine, wrapped, whole, last, whole_last) in run(together, 2, folder=tmp_path)[0].items():
        with case(name):
            assert len(mine) == len(wrapped) == len(whole) == 11
            assert all(map(torch.equal, mine, whole)) and all(map(torch.equal, last, whole_last))
            assert all(map(torch.equal, mine, wrapped))
    for one, other in zip(*run(apart, 2), strict=True):
        assert torch.equal(one, other)
