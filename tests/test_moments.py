"""The optimizer's state has the moments of exchanged steps: what saves and loads it saves and loads them, as in plain torch."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Muon, Optimizer

import sparsync
from helpers.distributed import case, run
from helpers.replicas import on_all_ranks
from sparsync import Steps
from sparsync.core import generator
from sparsync.schemes import Dense, TwoShot

pytestmark = pytest.mark.distributed

RATE = 3e-3
Saved = dict[str, Any]  # Any: as torch's optimizers save it


def made() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 33), nn.GELU(), nn.Linear(33, 8))


class Training:
    """The loop of plain torch; `scheme` None: without a handle."""

    def __init__(self, scheme: sparsync.Scheme | None, before: Callable[[Optimizer], object] = lambda _: None) -> None:
        self.model = made()
        self.optimizer = AdamW(self.model.parameters(), lr=RATE)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 400)
        before(self.optimizer)
        self.handle: Any = scheme and sparsync.attach(  # Any: of steps
            self.model, scheme, optimizer=self.optimizer, exchange=Steps(keep=0.0, beta2=0.999)
        )

    def step(self, number: int) -> None:
        source = generator(dist.get_rank(), "data", number)
        x, y = torch.randn(8, 20, generator=source), torch.randn(8, 8, generator=source)
        (self.model(x) - y).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.model.parameters()])

    def go_to(self, other: "Training") -> "Training":
        self.model.load_state_dict(other.model.state_dict())
        self.schedule.load_state_dict(other.schedule.state_dict())
        return self


def trained(steps: int, scheme: sparsync.Scheme | None = None) -> Training:
    found = Training(scheme or Dense())
    for number in range(steps):
        found.step(number)
    return found


def through_a_file(state: Mapping[str, Any]) -> Saved:  # Any: as `state_dict`
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def on_one_rank() -> None:
    whole, first = trained(12), trained(8)
    saved, torchs = through_a_file(first.optimizer.state_dict()), get_optimizer_state_dict(first.model, first.optimizer)
    assert {each["step"].item() for each in saved["state"].values()} == {8.0}
    resumed = {
        "before attach": lambda: Training(Dense(), lambda new: new.load_state_dict(saved)),
        "after attach": lambda: _given(Training(Dense()), saved),
        "by torch's checkpoint": lambda: _given_torchs(Training(Dense()), torchs),
        "of a handle that was detached": lambda: _detached(trained(8)),
    }
    for name, make in resumed.items():
        with case(name):
            training = make().go_to(first)
            for number in range(8, 12):
                training.step(number)
            # The momentum has the rate of now, and not those of earlier steps.
            assert (training.weights() - whole.weights()).norm() < 0.01 * (whole.weights() - first.weights()).norm()
    with case("the state of AdamW, and back to AdamW"):
        plain = Training(None)
        for number in range(8):
            plain.step(number)
        ours = _given(Training(Dense()), plain.optimizer.state_dict())
        again = AdamW(made().parameters())
        again.load_state_dict(ours.optimizer.state_dict())
        for mine, theirs in zip(again.state.values(), plain.optimizer.state.values(), strict=True):
            assert all(torch.allclose(mine[key], theirs[key], rtol=1e-4, atol=1e-7) for key in theirs)
    with case("what AdamW does with it is what the handle would do"):
        before, plain = first.weights(), _given(Training(None), saved).go_to(first)
        new = Training(None).go_to(first)
        for each in (first, plain, new):
            each.step(8)
        moves = [each.weights() - before for each in (first, plain, new)]
        assert (moves[1] - moves[0]).norm() < 0.1 * moves[0].norm() < 0.1 * (moves[2] - moves[0]).norm()
    with case("the momentum of a rate that has ended"):
        ended = trained(4)
        ended.optimizer.param_groups[0]["lr"] = 0.0
        for each, wanted in zip(
            ended.optimizer.state_dict()["state"].values(),
            trained(4).optimizer.state_dict()["state"].values(),
            strict=True,
        ):
            assert torch.equal(each["exp_avg"], wanted["exp_avg"])
    with case("a new beginning"):
        ended.optimizer.state.clear()
        assert not any(
            each["exp_avg_sq"].any() or each["step"] for each in ended.optimizer.state_dict()["state"].values()
        )
    with case("what stands in the state is what is trained"):
        training = trained(3)
        training.optimizer.state[training.model[0].weight]["exp_avg"].zero_()  # pyright: ignore[reportArgumentType]
        assert not training.handle.state_dict()["adamw_steps"]["momentum"]["0.weight"].any()


def _given(training: Training, saved: Mapping[str, Any]) -> Training:  # Any: as `state_dict`
    training.optimizer.load_state_dict(copy.deepcopy(dict(saved)))
    return training


def _given_torchs(training: Training, saved: Saved) -> Training:
    set_optimizer_state_dict(training.model, training.optimizer, copy.deepcopy(saved))
    return training


def _detached(training: Training) -> Training:
    training.handle.detach()
    training.handle = sparsync.attach(
        training.model, Dense(), optimizer=training.optimizer, exchange=Steps(keep=0.0, beta2=0.999)
    )
    return training


def on_several() -> None:
    scheme = TwoShot(density=1.0, values="int3")
    first = trained(6, scheme)
    states: list[Any] = [None] * dist.get_world_size()  # Any: of optimizers
    dist.all_gather_object(states, first.optimizer.state_dict())
    squares = [each["state"][0]["exp_avg_sq"] for each in states]
    assert torch.equal(*squares[:2])
    for name, saved in {"each rank's own": states[dist.get_rank()], "all from rank 0": states[0]}.items():
        with case(name):
            training = _given(Training(TwoShot(density=1.0, values="int3")), saved).go_to(first)
            for number in range(6, 9):
                training.step(number)
            assert on_all_ranks(training.weights())
    dense = Training(None)
    for number in range(6):
        dense.step(number)
    total = sum(float(each["exp_avg_sq"].sum()) for each in dense.optimizer.state.values())
    for scheme in (Dense(), TwoShot(0.5)):
        with case(
            f"squares of AdamW are those of the mean gradient, and become a rank's own with {scheme} if it leaves out"
        ):
            training = _given(Training(scheme), dense.optimizer.state_dict())
            training.handle.load_state_dict(training.handle.state_dict())  # which says that they are the mean's
            training.step(6)
            squares = training.handle.state_dict()["adamw_steps"]["square"].values()
            assert training.handle.clip_factor > 1.1
            factor = training.handle.clip_factor if scheme.leaves_out else 1.0
            assert 0.9 * factor**2 < sum(float(each.sum()) for each in squares) / total < 1.2 * factor**2
            found = training.optimizer.state_dict()["state"].values()
            assert 0.9 < sum(float(each["exp_avg_sq"].sum()) for each in found) / total < 1.2
    with case("one rank alone"):
        training = Training(Dense())
        if dist.get_rank() == 1:
            _given(training, states[0]).optimizer.param_groups[0]["lr"] = RATE
        with pytest.raises(sparsync.RanksDifferError, match="a state of the optimizer loaded before step 0"):
            training.step(0)
    with case("what one rank has never seen"):
        embedding = nn.Embedding(4, 3)
        optimizer = AdamW(embedding.parameters(), lr=0.5)
        sparsync.attach(embedding, Dense(), optimizer=optimizer, exchange=Steps(keep=0.0))
        embedding(torch.tensor([dist.get_rank()])).sum().backward()
        optimizer.step()
        (found,) = optimizer.state_dict()["state"].values()
        longest = (found["exp_avg"].abs() / found["exp_avg_sq"].sqrt()).nan_to_num(0.0).max()
        assert 0.1 < longest < 4.0
        assert found["exp_avg_sq"][2:].max() < 1e-29


def moved() -> None:
    found = []
    for moves in (False, True):
        model = made()
        optimizer = AdamW(model.parameters(), lr=RATE)
        handle: Any = sparsync.attach(model, Dense(), optimizer=optimizer, exchange=Steps(keep=0.0))
        for _ in range(3):
            model(torch.ones(4, 20)).square().mean().backward()
            optimizer.step()
            for state in optimizer.state.values() if moves else ():  # to another place and back
                state.update({key: each.clone() for key, each in state.items()})
        found.append(torch.cat(list(handle.state_dict()["adamw_steps"]["momentum"].values())))
    assert torch.equal(*found)


def muons() -> None:
    model = made()
    matrices, rest = ([each for each in model.parameters() if (each.ndim == 2) is wanted] for wanted in (True, False))
    muon, adamw = Muon(matrices, lr=RATE), AdamW(rest, lr=RATE)
    handle: Any = sparsync.attach(model, Dense(), optimizer=[muon, adamw], exchange=Steps())
    for number in range(3):
        model(torch.randn(4, 20, generator=generator(0, "data", number))).square().mean().backward()
        muon.step()
        adamw.step()
    held = handle.state_dict()["adamw_steps"]
    saved = muon.state_dict()
    own, gradient = saved["state"][0]["momentum_buffer"], matrices[0].grad
    assert gradient is not None and 0.1 < float(own.norm() / gradient.norm()) < 10  # torch's Muon mixes the two
    assert set(adamw.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}

    def momentum_with(*keys: str) -> Tensor:
        """Return the handle's after a state was loaded with these tensors of the first matrix only."""
        other = Muon([nn.Parameter(each.detach().clone()) for each in matrices], lr=RATE)
        other.load_state_dict(saved)
        state = other.state_dict()
        muon.load_state_dict({**state, "state": {0: {key: state["state"][0][key] for key in keys}}})
        found = handle.state_dict()["adamw_steps"]["momentum"]
        assert not found["2.weight"].any()
        return found["0.weight"]

    torch.testing.assert_close(momentum_with("step", "momentum_buffer", "exp_avg_sq"), held["momentum"]["0.weight"])
    assert not momentum_with("momentum_buffer").any()  # as torch's Muon saves it, without squares


