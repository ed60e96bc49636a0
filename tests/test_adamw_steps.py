"""Steps of AdamW in one process: the formulas, what NaN leads to, what is saved, and that nothing is lost on the way."""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward  # pyright: ignore[reportPrivateImportUsage]
from torch.optim import lr_scheduler

import sparsync
from helpers.quick import one_in
from helpers.sketches import too_long_to_measure
from sparsync import AdamWSteps, Bucket, Dense, LocalWorld, MiCRO, OkTopk, SkipReduce, State, Steps, TopK, TwoShot
from sparsync.base.scheme import Scheme
from sparsync.base.state import innermost
from sparsync.comm.local import LocalComm
from sparsync.core import Comm, Span, digest, laid_out
from sparsync.exchanges.block_ratios import BlockRatios
from sparsync.exchanges.rules import MuonRule
from sparsync.exchanges.whole_steps import Gradients, StepsToMake
from sparsync.kernels.step_reference import signs
from sparsync.schemes import ExDyna, PerParameter, Quantized

pytestmark = pytest.mark.filterwarnings("ignore:step .* was skipped on all ranks")
P, BLOCK, EVERY = 4, 8, 2
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "topk": lambda: TopK(0.25),
    "micro": lambda: MiCRO(0.25),
    "oktopk": lambda: OkTopk(0.25),
    "two_shot": lambda: TwoShot(0.25, values="float32"),
    "sign": lambda: TwoShot(1.0, values="sign"),
    "skip_reduce": lambda: SkipReduce(0.5, feedback=True),
    "per_parameter": lambda: PerParameter(TopK(0.25), {"*bias": Dense()}),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))


def learn(made: nn.Module, rank: int, step: int) -> None:
    """Noise around a common gradient, whole numbers whose sums over a block and ranks bfloat16 holds; some parameters have none."""
    for i, parameter in enumerate(made.parameters()):
        seeds = (10 * step + i, 1000 * (rank + 1) + 10 * step + i)
        parts = [torch.randint(-4, 5, parameter.shape, generator=torch.Generator().manual_seed(each)) for each in seeds]
        parameter.grad = None if (step + rank + i) % 5 == 0 else (parts[0] + parts[1]).to(parameter.dtype)


def flat(values: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.detach().flatten() for each in values])


def gradient(rank: int, step: int) -> Tensor:
    made = model()
    learn(made, rank, step)
    return flat(torch.zeros_like(each) if each.grad is None else each.grad for each in made.parameters())


def common(steps: AdamWSteps) -> Tensor:
    with steps.averaged():
        return flat(steps.model.parameters())


def groups(made: nn.Sequential, rates: Sequence[float], decays: Sequence[float]) -> list[dict[str, Any]]:
    layers = [each for each in made if isinstance(each, nn.Linear)]
    return [
        {"params": list(layer.parameters()), "lr": rate, "weight_decay": decay}
        for layer, rate, decay in zip(layers, rates, decays, strict=True)
    ]


def start(
    comm: Comm,
    scheme: Scheme,
    betas: tuple[float, float] = (0.9, 0.95),
    rates: Sequence[float] = (0.25, 0.25),
    decays: Sequence[float] = (0.0, 0.0),
    **settings: Any,
) -> AdamWSteps:
    made = model()
    optimizer = torch.optim.AdamW(groups(made, rates, decays), betas=betas)
    given = {"block": BLOCK, "measure_every": EVERY, "beta2": betas[1], "decay": 1.0, **settings}
    return AdamWSteps(made, optimizer, scheme, comm=comm, **given)


def train(steps: AdamWSteps, span: range) -> list[Tensor]:
    """Train, and return the common weights after each step."""
    seen = []
    for step in span:
        learn(steps.model, steps.place[0], step)
        steps.step()
        seen.append(common(steps))
    return seen


@cache
def taking_part(P: int, step: int) -> Tensor:
    """Return for each element whether any rank has a gradient of its parameter."""
    made = [model() for _ in range(P)]
    for rank, each in enumerate(made):
        learn(each, rank, step)
    some = [
        any(each.grad is not None for each in ranks)
        for ranks in zip(*(each.parameters() for each in made), strict=True)
    ]
    return flat(torch.full(each.shape, one) for each, one in zip(made[0].parameters(), some, strict=True))


@cache
def own_steps(rank: int, P: int, count: int, rate: float, beta2: float, eps: float) -> list[Tensor]:
    """Return x of one rank by the formulas, on whole vectors and with loops over blocks."""
    n = gradient(0, 0).numel()
    blocks = [slice(first, min(first + BLOCK, n)) for first in range(0, n, BLOCK)]
    square, of_mean, of_own = torch.zeros(n), torch.zeros(len(blocks)), torch.zeros(len(blocks))
    ends = list(accumulate(each.numel() for each in model().parameters()))
    place = torch.tensor([bisect_right(ends, block.start) for block in blocks])  # the parameter of each block
    found, measured, seen = [], 0, torch.zeros(n)

    def measure(gradients: list[Tensor], step: int) -> None:
        weight = max(0.02, 1 / measured)
        less = signs(n, digest(f"ratio/float32/cpu/0/{step}") % 2**32, gradients[0].device)
        for i, block in enumerate(blocks):
            mean = sum(float(torch.where(less, -each, each)[block].sum()) for each in gradients) / P
            of_mean[i] += weight * (mean**2 - of_mean[i])
            of_own[i] += weight * ((gradients[rank][block] ** 2).sum() - of_own[i])

    for step in range(count):
        gradients = [gradient(each, step) for each in range(P)]
        own, ratio = gradients[rank], torch.ones(n)
        due = P > 1 and (step < 8 or step % EVERY == 0)
        measured += due
        if due and measured == 1:
            measure(gradients, step)
        for i, block in enumerate(blocks):
            if of_own[i] > 0:
                around = of_mean[place == place[i]].sum() / of_own[place == place[i]].sum()
                known = measured - (due and measured > 1)
                both = (known * of_mean[i] / of_own[i] + 16 * around) / (known + 16)
                ratio[block] = both.clamp(1 / P, 1.0)
        active = taking_part(P, step)
        square, seen = torch.where(active, beta2 * square + (1 - beta2) * own**2, square), seen + active
        found.append(rate * own / ((ratio * square / (1 - beta2**seen).clamp(min=eps)).sqrt() + eps))
        if due and measured > 1:  # it serves from the next step on
            measure(gradients, step)
    return found


