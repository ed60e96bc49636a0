"""Local steps that drop an exchange, go on from a state, or find weights set from outside."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsync
from helpers.quick import one_in
from sparsync import OuterSGD
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.exchanges.weights import by_name
from sparsync.schemes import Dense, PerParameter, TopK
from test_local_steps import SETTINGS, adam, common, fit, flat, held, learn, model, start, total, train, waiting


@pytest.mark.parametrize("name", one_in(2, SETTINGS))
def test_a_resumed_run_has_the_same_bits_at_any_step(name: str, tmp_path: Path) -> None:
    def whole(comm: LocalComm) -> list[Tensor]:
        steps = adam(comm.rank, comm, **SETTINGS[name])
        fit(steps, range(9))
        return held(steps)

    def broken(comm: LocalComm, at: int) -> list[Tensor]:
        before = adam(comm.rank, comm, **SETTINGS[name])
        fit(before, range(at))
        sparsync.checkpoint.save(before, tmp_path / str(at))
        comm.all_gather(torch.zeros(1))
        after = adam(comm.rank, comm, **SETTINGS[name])
        sparsync.checkpoint.load(after, tmp_path / str(at))
        fit(after, range(at, 9))
        return held(after)

    wanted = LocalWorld(2).run(whole)
    for at in (3, 4, 5):
        for ours, theirs in zip(LocalWorld(2).run(partial(broken, at=at)), wanted, strict=True):
            assert all(map(torch.equal, ours, theirs)), at
    assert torch.equal(wanted[0][-1], wanted[1][-1])


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 3}])
@pytest.mark.parametrize("at", [3, 5])
def test_with_another_number_of_ranks_nothing_of_residuals_or_of_what_was_learnt_is_lost(
    at: int, settings: dict[str, Any]
) -> None:
    def save(comm: LocalComm) -> tuple[dict[str, Any], Tensor]:
        steps = start(comm, TopK(0.25), every=4, **settings)
        learnt = torch.zeros(83, dtype=torch.float64)
        for step in range(at):
            own = flat(list(steps.model.parameters()))
            learn(steps.model, comm.rank, step)
            steps.optimizers[0].step()
            learnt += own - flat(list(steps.model.parameters()))
            steps.step()
        return steps.state_dict(), learnt

    saved = LocalWorld(4).run(save)
    states = [state for state, _ in saved]

    def load(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        scheme = TopK(0.25)
        steps = start(comm, scheme, every=4, **settings)
        steps.load_state_dict(steps.resized(states))
        for exchange in list(steps._exchanger.pending):  # what was on its way is applied as it would have been
            steps._finish(exchange)
        steps._note_written()
        residual = waiting(steps).double()
        loaded, own = common(steps), flat(list(steps.model.parameters()))
        train(steps, range(at, at + 8))
        return loaded, own - loaded + 0.5 * residual, residual

    ranks = LocalWorld(2).run(load)
    before = flat(list(model().parameters()))
    learnt = total(each for _, each in saved)
    for common_weights, own, _ in ranks:
        assert torch.equal(common_weights, ranks[0][0])
        assert not own.any()
    assert torch.equal(4 * (before - ranks[0][0]) + 2 * total(rank[2] for rank in ranks), learnt)  # the mean stays


def poisoned(comm: LocalComm, settings: dict[str, Any]) -> list[Tensor]:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    steps = LocalTraining(made, optimizer, TopK(0.25), every=2, comm=comm, **settings)
    seen = []
    for step in range(12):
        learn(made, comm.rank, step)
        if comm.rank == 1 and step == 4:
            for each in made.parameters():
                each.grad = torch.full_like(each, torch.nan)
        optimizer.step()
        steps.step()
        seen.append(common(steps))
    assert flat(list(made.parameters())).isfinite().all()
    stats = steps.stats()
    assert (stats["steps"], stats["exchanges"], stats["dropped"]) == ((12, 9, 2) if settings else (12, 5, 1))
    assert any(report.details["overflow"] for report in steps.reports())
    return seen


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}])
def test_nan_on_one_rank_drops_the_exchange_on_all_and_training_goes_on(settings: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r"was dropped, the weights of ranks \[1\] hold NaN or Inf"):
        ranks = LocalWorld(3).run(partial(poisoned, settings=settings))
    for seen in zip(*ranks, strict=True):
        assert all(torch.equal(each, seen[0]) for each in seen)
        assert seen[0].isfinite().all()
    seen = ranks[0]
    if not settings:
        assert torch.equal(seen[4], seen[5])
        assert torch.equal(seen[4], seen[6])
    assert not torch.equal(seen[-1], seen[6])


def test_a_mean_that_overflows_is_dropped_too_and_what_a_residual_scheme_had_sent_is_in_its_residual_again() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        made = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
        scheme = PerParameter(TopK(0.5), {"b": Dense(wire="float16")})
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), scheme, every=1, comm=comm, keep=0.0)
        made["a"].grad, made["b"].grad = torch.arange(4.0), torch.full((4,), 1e6)
        steps.optimizers[0].step()
        steps.step()
        assert not flat([made["a"], made["b"]]).any()
        return steps.state.state_dict()["residual"]["a"], common(steps)

    with pytest.warns(UserWarning, match="the mean over ranks holds NaN or Inf"):
        ranks = LocalWorld(2).run(body)
    assert torch.equal(ranks[0][0] + ranks[1][0], 2 * torch.arange(4.0))
    assert not ranks[0][1].any()


@pytest.mark.filterwarnings("ignore:the exchange before step")
@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 1}])
def test_after_five_drops_in_a_row_all_ranks_raise(settings: dict[str, Any]) -> None:
    def body(comm: LocalComm) -> int:
        made = model()
        optimizer = torch.optim.SGD(made.parameters(), 1.0)
        steps = LocalTraining(made, optimizer, TopK(0.25), every=2, comm=comm, **settings)
        for step in range(20):
            learn(made, comm.rank, step)
            weight = made.get_parameter("0.weight")
            if comm.rank == 1 and step not in (2, 3):
                weight.grad = torch.full_like(weight, torch.nan)
            optimizer.step()
            try:
                steps.step()
            except RuntimeError as error:
                assert "the last 5 exchanges were dropped" in str(error)
                assert "the weights of ranks [1] hold NaN or Inf" in str(error)
                return step
        return -1

    first, second = LocalWorld(2).run(body)
    assert first == second
    assert first in ((13,) if not settings else (13, 14))


@pytest.mark.parametrize("settings", [{}, {"outer": OuterSGD()}, {"fragments": 2, "delay": 1}])
def test_weights_that_are_loaded_after_local_steps_were_made_are_no_change_that_was_learnt(
    settings: dict[str, Any],
) -> None:
    loaded = {name: 2.0 * each + 1.0 for name, each in model().state_dict().items()}

    def body(comm: LocalComm, late: bool) -> list[Tensor]:
        made = model()
        if not late:
            made.load_state_dict(loaded)
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), TopK(0.25), every=2, comm=comm, **settings)
        if late:
            made.load_state_dict(loaded)
        return [*train(steps, range(6)), flat(list(made.parameters()))]

    wanted, found = (LocalWorld(2).run(partial(body, late=late)) for late in (False, True))
    for one, other in zip(wanted, found, strict=True):
        assert all(map(torch.equal, one, other))


def test_buffers_of_a_model_that_is_loaded_are_evaluated_with_its_weights() -> None:
    def body(comm: LocalComm) -> None:
        made = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        steps = LocalTraining(made, torch.optim.SGD(made.parameters(), 1.0), Dense(), every=2, comm=comm)
        loaded = {name: each + 2 for name, each in made.state_dict().items()}
        made.load_state_dict(loaded)
        with steps.averaged():
            assert all(torch.equal(each, loaded[name]) for name, each in made.state_dict().items())

    LocalWorld(2).run(body)


class Wrapper(torch.optim.Optimizer):
    """An Optimizer by name only, as Accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.optimizer.step()