def sharded() -> None:
    def attached() -> tuple[nn.Sequential, Optimizer]:
        model = made()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        optimizer = AdamW(model.parameters(), lr=RATE)
        sparsync.attach(model, Dense(), optimizer=optimizer, exchange=Steps(keep=0.0))
        return model, optimizer

    def step(model: nn.Sequential, optimizer: Optimizer, number: int) -> None:
        model(torch.randn(8, 20, generator=generator(dist.get_rank(), "data", number))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = attached(), attached()
    for number in range(3):
        step(*first, number)
    saved: Any = get_optimizer_state_dict(*first)  # Any: DTensors
    found = saved["state"]["0.weight"]
    assert found["exp_avg"].full_tensor().shape == (33, 20)
    second[0].load_state_dict(first[0].state_dict())
    set_optimizer_state_dict(*second, optim_state_dict=saved)
    step(*second, 3)
    weights: list[Any] = list(second[0].parameters())  # Any: DTensors
    assert on_all_ranks(torch.cat([each.full_tensor().detach().flatten() for each in weights]))
    again: Any = get_optimizer_state_dict(*second)  # Any: as above
    assert again["state"]["0.weight"]["step"].item() == 4.0


def test_a_saved_state_of_the_optimizer_is_all_that_one_rank_needs_to_go_on() -> None:
    run(on_one_rank, 1)


def test_ranks_go_on_together_from_the_states_of_their_optimizers() -> None:
    run(on_several, 2)


def test_moments_that_were_moved_and_came_back_are_the_live_ones() -> None:
    run(moved, 1)


def test_the_momentum_of_muon_is_in_its_state() -> None:
    run(muons, 1)


@pytest.mark.slow
def test_shards_have_their_moments_in_the_state_of_the_optimizer() -> None:
    run(sharded, 4, fresh=True)  # its meshes stay