@pytest.mark.parametrize("P", [1, 4])
def test_with_dense_the_common_weights_follow_the_formulas(P: int) -> None:
    count, beta1 = 12, 0.75
    body = lambda comm: train(start(comm, Dense(), (beta1, 0.95), decays=(0.125, 0.125)), range(count))  # noqa: E731
    ranks = LocalWorld(P).run(body)
    weights, momentum, applied = flat(model().parameters()), torch.zeros(83), torch.zeros(83)
    steps = [own_steps(rank, P, count, 0.25, 0.95, 1e-8) for rank in range(P)]
    for t in range(count):
        mean = torch.stack([each[t] for each in steps]).sum(0) / P
        active = taking_part(P, t)
        momentum, applied = torch.where(active, beta1 * momentum + (1 - beta1) * mean, momentum), applied + active
        moved = (1 - 0.25 * 0.125) * weights - momentum / (1 - beta1**applied)
        weights = torch.where(active, moved, weights)
        for rank in ranks:
            assert torch.equal(rank[t], ranks[0][t])
        assert torch.allclose(ranks[0][t], weights, rtol=1e-5, atol=1e-5)


def test_one_rank_without_momentum_takes_the_steps_of_torchs_adamw_also_with_groups_a_schedule_and_gradients_that_are_missing() -> (
    None
):
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), (0.0, 0.95), (0.25, 0.0625), (0.125, 0.5), keep=0.0)
        reference = model()
        optimizer = torch.optim.AdamW(groups(reference, (0.25, 0.0625), (0.125, 0.5)), betas=(0.0, 0.95))
        schedules = [lr_scheduler.CosineAnnealingLR(each, 20) for each in (steps.optimizers[0], optimizer)]
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for one, other in zip(steps.model.parameters(), reference.parameters(), strict=True):
                one.grad = other.grad = torch.randn(one.shape, generator=generator)
            # The first layer has no gradient for a while, a bias none for long.
            for made in (steps.model, reference):
                missing = [
                    *(made.get_submodule("0").parameters() if step in range(5, 9) else ()),
                    *([made.get_parameter("1.bias")] if step < 15 else []),
                ]
                for each in missing:
                    each.grad = None
            assert [report.key for report in steps.step()] == ["float32/cpu/0"]  # no ratio
            optimizer.step()
            for schedule in schedules:
                schedule.step()
        assert torch.allclose(common(steps), flat(reference.parameters()), rtol=1e-5, atol=1e-6)
        assert steps.stats()["drift"] == 0

    LocalWorld(1).run(body)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        *one_in(3, (pytest.param(name, 0.5) for name in SCHEMES)),
        *(pytest.param(name, 0.0, marks=pytest.mark.slow if name != "micro" else ()) for name in SCHEMES),
    ],
)
def test_steps_are_in_the_common_weights_or_in_a_residual_and_own_weights_hold_their_share(
    name: str, keep: float
) -> None:
    def body(comm: LocalComm) -> tuple[list[Tensor], Tensor, Tensor]:
        scheme = SCHEMES[name]()
        steps = start(comm, scheme, (0.0, 0.95), keep=keep)
        seen = train(steps, range(10))
        reports = steps.reports()
        assert all(report.sent == report.cost for report in reports)
        assert [report.step for report in reports if report.key == "ratio"] == [*range(8), 8]
        stats, nbytes = steps.stats(), sum(report.cost.nbytes for report in reports)
        assert (stats["steps"], stats["skipped"], stats["bytes_sent"]) == (10, 0, nbytes)
        assert stats["bits"] == 8 * nbytes / 830
        names = [each for each, _ in steps.model.named_parameters()]
        residual = steps.state.state_dict().get("residual", {})
        held = flat(
            residual.get(each, torch.zeros(p.numel())) for each, p in zip(names, steps.model.parameters(), strict=True)
        )
        bucket = steps._weights.buckets[0]
        share = steps.state.unsent(bucket.bucket(bucket.common, 0), comm)
        wanted = bucket.common if share is None else bucket.common - keep * share
        assert torch.equal(flat(steps.model.parameters()), wanted)
        assert (stats["drift"] > 0) == (keep > 0 and name != "dense")
        return seen, held, sum(own_steps(comm.rank, P, 10, 0.25, 0.95, 1e-8), torch.zeros(83))

    ranks = LocalWorld(P).run(body)
    for seen, _, _ in ranks:
        assert all(map(torch.equal, seen, ranks[0][0]))
    moved = P * (flat(model().parameters()) - ranks[0][0][-1])
    held, taken = torch.stack([each[1] for each in ranks]).sum(0), torch.stack([each[2] for each in ranks]).sum(0)
    assert torch.allclose(moved + held, taken, rtol=1e-4, atol=1e-4)
    assert name == "dense" or bool(held.any())


def idle_for_a_while(comm: LocalComm, name: str, resumed_at: int = -1) -> list[list[Tensor]]:
    """Train 12 steps; from the 4th to the 8th the first weight is frozen, and the last bias has no gradient on any rank.

    Return own weights and common ones after each step.
    """

    def made() -> AdamWSteps:
        steps = start(comm, SCHEMES[name](), decays=(0.125, 0.125), keep=0.5, bucket_mb=2e-4)
        assert len(steps._weights.buckets) > 1
        return steps

    def state(steps: AdamWSteps) -> list[dict[str, Tensor]]:
        saved = steps.state_dict()
        return [saved["adamw_steps"]["square"], saved["adamw_steps"]["momentum"], saved["scheme"].get("residual", {})]

    steps, seen = made(), []
    for step in range(12):
        if step == resumed_at:
            before, steps = steps, made()
            steps.load_state_dict(before.state_dict())
        idle = step in range(4, 9)
        frozen, missing = steps.model.get_parameter("0.weight"), steps.model.get_parameter("1.bias")
        frozen.requires_grad_(not idle)
        learn(steps.model, comm.rank, step)
        if idle:
            missing.grad = None
        last, held = [each.detach().clone() for each in (frozen, missing)], state(steps)
        steps.step()
        if idle:
            for each, name_of in ((last[0], "0.weight"), (last[1], "1.bias")):
                assert torch.equal(each, steps.model.get_parameter(name_of))
                for before, after in zip(held, state(steps), strict=True):
                    assert torch.equal(before.get(name_of, torch.zeros(0)), after.get(name_of, torch.zeros(0)))
            assert torch.equal(common(steps)[:48], seen[3][1][:48])
            assert torch.equal(common(steps)[-3:], seen[3][1][-3:])
        seen.append([flat(steps.model.parameters()), common(steps)])
    assert not torch.equal(seen[-1][1][:48], seen[3][1][:48])
    return seen


@pytest.mark.parametrize("name", one_in(4, SCHEMES))
def test_what_is_frozen_or_has_no_gradient_on_any_rank_neither_moves_nor_decays_and_what_is_unsent_of_it_waits(
    name: str,
) -> None:
    ranks = LocalWorld(P).run(partial(idle_for_a_while, name=name))
    for seen in ranks:
        assert all(torch.equal(ours[1], first[1]) for ours, first in zip(seen, ranks[0], strict=True))
    if name == "two_shot":
        resumed = LocalWorld(P).run(partial(idle_for_a_while, name=name, resumed_at=6))
        for ours, wanted in zip(resumed, ranks, strict=True):
            assert all(
                torch.equal(*each) for pair in zip(ours, wanted, strict=True) for each in zip(*pair, strict=True)
            )


