"""`attach` with steps: the loop of plain torch, under DistributedDataParallel and without it, gives the same bits."""

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Gradients, LocalSteps, OkTopk, Steps, TopK, TwoShot
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import choose
from sparsync.exchanges.rules import rules_of
from sparsync.schemes import InTurn

pytestmark = pytest.mark.distributed

P, STEPS, HALVES = 2, 9, 2


def bare_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 7))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 20, generator=source), torch.randn(8, 7, generator=source)


class Training:
    """A loop as plain torch has it, with clipping, a schedule and accumulation; only `attach` was added."""

    def __init__(self, wrapped: bool, scheme: sparsync.Scheme | None = None, **options: Any) -> None:
        self.bare = bare_model()
        self.model: Any = DistributedDataParallel(self.bare) if wrapped else self.bare  # Any: of either kind
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        scheme = scheme if scheme is not None else TwoShot(density=0.1, values="sign")
        self.handle: Any = sparsync.attach(
            self.model, scheme, optimizer=self.optimizer, **options
        )  # Any: of either kind
        self.norms: list[float] = []

    def step(self, number: int) -> float:
        loss = torch.zeros(())
        for half in range(HALVES):
            x, y = batch(dist.get_rank(), HALVES * number + half)
            waits = isinstance(self.model, DistributedDataParallel) and half < HALVES - 1
            with self.model.no_sync() if waits else nullcontext():
                loss = (self.model(x) - y).square().mean() / HALVES
                loss.backward()
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)))
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def common(self) -> list[Tensor]:
        with self.handle.averaged():
            return [each.detach().clone() for each in self.bare.parameters()]


def trained_both_ways() -> None:
    bare, wrapped = Training(wrapped=False), Training(wrapped=True)
    assert bare.handle.exchange == wrapped.handle.exchange == Steps()
    before = bare.common()
    for number in range(STEPS):
        assert bare.step(number) == wrapped.step(number)
    assert bare.norms == wrapped.norms
    assert same(bare.common(), wrapped.common())
    assert not same(before, bare.common())
    assert wrapped.handle.stats()["drift"] > 0
    assert 1.1 < wrapped.handle.clip_factor <= P**0.5  # so that gradients were divided by something
    norm = sum(float(each.square().sum()) for each in wrapped.common()) ** 0.5
    assert on_all_ranks(torch.tensor([norm]))


@pytest.mark.slow
def test_the_loop_of_plain_torch_gives_the_same_bits_under_ddp_and_without_it() -> None:
    run(trained_both_ways, P)


def thawed_on_one_rank() -> str:
    training = Training(wrapped=False)
    training.step(0)
    if dist.get_rank() == 1:
        training.bare.append(nn.Linear(7, 7))
    with pytest.raises(RuntimeError) as raised:
        training.step(1)
    return str(raised.value)


def test_what_one_rank_alone_is_refused_is_an_error_on_all_ranks_at_once() -> None:
    other, own = run(thawed_on_one_rank, P)
    assert "4.weight, 4.bias was frozen, missing or of another type" in own
    assert "4.weight, 4.bias was frozen, missing or of another type" in other  # as the rank tells, and no timeout


def test_an_embedding_that_limits_its_norms_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    sign, adamw = TwoShot(density=0.1, values="sign"), torch.optim.AdamW(model.parameters())
    (found,) = sparsync.doctor(model, sign, optimizer=adamw)
    assert found.refused is ValueError
    assert "the embedding '0' has max_norm" in str(found)
    assert "max_norm" not in str(sparsync.doctor(model, sign, optimizer=adamw, exchange=Gradients()))


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


