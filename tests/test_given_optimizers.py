"""What is passed as a model and as an optimizer is examined before anything is sent."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

import sparsync
from helpers.distributed import case, run
from sparsync import AdamWSteps, Gradients, LocalSteps, Steps
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.runtime.findings import warn_or_raise
from sparsync.schemes import Dense

pytestmark = pytest.mark.distributed

Makers = dict[str, Callable[..., Any]]  # of what takes a model, a scheme and an optimizer
ATTACH: Makers = {"doctor": sparsync.doctor, "attach": sparsync.attach}
EXCHANGES = (Gradients(), Steps(), LocalSteps(every=2))
DIRECT: Makers = {
    "AdamWSteps": lambda model, scheme, optimizer: AdamWSteps(model, optimizer, scheme),
    "LocalTraining": lambda model, scheme, optimizer: LocalTraining(model, optimizer, scheme, every=2),
}


def attached() -> Makers:
    """Of attach and doctor, with each exchange."""
    return {
        f"{name} {how}": lambda *given, make=make, how=how, **more: make(*given, exchange=how, **more)
        for name, make in ATTACH.items()
        for how in (None, *EXCHANGES)
    }


def other_parameters() -> None:
    model, copied = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, whole = AdamW(copied.parameters()), AdamW(model.parameters())
    words = "none of the model's trained parameters, so they do not train, unless it has copies .*; make the optimizer from this model's"
    for name, make in {**attached(), **DIRECT}.items():
        if name == "LocalTraining":  # its caller says when an optimizer has stepped
            continue
        refused = " Steps(" in name or name == "AdamWSteps"
        with case(name), pytest.raises(ValueError, match=words) if refused else pytest.warns(UserWarning, match=words):
            made = make(model, Dense(), optimizer=optimizer)
            if isinstance(made, list):
                warn_or_raise(made)
            else:
                made.close()
    with case("of a part, and inside another one"):
        model.weight.requires_grad_(True)
        for held in (AdamW([model.bias]), Outer(whole)):
            sparsync.attach(model, Dense(), exchange=Gradients(), optimizer=held).close()
    with case("made before fully_shard"):
        before = SGD(model.parameters(), lr=0.1)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with pytest.warns(UserWarning, match=words):
            sparsync.attach(model, Dense(), optimizer=before).detach()
    with case("made after it, while the model has its gathered parameters"):
        after = SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert sparsync.doctor(model, Dense(), optimizer=after) == []


class Outer(torch.optim.Optimizer):
    """Has an optimizer inside, and no parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, []


def test_an_optimizer_of_other_parameters_is_told_of_and_one_of_some_of_them_is_not() -> None:
    run(other_parameters, 2)


class Complex(nn.Linear):
    """Has a complex parameter beside a floating one."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__(4, 1, bias=False)
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64), requires_grad=not frozen)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * self.turn.abs())


def complex_parameters() -> None:
    words = r"^turn is torch\.complex64, and only floating parameters are exchanged; make it a real one, nn\.Parameter\(torch\.view_as_r"
    sharded = Complex()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    for kind, model in (("bare", Complex()), ("DDP", DistributedDataParallel(Complex())), ("FSDP2", sharded)):
        optimizer = AdamW(model.parameters())
        makers = attached() if kind != "FSDP2" else {"attach": sparsync.attach, "doctor": sparsync.doctor}
        for name, make in {**makers, **(DIRECT if kind == "bare" else {})}.items():
            with case(f"{kind} {name}"), pytest.raises(TypeError, match=words):
                warn_or_raise(make(model, Dense(), optimizer=optimizer))
    frozen = DistributedDataParallel(Complex(frozen=True))
    with case("frozen"), sparsync.attach(frozen, Dense()):
        frozen(torch.ones(1, 4)).sum().backward()
        assert torch.equal(frozen.module.weight.grad, torch.ones(1, 4))


def test_a_complex_parameter_is_refused_wherever_it_would_be_reduced() -> None:
    run(complex_parameters, 2)