def test_a_rank_without_gradients_takes_part_with_zeros_where_another_rank_has_some() -> None:
    def body(comm: LocalComm) -> Tensor:
        steps = start(comm, Dense(), (0.0, 0.0))
        before = common(steps)
        for each in steps.model.parameters():
            each.grad = torch.full_like(each, 8.0) if comm.rank == 0 else None
        steps.step()
        return common(steps) - before

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first, second)
    assert bool((first < 0).all())


@pytest.mark.parametrize("name", one_in(3, SCHEMES))
def test_an_exchange_at_the_end_sends_all_that_is_unsent(name: str) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        scheme = SCHEMES[name]()
        steps = start(comm, scheme, (0.0, 0.95), keep=0.5)
        before = train(steps, range(6))[-1]
        assert len(steps.flush()) == (name != "dense")
        assert torch.equal(before, common(steps)) == (name == "dense")
        assert torch.equal(flat(steps.model.parameters()), common(steps))
        assert (steps.stats()["steps"], steps.stats()["drift"]) == (6, 0)
        assert not any(bool(each.any()) for each in steps.state.state_dict().get("residual", {}).values())
        ended = common(steps)
        train(steps, range(6, 7))
        return ended, sum(own_steps(comm.rank, P, 6, 0.25, 0.95, 1e-8), torch.zeros(83))

    ranks = LocalWorld(P).run(body)
    assert all(torch.equal(ended, ranks[0][0]) for ended, _ in ranks)
    taken = torch.stack([each for _, each in ranks]).sum(0)
    assert torch.allclose(P * (flat(model().parameters()) - ranks[0][0]), taken, rtol=1e-4, atol=1e-4)


def test_with_one_rank_neither_buckets_nor_blocks_change_any_bits() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        given: dict[str, Any] = {"rates": (0.25, 0.5), "decays": (0.125, 0.0)}
        one, many = start(comm, Dense(), **given), start(comm, Dense(), bucket_mb=1e-4, block=3, **given)
        assert (len(one._weights.buckets), len(many._weights.buckets)) == (1, 4)
        return [*map(torch.sub, train(one, range(5)), train(many, range(5)))]

    assert not any(each.any() for each in LocalWorld(1).run(body)[0])


@pytest.mark.parametrize("share", [0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 1.0))])
def test_the_ratio_is_1_for_alike_gradients_a_quarter_for_the_noise_of_4_ranks_and_between_for_a_mixture(
    share: float,
) -> None:
    def body(comm: LocalComm) -> tuple[float, float, float]:
        made = nn.Linear(40, 50)
        steps = AdamWSteps(made, torch.optim.AdamW(made.parameters()), Dense(), comm=comm, block=4, measure_every=1)
        assert steps.clip_factor == 1
        for step in range(60):
            for i, each in enumerate(made.parameters()):
                alike = torch.randn(each.shape, generator=torch.Generator().manual_seed(2 * step + i))
                seed = 1000 * (comm.rank + 1) + 2 * step + i
                own = torch.randn(each.shape, generator=torch.Generator().manual_seed(seed))
                each.grad = (1 - share) ** 0.5 * alike + share**0.5 * own
            steps.step()
        ratios = steps._ratios
        assert ratios.ratio(0, P).shape == (
            513,
        )  # the last block is half full; twice as many as there are rows of signs
        assert float(ratios.ratio(0, P).min()) >= 0.25
        made.zero_grad()
        made(torch.ones(1, 40)).sum().backward()
        norm = steps.clip_grad_norm_(1.0)
        return float(ratios.of_mean[0].sum() / ratios.of_own[0].sum()), steps.clip_factor, float(norm)

    wanted = 1 - share + share / P
    ranks = LocalWorld(P).run(body)
    common = (sum(2050 / factor**2 for _, factor, _ in ranks) / P) ** 0.5
    for ratio, factor, norm in ranks:
        assert norm == ranks[0][2] == pytest.approx(common, rel=1e-4)
        assert ratio == pytest.approx(wanted, rel=0.1)
        assert factor == pytest.approx(wanted**-0.5, rel=0.05)


def test_a_block_measured_once_hardly_counts_beside_its_parameter_and_later_it_does() -> None:
    layout = laid_out({"a": torch.Size([6]), "b": torch.Size([6])}.items())  # "a" has the block that reaches into "b"
    ratios = BlockRatios([torch.zeros(12)], [layout], block=4, every=8)
    assert ratios.ratio(0, P).tolist() == [1, 1, 1]
    ratios.observe(torch.tensor([0.0, 17.0, 2.0]), [torch.full((3,), 16.0)], [[each.span for each in layout]])
    assert ratios.ratio(0, P).tolist() == [0.5, 0.5625, 0.25]  # "a" has 17/32; "b" 1/8, and noise 1/P
    ratios.measured = 48
    assert ratios.ratio(0, P).tolist() == [0.25, 59.5 / 64, 0.25]


def test_whoever_asks_for_the_clip_factor_or_saves_before_a_device_has_measured_changes_nothing() -> None:
    def measured(asks: bool) -> tuple[float, float]:
        ratios = BlockRatios([torch.zeros(4)], [laid_out([("a", torch.Size([4]))])], block=4, every=8)
        if asks:
            assert ratios.state_dict(["all"])["all"]["known"].tolist() == [0.0, 0.0]
            assert ratios.clip_factor(P) == 1.0
        ratios.observe(torch.ones(1), [torch.full((1,), 4.0)], [[Span(0, 4)]], skip=torch.zeros(1))
        return ratios.clip_factor(P), ratios.clip_factor(P, latest=True)

    assert measured(asks=True) == measured(asks=False) == (1.0, 2.0)


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


def test_a_layer_that_is_loaded_in_training_is_the_common_one_on_all_ranks_and_the_others_go_on() -> None:
    def body(comm: LocalComm) -> Tensor:
        steps = start(comm, TwoShot(0.25, values="sign"), keep=0.5)
        before = train(steps, range(6))[-1]
        layer = {name: each for name, each in pretrained().items() if name.startswith("1.")}
        steps.model.load_state_dict(layer, strict=False)
        state = steps.state_dict()["adamw_steps"]["common"]
        assert all(torch.equal(state[name], each.flatten()) for name, each in layer.items())
        assert torch.equal(common(steps), torch.cat([before[:56], flat(layer.values())]))
        return train(steps, range(6, 9))[-1]

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first, second)


