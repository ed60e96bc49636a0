"""What a loop makes of the model's weights, while those of each rank are its own: averages, momentum encoders, merges, evaluations."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Gradients, LocalSteps, RanksDifferError, Steps
from sparsync.core import generator
from sparsync.schemes import TwoShot

pytestmark = pytest.mark.distributed

P, STEPS = 2, 4


def encoder() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 7))


def batch(number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(8, 20, generator=source), torch.randn(8, 7, generator=source)


def attached(model: nn.Module, exchange: Any) -> tuple[torch.optim.Optimizer, Any]:  # Any: of either kind
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=3e-3)
    return optimizer, sparsync.attach(
        model, TwoShot(density=0.1, values="sign"), optimizer=optimizer, exchange=exchange
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    x, y = batch(number)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def common(model: nn.Module, handle: Any) -> list[Tensor]:  # Any: as in `attached`
    with handle.averaged():
        return [each.detach().clone() for each in model.parameters()]


class Momentum(nn.Module):
    """An encoder, and one that follows it in the forward pass: in frozen parameters, in a copy's buffers, or in buffers without dots."""

    def __init__(self, online: nn.Sequential, kept: str) -> None:
        super().__init__()
        self.online, self.kept = online, kept
        self.statistics = nn.BatchNorm1d(
            online[0].get_parameter("bias").numel()
        )  # with means of a rank's own data, in the shape of a bias
        self.average = copy.deepcopy(self.online).requires_grad_(False) if kept == "parameters" else nn.Module()
        for name, each in self.online.named_parameters() if kept == "buffers" else ():
            self.average.register_buffer(name.replace(".", ""), each.detach().clone())

    def followers(self) -> list[Tensor]:
        return [*self.average.parameters(), *self.average.buffers()]

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, each in zip(self.followers(), self.online.parameters(), strict=self.kept != "nothing"):
                own.mul_(0.5).add_(each, alpha=0.5)
        first, activation, last = self.online
        return last(activation(self.statistics(first(x))))


def followed() -> None:
    for kept in ("parameters", "buffers"):
        with case(f"own weights move {kept}"):
            model = Momentum(encoder(), kept)
            optimizer, _ = attached(model, Steps(check_weights_every=2))
            with pytest.raises(RanksDifferError) as raised:
                for number in range(STEPS):
                    train(model, optimizer, number)
            name = "average.0.weight" if kept == "parameters" else "average.0weight"
            for part in (repr(name), "Steps(keep=0.0)", "`with handle.averaged():`", "(EMA)"):
                assert part in str(raised.value)
    with case("statistics of a rank's own data are no copies of parameters"):
        model = Momentum(encoder(), "nothing")
        optimizer, _ = attached(model, Steps(check_weights_every=1))
        for number in range(STEPS):
            train(model, optimizer, number)
        assert not on_all_ranks(model.statistics.buffers())


def test_what_own_weights_have_moved_is_an_error_that_names_its_cause_and_a_cure_that_works() -> None:
    run(followed, P)


