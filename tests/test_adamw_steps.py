"""Steps of AdamW in one process: the formulas, what NaN leads to, what is saved, and that nothing is lost on the way."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from helpers.quick import one_in
from sparsync import AdamWSteps
from sparsync.base.scheme import Scheme
from sparsync.comm import LocalWorld
from sparsync.comm.local import LocalComm
from sparsync.core import Comm, Span, digest, laid_out
from sparsync.exchanges.measured import BlockRatios
from sparsync.kernels.step_reference import signs
from sparsync.schemes import Dense, ExactMiCRO, ExactOkTopk, PerParameter, SkipReduce, TopK, TwoShot

pytestmark = pytest.mark.filterwarnings("ignore:step .* was skipped on all ranks")
P, BLOCK, EVERY = 4, 8, 2
SCHEMES: dict[str, Callable[[], Scheme]] = {
    "dense": Dense,
    "topk": lambda: TopK(0.25),
    "exact_micro": lambda: ExactMiCRO(0.25),
    "exact_oktopk": lambda: ExactOkTopk(0.25),
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
    squares, of_mean, of_own, shared = torch.zeros(P, n), *(torch.zeros(len(blocks)) for _ in range(3))
    ends = list(accumulate(each.numel() for each in model().parameters()))
    place = torch.tensor([bisect_right(ends, block.start) for block in blocks])  # the parameter of each block
    found, measured, seen = [], 0, torch.zeros(n)

    def measure(gradients: list[Tensor], step: int) -> None:
        weight = max(0.02, 1 / measured)
        less = signs(n, digest(f"ratio/float32/cpu/0/{step}") % 2**32, gradients[0].device)
        seen = torch.stack([torch.stack([(each[block] ** 2).sum() for block in blocks]) for each in gradients])
        for i, block in enumerate(blocks):
            mean = sum(float(torch.where(less, -each, each)[block].sum()) for each in gradients) / P
            of_mean[i] += weight * (mean**2 - of_mean[i])
            alike = [each[place == place[i]].mean().bfloat16() for each in seen]  # of the parameter, by rank
            of_own[i] += weight * (sum(alike, torch.zeros(()).bfloat16()).float() / P - of_own[i])

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
                ratio[block] = around.clamp(1 / P, 1.0)
        active = taking_part(P, step)
        before, each = squares, torch.stack(gradients)
        squares, seen = torch.where(active, beta2 * squares + (1 - beta2) * each**2, squares), seen + active
        found.append(rate * own / ((ratio * squares[rank] / (1 - beta2**seen).clamp(min=eps)).sqrt() + eps))
        for i, block in enumerate(blocks) if due else ():
            if bisect_right(ends, block.stop - 1) > place[i]:
                continue
            means = before[:, block].mean(1)
            moved = sum((means - 0.998 * shared[i]).bfloat16(), torch.zeros(1).bfloat16())
            mean = shared[i] = 0.998 * shared[i] + moved.float() / P
            for square, known in zip(squares, means, strict=True):
                now = square[block].mean()
                wanted = mean + now - known if now > known else mean * now / known
                square[block] = square[block] * (wanted / now) if now > 0 else mean
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


def test_one_rank_without_momentum_takes_torchs_adamw_steps_also_with_groups_a_schedule_and_missing_gradients() -> None:
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
        *one_in(3, (pytest.param(name, 0.25) for name in SCHEMES)),
        *(pytest.param(name, 0.0, marks=pytest.mark.slow if name != "exact_micro" else ()) for name in SCHEMES),
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
    # Common second moments make other steps, which test_whole_steps.py restates.
    common_squares = keep == 0.0 and not SCHEMES[name]().leaves_out
    assert common_squares or torch.allclose(moved + held, taken, rtol=1e-4, atol=1e-4)
    assert name == "dense" or bool(held.any())


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
        ratios = steps._sender.ratios
        # The last block is half full; twice as many as there are rows of signs.
        assert ratios.ratio(0, P).shape == (513,)
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
    ratios.regrouped(50, 2, 1)
    ratios.regrouped(60, 1, 16)  # what one rank holds is of other ranks
    assert ratios.measured == 0


def test_whoever_asks_for_the_clip_factor_or_saves_before_a_device_has_measured_changes_nothing() -> None:
    def measured(asks: bool) -> tuple[float, float]:
        ratios = BlockRatios([torch.zeros(4)], [laid_out([("a", torch.Size([4]))])], block=4, every=8)
        if asks:
            assert ratios.state_dict(["all"])["all"]["known"].tolist() == [0.0, 0.0]
            assert ratios.clip_factor(P) == 1.0
        ratios.observe(torch.ones(1), [torch.full((1,), 4.0)], [[Span(0, 4)]], skip=torch.zeros(1))
        return ratios.clip_factor(P), ratios.own_factor(P)

    assert measured(asks=True) == measured(asks=False) == (1.0, 2.0)


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
            else:  # AdamW's is sqrt((1 - beta2^41) / (1 - beta2)) = 6.34; the ratio makes it longer by at most sqrt(P)
                assert 4 < float(moved.abs().max()) <= 6.35 * P**0.5
        with steps.averaged():
            assert torch.equal(made.weight[2], before[2])

    LocalWorld(P).run(body)


def test_steps_too_short_for_16_bits_add_up_in_the_common_weights() -> None:
    def body(comm: LocalComm) -> tuple[float, float]:
        made = nn.Linear(1, 1, bias=False).bfloat16()
        made.weight.data.fill_(256.0)  # bfloat16 has 8 bits: 256 + 1 is 256
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.25, betas=(0.0, 0.0), weight_decay=0.0)
        steps = AdamWSteps(made, optimizer, Dense(), comm=comm, keep=0.0)
        for _ in range(32):
            made.weight.grad = torch.full((1, 1), -1.0).bfloat16()
            steps.step()
        with steps.averaged():
            assert made.weight.item() == 264
        return float(steps._weights.buckets[0].common), made.weight.item()

    assert LocalWorld(2).run(body) == [(264.0, 264.0)] * 2


@pytest.mark.parametrize("scheme", ["topk", "dense"])
def test_a_measurement_makes_blocks_of_second_moments_equally_large(scheme: str) -> None:
    """Ranks with other gradients agree on the means and the ratio. A block that was zero on a rank becomes the mean."""

    def body(comm: LocalComm) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        made = nn.Linear(9, 3, bias=False)  # three blocks of 8, and one of 3
        optimizer = torch.optim.AdamW(made.parameters(), betas=(0.9, 0.5))
        steps = AdamWSteps(made, optimizer, SCHEMES[scheme](), comm=comm, block=8, measure_every=1, beta2=0.5)
        ratios, seen = steps._sender.ratios, list[Tensor]()
        for step in range(5):
            grads = torch.randn(27, generator=torch.Generator().manual_seed(10 * step + comm.rank)) * (1 + comm.rank)
            grads[:8] *= comm.rank == 0 and step == 0
            grads[9] = torch.nan if step == 3 and comm.rank == 1 else grads[9]
            made.weight.grad = grads.view(3, 9)
            steps.step()
            seen.append(ratios.squares[0].clone())
        return seen, [*ratios._shared, ratios.ratio(0, P)]

    ranks = LocalWorld(P).run(body)
    touched = [[seen[:8].mean().item() for seen in steps] for steps, _ in ranks]
    assert touched[0][0] > 0
    assert [each[0] for each in touched[1:]] == [0.0] * (P - 1)
    same = [list(map(torch.equal, shared, ranks[0][1])) for _, shared in ranks]
    # Step 1 measured the squares after step 0, and scaled those after step 1.
    mean = touched[0][0] / P
    assert [each[1] for each in touched] == pytest.approx([mean / 2] + [mean] * (P - 1), rel=0.01)
    assert all(map(all, same))
    # The step of the NaN is skipped: those who found a finite gradient forget half, and nothing is scaled.
    assert [each[3] / each[2] for each in touched] == [0.5, 1.0] + [0.5] * (P - 2)


def test_blocks_stay_if_a_device_skips_the_step_or_they_overflow_or_have_several_parameters() -> None:
    squares = torch.ones(12)
    ratios = BlockRatios([squares], [laid_out([("a", torch.Size([4])), ("b", torch.Size([8]))])], block=8, every=8)
    ratios.average(True)
    for moved, flag, then in ((3.0, 1.0, 1.0), (torch.inf, 0.0, 1.0), (3.0, 0.0, 3.0), (torch.inf, None, 3.0)):
        skip = None if flag is None else torch.tensor([flag])
        ratios.share(0, torch.ones(2), torch.full((2,), moved), skip)
        assert squares.tolist() == [1.0] * 8 + [then] * 4


def test_a_row_that_was_nearly_forgotten_keeps_second_moments_of_its_size() -> None:
    """Without its own gradient of this step the block would be scaled by the others' mean over nearly nothing."""

    def body(comm: LocalComm) -> Tensor:
        made = nn.Linear(8, 1, bias=False)
        steps = AdamWSteps(made, torch.optim.AdamW(made.parameters()), TopK(0.25), comm=comm, block=8, measure_every=1)
        for size in (1e-12, 1.0) if comm.rank == 0 else (1.0, 0.0):
            made.weight.grad = torch.full((1, 8), size)
            steps.step()
        return steps._sender.vectors["square"][0]

    for square in LocalWorld(2).run(body):
        assert 1e-4 < square.mean() < 2e-3


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)], [2]
    ),
    "plateau": lr_scheduler.ReduceLROnPlateau,
}


def held(steps: AdamWSteps) -> Tensor:
    residual = steps.state_dict()["scheme"]["residual"]
    return flat(residual.get(name, torch.zeros(each.numel())) for name, each in steps.model.named_parameters())