def test_loading_the_common_weights_puts_the_own_ones_back_also_where_these_are_the_same() -> None:
    def body(comm: LocalComm) -> tuple[set[str], Tensor]:
        steps = start(comm, TopK(0.25), keep=0.5)
        for step in range(3):
            learn(steps.model, comm.rank, step)
            if comm.rank == 0:  # has nothing unsent of this one, so its own weights are the common ones
                steps.model.get_parameter("0.weight").grad = None
            steps.step()
        before = flat(deepcopy(steps.model).parameters())
        with steps.averaged():
            loaded = deepcopy(steps.model.state_dict())
        own = steps.model.get_parameter("0.weight")
        assert torch.equal(own, loaded["0.weight"]) == (comm.rank == 0)
        steps.model.load_state_dict(loaded)
        assert torch.equal(common(steps), flat(loaded.values()))
        assert torch.equal(flat(steps.model.parameters()), before)
        return set(steps._adopted), train(steps, range(3, 6))[-1]

    (first, weights), (second, others) = LocalWorld(2).run(body)
    assert first == second == set()
    assert torch.equal(weights, others)


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


def test_elements_without_gradient_stay_and_the_first_gradient_of_a_rare_row_makes_a_bounded_step() -> None:
    def body(comm: LocalComm) -> None:
        made = nn.Embedding(3, BLOCK)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1.0, betas=(0.0, 0.96), weight_decay=0.0)
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm, block=BLOCK, measure_every=2)
        before = made.weight.detach().clone()
        for step in range(90):
            made.weight.grad = torch.zeros(3, BLOCK)
            made.weight.grad[0] = torch.randn(BLOCK, generator=torch.Generator().manual_seed(10 * step + comm.rank))
            made.weight.grad[1] = 8.0 * (step in (40, 81))  # one is measured, and the other not
            last = common(steps).view(3, BLOCK)[1]
            steps.step()
            moved = last - common(steps).view(3, BLOCK)[1]
            if step not in (40, 81):
                assert not moved.any()
            else:  # AdamW's is 1 / sqrt(1 - beta2) = 5; a rank's own is longer by at most sqrt(P)
                assert 4 < float(moved.abs().max()) <= 5.0 * P**0.5
        with steps.averaged():
            assert torch.equal(made.weight[2], before[2])
        assert float(steps._ratios.ratio(0, P)[2]) == 1

    LocalWorld(P).run(body)


def poisoned(comm: LocalComm, name: str, at: int, value: float) -> list[Tensor]:
    scheme = SCHEMES[name]()
    steps = start(comm, scheme, keep=0.5, bucket_mb=2e-4)
    assert len(steps._weights.buckets) > 1
    seen = []
    for step in range(16):
        learn(steps.model, comm.rank, step)
        before = [common(steps), *(each.clone() for each in steps._vectors["momentum"])]
        ratios = [each.clone() for each in steps._ratios.of_own]
        if comm.rank == 1 and step == at:
            last = list(steps.model.parameters())[-1]
            last.grad = torch.full_like(last, value)
        reports = steps.step()
        if step == at:
            assert all(map(torch.equal, before, [common(steps), *steps._vectors["momentum"]]))
            assert all(map(torch.equal, ratios, steps._ratios.of_own))
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
    assert all(bool(each.isfinite().all()) for each in steps._vectors["square"])
    return seen


@pytest.mark.parametrize(
    "name", ["topk", "sign", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "per_parameter"))]
)
@pytest.mark.parametrize(
    ("at", "value"),
    one_in(
        2, (pytest.param(*each) for each in ((8, torch.nan), (11, torch.nan), (0, torch.inf), (11, 1e25), (10, 1.2e19)))
    ),
)
def test_nan_inf_or_squares_that_overflow_on_one_rank_skip_the_step_on_all(name: str, at: int, value: float) -> None:
    ranks = LocalWorld(3).run(partial(poisoned, name=name, at=at, value=value))
    for seen in zip(*ranks, strict=True):
        assert all(torch.equal(each, seen[0]) for each in seen)
        assert seen[0].isfinite().all()


def test_the_first_of_some_skipped_steps_is_told_with_the_parameter_and_32_in_a_row_raise_on_all_ranks() -> None:
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
    told = sorted(str(each.message).partition(", or is too long")[0] for each in caught)
    skipped = "was skipped on all ranks: the gradient"
    assert told == [
        f"step {step} {skipped} {where} holds NaN or Inf"
        for step in (1, 3)
        for where in ("of 1.bias on this rank", "on another rank, or the mean step,")
    ]


@pytest.mark.parametrize("key", ["lr", "weight_decay", "eps"])
def test_a_setting_that_is_not_finite_is_an_error_before_anything_is_sent(key: str) -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense())
        learn(steps.model, comm.rank, 0)
        steps.optimizers[0].param_groups[1][key] = torch.nan
        with pytest.raises(ValueError, match=f"{key} of parameter group 1 is nan; it must be finite"):
            steps.step()

    LocalWorld(1).run(body)


def test_after_skipped_steps_the_first_one_is_as_long_as_its_rate() -> None:
    def body(comm: LocalComm) -> Tensor:
        made = nn.Linear(2, 2, bias=False)
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.25, weight_decay=0.0)
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        before = common(steps)
        for value in (torch.nan, torch.inf, -8.0):
            made.weight.grad = torch.full((2, 2), value)
            steps.step()
        return common(steps) - before

    assert torch.allclose(LocalWorld(1).run(body)[0], torch.tensor(0.25), rtol=1e-6)


def test_where_the_mean_of_the_second_bucket_overflows_what_the_first_one_had_sent_is_in_its_residual_again() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        made = nn.ParameterDict({"a": torch.zeros(4), "b": torch.zeros(4)})
        scheme = PerParameter(TopK(0.5), {"b": Dense(wire="float16")})
        rows = [{"params": [made["a"]], "lr": 1.0}, {"params": [made["b"]], "lr": 1e6}]
        optimizer = torch.optim.AdamW(rows, betas=(0.0, 0.95), weight_decay=0.0)
        steps = AdamWSteps(made, optimizer, scheme, keep=0.5, comm=comm, bucket_mb=16 / 2**20)
        made["a"].grad, made["b"].grad = torch.arange(4.0), torch.full((4,), 1.0)
        reports = steps.step()
        assert [report.key for report in reports] == ["ratio", "float32/cpu/0", "float32/cpu/1"]
        assert not common(steps).any()
        assert torch.equal(
            flat(made.parameters()), -0.5 * flat([steps.state.state_dict()["residual"]["a"], torch.zeros(4)])
        )
        wanted = made["a"].grad / (steps._ratios.ratio(0, 2)[0] * made["a"].grad.square()).sqrt().clamp(min=1e-8)
        return steps.state.state_dict()["residual"]["a"], wanted

    ranks = LocalWorld(2).run(body)
    assert torch.allclose(ranks[0][0] + ranks[1][0], ranks[0][1] + ranks[1][1], rtol=1e-6)


