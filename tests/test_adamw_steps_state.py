"""Exchanged steps that are skipped, fail, or go on from a state: nothing is lost, and ranks stay the same."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsync
from helpers.quick import one_in
from helpers.sketches import too_long_to_measure
from sparsync import AdamWSteps, Bucket
from sparsync.base.scheme import Scheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Comm
from sparsync.exchanges.sender import Gradients, StepsToMake
from sparsync.schemes import Dense, State, TopK, TwoShot
from test_adamw_steps import BLOCK, EVERY, SCHEMES, P, common, flat, groups, held, learn, model, start, train

pytestmark = pytest.mark.filterwarnings("ignore:step .* was skipped on all ranks")


def pretrained() -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn_like(each) for name, each in model().state_dict().items()}


def test_weights_that_are_loaded_after_the_steps_were_made_are_those_that_are_trained() -> None:
    def body(comm: LocalComm, how: str) -> list[Tensor]:
        steps = start(comm, TwoShot(0.25, values="sign"), keep=0.5)
        loaded = flat(pretrained().values())
        if how == "load":
            steps.model.load_state_dict(pretrained())
        elif how == "data":
            nn.utils.vector_to_parameters(loaded, steps.model.parameters())
        else:
            made = model()
            made.load_state_dict(pretrained())
            optimizer = torch.optim.AdamW(groups(made, (0.25, 0.25), (0.0, 0.0)), betas=(0.9, 0.95))
            given: dict[str, Any] = {"keep": 0.5, "block": BLOCK, "measure_every": EVERY, "beta2": 0.95, "decay": 1.0}
            steps = AdamWSteps(made, optimizer, TwoShot(0.25, values="sign"), comm=comm, **given)
        assert torch.equal(common(steps), loaded)
        return [*train(steps, range(5)), flat(steps.model.parameters())]

    before, load, data = (LocalWorld(2).run(partial(body, how=how)) for how in ("before", "load", "data"))
    for wanted, one, other in zip(before, load, data, strict=True):
        assert all(map(torch.equal, wanted, one))
        assert all(map(torch.equal, wanted, other))


def test_own_weights_of_a_layer_are_put_back_and_resumed_with_their_bits_whatever_the_other_layers_got() -> None:
    def body(comm: LocalComm) -> None:
        steps, again = (start(comm, TwoShot(0.25, values="sign"), keep=0.5) for _ in range(2))
        train(steps, range(6))
        before = flat(deepcopy(steps.model).parameters())
        with steps.averaged():
            layer = {name: each.clone() for name, each in steps.model.state_dict().items() if name.startswith("1.")}
        steps.model.load_state_dict(layer, strict=False)
        assert steps._adopt() == []
        assert torch.equal(flat(steps.model.parameters()), before)
        steps.model.load_state_dict({name: each + 1 for name, each in layer.items()}, strict=False)
        again.load_state_dict(deepcopy(steps.state_dict()))
        assert torch.equal(flat(steps.model.parameters()), flat(again.model.parameters()))
        assert torch.equal(common(steps), common(again))

    LocalWorld(2).run(body)


def test_second_moments_go_on_where_steps_begin_or_end_to_average_them() -> None:
    """Measurements are kept. Ranks that begin take their own as the average rank's, and then agree on the means of blocks."""

    def body(comm: LocalComm, forms: tuple[tuple[float, float], ...]) -> tuple[list[Tensor], list[Tensor]]:
        before, after = (start(comm, TwoShot(density, values="sign"), keep=keep) for density, keep in forms)
        train(before, range(9))
        after.load_state_dict(deepcopy(before.state_dict()))
        old, new = before._sender.ratios, after._sender.ratios
        assert all(map(torch.equal, [*old.of_mean, *old.of_own], [*new.of_mean, *new.of_own]))
        assert all(map(torch.equal, new._of_all, old.of_own))
        train(after, range(9, 9 + 2 * EVERY))
        return new._shared, [common(after)]

    averaged, common_squares = (0.25, 0.5), (1.0, 0.0)
    for forms in ((averaged, common_squares), (common_squares, averaged)):
        (shared, weights), (others, same) = LocalWorld(2).run(partial(body, forms=forms))
        assert [bool(each.any()) for each in shared] == [True] * (forms[1] == averaged)
        assert all(map(torch.equal, [*shared, *weights], [*others, *same]))