def evaluated_and_saved() -> None:
    training = Training(wrapped=True)
    for number in range(3):
        training.step(number)
    common, own = training.common(), [each.detach().clone() for each in training.bare.parameters()]
    assert not same(common, own)
    with case("state_dict has the common weights"):
        saved = training.model.state_dict()
        assert same(common, [saved[f"module.{name}"] for name, _ in training.bare.named_parameters()])
        assert same(own, [each.detach() for each in training.bare.parameters()])
    with case("evaluation has them too, and training its own ones afterwards"):
        training.model.eval()
        with torch.no_grad():
            assert on_all_ranks(training.model(batch(0, 0)[0]))
        assert same(common, [each.detach() for each in training.bare.parameters()])
        training.model.train()
        with torch.no_grad():
            training.bare(batch(0, 0)[0])  # no gradient is wanted
        assert same(common, [each.detach() for each in training.bare.parameters()])
        training.model(batch(0, 0)[0])
        assert same(own, [each.detach() for each in training.bare.parameters()])
    with case("what is loaded during evaluation is what is trained"):
        training.model.eval()
        with torch.no_grad():
            training.model(batch(0, 0)[0])
        loaded = {name: each + 1 for name, each in training.bare.state_dict().items()}
        training.bare.load_state_dict(loaded)
        assert same(training.common(), [loaded[name] for name, _ in training.bare.named_parameters()])
        training.model.train()
        training.step(3)
        wanted = [loaded[name] for name, _ in training.bare.named_parameters()]
        distance = max(float((x - y).abs().max()) for x, y in zip(training.common(), wanted, strict=True))
        assert distance < 0.1
    with case("copies are free"):
        twin = copy.deepcopy(training.bare)
        file = io.BytesIO()
        torch.save(training.bare, file)
        file.seek(0)
        for each in (twin, torch.load(file, weights_only=False)):
            before = [one.detach().clone() for one in each.parameters()]
            each.eval()
            each(batch(0, 0)[0]).sum().backward()
            assert same(before, [one.detach() for one in each.parameters()])
    with case("closing leaves the common weights"):
        common = training.common()
        training.handle.detach()
        assert same(common, [each.detach() for each in training.bare.parameters()])
        training.step(4)  # plain DDP
        assert on_all_ranks(torch.cat([each.detach().flatten() for each in training.bare.parameters()]))
        assert not same(common, [each.detach() for each in training.bare.parameters()])


def test_what_is_evaluated_or_saved_are_the_common_weights() -> None:
    run(evaluated_and_saved, P)


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


def with_closures() -> None:
    plain, closed = Training(wrapped=True), Training(wrapped=True)
    for number in range(3):
        x, y = batch(dist.get_rank(), number)

        def closure(training: Training, x: Tensor = x, y: Tensor = y) -> Tensor:
            training.optimizer.zero_grad()
            loss = (training.model(x) - y).square().mean()
            loss.backward()
            return loss

        loss = closure(plain)
        plain.optimizer.step()
        given = closed.optimizer.step(lambda training=closed: closure(training))
        assert given is not None
        assert float(given) == float(loss)
    assert same(plain.common(), closed.common())


@pytest.mark.slow
def test_an_optimizer_whose_step_takes_a_closure_makes_the_same_steps() -> None:
    run(with_closures, P)


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


def refused() -> None:
    with case("closed, and not detached"):
        training = Training(wrapped=True)
        training.handle.close()
        with pytest.raises(RuntimeError, match=r"this handle was closed.*call detach\(\) instead"):
            training.model(batch(0, 0)[0]).sum().backward()
    with case("arguments of gradients"):
        model = DistributedDataParallel(bare_model())
        adamw = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match="join_mb and dense_below are about gradients"):
            sparsync.attach(model, TopK(0.1), optimizer=adamw, options=sparsync.Options(join_mb=1.0))
        with pytest.raises(ValueError, match=r"pass it, or several: attach\(model, .*, optimizer=optimizer\)"):
            sparsync.attach(model, TopK(0.1), exchange=Steps())
        with pytest.raises(
            TypeError,
            match=r"exchange must be sparsync\.Gradients\(\), Steps\(\) or LocalSteps\(every=\.\.\.\), got 'steps'",
        ):
            sparsync.attach(model, TopK(0.1), exchange="steps")  # pyright: ignore[reportArgumentType]
    with case("steps of another optimizer"):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="got SGD; for others attach with exchange="):
            sparsync.attach(model, TopK(0.1), optimizer=sgd, exchange=Steps())
    with case("a parameter that DDP ignores"):
        bare = bare_model()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight"])
        model = DistributedDataParallel(bare)
        with pytest.raises(ValueError, match=r"DDP ignores 0\.weight"):
            sparsync.attach(model, TopK(0.1), optimizer=torch.optim.AdamW(model.parameters()))
    with case("gradients as ever"):
        model = DistributedDataParallel(bare_model())
        with pytest.warns(UserWarning, match=r"leave the scheme out, .*; or use TwoShot"):
            handle: Any = sparsync.attach(
                model, TopK(0.1), optimizer=torch.optim.AdamW(model.parameters()), exchange=Gradients()
            )
        assert handle.exchange == Gradients()