def test_weights_of_all_types_frozen_shared_and_in_any_memory_format() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        convolution = nn.Conv2d(2, 3, 3)
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
        made = nn.ModuleList(
            [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(3, 2).bfloat16(), nn.Linear(3, 2).double(), convolution]
        )
        made[1].weight = made[0].weight
        frozen = made[1].bias
        assert isinstance(frozen, nn.Parameter)
        frozen.requires_grad_(False)
        with torch.no_grad():
            for each in made.parameters():
                each.fill_(1.0 + comm.rank)  # rank 0's are copied to all
        steps = AdamWSteps(made, torch.optim.AdamW(made.parameters()), TopK(0.5), keep=0.0, comm=comm, block=5)
        assert all(bool((each == 1).all()) for each in made.parameters())
        reports = []
        for step in range(3):
            learn(made, comm.rank, step)
            frozen.grad = None
            reports = steps.step()
        assert [report.key for report in reports] == ["ratio", "float32/cpu/0", "float64/cpu/0"]
        assert [each.dtype for each in steps._vectors["square"]] == [torch.float32, torch.float64]
        assert torch.equal(frozen, torch.ones(4))
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"1\.bias was frozen or missing when the model was attached"):
            steps.step()
        return list(made.state_dict().values())

    first, second = LocalWorld(2).run(body)
    assert all(map(torch.equal, first, second))


def test_steps_too_short_for_16_bits_add_up_in_the_common_weights() -> None:
    def body(comm: LocalComm) -> tuple[float, float]:
        made = nn.Linear(1, 1, bias=False).bfloat16()
        made.weight.data.fill_(256.0)  # bfloat16 has 8 bits: 256 + 1 is 256
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.25, betas=(0.0, 0.0), weight_decay=0.0)
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        for _ in range(32):
            made.weight.grad = torch.full((1, 1), -1.0).bfloat16()
            steps.step()
        with steps.averaged():
            assert made.weight.item() == 264
        return float(steps._weights.buckets[0].common), made.weight.item()

    assert LocalWorld(2).run(body) == [(264.0, 264.0)] * 2