class TwoPhase(torch.optim.SGD):
    """Steps by another name than `step`, by an optimizer inside it, as SAM does."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, 1.0)
        self.base_optimizer = torch.optim.SGD(self.param_groups, 1.0)

    def second_step(self) -> None:
        self.base_optimizer.step()


@pytest.mark.parametrize("how", ["wrapped", "inside", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_an_optimizer_inside_another_one_or_a_compiled_step_has_changed_was_learnt(how: str) -> None:
    def body(comm: LocalComm, how: str) -> tuple[set[str], Tensor]:
        made = model()
        sgd, two_phase = torch.optim.SGD(made.parameters(), 1.0), TwoPhase(made.parameters())
        optimizer = {"wrapped": Wrapper(sgd), "inside": two_phase}.get(how, sgd)

        @torch.compile(backend="eager")
        def compiled() -> None:
            sgd.step()

        take = {"wrapped": optimizer.step, "inside": two_phase.second_step, "compiled": compiled}.get(how, sgd.step)
        steps = LocalTraining(made, optimizer, Dense(), every=2, comm=comm)
        seen = set[str]()
        for step in range(4):
            learn(made, comm.rank, step)
            take()
            steps.step()
            seen |= steps._adopted
        return seen, common(steps)

    P = 1 if how == "compiled" else 2
    wanted, found = (LocalWorld(P).run(partial(body, how=each)) for each in ("plain", how))
    for (_, weights), (adopted, others) in zip(wanted, found, strict=True):
        assert not adopted and torch.equal(weights, others)


@pytest.mark.parametrize("settings", [{}, {"fragments": 2, "delay": 2}])
def test_a_layer_that_is_loaded_in_training_is_the_common_one_and_steps_before_and_after_it_are_kept(
    settings: dict[str, Any],
) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        steps = start(comm, Dense(), every=2, **settings)
        train(steps, range(3))
        bias = steps.model.get_parameter("1.bias")
        with torch.no_grad():
            bias.fill_(64.0)
        learnt = torch.zeros(3, dtype=torch.float64)
        # What was learnt before and is on its way comes, as what is in a residual does.
        for exchange in steps._exchanger.pending.values():
            for bucket, mean in zip(exchange.buckets, exchange.changes, strict=True):
                learnt += by_name([bucket], [mean.grad]).get("1.bias", torch.zeros(3))
        for step in range(3, 8):
            learn(steps.model, comm.rank, step)
            bias.grad = torch.full((3,), 8.0 * comm.rank)
            learnt += bias.grad
            steps.optimizers[0].step()
            steps.step()
        steps.flush()
        return common(steps)[-3:], learnt

    ranks = LocalWorld(2).run(body)
    for found, _ in ranks:
        assert torch.equal(found, 64.0 - total(learnt for _, learnt in ranks) / 2)


def test_a_state_of_another_model_or_other_fragments_changes_nothing() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, TopK(0.25), every=2, fragments=2, delay=2)
        train(steps, range(3))
        state = steps.state_dict()
        for other, message in (
            (start(comm, TopK(0.25), every=2), "this state was saved with 2 fragments"),
            (start(comm, TopK(0.25), every=2, fragments=2, outer=OuterSGD()), "has an outer optimizer, but not both"),
        ):
            before = flat(list(other.model.parameters()))
            with pytest.raises(ValueError, match=message):
                other.load_state_dict(state)
            assert torch.equal(flat(list(other.model.parameters())), before)
        made = nn.Linear(2, 2)
        small = LocalTraining(
            made, torch.optim.SGD(made.parameters(), 1.0), TopK(0.25), every=2, comm=comm, fragments=2
        )
        with pytest.raises(ValueError, match=r"it has a parameter '0.weight', which this model lacks"):
            small.load_state_dict(state)

    LocalWorld(1).run(body)