def test_weights_that_are_loaded_inside_averaged_are_an_error_because_they_would_be_lost() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, TopK(0.25))
        train(steps, range(3))
        own = flat(steps.model.parameters())
        with (
            pytest.raises(RuntimeError, match=r"0\.weight, 0\.bias, 1\.weight got other values inside averaged"),
            steps.averaged(),
        ):
            steps.model.load_state_dict(pretrained())
        assert torch.equal(flat(steps.model.parameters()), own)

    LocalWorld(1).run(body)


def poisoned(comm: LocalComm, name: str, at: int, value: float) -> list[Tensor]:
    scheme = SCHEMES[name]()
    steps = start(comm, scheme, keep=0.5, bucket_mb=2e-4)
    assert len(steps._weights.buckets) > 1
    seen = []
    for step in range(16):
        learn(steps.model, comm.rank, step)
        before = [common(steps), *(each.clone() for each in steps._sender.vectors["momentum"])]
        ratios = [each.clone() for each in steps._sender.ratios.of_own]
        if comm.rank == 1 and step == at:
            last = list(steps.model.parameters())[-1]
            last.grad = torch.full_like(last, value)
        reports = steps.step()
        if step == at:
            assert all(map(torch.equal, before, [common(steps), *steps._sender.vectors["momentum"]]))
            assert all(map(torch.equal, ratios, steps._sender.ratios.of_own))
            measured = at % EVERY == 0
            assert len(reports) == len(steps._weights.buckets) + measured
            assert all(report.details["overflow"] for report in reports)
        else:
            assert not torch.equal(before[0], common(steps))
        for bucket in steps._weights.buckets:
            share = steps.state.unsent(bucket.bucket(bucket.common, 0), comm)
            assert torch.equal(bucket.own(), bucket.common if share is None else bucket.common - 0.5 * share)
        seen.append(common(steps))
    stats = steps.stats()
    assert (stats["skipped"], stats["exchanges"]) == (1, stats["steps"] - 1)
    assert all(bool(each.isfinite().all()) for each in steps._sender.vectors["square"])
    return seen


@pytest.mark.parametrize(
    "name", ["topk", "sign", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "per_parameter"))]
)
@pytest.mark.parametrize(
    ("at", "value"),
    one_in(
        3, (pytest.param(*each) for each in ((8, torch.nan), (11, torch.nan), (0, torch.inf), (11, 1e25), (10, 1.2e19)))
    ),
)
def test_nan_inf_or_squares_that_overflow_on_one_rank_skip_the_step_on_all(name: str, at: int, value: float) -> None:
    ranks = LocalWorld(3).run(partial(poisoned, name=name, at=at, value=value))
    for seen in zip(*ranks, strict=True):
        assert all(torch.equal(each, seen[0]) for each in seen)
        assert seen[0].isfinite().all()


def test_the_first_of_some_skipped_steps_is_told_and_32_in_a_row_raise_on_all_ranks() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense())
        for step in range(35):
            learn(steps.model, comm.rank, step)
            bias = steps.model.get_parameter("1.bias")
            if comm.rank == 1 and step not in (0, 2):
                bias.grad = torch.full_like(bias, torch.nan)
            if step < 34:
                steps.step()
        with pytest.raises(RuntimeError, match="the last 32 steps were skipped on all ranks, and no weight has moved"):
            steps.step()

    with pytest.warns(UserWarning, match="was skipped on all ranks") as caught:
        LocalWorld(2).run(body)
    told = sorted(str(each.message).partition(" was skipped")[0] for each in caught)
    assert told == ["step 1", "step 1", "step 3", "step 3"]  # on both ranks


def normed(comm: Comm | None = None, **settings: Any) -> AdamWSteps:
    """Make steps of layers with BatchNorm, whose buffers differ from rank to rank; without `comm` ranks are processes."""
    torch.manual_seed(dist.get_rank() if comm is None else comm.rank)
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    given = {"block": 16, "measure_every": 3, "bucket_mb": 2e-4, "timeout_s": 120.0, **settings}
    return AdamWSteps(made, torch.optim.AdamW(made.parameters(), lr=0.01), TopK(0.25), comm=comm, **given)


def fit(steps: AdamWSteps, span: range, skipped: Sequence[int] = (10,), too_long: Sequence[int] = ()) -> list[Tensor]:
    """Train; return own weights and buffers, then common weights. In `skipped` steps rank 1 has Inf, in `too_long` sketches overflow."""
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.optimizers[0].zero_grad()
        loss = steps.model(torch.randn(8, 6, generator=generator)).square().sum()
        (loss * (torch.inf if step in skipped and steps.place[0] == 1 else 1.0)).backward()
        steps.clip_grad_norm_(1.0)
        if step in too_long:
            _first(steps, 16).copy_(too_long_to_measure(step, 16))
        steps.step()
    return [*(each.clone() for each in steps.model.state_dict().values()), common(steps)]