class Normed(nn.Module):
    """Two layers with BatchNorm between them, whose buffers differ from rank to rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def normed(comm: Comm, **settings: Any) -> AdamWSteps:
    made = Normed(comm.rank)
    given = {"block": 16, "measure_every": 3, "bucket_mb": 2e-4, **settings}
    return AdamWSteps(made, torch.optim.AdamW(made.parameters(), lr=0.01), TopK(0.25), comm=comm, **given)


def fit(steps: AdamWSteps, span: range, skipped: Sequence[int] = (10,)) -> None:
    """Train; in the `skipped` steps rank 1 has Inf."""
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.optimizers[0].zero_grad()
        loss = steps.model(torch.randn(8, 6, generator=generator)).square().sum()
        (loss * (torch.inf if step in skipped and steps.place[0] == 1 else 1.0)).backward()
        steps.clip_grad_norm_(1.0)
        steps.step()


@pytest.mark.slow
def test_a_run_that_is_resumed_at_any_step_has_the_same_bits_also_where_steps_are_skipped(tmp_path: Path) -> None:
    """Of the skipped steps the first one, and the 9th, measure the ratio, and the 10th does not."""
    skipped = (0, 9, 10)

    def whole(comm: LocalComm) -> list[Tensor]:
        steps = normed(comm)
        fit(steps, range(14), skipped)
        assert steps.stats()["skipped"] == 3
        return [*steps.model.state_dict().values(), common(steps)]

    def broken(comm: LocalComm, at: int) -> list[Tensor]:
        before = normed(comm)
        fit(before, range(at), skipped)
        sparsync.checkpoint.save(before, tmp_path / str(at))
        comm.all_gather(torch.zeros(1))
        after = normed(comm)
        sparsync.checkpoint.load(after, tmp_path / str(at))
        assert all(map(torch.equal, before.model.state_dict().values(), after.model.state_dict().values()))
        assert before.stats() == after.stats()
        fit(after, range(at, 14), skipped)
        return [*after.model.state_dict().values(), common(after)]

    wanted = LocalWorld(2).run(whole)
    for at in range(1, 14):
        for ours, theirs in zip(LocalWorld(2).run(partial(broken, at=at)), wanted, strict=True):
            assert all(map(torch.equal, ours, theirs)), at
    assert torch.equal(wanted[0][-1], wanted[1][-1])


def test_a_run_that_is_resumed_before_the_step_after_a_load_has_the_same_bits() -> None:
    def body(comm: LocalComm) -> None:
        before, after = (normed(comm) for _ in range(2))
        fit(before, range(4))
        with before.averaged():
            loaded = deepcopy(before.model.state_dict())
        before.model.load_state_dict(loaded)
        after.load_state_dict(before.state_dict())
        for each in (before, after):
            fit(each, range(4, 6))
        assert all(map(torch.equal, before.model.state_dict().values(), after.model.state_dict().values()))
        assert torch.equal(common(before), common(after))

    LocalWorld(2).run(body)


def test_other_blocks_or_buckets_measure_the_ratio_anew() -> None:
    def body(comm: LocalComm) -> None:
        before = normed(comm)
        fit(before, range(9))
        state = before.state_dict()
        for settings in ({"block": 4}, {"bucket_mb": 25.0}):
            after = normed(comm, **settings)
            after.load_state_dict(state)
            assert torch.equal(common(after), common(before))
            assert after.clip_factor == 1
            again = normed(comm, **settings)
            fit(after, range(9, 11))
            again.load_state_dict(after.state_dict())
            saved, loaded = (each.state_dict()["adamw_steps"] for each in (after, again))
            assert all(saved[key] == loaded[key] for key in ("measured", "measure_until", "applied", "seen"))
            for steps in (after, again):
                fit(steps, range(11, 19))
            measured = [report.step for report in after.reports() if report.key == "ratio"]
            assert measured == [*range(9, 17), 18]
            assert torch.equal(common(after), common(again))

    LocalWorld(2).run(body)


@pytest.mark.parametrize("now", [2, 6])
def test_another_number_of_ranks_continues_from_the_common_weights_and_loses_no_residual(now: int) -> None:
    def save(comm: LocalComm) -> tuple[dict[str, Any], Tensor]:
        steps = start(comm, TopK(0.25))
        train(steps, range(9))
        return steps.state_dict(), common(steps)

    saved = LocalWorld(P).run(save)
    states = [state for state, _ in saved]

    def load(comm: LocalComm) -> dict[str, Any]:
        steps = start(comm, TopK(0.25))
        steps.load_state_dict(steps.resized(states))
        assert torch.equal(common(steps), saved[0][1])
        state = steps.state_dict()
        assert all(map(torch.equal, state["adamw_steps"]["square"].values(), _squares(states[comm.rank % P])))
        seen = train(steps, range(9, 19))
        assert [report.step for report in steps.reports() if report.key == "ratio"] == [*range(9, 17), 18]
        return {**state, "seen": seen}

    ranks = LocalWorld(now).run(load)
    for rank in ranks:
        assert all(map(torch.equal, rank["seen"], ranks[0]["seen"]))
    for name in states[0]["scheme"]["residual"]:
        before = torch.stack([state["scheme"]["residual"][name] for state in states]).mean(0)
        after = torch.stack([rank["scheme"]["residual"].get(name, torch.zeros_like(before)) for rank in ranks]).mean(0)
        assert torch.allclose(before, after, atol=1e-6)


def _squares(state: dict[str, Any]) -> Iterable[Tensor]:
    return state["adamw_steps"]["square"].values()


def test_a_state_of_another_model_changes_nothing() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, TopK(0.25))
        train(steps, range(3))
        made = nn.Linear(2, 2)
        other = AdamWSteps(made, torch.optim.AdamW(made.parameters()), TopK(0.25), comm=comm)
        before = flat(made.parameters())
        with pytest.raises(ValueError, match=r"it has a parameter .*, which this model has not"):
            other.load_state_dict(steps.state_dict())
        assert torch.equal(flat(made.parameters()), before)

    LocalWorld(1).run(body)


def test_buffers_are_a_ranks_own_and_own_weights_are_back_after_an_evaluation() -> None:
    def body(comm: LocalComm) -> None:
        steps = normed(comm, keep=1.0)
        fit(steps, range(3))
        own = [each.clone() for each in steps.model.state_dict().values()]
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


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2]
    ),
    "plateau": lr_scheduler.ReduceLROnPlateau,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_work_and_do_not_warn_whether_made_before_or_after(name: str, first: bool) -> None:
    def body(comm: LocalComm) -> None:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.125)
        schedule = SCHEDULES[name](optimizer) if first else None
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        schedule = schedule or SCHEDULES[name](optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(6):
                learn(made, comm.rank, step)
                steps.step()
                schedule.step(*([1.0] if name == "plateau" else []))
        assert name == "plateau" or optimizer.param_groups[0]["lr"] != 0.125

    LocalWorld(1).run(body)


def test_a_step_is_as_long_as_the_rate_of_its_group_now() -> None:
    def body(comm: LocalComm) -> None:
        made = nn.ParameterList([torch.zeros(3), torch.zeros(2), torch.zeros(4)])
        optimizer = torch.optim.AdamW(
            [{"params": [made[0], made[2]]}, {"params": [made[1]], "lr": torch.tensor(0.5)}],
            lr=0.25,
            betas=(0.0, 0.0),
            weight_decay=0.0,
        )
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        for factor in (1, 2, 0):
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            before = common(steps)
            for each in made:
                each.grad = torch.full_like(each, -8.0)
            steps.step()
            wanted = torch.tensor([0.25] * 3 + [0.5] * 2 + [0.25] * 4) * factor
            assert torch.allclose(common(steps) - before, wanted, rtol=1e-6)

    LocalWorld(1).run(body)


def test_a_parameter_that_changes_its_group_has_the_settings_of_the_new_one_from_the_next_step_on() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), rates=(0.25, 0.0))
        one, other = steps.optimizers[0].param_groups
        train(steps, range(2))
        one["params"], other["params"] = other["params"], one["params"]
        before = common(steps)
        train(steps, range(2, 3))
        assert (common(steps) - before).tolist() != [0.0] * len(before)
        assert steps._groups.number[next(iter(steps.model.state_dict()))] == 1

    LocalWorld(2).run(body)


def test_a_loop_steps_in_one_way_only_and_a_loss_scaler_works_with_that_of_the_handle() -> None:
    def body(comm: LocalComm) -> None:
        torch.manual_seed(0)
        made = nn.Linear(4, 4)
        optimizer, scaler = torch.optim.AdamW(made.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm)
        for step in range(3):
            before = common(steps)
            optimizer.zero_grad()
            loss = made(torch.ones(1, 4)).sum() * (torch.inf if step == 1 and comm.rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            assert step == 1 or bool((made.weight.grad == 1).all())
            steps.step()
            scaler.update()
            assert torch.equal(before, common(steps)) == (step == 1)
        assert (steps.stats()["skipped"], scaler.get_scale()) == (1, 2.0 if comm.rank == 1 else 4.0)
        with pytest.raises(
            RuntimeError, match=r"has called steps\.step\(\) before, and optimizer\.step\(\) would take a second step"
        ):
            optimizer.step()
        steps.close()
        before = made.weight.detach().clone()
        optimizer.step()
        assert not torch.equal(made.weight, before)

    LocalWorld(2).run(body)


def test_what_cannot_be_trained_by_steps_of_adamw_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        made, other = nn.Linear(2, 2), nn.Linear(3, 3)
        adamw = torch.optim.AdamW(made.parameters())
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (torch.optim.SGD(made.parameters(), 1.0), {}, TypeError, "got SGD; for others attach with exchange="),
            (torch.optim.AdamW([made.weight]), {}, ValueError, "the optimizer lacks bias"),
            (
                torch.optim.AdamW([*made.parameters(), other.bias]),
                {},
                ValueError,
                r"that the model lacks, of shapes \[\(3,\)\]",
            ),
            (torch.optim.AdamW(made.parameters(), amsgrad=True), {}, ValueError, "neither amsgrad nor maximize"),
            (torch.optim.AdamW(made.parameters(), maximize=True), {}, ValueError, "neither amsgrad nor maximize"),
            (torch.optim.AdamW(made.parameters(), eps=0.0), {}, ValueError, "eps must be above 0"),
            (torch.optim.Adam(made.parameters(), weight_decay=0.1), {}, ValueError, r"use torch\.optim\.AdamW"),
            (adamw, {"keep": 1.5}, ValueError, r"keep must be in \[0, 1\]"),
            (adamw, {"block": 0}, ValueError, "block must be at least 1"),
            (adamw, {"measure_every": 0}, ValueError, "measure_every must be at least 1"),
            (adamw, {"bucket_mb": 0}, ValueError, "bucket_mb must be above 0"),
            (adamw, {"scheme": "topk"}, TypeError, "scheme must be an instance"),
        ]
        for optimizer, settings, kind, message in cases:
            with pytest.raises(kind, match=message):
                AdamWSteps(made, optimizer, comm=comm, **{"scheme": Dense(), **settings})
        AdamWSteps(made, torch.optim.Adam(made.parameters()), Dense(), comm=comm)

    LocalWorld(1).run(body)


def test_an_optimizer_that_steps_in_the_backward_pass_and_leaves_no_gradient_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        made = nn.Linear(2, 2)
        _apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.1})
        with pytest.raises(ValueError, match="steps during the backward pass and leaves no gradient for a step"):
            AdamWSteps(made, torch.optim.AdamW(made.parameters()), Dense(), comm=comm)

    LocalWorld(1).run(body)


@pytest.mark.parametrize(
    ("setting", "other", "named"),
    [
        ("keep", 0.0, "Steps(keep=0.5)"),
        ("block", 4, "Steps(block=8)"),
        ("scheme", TopK(0.25), "TopK(density=0.5)"),
        ("lr", 0.2, "lr=0.1 in parameter group 0 of AdamW"),
        ("eps", 1e-6, "eps=1e-08 in parameter group 0 of AdamW"),
        ("order", [1, 0], "parameter 'bias' in parameter group 1 of AdamW"),
    ],
)
def test_ranks_with_other_settings_or_groups_are_found_before_anything_is_sent(
    setting: str, other: object, named: str
) -> None:
    def body(comm: LocalComm) -> str:
        given: dict[str, Any] = {"keep": 0.5, "block": 8, "scheme": TopK(0.5), "lr": 0.1, "eps": 1e-8, "order": [0, 1]}
        if comm.rank == 1:
            given[setting] = other
        made = nn.Linear(2, 2)
        parameters = list(made.parameters())
        groups = [{"params": [parameters[each]], "weight_decay": 0.1 * i} for i, each in enumerate(given.pop("order"))]
        optimizer = torch.optim.AdamW(groups, lr=given.pop("lr"), eps=given.pop("eps"))
        with pytest.raises(RuntimeError, match="ranks must agree") as error:
            AdamWSteps(made, optimizer, given.pop("scheme"), **given, comm=comm)
        return str(error.value)

    for found in LocalWorld(2).run(body):
        assert f"rank 0 has {named}" in found and "; give all ranks the same" in found
        assert ("keep" in found) == (setting == "keep")


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


def _first(steps: AdamWSteps) -> Tensor:
    """Return the first block of the gradient, a view."""
    gradient = next(steps.model.parameters()).grad
    assert gradient is not None
    return gradient.view(-1)[:BLOCK]


class NotedSteps(AdamWSteps):
    """Notes this rank's steps of each bucket."""

    made: list[Tensor]

    rate: float | None = None  # of the last bucket, in place of the right one

    def _steps_to_make(self, place: int, gradients: Gradients) -> StepsToMake:
        steps = super()._steps_to_make(place, gradients)
        self.made = [*(self.made if place else []), replace(steps, square=steps.square.clone()).make()]
        if self.rate is not None and place == len(self._weights.buckets) - 1:
            return replace(steps, numbers=[(self.rate, *rest) for _, *rest in steps.numbers])
        return steps