class Averaged(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.body = encoder()
        self.average = torch.optim.swa_utils.AveragedModel(self.body).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def averaged_inside() -> None:
    for frozen in (False, True):
        with case(f"frozen: {frozen}"):
            model = Averaged(frozen)
            optimizer, handle = attached(model, Steps(check_weights_every=1))
            for number in range(2):
                train(model, optimizer, number)
            if frozen:
                with handle.averaged():
                    model.average.update_parameters(model.body)
                train(model, optimizer, 2)
                assert on_all_ranks(model.average.parameters())
                continue
            with (
                pytest.raises(RuntimeError, match=r"average.* requires_grad_\(False\) before attach"),
                handle.averaged(),
            ):
                model.average.update_parameters(model.body)
            model.average.update_parameters(model.body)
            with pytest.raises(RanksDifferError, match=r"average \(EMA\), .* inside `with handle\.averaged\(\):`"):
                train(model, optimizer, 2)


def test_an_average_in_the_model_is_the_same_on_all_ranks_or_an_error_says_how() -> None:
    run(averaged_inside, P)


class Adapted(nn.Linear):
    """A frozen layer with an adapter, which is merged and begins again, as in ReLoRA."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        super().__init__(20, 7)
        self.requires_grad_(False)
        self.down, self.up = nn.Parameter(0.3 * torch.randn(3, 20)), nn.Parameter(torch.zeros(7, 3))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + x @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> None:
        self.weight += self.up @ self.down

    @torch.no_grad()
    def restart(self, seed: int = 0) -> None:
        self.up.zero_()
        self.down.copy_(0.3 * torch.randn(3, 20, generator=generator(0, "adapter", seed)))


def merged() -> None:
    for inside in (False, True):
        with case(f"inside averaged(): {inside}"):
            model = Adapted()
            optimizer, handle = attached(model, Steps(check_weights_every=1))
            for number in range(2):
                train(model, optimizer, number)
            if inside:
                with handle.averaged():
                    model.merge()
                model.restart()
                train(model, optimizer, 2)
                assert on_all_ranks([model.weight])
                continue
            model.merge()
            with pytest.raises(RanksDifferError, match=r"'weight' with .* or a merge, inside"):
                train(model, optimizer, 2)


def test_a_merge_of_own_weights_into_frozen_ones_is_an_error_whose_cure_works() -> None:
    run(merged, P)


def swapped() -> None:
    exchanges = Steps(check_weights_every=1), LocalSteps(every=3, check_weights_every=1)
    for exchange, moment in [(each, moment) for each in exchanges for moment in ("first", "evaluated", "put back")]:
        with case((exchange, moment)):
            plain, model = encoder(), encoder()
            (plain_optimizer, plain_handle), (optimizer, handle) = attached(plain, exchange), attached(model, exchange)
            average = [each.detach() + 1 for each in model.parameters()]
            stored: list[Tensor] = []
            for number in range(2 * STEPS):
                for each, its in ((plain, plain_optimizer), (model, optimizer)):
                    train(each, its, number)
                if moment == "put back":  # own weights, while the common ones are in the model
                    stored = [each.detach().clone() for each in model.parameters()]
                if moment != "first":
                    with torch.no_grad():
                        model(batch(0)[0])
                if moment != "put back":
                    stored = [each.detach().clone() for each in model.parameters()]
                for each, value in zip(model.parameters(), average, strict=True):
                    each.data.copy_(value)
                model.eval()
                with torch.no_grad():
                    found = model(torch.ones(1, 20))
                wanted = nn.Sequential(*(copy.deepcopy(each) for each in model))
                assert same(list(wanted.parameters()), average)
                assert torch.equal(found, wanted(torch.ones(1, 20)))
                assert same([each.clone() for each in model.state_dict().values()], average)
                model.train()
                for each, value in zip(model.parameters(), stored, strict=True):
                    each.data.copy_(value) if number % 2 else each.detach().copy_(value)
            assert same(common(plain, plain_handle), common(model, handle))
            assert on_all_ranks(common(model, handle))


@pytest.mark.slow
def test_weights_that_are_put_back_after_an_evaluation_of_others_are_those_that_were_there() -> None:
    run(swapped, P)


def closed_inside() -> None:
    for end in ("close", "detach"):
        for exchange in (Steps(), LocalSteps(every=3)):
            with case(f"{end} {exchange}"):
                model = encoder()
                optimizer, handle = attached(model, exchange)
                train(model, optimizer, STEPS + 1)
                with handle.averaged():
                    common = copy.deepcopy(model.state_dict())
                    getattr(handle, end)()
                assert same([*common.values()], [*model.state_dict().values()])


def test_a_handle_that_ends_inside_averaged_leaves_the_common_weights() -> None:
    run(closed_inside, P)


def in_evaluation_mode() -> None:
    for exchange in (Steps(), LocalSteps(every=3), Gradients()):
        with case(exchange):
            found = []
            for training in (True, False):
                model = encoder().train(training)
                optimizer, handle = attached(model, exchange)
                for number in range(STEPS):
                    x, y = batch(number)
                    if number == STEPS // 2:
                        with torch.inference_mode(), torch.enable_grad():
                            model(x)  # records nothing
                    (model(x) - y).square().mean().backward()
                    if isinstance(exchange, Gradients):
                        handle.reduce()
                    optimizer.step()
                    optimizer.zero_grad()
                with torch.no_grad():
                    found += [[model(torch.ones(1, 20)), *model.state_dict().values()]]
                assert on_all_ranks(found[-1])
            assert same(*found)


def test_a_training_in_evaluation_mode_takes_the_steps_of_one_in_training_mode() -> None:
    run(in_evaluation_mode, P)


class SAM(torch.optim.Optimizer):
    """Steps by gradients at weights that each rank has moved along its own gradient, as published programs do (arXiv 2010.01412)."""

    def __init__(self, parameters: Any, inside: torch.optim.Optimizer) -> None:
        super().__init__(parameters, {})
        self.base_optimizer, self.param_groups = inside, inside.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        self.before = [each.detach().clone() for each in self.param_groups[0]["params"]]
        for each in self.param_groups[0]["params"]:
            each.add_(each.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for each, was in zip(self.param_groups[0]["params"], self.before, strict=True):
            each.data = was
        self.base_optimizer.step()
        self.zero_grad()


def sharp_step(model: Any, optimizer: SAM, handle: Any, number: int) -> None:  # Any: of either kind
    wrapped = isinstance(model, DistributedDataParallel)
    x, y = batch(number)
    with model.no_sync() if wrapped else nullcontext():
        (model(x) - y).square().mean().backward()
    optimizer.first_step()
    (model(x) - y).square().mean().backward()
    if not wrapped:
        handle.reduce()
    optimizer.second_step()


def sharpness_aware() -> None:
    for wrapped, inner in ((True, False), (True, True), (False, False)):
        with case((wrapped, inner)):
            bare = encoder()
            model: Any = DistributedDataParallel(bare) if wrapped else bare  # Any: of either kind
            base = torch.optim.AdamW(model.parameters(), lr=3e-3)
            optimizer = SAM(model.parameters(), base)
            handle: Any = sparsync.attach(
                model,
                TwoShot(density=1.0, values="int4"),
                optimizer=base if inner else optimizer,
                exchange=Gradients(),
                options=sparsync.Options(check_weights_every=2, timeout_s=20.0),
            )

            for number in range(5):
                sharp_step(model, optimizer, handle, number)
            assert on_all_ranks(bare.parameters())
            if dist.get_rank() == 1:
                with torch.no_grad():
                    next(bare.parameters())[0, 3] += 1e-3
            sharp_step(model, optimizer, handle, 5)
            with pytest.raises(RuntimeError, match=r"rank 0 has weights '0\.weight' with digest \w+ before step 6"):
                sharp_step(model, optimizer, handle, 6)


def test_weights_that_each_rank_moves_for_a_backward_pass_are_compared_where_the_optimizer_steps() -> None:
    run(sharpness_aware, P)