@pytest.mark.slow
def test_a_run_that_is_resumed_at_any_step_has_the_same_bits_also_where_steps_are_skipped(tmp_path: Path) -> None:
    """Of the skipped steps the first one, and the 9th, measure the ratio, and the 10th does not."""
    skipped = (0, 9, 10)

    def whole(comm: LocalComm) -> list[Tensor]:
        steps = normed(comm)
        found = fit(steps, range(14), skipped)
        assert steps.stats()["skipped"] == 3
        return found

    def broken(comm: LocalComm, at: int) -> list[Tensor]:
        before = normed(comm)
        fit(before, range(at), skipped)
        sparsync.checkpoint.save(before, tmp_path / str(at))
        comm.all_gather(torch.zeros(1))
        after = normed(comm)
        sparsync.checkpoint.load(after, tmp_path / str(at))
        assert all(map(torch.equal, before.model.state_dict().values(), after.model.state_dict().values()))
        assert before.stats() == after.stats()
        return fit(after, range(at, 14), skipped)

    wanted = LocalWorld(2).run(whole)
    for at in range(1, 14):
        for ours, theirs in zip(LocalWorld(2).run(partial(broken, at=at)), wanted, strict=True):
            assert all(map(torch.equal, ours, theirs)), at
    assert torch.equal(wanted[0][-1], wanted[1][-1])


def test_buffers_are_a_ranks_own_and_own_weights_are_back_after_an_evaluation() -> None:
    def body(comm: LocalComm) -> None:
        steps = normed(comm, keep=1.0)
        *own, _ = fit(steps, range(3))
        with steps.averaged():
            assert all(map(torch.equal, steps.model.buffers(), [each for each in own if each.shape in ((8,), ())][-3:]))
            for call in (steps.step, steps.state_dict, steps.averaged().__enter__):
                with pytest.raises(RuntimeError, match="leave `with handle"):
                    call()
        assert all(map(torch.equal, steps.model.state_dict().values(), own))
        with pytest.raises(ZeroDivisionError), steps.averaged():
            raise ZeroDivisionError
        assert all(map(torch.equal, steps.model.state_dict().values(), own))

    LocalWorld(2).run(body)


class FailsInSecondBucket(TopK):
    """Fails in the second bucket of step 3, on all ranks."""

    def reduce(self, state: State, bucket: Bucket, comm: Comm) -> sparsync.Report:
        if bucket.step == 3 and bucket.key.endswith("/1"):
            raise MemoryError("no memory")
        self.given = bucket.grad.clone()
        return super().reduce(state, bucket, comm)


@pytest.mark.parametrize("overflow", [False, True], ids=["finite", "sketch overflows"])
def test_after_a_failure_in_a_later_bucket_what_the_first_one_sent_is_in_the_residuals_again(overflow: bool) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        scheme = FailsInSecondBucket(0.25)
        steps = start(comm, scheme, bucket_mb=2e-4)
        seen = train(steps, range(3))
        own, before = flat(steps.model.parameters()), steps.state.state_dict()["residual"]["0.weight"]
        learn(steps.model, comm.rank, 3)
        if overflow:
            steps.model.get_parameter("0.weight").grad = torch.zeros(8, 6)
            _first(steps).copy_(too_long_to_measure(3, BLOCK))
        with pytest.raises(MemoryError, match="no memory"):
            steps.step()
        assert torch.equal(common(steps), seen[-1])
        assert torch.equal(flat(steps.model.parameters()), own)
        held, given = steps.state.state_dict()["residual"]["0.weight"], scheme.given
        train(steps, range(4, 6))
        assert steps.stats()["steps"] == 6
        return before + given, held, common(steps)

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first[2], second[2])
    assert torch.allclose(first[0] + second[0], first[1] + second[1], atol=1e-6)


def _first(steps: AdamWSteps, block: int = BLOCK) -> Tensor:
    """Return the first block of the gradient, a view."""
    gradient = next(steps.model.parameters()).grad
    assert gradient is not None
    return gradient.view(-1)[:block]