def noted(comm: Comm, scheme: Scheme) -> NotedSteps:
    made = model()
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.25, betas=(0.5, 0.95))
    given: dict[str, Any] = {"bucket_mb": 2e-4, "block": BLOCK, "measure_every": EVERY, "keep": 0.5, "decay": 1.0}
    steps = NotedSteps(made, optimizer, scheme, comm=comm, **given)
    assert len(steps._weights.buckets) > 1
    return steps


def held(steps: AdamWSteps) -> Tensor:
    residual = steps.state_dict()["scheme"]["residual"]
    return flat(residual.get(name, torch.zeros(each.numel())) for name, each in steps.model.named_parameters())


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
        before, moved, momentum = held(steps), common(steps), [each.clone() for each in steps._vectors["momentum"]]
        ratios = deepcopy(steps.state_dict()["adamw_steps"]["ratio"])
        for each in steps.model.parameters():
            each.grad = torch.full_like(each, comm.rank + 1)
        _first(steps).copy_(too_long_to_measure(at, BLOCK))
        reports = steps.step()
        assert [report.key == "ratio" for report in reports] == [True, *[False] * len(steps._weights.buckets)]
        assert [bool(report.details["overflow"]) for report in reports] == [report.key == "ratio" for report in reports]
        assert (steps.stats()["skipped"], steps.stats()["exchanges"], steps._ratios.measured) == (1, at, at)
        assert torch.equal(common(steps), moved)
        assert all(map(torch.equal, momentum, steps._vectors["momentum"]))
        after, now = held(steps), steps.state_dict()["adamw_steps"]["ratio"]
        assert all(torch.equal(ratios[key][kind], now[key][kind]) for key in ratios for kind in ("mean", "own"))
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


@pytest.mark.parametrize("name", ["topk", "two_shot"])
def test_where_the_measurement_fails_after_the_buckets_what_they_sent_is_in_the_residuals_again(name: str) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no memory")

    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        steps = noted(comm, SCHEMES[name]())
        train(steps, range(5))
        before, moved = held(steps), common(steps)
        for each in steps.model.parameters():
            each.grad = torch.full_like(each, comm.rank + 1)
        vars(steps._ratios)["observe"] = fail
        with pytest.raises(MemoryError, match="no memory"):
            steps.step()
        del vars(steps._ratios)["observe"]
        assert torch.equal(common(steps), moved)
        after, own = held(steps), flat(steps.made)
        return before, own, after, train(steps, range(6, 9))[-1]

    ranks = LocalWorld(P).run(body)
    assert all(torch.equal(seen, ranks[0][3]) for *_, seen in ranks)
    before, own, after = (torch.stack([rank[i] for rank in ranks]).sum(0) for i in range(3))
    assert torch.allclose(after, before + own, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_only_its_division_made_short_enough_is_not_measured() -> None:
    """The ranks' gradients cancel out, so that the sums of their sketch are finite."""

    def body(comm: LocalComm) -> Tensor:
        steps = noted(comm, TopK(0.25))
        train(steps, range(4))
        assert steps.clip_factor > 1.05
        before, moved = [each.clone() for each in steps._ratios.of_own], common(steps)
        steps.optimizers[0].zero_grad()
        bias = steps.model.get_parameter("1.bias")
        (bias * torch.tensor([1.86e19 if comm.rank else -1.86e19, 0.0, 0.0])).sum().backward()
        assert bias.grad is not None and bool(bias.grad.square().isfinite().all())
        reports = steps.step()
        assert reports[0].key == "ratio" and all(report.details["overflow"] for report in reports)
        assert all(map(torch.equal, before, steps._ratios.of_own))
        assert torch.equal(common(steps), moved)
        return train(steps, range(5, 8))[-1]

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first, second) and bool(first.isfinite().all())