def test_what_steps_cannot_do_is_refused_with_what_can_be_done() -> None:
    run(refused, P)


def beside_the_loop() -> None:
    with case("torch's checkpoint of the optimizer takes no step"):
        training = Training(wrapped=True)
        training.step(0)
        common = training.common()
        get_optimizer_state_dict(training.model, training.optimizer)
        assert same(common, training.common())
        assert training.handle.stats()["steps"] == 1
    with case("settings that steps do not have"):
        training = Training(wrapped=False)
        training.optimizer.param_groups[0]["amsgrad"] = True
        training.model(batch(0, 0)[0]).sum().backward()
        with pytest.raises(ValueError, match="neither amsgrad nor maximize"):
            training.optimizer.step()
    with case("a scaler that is off"):
        training = Training(wrapped=False, scaler=(scaler := GradScaler("cpu", enabled=False)))
        scaler.scale(training.model(batch(0, 0)[0]).sum() * torch.nan).backward()
        with pytest.warns(UserWarning, match="was skipped on all ranks"):
            scaler.step(training.optimizer)
        scaler.update()


def test_what_stands_beside_the_loop_changes_no_weights_in_silence() -> None:
    run(beside_the_loop, P)


def other_weights_in_a_pass() -> None:
    both = Steps(), LocalSteps(every=3)
    for exchange in both:
        with case(f"one region of autocast, {exchange}"):
            plain, beside = (Training(wrapped=True, exchange=exchange) for _ in range(2))
            differing = 0
            for number in range(5):
                x, y = batch(dist.get_rank(), number)
                for each in (plain, beside):
                    with torch.autocast("cpu", torch.bfloat16):
                        with torch.no_grad():
                            target = each.model(x) if each is beside else y
                        made = each.model(x)
                        differing += each is beside and not torch.equal(target, made)
                    (made.float() - y).square().mean().backward()
                    each.optimizer.step()
                    each.optimizer.zero_grad()
            assert differing  # common weights, own weights
            assert same(plain.common(), beside.common())
    with case("between forward and backward pass"):
        training = Training(wrapped=False)
        training.step(0)
        x, _ = batch(dist.get_rank(), 0)
        loss = training.model(x).square().mean()
        with torch.no_grad():
            training.model(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # torch's own words
            loss.backward()


def test_no_pass_uses_other_weights_than_it_says() -> None:
    run(other_weights_in_a_pass, P)


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
    with pytest.raises(
        RuntimeError, match=r"^the gradients of this Adam have changed since .* with its own optimizer$"
    ):
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


def changed_by_the_loop() -> None:
    training = Training(wrapped=True)
    with case("own weights"), pytest.raises(sparsync.RanksDifferError) as raised:
        for number in range(3):
            training.step(number)
            with torch.no_grad():
                for each in training.bare.parameters():
                    each.clamp_(-0.1, 0.1)
    for part in ("attach with bits=4.6, or with exchange=sparsync.Steps(keep=0.0)", "`with handle.averaged():`"):
        assert part in str(raised.value)


def test_weights_that_the_loop_changes_are_an_error_whose_cure_works() -> None:
    run(changed_by_the_loop, P)


def compiled() -> None:
    plain, made = Training(wrapped=True), Training(wrapped=True)
    made.model = torch.compile(made.model, backend="eager")
    for number in range(2):
        assert plain.step(number) == made.step(number)
    made.model.eval()
    with torch.inference_mode():
        assert on_all_ranks(made.model(batch(0, 0)[0]))
        assert on_all_ranks(made.bare(batch(0, 0)[0]))
    made.bare.load_state_dict({name: each + 1 for name, each in made.bare.state_dict().items()})
    made.model.train()
    made.step(2)


@pytest.mark.slow
def test_a_model_that_is_compiled_afterwards_is_evaluated_with_common_weights_too() -> None:
    run(compiled, P)


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
    yield OkTopk(density=0.1), torch.optim.Adam, Steps()
    yield sparsync.Dense(), torch.optim.AdamW, Gradients()
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
    with pytest.raises(TypeError, match="Cautious has a `step` that is not AdamW's"):
        rules_of([Cautious(parameters)])


def test_a_gradient_that_the_loop_itself_sets_is_not_taken_for_a_shortened_one() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        """Train with gradients from a backward pass, and with the same ones set by hand; the ratio is the same, and so are the steps."""
        weights = []
        for by_hand in (False, True):
            torch.manual_seed(0)
            made = nn.Linear(6, 5)
            optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
            AdamWSteps(made, optimizer, sparsync.Dense(), comm=comm, measure_every=1)
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


class ShardedTraining(Training):
    """The same loop on a mesh of replicas and shards."""

    def __init__(self, replicas: int, shards: int, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        self.bare = bare_model()
        self.model: Any = self.bare
        for layer in (self.bare[0], self.bare[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.bare, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.handle: Any = sparsync.attach(
            self.model, TwoShot(density=0.1, values="sign"), optimizer=self.optimizer, **options
        )
        self.norms: list[float] = []

    def common(self) -> list[Tensor]:
        """Return the common weights of whole parameters, on all ranks."""
        saved = self.model.state_dict()
        return [saved[name].full_tensor() for name, _ in self.bare.named_parameters()]


def sharded(folder: Path) -> None:
    whole, first, second = (ShardedTraining(2, 2) for _ in range(3))
    for number in range(STEPS):
        whole.step(number)
    for number in range(4):
        first.step(number)
    with case("all ranks have the same common weights, and evaluate these"):
        common = torch.cat([each.flatten() for each in first.common()])
        first.model.eval()
        with torch.no_grad():
            out = first.model(batch(0, 0)[0])
        for each in (common, out):
            every = [torch.empty_like(each) for _ in range(4)]
            dist.all_gather(every, each)
            assert all(torch.equal(one, each) for one in every)
        first.model.train()
    with case("resume"):
        sparsync.checkpoint.save(first.handle, folder)
        dist.barrier()
        second.model.load_state_dict(first.model.state_dict())
        second.schedule.load_state_dict(first.schedule.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        sparsync.checkpoint.load(second.handle, folder)
        for number in range(4, STEPS):
            second.step(number)
        assert same(whole.common(), second.common())
    with case("NaN in one shard"):
        before = second.common()
        x, y = batch(dist.get_rank(), 0)
        (second.model(x) - y).square().mean().backward()
        if dist.get_rank() == 3:
            gradient: Any = next(second.bare.parameters()).grad  # Any: a DTensor
            local = gradient.to_local()
            local.view(-1)[0] = torch.nan
        with pytest.warns(UserWarning, match="was skipped on all ranks"):
            second.optimizer.step()
        second.optimizer.zero_grad()
        assert same(before, second.common())
        assert second.handle.stats()["skipped"] == 1
    with case("detached, the replicas are FSDP2's own"):
        second.handle.detach()
        second.step(STEPS)
        common = torch.cat([each.flatten() for each in second.common()])
        every = [torch.empty_like(common) for _ in range(4)]
        dist.all_gather(every, common)
        assert all(torch.equal(one, common) for one in every)
        assert not same(before, second.common())
    with case("an attach that fails leaves FSDP2's own all-reduce"):
        plain = bare_model()
        fully_shard(plain, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="got SGD"):
            sparsync.attach(plain, TopK(0.1), optimizer=sgd, exchange=Steps())
        adamw = torch.optim.AdamW([next(plain.parameters())])
        with pytest.raises(ValueError, match="the optimizer lacks"):
            sparsync.attach(plain, TopK(0.1), optimizer=adamw, exchange=Steps())
        x, y = batch(dist.get_rank(), 0)
        (plain(x) - y).square().mean().backward()
        sgd.step()
        weights: list[Any] = list(plain.parameters())  # Any: DTensors
        flat = torch.cat([each.full_tensor().detach().flatten() for each in weights])
        every = [torch.empty_like(flat) for _ in range(4)]
        dist.all_gather(every, flat)
        assert all(torch.equal(one, flat) for one in every)
    with case("no replicas"):
        bare = bare_model()
        fully_shard(bare)
        with pytest.raises(ValueError, match="exchanged steps need the whole model on every rank"):
            sparsync.attach(bare, TopK(0.1), optimizer=torch.optim.AdamW(bare.parameters()), exchange=Steps())


@pytest.mark.slow
def test_two_replicas_of_two_shards_train_evaluate_save_and_go_on(tmp_path: Path) -> None:
    run(sharded, 4, folder=tmp_path)
