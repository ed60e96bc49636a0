"""A model is trained through one integration at a time; parts of it that have no parameter in common by as many as there are."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, in_turn, run
from sparsync import AdamWSteps, GradientReducer
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import Dense

pytestmark = pytest.mark.distributed

Made = Any  # a handle


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def adamw(model: nn.Module) -> Made:
    return AdamWSteps(model, torch.optim.AdamW(model.parameters()), Dense())


def local(model: nn.Module) -> Made:
    return LocalTraining(model, torch.optim.SGD(model.parameters()), Dense(), every=2)


MAKE: dict[str, Callable[[nn.Module], Made]] = {
    "sparsync.attach": lambda model: sparsync.attach(model, Dense()),
    "sparsync.GradientReducer": lambda model: GradientReducer(model, Dense()),
    "sparsync.AdamWSteps": adamw,
    "LocalTraining": local,
}


def each_pair() -> None:
    for first, make in MAKE.items():
        for second, other in MAKE.items():
            with case((first, second)):
                model = bare()
                given, again = (
                    DistributedDataParallel(model) if "attach" in each else model for each in (first, second)
                )
                handle = make(given)
                with pytest.raises(
                    ValueError, match=rf"^{first} trains '0\.weight' of this model already, .*close\(\)"
                ):
                    other(again)
                if second != "sparsync.attach":
                    with pytest.raises(ValueError, match=f"^{first} trains 'weight' of this model already"):
                        other(model[1])
                for copied in (copy.deepcopy(model), torch.load(saved(model), weights_only=False)):
                    other(DistributedDataParallel(copied) if "attach" in second else copied).close()
                handle.detach() if first == "sparsync.attach" else handle.close()
                other(again).close()
                if second != "sparsync.attach":
                    other(again)  # nothing refers to it, so it trains the model no more
                other(again).close()


def saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def parts_of_one_model() -> None:
    generator, discriminator = bare(), bare()
    handles = [GradientReducer(generator, Dense()), adamw(discriminator)]
    with pytest.raises(ValueError, match=r"sparsync\.GradientReducer trains '0\.0\.weight' of this model"):
        local(nn.Sequential(generator, bare()))
    shared = bare().requires_grad_(False)
    adapters = [nn.Linear(2, 2), nn.Linear(2, 2)]
    handles += [local(nn.Sequential(shared, each)) for each in adapters]  # neither trains what they share
    assert not any(each.closed for each in handles)


def of_a_ddp_model_that_is_gone() -> None:
    model = bare()
    handle = sparsync.attach(DistributedDataParallel(model), Dense())
    ddp = DistributedDataParallel(model)
    again = sparsync.attach(ddp, Dense())  # the first one gets no bucket any more
    assert handle.closed and not again.closed


def axes() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model: Any = fully_shard(bare(), mesh=mesh["shard"])
    first = sparsync.attach(model, Dense())
    second = sparsync.attach(model, Dense(), options=sparsync.Options(replicate=mesh["replicate"]))
    for handle in (first, second):
        with pytest.raises(ValueError, match=r"^sparsync\.attach trains '0\.weight' .* detach\(\) or close\(\)"):
            GradientReducer(model, Dense())
        handle.detach()
    GradientReducer(model, Dense()).close()


def test_a_model_is_trained_through_one_integration_until_that_is_closed_or_gone() -> None:
    run(in_turn, 1, parts=(each_pair, parts_of_one_model, of_a_ddp_model_that_is_gone))


def test_both_axes_of_an_fsdp2_model_are_attached_to_but_nothing_else_trains_it_meanwhile() -> None:
    run(axes, 2)
