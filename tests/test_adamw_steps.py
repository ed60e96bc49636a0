"""Steps of AdamW in one process: the formulas, what NaN leads to, what is saved, and that nothing is lost on the way."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import sparsync
from sparsync import AdamWSteps, Bucket, Dense, LocalWorld, MiCRO, OkTopk, PerParameter, SkipReduce, TopK, TwoShot
from sparsync.base.scheme import Scheme
from sparsync.comm.local import LocalComm
from sparsync.core import Comm, generator
from sparsync.integrations.checkpoint import resized

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
    return AdamWSteps(made, optimizer, scheme, comm=comm, **{"block": BLOCK, "measure_every": EVERY, **settings})


def train(steps: AdamWSteps, span: range) -> list[Tensor]:
    """Train, and return the common weights after each step."""
    seen = []
    for step in span:
        learn(steps.model, steps.place[0], step)
        steps.step()
        seen.append(common(steps))
    return seen


def own_steps(rank: int, P: int, count: int, rate: float, beta2: float, eps: float) -> list[Tensor]:
    """Return x of one rank by the formulas, on whole vectors and with loops over blocks."""
    n = gradient(0, 0).numel()
    blocks = [slice(first, min(first + BLOCK, n)) for first in range(0, n, BLOCK)]
    square, of_mean, of_own = torch.zeros(n), torch.zeros(len(blocks)), torch.zeros(len(blocks))
    found, measured = [], 0
    for step in range(count):
        gradients = [gradient(each, step) for each in range(P)]
        own = gradients[rank]
        ratio = torch.ones(n)
        if P > 1:
            if step < 8 or step % EVERY == 0:
                measured += 1
                weight = max(0.02, 1 / measured)
                drawn = torch.randint(0, 2, (256, BLOCK), generator=generator(0, "ratio/float32/cpu/0", step))
                for i, block in enumerate(blocks):
                    signs = (2 * drawn[i] - 1).float()[: block.stop - block.start]
                    mean = sum(float((each[block] * signs).sum()) for each in gradients) / P
                    of_mean[i] += weight * (mean**2 - of_mean[i])
                    of_own[i] += weight * ((own[block] ** 2).sum() - of_own[i])
            for i, block in enumerate(blocks):
                ratio[block] = min(1.0, max(0.5 / P, float(of_mean[i] / of_own[i]))) if of_own[i] > 0 else 1.0
        square = beta2 * square + (1 - beta2) * own**2
        found.append(rate * own / ((ratio * square / (1 - beta2 ** (step + 1))).sqrt() + eps))
    return found


@pytest.mark.parametrize("P", [1, 4])
def test_with_dense_the_common_weights_follow_the_formulas(P: int) -> None:
    count, beta1 = 12, 0.75
    body = lambda comm: train(start(comm, Dense(), (beta1, 0.95), decays=(0.125, 0.125)), range(count))  # noqa: E731
    ranks = LocalWorld(P).run(body)
    weights, momentum = flat(model().parameters()), torch.zeros(83)
    steps = [own_steps(rank, P, count, 0.25, 0.95, 1e-8) for rank in range(P)]
    for t in range(count):
        mean = torch.stack([each[t] for each in steps]).sum(0) / P
        momentum = beta1 * momentum + (1 - beta1) * mean
        weights = (1 - 0.25 * 0.125) * weights - momentum / (1 - beta1 ** (t + 1))
        for rank in ranks:
            assert torch.equal(rank[t], ranks[0][t])
        assert torch.allclose(ranks[0][t], weights, rtol=1e-5, atol=1e-5)


def test_one_rank_without_momentum_takes_the_steps_of_torchs_adamw_also_with_groups_and_a_schedule() -> None:
    def body(comm: LocalComm) -> None:
        steps = start(comm, Dense(), (0.0, 0.95), (0.25, 0.0625), (0.125, 0.5), keep=0.0)
        reference = model()
        optimizer = torch.optim.AdamW(groups(reference, (0.25, 0.0625), (0.125, 0.5)), betas=(0.0, 0.95))
        schedules = [lr_scheduler.CosineAnnealingLR(each, 20) for each in (steps.optimizer, optimizer)]
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            for one, other in zip(steps.model.parameters(), reference.parameters(), strict=True):
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
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
        *((name, 0.5) for name in SCHEMES),
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
        residual = scheme.state_dict().get("residual", {})
        held = flat(
            residual.get(each, torch.zeros(p.numel())) for each, p in zip(names, steps.model.parameters(), strict=True)
        )
        bucket = steps._buckets[0]
        share = scheme.unsent(bucket.bucket(bucket.common, 0), comm)
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


def test_with_one_rank_neither_buckets_nor_blocks_change_any_bits() -> None:
    def body(comm: LocalComm) -> list[Tensor]:
        given: dict[str, Any] = {"rates": (0.25, 0.5), "decays": (0.125, 0.0)}
        one, many = start(comm, Dense(), **given), start(comm, Dense(), bucket_mb=1e-4, block=3, **given)
        assert (len(one._buckets), len(many._buckets)) == (1, 4)
        return [*map(torch.sub, train(one, range(5)), train(many, range(5)))]

    assert not any(each.any() for each in LocalWorld(1).run(body)[0])


@pytest.mark.parametrize("share", [0.5, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.0, 1.0))])
def test_the_ratio_is_1_for_alike_gradients_a_quarter_for_the_noise_of_4_ranks_and_between_for_a_mixture(
    share: float,
) -> None:
    def body(comm: LocalComm) -> tuple[float, float]:
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
        moments = steps._moments[0]
        assert moments.ratio(P).shape == (513,)  # the last block is half full; twice as many as there are rows of signs
        assert float(moments.ratio(P).min()) >= 0.125
        made.bias.grad = None
        made.weight.grad = torch.full((50, 40), 1.0)
        norm = steps.clip_grad_norm_(1.0)
        assert float(norm) == pytest.approx(2000**0.5)
        assert float(made.weight.grad.norm()) == pytest.approx(steps.clip_factor, rel=1e-4)
        return float(moments.of_mean.sum() / moments.of_own.sum()), steps.clip_factor

    wanted = 1 - share + share / P
    for ratio, factor in LocalWorld(P).run(body):
        assert ratio == pytest.approx(wanted, rel=0.1)
        assert factor == pytest.approx(wanted**-0.5, rel=0.05)


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
            else:  # AdamW's is 1 / sqrt(1 - beta2) = 5; a rank's own is longer by at most sqrt(2 P)
                assert 4 < float(moved.abs().max()) <= 5.0 * (2 * P) ** 0.5
        with steps.averaged():
            assert torch.equal(made.weight[2], before[2])
        assert float(steps._moments[0].ratio(P)[2]) == 1

    LocalWorld(P).run(body)


def poisoned(comm: LocalComm, name: str, at: int, value: float) -> list[Tensor]:
    scheme = SCHEMES[name]()
    steps = start(comm, scheme, keep=0.5, bucket_mb=2e-4)
    assert len(steps._buckets) > 1
    seen = []
    for step in range(16):
        learn(steps.model, comm.rank, step)
        before = [common(steps), *(each.momentum.clone() for each in steps._moments)]
        ratios = [each.of_own.clone() for each in steps._moments]
        if comm.rank == 1 and step == at:
            last = list(steps.model.parameters())[-1]
            last.grad = torch.full_like(last, value)
        reports = steps.step()
        if step == at:
            assert all(map(torch.equal, before, [common(steps), *(each.momentum for each in steps._moments)]))
            assert all(map(torch.equal, ratios, [each.of_own for each in steps._moments]))
            assert len(reports) == (1 if at % EVERY == 0 else len(steps._buckets))
        else:
            assert not torch.equal(before[0], common(steps))
        for bucket in steps._buckets:
            share = scheme.unsent(bucket.bucket(bucket.common, 0), comm)
            assert torch.equal(bucket.own(), bucket.common if share is None else bucket.common - 0.5 * share)
        seen.append(common(steps))
    assert steps.stats()["skipped"] == 1
    assert all(bool(each.square.isfinite().all()) for each in steps._moments)
    return seen


@pytest.mark.parametrize(
    "name", ["topk", "sign", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "per_parameter"))]
)
@pytest.mark.parametrize(("at", "value"), [(8, torch.nan), (11, torch.nan), (0, torch.inf), (11, 1e25), (10, 1.2e19)])
def test_nan_inf_or_squares_that_overflow_on_one_rank_skip_the_step_on_all(name: str, at: int, value: float) -> None:
    ranks = LocalWorld(3).run(partial(poisoned, name=name, at=at, value=value))
    for seen in zip(*ranks, strict=True):
        assert all(torch.equal(each, seen[0]) for each in seen)
        assert seen[0].isfinite().all()


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
        assert torch.equal(flat(made.parameters()), -0.5 * flat([scheme.state_dict()["residual"]["a"], torch.zeros(4)]))
        moments = steps._moments[0]
        wanted = made["a"].grad / (moments.ratio(2)[0] * made["a"].grad.square()).sqrt().clamp(min=1e-8)
        return scheme.state_dict()["residual"]["a"], wanted

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
        assert [each.square.dtype for each in steps._moments] == [torch.float32, torch.float64]
        assert torch.equal(frozen, torch.ones(4))
        assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
        frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"1\.bias had no gradient when AdamWSteps was made"):
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
        return float(steps._buckets[0].common), made.weight.item()

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


def fit(steps: AdamWSteps, span: range) -> None:
    for step in span:
        generator = torch.Generator().manual_seed(100 * step + steps.place[0])
        steps.optimizer.zero_grad()
        loss = steps.model(torch.randn(8, 6, generator=generator)).square().sum()
        (loss * (torch.inf if step == 10 and steps.place[0] == 1 else 1.0)).backward()
        steps.clip_grad_norm_(1.0)
        steps.step()


def test_a_resumed_run_has_the_same_bits_also_after_a_skipped_step(tmp_path: Path) -> None:
    def whole(comm: LocalComm) -> list[Tensor]:
        steps = normed(comm)
        fit(steps, range(14))
        assert steps.stats()["skipped"] == 1
        return [*steps.model.state_dict().values(), common(steps)]

    def broken(comm: LocalComm, at: int) -> list[Tensor]:
        before = normed(comm)
        fit(before, range(at))
        sparsync.checkpoint.save(before, tmp_path / str(at))
        comm.all_gather(torch.zeros(1))
        after = normed(comm)
        sparsync.checkpoint.load(after, tmp_path / str(at))
        assert all(map(torch.equal, before.model.state_dict().values(), after.model.state_dict().values()))
        assert before.stats() == after.stats()
        fit(after, range(at, 14))
        return [*after.model.state_dict().values(), common(after)]

    wanted = LocalWorld(2).run(whole)
    for at in (3, 9, 11):
        for ours, theirs in zip(LocalWorld(2).run(partial(broken, at=at)), wanted, strict=True):
            assert all(map(torch.equal, ours, theirs)), at
    assert torch.equal(wanted[0][-1], wanted[1][-1])


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
            assert again._progress == after._progress
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
        steps.load_state_dict(resized(states, comm.rank, comm.size))
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
        before = torch.stack([state["scheme"]["residual"][name] for state in states]).sum(0)
        after = torch.stack([rank["scheme"]["residual"].get(name, torch.zeros_like(before)) for rank in ranks]).sum(0)
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
        state = steps.state_dict()
        del state["adamw_steps"]
        with pytest.raises(ValueError, match="the state of AdamWSteps needs 'adamw_steps'"):
            steps.load_state_dict(state)
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
                with pytest.raises(RuntimeError, match="leave `with steps"):
                    call()
        assert all(map(torch.equal, steps.model.state_dict().values(), own))
        assert steps.exchange() == []
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


def test_the_optimizers_own_step_raises_and_a_loss_scaler_works_without_it() -> None:
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
        with pytest.raises(RuntimeError, match=r"call steps\.step\(\) in place of optimizer\.step\(\)"):
            optimizer.step()
        scaler.scale(made(torch.ones(1, 4)).sum()).backward()
        with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\), steps\.step\(\)"):
            scaler.step(optimizer)
        del steps
        optimizer.step()

    LocalWorld(2).run(body)


def test_what_cannot_be_trained_by_steps_of_adamw_is_refused() -> None:
    def body(comm: LocalComm) -> None:
        made, other = nn.Linear(2, 2), nn.Linear(3, 3)
        adamw = torch.optim.AdamW(made.parameters())
        two = [{"params": [made.weight]}, {"params": [made.bias], "betas": (0.8, 0.9)}]
        cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
            (torch.optim.SGD(made.parameters(), 1.0), {}, TypeError, "got SGD; for others there is LocalSteps"),
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
            (torch.optim.AdamW(two), {}, ValueError, "must have the same betas"),
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


@pytest.mark.parametrize("setting", ["keep", "block", "scheme", "lr", "eps"])
def test_ranks_with_other_settings_are_found_before_anything_is_sent(setting: str) -> None:
    def body(comm: LocalComm) -> None:
        given: dict[str, Any] = {"keep": 0.5, "block": 8, "scheme": TopK(0.5), "lr": 0.1, "eps": 1e-8}
        if comm.rank == 1:
            given[setting] = {"keep": 0.0, "block": 4, "scheme": TopK(0.25), "lr": 0.2, "eps": 1e-6}[setting]
        made = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(made.parameters(), lr=given.pop("lr"), eps=given.pop("eps"))
        AdamWSteps(made, optimizer, given.pop("scheme"), **given, comm=comm)

    with pytest.raises(RuntimeError, match="has other settings or another model"):
        LocalWorld(2).run(body)


class Failing(TopK):
    """Fails in the second bucket of step 3, on all ranks."""

    def reduce(self, bucket: Bucket, comm: Comm) -> sparsync.Report:
        if bucket.step == 3 and bucket.key.endswith("/1"):
            raise MemoryError("no memory")
        self.given = bucket.grad.clone()
        return super().reduce(bucket, comm)


def test_after_a_failure_in_a_later_bucket_what_the_first_one_sent_is_in_the_residuals_again() -> None:
    def body(comm: LocalComm) -> tuple[Tensor, Tensor, Tensor]:
        scheme = Failing(0.25)
        steps = start(comm, scheme, bucket_mb=2e-4)
        seen = train(steps, range(3))
        own, before = flat(steps.model.parameters()), scheme.state_dict()["residual"]["0.weight"]
        learn(steps.model, comm.rank, 3)
        with pytest.raises(MemoryError, match="no memory"):
            steps.step()
        assert torch.equal(common(steps), seen[-1])
        assert torch.equal(flat(steps.model.parameters()), own)
        held, given = scheme.state_dict()["residual"]["0.weight"], scheme.given
        train(steps, range(4, 6))
        assert steps.stats()["steps"] == 6
        return before + given, held, common(steps)

    first, second = LocalWorld(2).run(body)
    assert torch.equal(first[2], second[2])
    assert torch.allclose(first[0] + second[0], first[1] + second[1], atol=1e-6)


@pytest.mark.slow
def test_one_bit_an_element_fits_a_line_as_all_of_them_do() -> None:
    """Least squares; each rank has data of its own."""

    def body(comm: LocalComm, scheme: Callable[[], Scheme]) -> float:
        torch.manual_seed(0)
        made, target = nn.Linear(32, 16), torch.randn(16, 32)
        steps = AdamWSteps(made, torch.optim.AdamW(made.parameters(), lr=0.05, weight_decay=0.0), scheme(), comm=comm)
        schedule = lr_scheduler.LinearLR(steps.optimizer, 1.0, 0.01, 120)
        data = torch.Generator().manual_seed(1 + comm.rank)
        for _ in range(120):
            x = torch.randn(16, 32, generator=data)
            steps.optimizer.zero_grad()
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
