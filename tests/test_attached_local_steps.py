"""`attach` with local steps: the loop of plain torch, under DistributedDataParallel and without it, gives the same bits."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import fully_shard

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import LocalSteps, OuterSGD
from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import Dense, TopK, TwoShot
from test_attached_steps import Training as Loop
from test_attached_steps import adamw, bare_model, batch

pytestmark = pytest.mark.distributed

P, STEPS, EVERY = 2, 10, 3


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Training(Loop):
    """The same loop with batch normalisation and local steps; with `comm` they are counted by hand."""

    most = 0.5

    def __init__(
        self,
        wrapped: bool,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        comm: LocalComm | None = None,
        **options: Any,
    ) -> None:
        self.prepare(bare_model(nn.BatchNorm1d), wrapped, make, None if comm is None else comm.rank)
        scheme, options = TwoShot(density=0.1, values="int4"), {"every": EVERY, **options}
        self.handle: Any = (  # Any: of either kind
            sparsync.attach(self.model, scheme, exchange=LocalSteps(**options), optimizer=self.optimizer)
            if comm is None
            else LocalTraining(self.model, self.optimizer, scheme, comm=comm, **options)
        )
        self.counts = comm is None

    def take(self) -> None:
        super().take()
        if not self.counts:
            self.handle.step()


SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "diloco": {"make": sgd, "outer": OuterSGD(), "keep": 0.0},
    "delayed": {"fragments": 2, "delay": 2, "every": 4},
}


def trained_both_ways() -> dict[str, list[Tensor]]:
    found = {}
    for name, settings in SETTINGS.items():
        with case(name):
            bare, wrapped = Training(wrapped=False, **settings), Training(wrapped=True, **settings)
            for number in range(STEPS):
                assert bare.step(number) == wrapped.step(number)
            assert same(bare.own(), wrapped.own()) and same(bare.common(), wrapped.common())
            assert same(list(bare.bare.buffers()), list(wrapped.bare.buffers()))
            assert on_all_ranks(wrapped.common())
            assert not on_all_ranks(wrapped.own())
            assert wrapped.handle.stats()["steps"] == STEPS
            assert wrapped.handle.stats()["exchanges"] > 0
            assert isinstance(wrapped.handle.exchange, LocalSteps)
            found[name] = [*wrapped.own(), *wrapped.common()]
    return found


@pytest.mark.slow
def test_the_loop_of_plain_torch_gives_the_bits_of_steps_that_are_counted_by_hand_under_ddp_and_without_it() -> None:
    ranks = run(trained_both_ways, P)
    for name, settings in SETTINGS.items():

        def body(comm: LocalComm, settings: dict[str, Any] = settings) -> list[Tensor]:
            training = Training(False, comm=comm, **settings)
            for number in range(STEPS):
                training.step(number)
            return [*training.own(), *training.common()]

        for ours, theirs in zip(ranks, LocalWorld(P).run(body), strict=True):
            assert same(ours[name], theirs), name


def evaluated_and_saved() -> None:
    training = Training(wrapped=True)
    for number in range(EVERY + 1):
        training.step(number)
    common, own = training.common(), training.own()
    assert not same(common, own)
    with case("an optimizer steps its own weights after an evaluation"):
        whole = Training(wrapped=False)
        for number in range(EVERY + 1):
            whole.step(number)
        for each in (whole, training):
            each.bare.get_parameter("0.weight").grad = torch.ones(33, 20)
        training.model.eval()
        with torch.no_grad():
            training.model(batch(0, 0)[0])
        training.model.train()
        for each in (whole, training):
            each.optimizer.step()
        assert same(whole.own(), training.own())
    with case("loading the common weights changes nothing that is common"):
        training.bare.load_state_dict(training.bare.state_dict())
        assert same(common, training.common())
        training.step(EVERY + 2)
    with case("detaching leaves the common weights"):
        common = training.common()
        training.step(0)
        training.handle.detach()
        assert same(common, training.own())
        training.step(4)  # plain DDP
        assert on_all_ranks(training.own())
        assert not same(common, training.own())
        assert training.model.broadcast_buffers


def test_what_is_evaluated_or_saved_are_the_common_weights() -> None:
    run(evaluated_and_saved, P)


def scaled(unscales: bool, fused: bool = False) -> list[list[Tensor]]:
    """Train with a loss scale, and an infinity on one rank in one step; return own and common weights of each step."""
    model = bare_model(nn.BatchNorm1d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    scaler = GradScaler("cpu", init_scale=2.0**6, growth_interval=100)
    handle: Any = sparsync.attach(model, Dense(), exchange=LocalSteps(every=2), optimizer=optimizer, scaler=scaler)
    seen = []
    for number in range(4):
        x, y = batch(dist.get_rank(), number)
        before = [each.detach().clone() for each in model.parameters()]
        loss = (model(x) - y).square().mean() * (torch.inf if number == 2 and dist.get_rank() == 1 else 1.0)
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert all((each.grad is not None) for each in model.parameters())
        optimizer.zero_grad()
        own = [each.detach().clone() for each in model.parameters()]
        with handle.averaged():
            seen += [own, [each.detach().clone() for each in model.parameters()]]
        assert same(before, own) == (number == 2 and dist.get_rank() == 1)
        assert on_all_ranks(torch.cat([each.flatten() for each in seen[-1]]))
    assert handle.stats()["steps"] == 4
    assert handle.stats()["exchanges"] == 2
    assert scaler.get_scale() == (32.0 if dist.get_rank() == 1 else 64.0)
    return seen


def loss_scaled() -> None:
    assert all(map(same, scaled(unscales=True), scaled(unscales=False)))
    scaled(unscales=False, fused=True)  # which divides by itself


def test_a_step_that_a_loss_scaler_skips_on_one_rank_counts_there_too() -> None:
    run(loss_scaled, P)


def several_optimizers() -> None:
    with case("a step counts when all have stepped"):
        model = bare_model(nn.BatchNorm1d)
        weights = [each for each in model.parameters() if each.dim() == 2]
        rest = [each for each in model.parameters() if each.dim() < 2]
        first, second = torch.optim.SGD(weights, lr=0.1), torch.optim.AdamW(rest)
        handle: Any = sparsync.attach(model, Dense(), exchange=LocalSteps(every=1), optimizer=[first, second])
        for number in range(3):
            x, y = batch(dist.get_rank(), number)
            (model(x) - y).square().mean().backward()
            for _ in range(1 + number):  # one of them may step more often
                first.step()
            with torch.no_grad():
                model(x)  # the common weights, and own ones again
            assert handle.stats()["steps"] == number
            second.step()
            assert handle.stats()["steps"] == number + 1
            assert on_all_ranks(model.parameters())
        handle.detach()
    with case("an optimizer with a closure"):
        losses = []
        for closes in (False, True):
            training = Training(wrapped=False, make=sgd)
            for number in range(EVERY):
                x, y = batch(dist.get_rank(), number)

                def closure(training: Training = training, x: Tensor = x, y: Tensor = y) -> float:
                    training.optimizer.zero_grad()
                    loss = (training.model(x) - y).square().mean()
                    loss.backward()
                    with torch.no_grad():
                        training.model(x)  # a metric, which must not be what is stepped
                    return float(loss)

                if closes:
                    losses.append(float(training.optimizer.step(closure) or 0.0))
                else:
                    losses.append(closure())
                    training.optimizer.step()
            assert training.handle.stats()["exchanges"] == 1
        assert losses[:EVERY] == losses[EVERY:]
    with case("an optimizer whose step raises"):
        training = Training(wrapped=False, every=1)
        training.step(0)
        with pytest.raises(ZeroDivisionError):
            training.optimizer.step(lambda: 1 / 0)
        assert training.handle.stats()["steps"] == 1
        training.step(1)
        assert training.handle.stats()["steps"] == 2


def test_a_step_of_several_optimizers_counts_once() -> None:
    run(several_optimizers, P)


def refused() -> None:
    exchange = LocalSteps(every=2)
    with case("a step by hand, too"):
        training = Training(wrapped=False)
        with pytest.raises(RuntimeError, match=r"optimizer\.step\(\) counts the steps of this handle"):
            training.handle.step()
    with case("FSDP2"):
        sharded: Any = fully_shard(bare_model(nn.BatchNorm1d))
        with pytest.raises(ValueError, match=r"whole model on each rank, and FSDP2 shards it; exchange steps"):
            sparsync.attach(sharded, TopK(0.1), exchange=exchange, optimizer=sgd(sharded))
    with case("an optimizer without hooks"):
        bare = bare_model(nn.BatchNorm1d)

        class Silent(torch.optim.Optimizer):
            def __init__(self) -> None:
                self.param_groups = [{"params": list(bare.parameters()), "lr": 0.1}]

        with pytest.warns(UserWarning, match=r"Silent calls no hooks.*call handle\.step\(\) after"):
            handle: Any = sparsync.attach(bare, TopK(0.1), exchange=exchange, optimizer=Silent())
        for number in range(2 * EVERY):  # what it has learnt is not taken for weights that were set from outside
            bare(batch(dist.get_rank(), number)[0])
            with torch.no_grad():
                for each in bare.parameters():
                    each.add_(0.01 * (dist.get_rank() + number))
            handle.step()
        assert handle.stats()["steps"] == 2 * EVERY
        assert handle.stats()["exchanges"] == 2 * EVERY // exchange.every


def test_what_local_steps_cannot_do_is_refused_with_what_can_be_done() -> None:
    run(refused, P)


def changed_by_the_loop() -> None:
    def clamp(training: Training) -> None:
        with torch.no_grad():
            for each in training.bare.parameters():
                each.clamp_(-0.1, 0.1)

    with case("after each step"), pytest.raises(sparsync.RanksDifferError, match=r"optimizer\.register_step_post_hook"):
        training = Training(wrapped=True)
        for number in range(EVERY):
            training.step(number)
            clamp(training)
    with case("in a hook, which is the cure"):

        def hooked(model: nn.Module) -> torch.optim.Optimizer:
            optimizer = adamw(model)
            optimizer.register_step_post_hook(lambda *_: clamp(training))
            return optimizer

        training = Training(wrapped=True, make=hooked)
        for number in range(2 * EVERY - 1):
            training.step(number)
        assert max(float(each.abs().max()) for each in training.own()) == torch.tensor(0.1).item()
        training.handle.flush()
        assert training.handle.stats()["exchanges"] == 2
        assert all(map(on_all_ranks, training.common()))


def test_weights_that_the_loop_changes_are_an_error_whose_cure_works() -> None:
    run(changed_by_the_loop, P)


def no_traffic_between_exchanges() -> None:
    training = Training(wrapped=True)
    training.step(0)
    training.step(1)  # DDP has made its buckets
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if dist.get_rank() == 0:  # alone: nobody is waited for, not even for buffers
            for number in range(2 * EVERY):
                training.model(batch(0, number)[0]).sum().backward()
    dist.barrier()


def test_under_ddp_nothing_is_sent_between_two_exchanges() -> None:
    run(no_traffic_between_exchanges, P, within_s=60)
