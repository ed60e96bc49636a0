"""Loops that go back to earlier weights: what a handle holds back of the weights that they leave is dropped, and one warning says so."""

import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon, Optimizer

import sparsync
from helpers.distributed import case, run
from helpers.replicas import behind, local, perceptron
from sparsync import Gradients, LocalSteps, Steps
from sparsync.core import generator

RATE, EXPLODED = 0.0625, 1024.0
TOLD = "was loaded after step .*, and none of the handle"


class Training:
    """A model that all ranks begin with, its optimizers and its handle."""

    def __init__(
        self, kind: str, scheme: str, exchange: Any, start: Sequence[Any] | None = None, wrapper: str = "ddp"
    ) -> None:
        self.bare = perceptron()
        self.model, options = behind(wrapper, self.bare)
        self.optimizers = made(kind, self.bare)
        if start is not None:
            self.go_to(start)
        optimizer = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
        self.handle: Any = sparsync.attach(
            self.model, sparsync.schemes.from_text(scheme), optimizer=optimizer, exchange=exchange, **options
        )

    def step(self, number: int, rate: float = RATE) -> None:
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] = rate
        x = torch.randn(4, 8, generator=generator(dist.get_rank(), "data", number))
        self.model(x).square().mean().backward()
        if isinstance(self.handle, sparsync.GradientReducer):
            self.handle.reduce()
        for each in self.optimizers:
            each.step()
            each.zero_grad()

    def saved(self) -> list[Any]:
        return deepcopy([self.model.state_dict(), *(each.state_dict() for each in self.optimizers)])

    def go_to(self, saved: Sequence[Any]) -> None:
        for each, state in zip((self.model, *self.optimizers), saved, strict=True):
            each.load_state_dict(deepcopy(state))

    def weights(self) -> Tensor:
        return flat(self.bare.state_dict())

    def residual(self) -> Tensor:
        held = self.handle.state_dict()["scheme"]["residual"]
        return torch.cat([held[name] for name in sorted(held)])


def flat(state: Mapping[str, Any]) -> Tensor:  # Any: a Tensor, or a DTensor
    return torch.cat([local(each).flatten() for each in state.values()])


