"""`attach` with steps: the loop of plain torch, under DistributedDataParallel and without it, gives the same bits."""

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
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
from torch.utils.checkpoint import checkpoint

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks, same
from sparsync import Gradients, LocalSteps, Steps
from sparsync.schemes import TopK, TwoShot

pytestmark = pytest.mark.distributed

P, STEPS, HALVES = 2, 9, 2


def bare_model(norm: type[nn.Module] = nn.LayerNorm) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 33), norm(33), nn.GELU(), nn.Linear(33, 7))


def batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(8, 20, generator=source), torch.randn(8, 7, generator=source)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)


class Training:
    """A loop as plain torch has it, with clipping, a schedule and accumulation; only `attach` was added."""

    most = 0.1  # norm of a gradient

    def __init__(self, wrapped: bool, scheme: sparsync.Scheme | None = None, **options: Any) -> None:
        self.prepare(bare_model(), wrapped)
        scheme = scheme if scheme is not None else TwoShot(density=0.1, values="sign")
        self.handle: Any = sparsync.attach(  # Any: of either kind
            self.model, scheme, optimizer=self.optimizer, **options
        )

    def prepare(
        self,
        bare: nn.Sequential,
        wrapped: bool,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        rank: int | None = None,
    ) -> None:
        """Make all but the handle."""
        self.bare, self.rank = bare, dist.get_rank() if rank is None else rank
        self.model: Any = DistributedDataParallel(bare) if wrapped else bare  # Any: of either kind
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.norms: list[float] = []

    def step(self, number: int) -> float:
        loss = torch.zeros(())
        for half in range(HALVES):
            x, y = batch(self.rank, HALVES * number + half)
            waits = isinstance(self.model, DistributedDataParallel) and half < HALVES - 1
            with self.model.no_sync() if waits else nullcontext():
                loss = (self.model(x) - y).square().mean() / HALVES
                loss.backward()
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), self.most)))
        self.take()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def take(self) -> None:
        self.optimizer.step()

    def own(self) -> list[Tensor]:
        return [each.detach().clone() for each in self.bare.parameters()]

    def common(self) -> list[Tensor]:
        with self.handle.averaged():
            return self.own()


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


def evaluated_and_saved() -> None:
    training = Training(wrapped=True)
    for number in range(3):
        training.step(number)
    common, own = training.common(), training.own()
    assert not same(common, own)
    with case("state_dict has the common weights"):
        saved = training.model.state_dict()
        assert same(common, [saved[f"module.{name}"] for name, _ in training.bare.named_parameters()])
        assert same(own, training.own())
    with case("evaluation has them too, and training its own ones afterwards"):
        training.model.eval()
        with torch.no_grad():
            assert on_all_ranks(training.model(batch(0, 0)[0]))
        assert same(common, training.own())
        training.model.train()
        with torch.no_grad():
            training.bare(batch(0, 0)[0])  # no gradient is wanted
        assert same(common, training.own())
        training.model(batch(0, 0)[0])
        assert same(own, training.own())
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
        assert same(common, training.own())
        training.step(4)  # plain DDP
        assert on_all_ranks(training.own())
        assert not same(common, training.own())


def test_what_is_evaluated_or_saved_are_the_common_weights() -> None:
    run(evaluated_and_saved, P)


def refused() -> None:
    with case("closed, and not detached"):
        training = Training(wrapped=True)
        training.handle.close()
        with pytest.raises(RuntimeError, match=r"this handle is closed.*call detach\(\) instead"):
            training.model(batch(0, 0)[0]).sum().backward()
    with case("a parameter that DDP ignores"):
        bare = bare_model()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(bare, ["0.weight"])
        model = DistributedDataParallel(bare)
        with pytest.raises(ValueError, match=r"DDP ignores 0\.weight"):
            sparsync.attach(model, TopK(0.1), optimizer=torch.optim.AdamW(model.parameters()))


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


class Checkpointed(nn.Module):
    """Computes its layers again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = bare_model()

    def forward(self, x: Tensor) -> Any:  # Any: torch types no result
        return checkpoint(self.blocks, x, use_reentrant=False)


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
        with case(f"between forward and backward pass, {exchange}"):
            model = Checkpointed()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            sparsync.attach(model, TwoShot(density=0.1, values="sign"), optimizer=optimizer, exchange=exchange)
            x, _ = batch(dist.get_rank(), 0)
            for _ in range(2):
                model(x).square().mean().backward()
                with torch.no_grad():
                    model(x)
                optimizer.step()
                optimizer.zero_grad()
            loss = model(x).square().mean()
            with torch.no_grad():
                model(x)
            with pytest.raises(
                RuntimeError, match="another forward pass of the model, without gradients, came between"
            ):
                loss.backward()


def test_no_pass_uses_other_weights_than_it_says() -> None:
    run(other_weights_in_a_pass, P)


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


class ShardedTraining(Training):
    """The same loop on a mesh of replicas and shards."""

    def __init__(self, replicas: int, shards: int, **options: Any) -> None:
        mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        bare = bare_model()
        for part in (bare[0], bare[3], bare):
            fully_shard(part, mesh=mesh)
        self.prepare(bare, wrapped=False)
        scheme = TwoShot(density=0.1, values="sign")
        self.handle: Any = sparsync.attach(self.model, scheme, optimizer=self.optimizer, **options)

    def common(self) -> list[Tensor]:
        """Return the common weights of whole parameters, on all ranks."""
        saved = self.model.state_dict()
        return [saved[name].full_tensor() for name, _ in self.bare.named_parameters()]


def sharded() -> None:
    training = ShardedTraining(2, 2)
    for number in range(4):
        training.step(number)
    with case("NaN in one shard"):
        before = training.common()
        x, y = batch(dist.get_rank(), 0)
        (training.model(x) - y).square().mean().backward()
        if dist.get_rank() == 3:
            gradient: Any = next(training.bare.parameters()).grad  # Any: a DTensor
            local = gradient.to_local()
            local.view(-1)[0] = torch.nan
        with pytest.warns(UserWarning, match="was skipped on all ranks"):
            training.optimizer.step()
        training.optimizer.zero_grad()
        assert same(before, training.common())
        assert training.handle.stats()["skipped"] == 1
    with case("detached, the replicas are FSDP2's own"):
        training.handle.detach()
        training.step(4)
        assert on_all_ranks(training.common())
        assert not same(before, training.common())
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
        assert on_all_ranks(each.full_tensor() for each in weights)


@pytest.mark.slow
def test_two_replicas_of_two_shards_skip_a_step_together_and_reduce_by_themselves_once_detached() -> None:
    run(sharded, 4)


def test_an_embedding_that_limits_its_norms_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    sign, adamw = TwoShot(density=0.1, values="sign"), torch.optim.AdamW(model.parameters())
    (found,) = sparsync.doctor(model, sign, optimizer=adamw)
    assert found.refused is ValueError
    assert "the embedding '0' has max_norm" in str(found)
    assert "max_norm" not in str(sparsync.doctor(model, sign, optimizer=adamw, exchange=Gradients()))
