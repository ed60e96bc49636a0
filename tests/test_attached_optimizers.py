"""What an optimizer whose steps are exchanged is to its loop: hooks, closures, scalers, several optimizers; and what is exchanged."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Gradients, Steps
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import choose
from sparsync.exchanges.rules import rules_of
from sparsync.schemes import ExactOkTopk, InTurn, TopK, TwoShot
from test_attached_steps import P, Training, bare_model, batch

pytestmark = pytest.mark.distributed


def given_back() -> None:
    training = Training(wrapped=False)
    dense = torch.optim.AdamW(bare_model().parameters(), lr=3e-3, weight_decay=0.1)
    for group in dense.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    dense.step()
    training.step(0)
    training.optimizer.load_state_dict(dense.state_dict())
    with pytest.warns(UserWarning, match="a state of the optimizer was loaded after step 0, and none of the handle"):
        training.step(1)
    before = [list(group["params"]) for group in training.optimizer.param_groups]
    assert before == [list(training.bare.parameters())]
    training.handle.detach()
    assert all(on_all_ranks(each[key]) for each in training.optimizer.state.values() for key in each)
    training.step(2)
    assert all(float(each["step"]) == 3 for each in training.optimizer.state.values())


def test_a_detached_optimizer_is_as_it_was_and_goes_on_with_moments_that_are_the_same_on_all_ranks() -> None:
    run(given_back, P)


def stepped_by_another() -> None:
    for wrapped in (False, True):
        training = Training(wrapped=wrapped)
        training.step(0)
        common = training.common()
        other = torch.optim.SGD(training.model.parameters(), lr=0.1)
        training.model(batch(dist.get_rank(), 1)[0]).sum().backward()
        with pytest.raises(RuntimeError, match="another SGD steps a model whose optimizer was passed"):
            other.step()
        with pytest.raises(
            RuntimeError, match=r"has called optimizer\.step\(\) before, and handle\.step\(\) would take a second step"
        ):
            training.handle.step()
        assert same(common, training.common())
        beside = nn.Parameter(torch.ones(1))
        beside.grad = torch.ones(1)
        torch.optim.SGD([beside], lr=1.0).step()  # of no attached model
        assert not beside
        training.handle.detach()
        other.step()


def test_another_optimizer_of_an_attached_model_raises_in_place_of_moving_each_rank_its_own_way() -> None:
    run(stepped_by_another, P)


def scaled(unscales: bool) -> list[tuple[float, list[Tensor]]]:
    """Train with a loss scale, and NaN on one rank in one step; return scales and common weights."""
    training = Training(wrapped=True, scaler=(scaler := GradScaler("cpu", init_scale=2.0**6, growth_interval=100)))
    seen = []
    for number in range(4):
        x, y = batch(dist.get_rank(), number)
        loss = (training.model(x) - y).square().mean() * (torch.inf if number == 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
        seen.append((scaler.get_scale(), training.common()))
    assert training.handle.stats()["skipped"] == 1
    return seen


def loss_scaled() -> None:
    with pytest.warns(UserWarning, match="was skipped on all ranks"):
        one, other = scaled(unscales=True), scaled(unscales=False)
    for (scale, weights), (other_scale, other_weights) in zip(one, other, strict=True):
        assert scale == other_scale
        assert same(weights, other_weights)
    assert [scale for scale, _ in one] == [64.0, 64.0, 32.0, 32.0]
    assert same(one[1][1], one[2][1])
    assert not same(one[2][1], one[3][1])
    training = Training(wrapped=False)
    scaler, fused = GradScaler("cpu"), torch.optim.AdamW(training.bare.parameters(), fused=True)
    training.handle.detach()
    assert not hasattr(training.optimizer, "_step_supports_amp_scaling")
    sparsync.attach(training.bare, TopK(0.1), optimizer=fused)
    scaler.scale(training.bare(batch(0, 0)[0]).sum()).backward()
    with pytest.raises(RuntimeError, match=r"sparsync\.attach\(\.\.\., scaler=scaler\)"):
        scaler.step(fused)


def test_a_loss_scaler_is_stepped_as_ever_and_all_ranks_skip_the_step_that_one_of_them_cannot_take() -> None:
    run(loss_scaled, P)


def hooked(scaler: GradScaler, by_closure: bool) -> None:
    """Train with step hooks that were registered before and after `attach`, one of which averages the weights."""
    model, seen = bare_model(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parameters, averaged = list(model.parameters()), torch.optim.swa_utils.AveragedModel(model)
    weights = list[Tensor]()

    def look(*_: object) -> None:
        assert optimizer.param_groups[0]["params"] == parameters
        gradients = "gradients" if any(each.grad is not None for each in parameters) else "none"
        seen.append(f"{'old' if same(weights, parameters) else 'new'}, {gradients}")

    def average(*_: object) -> None:
        averaged.update_parameters(model)

    def closure() -> Tensor:
        loss = (model(batch(dist.get_rank(), 0)[0])).square().mean()
        scaler.scale(loss).backward()
        return loss

    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(average)
    scheme = TwoShot(density=1.0, values="int3")
    handle: Any = sparsync.attach(model, scheme, optimizer=optimizer, exchange=Steps(keep=0.0), scaler=scaler)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps `step`
    for _ in range(2):
        weights[:] = [each.detach().clone() for each in parameters]
        if by_closure:
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        schedule.step()
    before, after = "old, none" if by_closure else "old, gradients", "new, gradients"
    assert seen == [before, "new, none", after, before, before, after]  # the second hook is late in its first step
    assert handle.stats()["steps"] == 2
    assert on_all_ranks(averaged.parameters())
    assert not any(map(torch.equal, averaged.module.parameters(), parameters))
    handle.detach()
    assert len(optimizer._optimizer_step_pre_hooks) == len(optimizer._optimizer_step_post_hooks) == 2


def hooked_in_all_ways() -> None:
    off = GradScaler("cpu", enabled=False)
    for how, scaler in {"plain": off, "scaler": GradScaler("cpu", init_scale=2.0**6), "closure": off}.items():
        with case(how):
            hooked(scaler, how == "closure")


def test_step_hooks_of_an_optimizer_see_all_parameters_and_an_average_of_the_weights_follows_them() -> None:
    run(hooked_in_all_ways, P)


def optimizers_apart() -> None:
    model = bare_model()
    parameters = list(model.parameters())
    first, second = torch.optim.AdamW(parameters[:2]), torch.optim.Adam(parameters[2:])
    handle: Any = sparsync.attach(model, TwoShot(density=0.1, values="sign"), optimizer=[first, second])

    def backward() -> None:
        model(batch(dist.get_rank(), 0)[0]).square().mean().backward()

    backward()
    first.step()
    backward()
    with pytest.raises(RuntimeError, match=r"^the gradients of this Adam have changed since .* with its optimizer$"):
        second.step()
    first.step()
    torch.autograd.grad(model(batch(0, 0)[0]).sum(), parameters)  # for a log
    second.step()
    assert handle.stats()["steps"] == 2
    for each in parameters[2:]:
        each.requires_grad_(False).grad = None
    for _ in range(2):
        backward()
        first.step()  # the other has nothing to step
    assert handle.stats()["steps"] == 4


def test_several_optimizers_step_one_after_the_other_after_the_backward_passes() -> None:
    run(optimizers_apart, 1)


def chosen_cases() -> Iterator[tuple[sparsync.Scheme, Any, Any]]:  # Any: an optimizer's class and its settings
    yield TopK(0.1), torch.optim.AdamW, Steps()
    yield TwoShot(density=1.0, values="sign"), torch.optim.AdamW, Steps()
    yield TwoShot(density=1.0, values="ternary"), torch.optim.AdamW, Steps()
    yield TwoShot(density=1.0, values="int4"), torch.optim.AdamW, Gradients()
    yield TwoShot(density=1.0, values="int4", values_down="int3"), torch.optim.AdamW, Steps()
    yield TwoShot(density=1.0, values="int4", density_down=0.2), torch.optim.AdamW, Steps()
    yield InTurn(), torch.optim.AdamW, Steps()
    yield InTurn(2, "int8", "int8"), torch.optim.AdamW, Steps()
    yield InTurn(1, "int8", "int8"), torch.optim.AdamW, Gradients()
    yield ExactOkTopk(density=0.1), torch.optim.Adam, Steps()
    yield sparsync.schemes.Dense(), torch.optim.AdamW, Gradients()
    yield TopK(0.1), torch.optim.NAdam, Gradients()
    yield TopK(0.1), lambda given: torch.optim.AdamW(given, amsgrad=True), Gradients()
    yield TopK(0.1), lambda given: torch.optim.SGD(given, lr=0.1), Gradients()


@pytest.mark.parametrize("case", list(chosen_cases()), ids=str)
def test_what_is_exchanged_follows_from_the_scheme_and_the_optimizer(case: tuple[sparsync.Scheme, Any, Any]) -> None:
    scheme, make, wanted = case
    optimizer = make(bare_model().parameters())
    assert choose(scheme, None, None, optimizer).exchange == wanted
    assert choose(scheme, None, None, optimizer, sharded=True).exchange == Gradients()
    assert choose(scheme, None, None, None).exchange == Gradients()


class _FabricOptimizer(torch.optim.Optimizer):
    """Passes on to the optimizer inside, as that of Fabric does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.__class__ = type(f"Fabric{type(optimizer).__name__}", (type(self), type(optimizer)), {})  # pyright: ignore