class NotedSteps(AdamWSteps):
    """Notes this rank's steps of each bucket."""

    made: list[Tensor]

    rate: float | None = None  # of the last bucket, in place of the right one

    def note(self) -> "NotedSteps":
        self._make = self._sender.steps_to_make
        self._sender.steps_to_make = self._noted
        return self

    def _noted(self, place: int, gradients: Gradients, P: int) -> StepsToMake:
        steps = self._make(place, gradients, P)
        self.made = [*(self.made if place else []), replace(steps, square=steps.square.clone()).make()]
        if self.rate is not None and place == len(self._weights.buckets) - 1:
            return replace(steps, numbers=[(self.rate, *rest) for _, *rest in steps.numbers])
        return steps


def noted(comm: Comm, scheme: Scheme) -> NotedSteps:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.25, betas=(0.5, 0.95))
    given: dict[str, Any] = {"bucket_mb": 2e-4, "block": BLOCK, "measure_every": EVERY, "keep": 0.5, "decay": 1.0}
    steps = NotedSteps(made, optimizer, scheme, comm=comm, **given).note()
    assert len(steps._weights.buckets) > 1
    return steps


@pytest.mark.parametrize("at", [0, 5])
@pytest.mark.parametrize("name", one_in(3, (name for name in SCHEMES if name not in ("dense", "per_parameter"))))
def test_where_only_the_sketch_overflows_the_step_is_skipped_and_what_was_sent_is_in_the_residuals_again(
    name: str, at: int
) -> None:
    """At step 0 the ratio is measured before the steps, at step 5 beside them."""

    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        scheme = SCHEMES[name]()
        steps = noted(comm, scheme)
        train(steps, range(at))
        before, moved, momentum = (
            held(steps),
            common(steps),
            [each.clone() for each in steps._sender.vectors["momentum"]],
        )
        was = deepcopy(steps.state_dict()["adamw_steps"]["ratio"])
        for each in steps.model.parameters():
            each.grad = torch.full_like(each, comm.rank + 1)
        _first(steps).copy_(too_long_to_measure(at, BLOCK))
        reports = steps.step()
        assert [report.key == "ratio" for report in reports] == [True, *[False] * len(steps._weights.buckets)]
        assert [bool(report.details["overflow"]) for report in reports] == [report.key == "ratio" for report in reports]
        assert (steps.stats()["skipped"], steps.stats()["exchanges"], steps._sender.ratios.measured) == (1, at, at)
        assert torch.equal(common(steps), moved)
        assert all(map(torch.equal, momentum, steps._sender.vectors["momentum"]))
        after, now = held(steps), steps.state_dict()["adamw_steps"]["ratio"]
        assert all(torch.equal(was[key][kind], now[key][kind]) for key in was for kind in was[key] if kind != "block")
        for bucket in steps._weights.buckets:
            share = steps.state.unsent(bucket.bucket(bucket.common, 0), comm)
            assert share is not None
            assert torch.equal(bucket.own(), bucket.common - 0.5 * share)
        own = flat(steps.made)
        seen = train(steps, range(at + 1, at + 5))[-1]
        assert not torch.equal(seen, moved)
        return before, own, after, seen

    ranks = LocalWorld(P).run(body)
    assert all(torch.equal(seen, ranks[0][3]) for *_, seen in ranks)
    before, own, after = (torch.stack([rank[i] for rank in ranks]).sum(0) for i in range(3))
    assert bool(own.any())
    assert torch.allclose(after, before + own, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_only_its_division_made_short_enough_is_not_measured() -> None:
    """The ranks' gradients cancel out, so that the sums of their sketch are finite."""

    def body(comm: LocalComm) -> Tensor:
        steps = noted(comm, TopK(0.25))
        train(steps, range(4))
        assert steps.clip_factor > 1.05
        before, moved = [each.clone() for each in steps._sender.ratios.of_own], common(steps)
        steps.optimizers[0].zero_grad()
        bias = steps.model.get_parameter("1.bias")
        (bias * torch.tensor([1.86e19 if comm.rank else -1.86e19, 0.0, 0.0])).sum().backward()
        assert bias.grad is not None and bool(bias.grad.square().isfinite().all())
        reports = steps.step()
        assert reports[0].key == "ratio" and all(report.details["overflow"] for report in reports)
        assert all(map(torch.equal, before, steps._sender.ratios.of_own))
        assert torch.equal(common(steps), moved)
        return train(steps, range(5, 8))[-1]

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first, second) and bool(first.isfinite().all())