@pytest.mark.parametrize("make", [OkTopk, ExDyna], ids=["oktopk", "exdyna"])
def test_a_checkpoint_that_is_loaded_after_a_failure_brings_the_schemes_shared_state_back(
    make: Callable[[float], Scheme],
) -> None:
    """Regions and partitions are reset where a step fails, and not again when the next one begins."""

    def body(comm: LocalComm) -> tuple[Tensor, Tensor]:
        whole, steps = start(comm, make(0.25)), start(comm, make(0.25))
        train(steps, range(4))
        state = deepcopy(steps.state_dict())
        steps.optimizers[0].param_groups[0]["lr"] = torch.nan
        with pytest.raises(ValueError, match="lr"):
            steps.step()
        steps.optimizers[0].param_groups[0]["lr"] = 0.25
        steps.load_state_dict(state)
        return train(whole, range(9))[-1], train(steps, range(4, 9))[-1]

    assert all(torch.equal(*each) for each in LocalWorld(P).run(body))


@pytest.mark.slow
def test_one_bit_an_element_fits_a_line_as_all_of_them_do() -> None:
    """Least squares; each rank has data of its own."""

    def body(comm: LocalComm, scheme: Callable[[], Scheme]) -> float:
        torch.manual_seed(0)
        made, target = nn.Linear(32, 16), torch.randn(16, 32)
        steps = AdamWSteps(made, torch.optim.AdamW(made.parameters(), lr=0.05, weight_decay=0.0), scheme(), comm=comm)
        schedule = lr_scheduler.LinearLR(steps.optimizers[0], 1.0, 0.01, 120)
        data = torch.Generator().manual_seed(1 + comm.rank)
        for _ in range(120):
            x = torch.randn(16, 32, generator=data)
            steps.optimizers[0].zero_grad()
            (made(x) - x @ target.T).square().mean().backward()
            steps.step()
            schedule.step()
        with steps.averaged():
            return float((made.weight - target).detach().square().mean())

    dense, one_bit = (
        LocalWorld(P).run(partial(body, scheme=each))[0] for each in (Dense, lambda: TwoShot(1.0, values="sign"))
    )
    assert dense < 0.1
    assert one_bit < 2 * dense + 0.01


@pytest.mark.filterwarnings("ignore:step 4 was skipped")
@pytest.mark.parametrize("name", ["two_shot", "micro"])
def test_buckets_that_were_reduced_before_one_that_overflows_return_to_the_residuals(name: str) -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        steps = noted(comm, SCHEMES[name]())
        few = len(steps._weights.buckets[-1].common)
        train(steps, range(4))
        before, moved = held(steps), common(steps)
        steps.rate = math.inf
        for parameter in steps.model.parameters():
            parameter.grad = torch.full_like(parameter, comm.rank + 1)
        reports = steps.step()
        assert [bool(report.details["overflow"]) for report in reports] == [False] * (len(reports) - 1) + [True]
        assert torch.equal(common(steps), moved)
        return before[:-few], flat(steps.made[:-1]), held(steps)[:-few]

    before, own, after = (torch.stack(each).sum(0) for each in zip(*LocalWorld(P).run(body), strict=True))
    assert bool(own.any())
    assert torch.allclose(after, before + own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("scheme", "beta2", "decay", "found"),
    [
        (lambda: TwoShot(density=1.0, values="sign"), 0.95, None, (0.99, 1.0)),
        (lambda: TwoShot(density=0.25), 0.999, None, (0.999, 0.97)),
        (lambda: TwoShot(density=0.01, density_down=0.04), 0.95, None, (0.99, 0.99)),
        (lambda: PerParameter(TopK(0.25), {"0.*": TopK(0.01)}), 0.95, None, (0.99, 0.99, 0.97)),
        (lambda: PerParameter(TopK(0.01), {"0.*": Quantized("sign")}), 0.95, None, (0.99, 1.0, 0.99)),
        (lambda: TwoShot(density=0.25), 0.95, 0.5, (0.99, 0.5)),
        (lambda: TwoShot(density=0.25, decay=0.9), 0.95, None, (0.99, 0.9)),
    ],
)
def test_moments_remember_and_residuals_forget_by_rule_unless_they_are_told(
    scheme: Callable[[], Scheme], beta2: float, decay: float | None, found: tuple[float, ...]
) -> None:
    def body(comm: LocalComm) -> tuple[float, ...]:
        made = model()
        optimizer = torch.optim.AdamW(made.parameters(), betas=(0.9, beta2))
        mine = scheme()
        steps = AdamWSteps(made, optimizer, mine, comm=comm, decay=decay)
        inside = innermost(steps.state)
        assert isinstance(steps.exchange, Steps)
        memories = steps._groups.rules[0].remembers(steps.exchange.beta2), *(each.decay for each in inside)
        steps.close()
        return memories

    assert LocalWorld(1).run(body) == [found]


def test_muon_keeps_its_own_memory_of_second_moments_unless_it_is_told() -> None:
    rule = MuonRule(0.1, 0.0, 0.95, True, (3.4445, -4.7750, 2.0315), 5, None)
    assert (rule.remembers(None), rule.remembers(0.5)) == (0.95, 0.5)


@pytest.mark.parametrize(("setting", "value"), [("beta2", 1.0), ("beta2", -0.1), ("decay", 1.5), ("decay", -0.5)])
def test_memories_out_of_range_are_refused_with_their_value(setting: str, value: float) -> None:
    given: dict[str, Any] = {setting: value}
    with pytest.raises(ValueError, match=f"{setting} must be in .*, got {value}"):
        Steps(**given)


def test_what_waits_is_forgotten_by_the_share_of_decay() -> None:
    def body(comm: LocalComm) -> Tensor:
        made = nn.Linear(4, 1, bias=False)
        scheme = TopK(0.25)
        steps = AdamWSteps(
            made, torch.optim.AdamW(made.parameters(), lr=1.0, weight_decay=0.0), scheme, comm=comm, decay=0.5
        )
        for gradient in ([8.0, 4.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]):
            made.weight.grad = torch.tensor([gradient])
            steps.step()
        waits, before = steps.state.state_dict()["residual"]["weight"], common(steps)
        steps.flush()
        assert torch.equal(before - common(steps), waits)  # at the end nothing is forgotten
        return waits

    # The first steps are 1 for every element; one is sent in each of the two.
    (residual,) = LocalWorld(1).run(body)
    assert sorted(residual.tolist()) == pytest.approx([0.0, 0.0, 0.5, 0.5], rel=1e-6)


def test_a_decay_that_no_residual_takes_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        for scheme in (Dense(), TwoShot(decay=0.9)):
            made = model()
            with pytest.raises(ValueError, match=r"decay=0\.5 needs a scheme with a residual and no decay setting"):
                AdamWSteps(made, torch.optim.AdamW(made.parameters()), scheme, comm=comm, decay=0.5)

    LocalWorld(1).run(body)
