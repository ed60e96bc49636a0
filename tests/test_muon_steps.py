"""Exchanged steps of Muon: momentum and orthogonal steps on the mean, as two optimizers or as one, with the loop of plain torch."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Steps
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.exchanges import rules
from sparsync.exchanges.adamw_steps import AdamWSteps
from sparsync.exchanges.choice import choose
from sparsync.exchanges.rules import MuonRule, move_matrices_, orthogonalised
from sparsync.schemes import Dense, TwoShot

P, STEPS = 2, 7
SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
PUBLISHED = MuonRule(1.0, 0.0, 0.95, True, (3.4445, -4.7750, 2.0315), 5, None)


def bare_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 33), nn.LayerNorm(33), nn.GELU(), nn.Linear(33, 33), nn.GELU(), nn.Linear(33, 7))


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    return matrices, [each for each in model.parameters() if each.dim() != 2]


def two(model: nn.Module) -> list[Optimizer]:
    matrices, others = split(model)
    return [Muon(matrices, **SETTINGS), AdamW(others, lr=0.003, betas=(0.8, 0.9))]


class Both(Optimizer):
    """One that holds the two, as trainers want it."""

    def __init__(self, members: list[Optimizer]) -> None:
        self.members = members
        super().__init__([group for each in members for group in each.param_groups], {})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for each in self.members:
            each.step()


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "two optimizers": two,
    "one that holds both": lambda model: Both(two(model)),
}


class Training:
    def __init__(self, form: str, wrapped: bool) -> None:
        self.bare = bare_model()
        self.model: nn.Module = DistributedDataParallel(self.bare) if wrapped else self.bare
        self.given = FORMS[form](self.bare)
        scheme = TwoShot(density=0.2, values="sign")
        self.handle: Any = sparsync.attach(self.model, scheme, optimizer=self.given)  # Any: of either kind
        assert self.handle.exchange == Steps()

    def step(self, number: int) -> None:
        source = torch.Generator().manual_seed(100 * number + dist.get_rank())
        x, y = torch.randn(8, 20, generator=source), torch.randn(8, 7, generator=source)
        (self.model(x) - y).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        for each in self.given if isinstance(self.given, list) else [self.given]:
            each.step()
            each.zero_grad()

    def common(self) -> list[Tensor]:
        with self.handle.averaged():
            return [each.detach().clone() for each in self.bare.parameters()]


def every_form(folder: Path) -> None:
    trainings = [Training(form, wrapped) for form in FORMS for wrapped in (False, True)]
    begin = trainings[0].common()
    for number in range(STEPS):
        for each in trainings:
            each.step(number)
        if number == 2:
            sparsync.checkpoint.save(trainings[1].handle, folder)
            dist.barrier()
    found = [each.common() for each in trainings]
    assert not same(begin, found[0])
    for form, other in zip([form for form in FORMS for _ in (0, 1)], found, strict=True):
        with case(form):
            assert same(found[0], other)
    assert all(each.handle.stats()["steps"] == STEPS for each in trainings)
    assert on_all_ranks(found[0])
    with case("resumed"):
        again = Training("two optimizers", wrapped=True)
        sparsync.checkpoint.load(again.handle, folder)
        for number in range(3, STEPS):
            again.step(number)
        assert same(again.common(), found[0])


@pytest.mark.slow
@pytest.mark.distributed
def test_muon_and_adamw_as_two_optimizers_or_one_take_the_same_steps_with_and_without_ddp(tmp_path: Path) -> None:
    run(every_form, P, fresh=True, folder=tmp_path)


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_with_one_rank_the_step_is_torchs_muon_of_the_normalised_gradient(nesterov: bool, adjust: str | None) -> None:
    def body(comm: LocalComm) -> None:
        torch.manual_seed(3)
        ours, plain = nn.Linear(12, 30, bias=False), nn.Linear(12, 30, bias=False)
        plain.load_state_dict(ours.state_dict())
        settings = {**SETTINGS, "nesterov": nesterov, "adjust_lr_fn": adjust}
        own, theirs = Muon(ours.parameters(), **settings), Muon(plain.parameters(), **settings)
        steps = AdamWSteps(ours, own, Dense(), comm=comm)
        second = torch.zeros(30, 12)
        for t in range(1, 5):
            gradient = torch.randn(30, 12)
            second = 0.95 * second + 0.05 * gradient.square()
            ours.weight.grad, plain.weight.grad = gradient.clone(), gradient / (second / (1 - 0.95**t)).sqrt()
            steps.step()
            theirs.step()
        # Both iterate in bfloat16, of 8 bits, from momenta that differ in rounding.
        moved = (plain.weight - ours.weight).norm() / 4
        rate = theirs.param_groups[0]["lr"] * steps._sender.groups.rules[0].sent_rate((30, 12))
        assert moved < 0.02 * rate / 0.02 * 0.2 * 360**0.5

    LocalWorld(1).run(body)


def test_singular_values_become_about_one_and_zero_stays_zero() -> None:
    drawn = torch.Generator().manual_seed(2)
    matrices = [torch.randn(shape, generator=drawn) for shape in [(5, 5), (5, 40), (40, 5)]] + [torch.zeros(5, 60)]
    *found, zero = orthogonalised(matrices, PUBLISHED.coefficients, 5)
    for step, matrix in zip(found, matrices, strict=False):
        values = torch.linalg.svdvals(step)
        assert step.shape == matrix.shape
        assert 0.5 < float(values.min()) <= float(values.max()) < 1.3
    assert not zero.any()
    assert not any(each.any() for each in orthogonalised(matrices, PUBLISHED.coefficients, 5, torch.ones(1)))


@pytest.mark.parametrize("together", [1, 1 << 26])
def test_matrices_that_are_moved_at_once_take_the_steps_of_each_alone(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(shapes: list[tuple[int, ...]]) -> list[Tensor]:
        weights = [torch.zeros(shape) for shape in shapes]
        rules = [replace(PUBLISHED, rate=1.0 if math.prod(shape) < 20 else 0.5) for shape in shapes]
        followed = [torch.arange(1.0, math.prod(shape) + 1).sin() for shape in shapes]
        move_matrices_(zip(weights, followed, rules, strict=True))
        return weights

    shapes = [(12, 3), (3, 12), (4, 12), (3, 4), (6, 8), (3, 12)]
    monkeypatch.setattr(rules, "_TOGETHER", together)
    for shape, step in zip(shapes, moved(shapes), strict=True):
        (alone,) = moved([shape])
        assert step.shape == shape
        # In bfloat16, products in another order, as some processors take them, may differ; elements are about 0.3.
        torch.testing.assert_close(step, alone, rtol=0, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):  # around the optimizer's step
        surrounded = moved(shapes)
    assert all(map(torch.equal, surrounded, moved(shapes)))


def test_steps_are_chosen_for_muon_and_a_pair_where_few_bits_are_sent() -> None:
    model = bare_model()
    sign = TwoShot(density=0.1, values="sign")
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert choose(sign, None, None, two(model)).exchange == Steps()
    assert choose(sign, None, None, Muon(split(model)[0])).exchange == Steps()
    assert choose(Dense(), None, None, two(model)).exchange == sparsync.Gradients()
    assert choose(sign, None, None, [*two(model), sgd]).exchange == sparsync.Gradients()


def gradients_of_both() -> None:
    """Exchange gradients for two optimizers, under DDP and by calls; in the third step rank 1 gives the second one another rate."""
    for wrap in (DistributedDataParallel, nn.Sequential):
        bare = bare_model()
        called = wrap(bare)
        optimizers = two(bare)
        options: dict[str, Any] = {"exchange": sparsync.Gradients(), "optimizer": optimizers}
        handle: Any = sparsync.attach(called, TwoShot(density=1.0, values="int4"), **options)

        def step(model: nn.Module = called, handle: Any = handle) -> None:
            model(
                torch.randn(4, 20, generator=torch.Generator().manual_seed(dist.get_rank()))
            ).square().mean().backward()
            if isinstance(handle, sparsync.GradientReducer):
                handle.reduce()

        with case(wrap.__name__):
            for rate in (0.003, 0.03):
                step()
                for each in optimizers:
                    each.step()
                    each.zero_grad()
                optimizers[1].param_groups[0]["lr"] = rate
            assert len(handle.state_dict()["rates"]) == len(list(bare.parameters()))
            optimizers[1].param_groups[0]["lr"] *= 1 + dist.get_rank()
            with pytest.raises(RuntimeError, match=r"lr=.* in parameter group 0 of AdamW"):
                step()
            handle.close()


def refused() -> None:
    model = bare_model()
    matrices, others = split(model)
    flat = Muon(matrices)
    flat.param_groups.append({**flat.param_groups[0], "params": others})
    muon, adamw = Muon(matrices), AdamW(others)
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (flat, {}, r"of shape \[33\]; give it to AdamW"),
        ([muon, AdamW(model.parameters())], {}, "0.weight is in two parameter groups"),
        ([muon], {}, "the optimizer lacks 0.bias"),
        ([muon, adamw], {"scaler": GradScaler("cpu")}, "one optimizer, and there are 2"),
    ]
    for optimizer, options, message in refusals:
        with case(message), pytest.raises(ValueError, match=message):
            sparsync.attach(
                model, TwoShot(density=0.1, values="sign"), optimizer=optimizer, **{"exchange": Steps(), **options}
            )
    with case("split matrices"):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        sharded = bare_model()
        fully_shard(sharded, mesh=mesh)
        single = two(sharded)
        with pytest.raises(ValueError, match="Muon needs whole matrices, and fully_shard has split them"):
            sparsync.attach(sharded, TwoShot(density=0.1, values="sign"), optimizer=single, exchange=Steps())


@pytest.mark.distributed
def test_what_steps_of_muon_cannot_do_is_refused() -> None:
    run(refused, P, fresh=True)


@pytest.mark.distributed
def test_gradients_for_muon_and_adamw_follow_the_rates_of_both_which_ranks_compare() -> None:
    run(gradients_of_both, P)
