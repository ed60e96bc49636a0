"""Loops that do more than train, with all elements in int3 and without own weights: parameters are parameters, as in plain torch."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Steps
from sparsync.schemes import TwoShot
from test_own_weights import Adapted, Momentum, batch, encoder

pytestmark = pytest.mark.distributed

P, STEPS, RATE = 2, 4, 1e-2


class Training:
    """A loop of plain torch with `attach`; `dense`: with the mean gradient of all ranks instead."""

    def __init__(self, model: nn.Module, rate: float = RATE, dense: bool = False) -> None:
        self.model, self.dense = model, dense
        self.optimizer = AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
        if not dense:
            self.handle: Any = sparsync.attach(  # Any: of steps
                model,
                TwoShot(density=1.0, values="int3"),
                optimizer=self.optimizer,
                exchange=Steps(keep=0.0, check_weights_every=2),
            )

    def step(self, number: int, loss_of: Callable[[Tensor, Tensor], Tensor] | None = None) -> float:
        x, y = batch(number)
        loss = (self.model(x) - y).square().mean() if loss_of is None else loss_of(x, y)
        loss.backward()
        for each in self.model.parameters() if self.dense else ():
            dist.all_reduce(each.grad, dist.ReduceOp.AVG)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def weights(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.model.parameters()]


def trained(model: nn.Module | None = None, steps: int = STEPS) -> Training:
    training = Training(model or encoder())
    for number in range(steps):
        training.step(number)
    return training


class Average:
    """An average of parameters that is put into the model and taken out again, as torch_ema does it."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.values = [each.detach().clone() for each in self.parameters]

    def update(self) -> None:
        with torch.no_grad():
            for value, each in zip(self.values, self.parameters, strict=True):
                value.lerp_(each, 0.25)

    @contextmanager
    def in_model(self, by_data: bool) -> Iterator[None]:
        stored = [each.detach().clone() for each in self.parameters]
        for each, value in zip(self.parameters, self.values, strict=True):
            each.data.copy_(value)
        yield
        for each, value in zip(self.parameters, stored, strict=True):
            if by_data:
                each.data = value
            else:
                each.data.copy_(value)


def averaged() -> None:
    plain = trained()
    for by_data in (False, True):
        with case(f"an average that is evaluated, put back by data={by_data}"):
            training, validated = Training(encoder()), []
            average = Average(training.model.parameters())
            for number in range(STEPS):
                training.step(number)
                average.update()
                with average.in_model(by_data), torch.no_grad():
                    validated.append(training.model(torch.ones(1, 20)))
                    assert same(training.model.state_dict().values(), average.values)
                    with training.handle.averaged():  # has nothing to do
                        assert same(training.model.parameters(), average.values)
            assert same(training.weights(), plain.weights())
            assert on_all_ranks([*training.weights(), *average.values, *validated])


def written_by_the_loop() -> None:
    for kept in ("parameters", "buffers"):
        with case(f"a momentum encoder inside the forward pass, in {kept}"):  # as MoCo and BYOL have it
            model = Momentum(encoder(), kept)
            training, begin = Training(model), [each.clone() for each in model.followers()]
            for number in range(STEPS):
                training.step(number, lambda x, _, model=model: model(x).square().mean())
            assert on_all_ranks([*training.weights(), *model.followers()])
            assert not same(begin, model.followers())
    with case("adapters that are merged and begin again"):
        adapted = Adapted()
        training, begin = Training(adapted), adapted.weight.clone()
        for number in range(STEPS):
            training.step(number)
            if number % 2:
                before = adapted(torch.eye(20))
                adapted.merge()
                adapted.restart(number)
                assert torch.allclose(before, adapted(torch.eye(20)), atol=1e-6)
                for each in (adapted.down, adapted.up):
                    training.optimizer.state[each]["exp_avg"].zero_()
                assert not any(each.any() for each in training.handle.state_dict()["adamw_steps"]["momentum"].values())
        assert on_all_ranks(training.weights())
        assert not torch.equal(begin, adapted.weight)
    for dtype in (torch.float32, torch.bfloat16):
        with case(f"weights of {dtype} that are clamped after each step"):
            training = Training(encoder().to(dtype))
            for number in range(STEPS):
                training.step(number, lambda x, y, each=training, to=dtype: (each.model(x.to(to)) - y).square().mean())
                with torch.no_grad():
                    for each in training.model.parameters():
                        each.clamp_(-0.125, 0.125)
            assert on_all_ranks(training.weights())
            assert max(float(each.abs().max()) for each in training.weights()) == 0.125


def untouched() -> None:
    plain = trained()
    with case("the model itself is what is saved, copied and called, and has no hooks"):
        weight = next(plain.model.parameters())
        assert plain.model.state_dict()["0.weight"].data_ptr() == weight.data_ptr()
        hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks")
        assert not any(getattr(each, hook) for each in plain.model.modules() for hook in hooks)
        assert same(copy.deepcopy(plain.model).parameters(), plain.weights())
        assert plain.handle.stats()["drift"] == 0.0


@pytest.mark.parametrize("idioms", [averaged, written_by_the_loop, untouched])
def test_what_a_loop_does_beside_training_works_as_in_plain_torch(idioms: Callable[[], None]) -> None:
    run(idioms, P)