def made(kind: str, model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    if kind == "muon":
        matrices, rest = ([each for each in parameters if (each.ndim == 2) is wanted] for wanted in (True, False))
        return [Muon(matrices, lr=RATE), AdamW(rest, lr=RATE)]
    return [AdamW(parameters, lr=RATE) if kind == "adamw" else SGD(parameters, lr=RATE, momentum=0.5)]


def quietly(training: Training, *numbers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in numbers:
            training.step(number)


def exploded(*args: Any, **options: Any) -> tuple[Training, list[Any]]:  # Any: as Training
    """A training whose rate was too high for some steps after the returned state was saved."""
    training = Training(*args, **options)
    quietly(training, 0, 1)
    saved = training.saved()
    for number in range(2, 7):
        training.step(number, rate=EXPLODED)
    return training, saved


def gradients() -> None:
    for scheme, wrapper in (("topk:density=0.05", "ddp"), ("two_shot:density=1.0:values=int4", "bare")):
        with case(scheme):
            training, saved = exploded("sgd", scheme, Gradients(), wrapper=wrapper)
            assert training.residual().abs().max() > 1e3
            training.go_to(saved)
            with pytest.warns(UserWarning, match=f"a state of the model and of the optimizer {TOLD}"):
                training.step(7)
            fresh = Training("sgd", scheme, Gradients(), saved, wrapper=wrapper)
            fresh.step(7)
            assert torch.equal(training.residual(), fresh.residual())
            for number in (8, 9):
                quietly(training, number)
                fresh.step(number)
            assert torch.equal(training.weights(), fresh.weights())
            training.go_to(saved)
            quietly(training, 10)  # told once
            training.go_to(saved)
            training.handle.close()
    with case("exact_micro"):
        training, saved = exploded("sgd", "exact_micro:density=0.05", Gradients())
        training.go_to(saved)
        training.step(7)
        assert training.residual().abs().max() < 100


def steps() -> None:
    for kind, scheme, wrapper in (
        ("adamw", "two_shot:density=0.07:values=sign", "ddp"),
        ("adamw", "topk:density=0.05", "fsdp"),
        ("muon", "topk:density=0.05", "bare"),
    ):
        with case((kind, wrapper)):
            training, saved = exploded(kind, scheme, Steps(), wrapper=wrapper)
            assert training.residual().abs().max() > 1.0
            training.go_to(saved)
            with pytest.warns(UserWarning, match=f"a state of the model and of the optimizer {TOLD}") as told:
                training.step(7)
            assert len(told) == 1
            state = training.handle.state_dict()["adamw_steps"]
            assert {*state["applied"].values(), *state["seen"].values()} == {3}
            assert state["measured"] == 1
            assert training.residual().abs().max() < 20 * RATE
            assert (training.weights() - flat(saved[0])).abs().max() < 20 * RATE
    with case("moments stay where the optimizer does"):
        training, saved = exploded("adamw", "topk:density=0.05", Steps())
        training.model.load_state_dict(saved[0])
        with pytest.warns(UserWarning, match=f"a state of the model {TOLD}"):
            training.step(7)
        assert set(training.handle.state_dict()["adamw_steps"]["applied"].values()) == {8}
    with case("on one rank"):
        training.model.load_state_dict(saved[0])
        if dist.get_rank() == 1:
            training.optimizers[0].load_state_dict(saved[1])
        with pytest.raises(sparsync.RanksDifferError, match="a state of the optimizer loaded before step 8"):
            training.step(8)


def local_steps() -> None:
    for exchange in (LocalSteps(every=2), LocalSteps(every=4, delay=2, outer=sparsync.OuterSGD())):
        with case(exchange):
            scheme = "two_shot:density=0.05"
            training, saved = exploded("sgd", scheme, exchange)
            training.step(7, rate=EXPLODED)
            training.go_to(saved)
            with pytest.warns(UserWarning, match=TOLD):
                training.step(8)
            fresh = Training("sgd", scheme, exchange, saved)
            fresh.step(8)
            for number in range(9, 16):
                quietly(training, number)
                fresh.step(number)
            assert torch.equal(training.weights(), fresh.weights())
            assert torch.equal(training.residual(), fresh.residual())


WAYS = (("sgd", "topk:density=0.05", Gradients()), ("adamw", "topk:density=0.05", Steps(keep=0.0)))


def not_going_back() -> None:
    for way in WAYS:
        untouched = Training(*way)
        quietly(untouched, 0, 1, 2, 3)

        def trained(way: Any = way) -> Training:
            training = Training(*way)
            quietly(training, 0, 1)
            return training

        def same(training: Training, expected: Training = untouched) -> bool:
            quietly(training, 2, 3)
            return torch.equal(training.weights(), expected.weights()) and torch.equal(
                training.residual(), expected.residual()
            )

        with case(f"averages that are evaluated, with {way}"):
            training = trained()
            own = deepcopy(training.model.state_dict())
            training.model.load_state_dict({name: 0.5 * each for name, each in own.items()})
            training.model.eval()
            with torch.no_grad():
                training.model(torch.ones(1, 8))
            training.model.train()
            training.model.load_state_dict(own)
            assert same(training)
        for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
            with case(f"all is loaded, in order {order}, with {way}"):
                training = trained()
                saved, state = training.saved(), training.handle.state_dict()
                training.step(7, rate=EXPLODED)
                parts = (training.model, *training.optimizers, training.handle)
                for each in order:
                    parts[each].load_state_dict([*saved, state][each])
                assert same(training)
        with case(f"a part of the model, with {way}"):
            training = trained()
            own = {name: each.clone() for name, each in training.bare.state_dict().items() if name != "0.weight"}
            training.bare.load_state_dict({**own, "2.bias": own["2.bias"] + 1}, strict=False)
            quietly(training, 2)
        with case(f"the optimizer's own state, for another rate, with {way}"):
            training = trained()
            state = training.optimizers[0].state_dict()
            state["param_groups"][0]["lr"] = RATE
            training.optimizers[0].load_state_dict(deepcopy(state))
            assert same(training)
        with case(f"a copy of the model, with {way}"):
            training = trained()
            deepcopy(training.bare).load_state_dict(untouched.bare.state_dict())
            assert same(training)


def compiled_inside() -> None:
    torch.manual_seed(0)
    module = nn.Linear(8, 24)
    model = DistributedDataParallel(torch.compile(module, backend="eager"))  # pyright: ignore[reportArgumentType]
    optimizer, saved = SGD(module.parameters(), lr=RATE), deepcopy(module.state_dict())
    sparsync.attach(model, sparsync.schemes.from_text("topk:density=0.05"), optimizer=optimizer)
    model(torch.ones(1, 8)).square().mean().backward()
    optimizer.step()
    module.load_state_dict(saved)
    with pytest.warns(UserWarning, match=f"a state of the model {TOLD}"):
        model(torch.ones(1, 8)).square().mean().backward()


@pytest.mark.slow
def test_a_loop_that_goes_back_by_the_module_inside_a_compiled_one_is_seen() -> None:
    run(compiled_inside, 2)


def test_a_loop_that_goes_back_leaves_what_was_held_back_of_gradients() -> None:
    run(gradients, 2)


def test_a_loop_that_goes_back_leaves_what_was_held_back_of_steps_and_their_moments_on_all_ranks() -> None:
    run(steps, 2)


def test_a_loop_that_goes_back_leaves_what_was_held_back_of_local_steps_and_what_is_on_its_way() -> None:
    run(local_steps, 2)


@pytest.mark.slow
def test_what_fits_the_weights_stays() -> None:
    run(not_going_back, 2)