class Cautious(torch.optim.AdamW):
    """Has another step than AdamW."""

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class OwnMuon(torch.optim.Muon):
    """Has another step than Muon."""

    def step(self, closure: Any = None) -> None:
        raise NotImplementedError


class Renamed(torch.optim.AdamW):
    """Has AdamW's step."""


def test_a_trainers_wrapper_of_adamw_counts_as_adamw_and_another_step_does_not() -> None:
    sign, parameters = TwoShot(density=0.07, values="sign"), list(nn.Linear(2, 2).parameters())
    adamw = torch.optim.AdamW(parameters)
    for optimizer, wanted in [
        (_FabricOptimizer(adamw), Steps()),
        ([_FabricOptimizer(adamw)], Steps()),
        (Renamed(parameters), Steps()),
        (Cautious(parameters), Gradients()),
    ]:
        assert choose(sign, None, None, optimizer).exchange == wanted, optimizer
    for kind, of, given in ((Cautious, "AdamW", parameters), (OwnMuon, "Muon", parameters[:1])):
        with pytest.raises(TypeError, match=f"{kind.__name__} has a `step` that is not {of}'s"):
            rules_of([kind(given)])


def test_a_gradient_that_the_loop_itself_sets_is_not_taken_for_a_shortened_one() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        """Train with gradients from a backward pass, and with the same ones set by hand; the ratio is the same, and so are the steps."""
        weights = []
        for by_hand in (False, True):
            torch.manual_seed(0)
            made = nn.Linear(6, 5)
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
            AdamWSteps(made, optimizer, sparsync.schemes.Dense(), comm=comm, measure_every=1)
            for number in range(5):
                optimizer.zero_grad()
                x = torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * number + comm.rank))
                loss = made(x).square().mean()
                if by_hand:
                    gradients = torch.autograd.grad(loss, list(made.parameters()))
                    for each, gradient in zip(made.parameters(), gradients, strict=True):
                        each.grad = gradient
                else:
                    loss.backward()
                optimizer.step()
            weights.append(torch.cat([each.detach().flatten() for each in made.parameters()]))
        return weights

    for set_by_torch, set_by_hand in LocalWorld(P).run(body):
        assert torch.allclose(set_by_torch, set_by_hand, rtol=1e-5, atol=1e-6)
