"""Ok-Topk: its bound on traffic, exact counts at any scale, who is cleared, the paper's learning rate, and its parts one by one."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from helpers.plain_oktopk import Restated
from helpers.quick import one_in
from sparsync import ErrorFeedbackScheme, Report
from sparsync.base.state import State
from sparsync.core import generator, laid_out
from sparsync.runtime.rescaling import ResidualRescaler
from sparsync.schemes import ExDyna, MiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk
from sparsync.schemes.oktopk import OkTopk
from sparsync.selection.scaling import Program
from sparsync.testing import world

Step = tuple[list[Tensor], list[Report], list[Tensor]]  # written, reports, residuals; in rank order
MAKES: dict[str, Callable[[float], ErrorFeedbackScheme]] = {
    "ours": ExactOkTopk,
    "published": OkTopk,
    "code": lambda density: OkTopk(density, bug_compatible=True),
}


def run(schemes: list[State], gradients: list[list[Tensor]], first: int = 0) -> list[Step]:
    """Reduces `gradients[step][rank]`; every report's cost is checked against what was counted, every rank's result against rank 0's."""
    steps = world.run(schemes, gradients, first, laid_out([("w", gradients[0][0].numel())]), "w")
    for step in steps:
        assert step.counted == [report.cost for report in step.reports]
        assert all(torch.equal(x, step.written[0]) or bool(x.isnan().all()) for x in step.written)
    return [(step.written, step.reports, step.residuals) for step in steps]


def normal(n: int, rank: int, step: int) -> Tensor:
    return torch.randn(n, generator=generator(rank, "normal", step))


def heavy(n: int, rank: int, step: int) -> Tensor:
    """Layers whose scales spread as e^N(0,1), heavy tails within."""
    layer = torch.randn(20, generator=generator(0, "layers", 0)).exp().repeat_interleave(-(-n // 20))[:n]
    return layer * normal(n, rank, step) ** 3


def one_region(n: int, rank: int, step: int) -> Tensor:
    """All large ones in the last hundredth; everything else is small but not zero."""
    x = normal(n, rank, step) * 1e-3
    x[-max(1, n // 100) :] *= 1e6
    return x


def drifting(n: int, rank: int, step: int) -> Tensor:
    """A hot window that jumps by a third of the vector each step."""
    x = normal(n, rank, step) * 1e-3
    start = (step * n // 3) % n
    x[start : start + n // 20] *= 1e6
    return x


def last_rank_hot(n: int, rank: int, step: int) -> Tensor:
    """Rank 1 alone is large, and only in what is rank 0's region at first."""
    x = 1e-6 * normal(n, rank, step)
    if rank == 1:
        x[: n // 8] = 1e3 * normal(n, rank, step)[: n // 8]
    return x


def disjoint(n: int, rank: int, step: int, P: int) -> Tensor:
    x = torch.zeros(n)
    x[rank::P] = normal(n, rank, step)[rank::P]
    return x


NEVER = {"imbalance": math.inf}
HOSTILE: dict[str, Callable[[int, int, int, int], Tensor]] = {  # n, rank, step and P
    "one region": lambda n, r, t, P: one_region(n, r, t),
    "drifting": lambda n, r, t, P: drifting(n, r, t),
    "first rank only": lambda n, r, t, P: normal(n, r, t) if r == 0 else torch.zeros(n),
    "one rank in one region": lambda n, r, t, P: last_rank_hot(n, r, t),
    "disjoint": disjoint,
    "identical": lambda n, r, t, P: normal(n, 0, t),
    "all equal": lambda n, r, t, P: torch.ones(n),
    "all zero": lambda n, r, t, P: torch.zeros(n),
    "heavy": lambda n, r, t, P: heavy(n, r, t),
}


def bound(k: int, P: int) -> int:
    """The bytes that the class promises not to exceed, times P."""
    return 4 * (4 * k + 9 * P) * (P - 1)


@pytest.mark.parametrize("name", one_in(3, HOSTILE))
@pytest.mark.parametrize("P", [2, 3, 8, *(pytest.param(P, marks=pytest.mark.slow) for P in (4, 5, 16))])
def test_no_rank_ever_sends_more_than_4k_words_and_9_a_peer_and_exactly_k_survive(P: int, name: str) -> None:
    n = 2000
    grads = [[HOSTILE[name](n, rank, step, P) for rank in range(P)] for step in range(3)]
    for k in (1, 2, P, 50, 400):
        for written, reports, _ in run([ExactOkTopk(k / n).start() for _ in range(P)], grads):
            assert max(report.cost.nbytes for report in reports) * P <= bound(k, P)
            assert {(report.cost.steps, report.cost.messages) for report in reports} == {(2, 2 * (P - 1))}
            assert reports[0].union == int(written[0].count_nonzero())
            if name == "first rank only":  # a region has no more than that rank sends of it
                assert reports[0].union <= k
            else:
                assert reports[0].union == (0 if name == "all zero" else k)


@pytest.mark.parametrize("scale", [1e-8, 1e-4, 1.0, 1e4, 1e8])
def test_the_density_is_exact_from_the_first_step_at_any_scale_and_through_a_jump(scale: float) -> None:
    n, P, k = 2000, 4, 40
    grads = [[heavy(n, r, t) * scale * (10 if t >= 4 else 1) for r in range(P)] for t in range(8)]
    assert [reports[0].union for _, reports, _ in run([ExactOkTopk(k / n).start() for _ in range(P)], grads)] == [k] * 8


@pytest.mark.parametrize("make", [*MAKES.values(), MiCRO, ExDyna])
def test_the_learning_rate_outside_moves_weights_as_the_papers_inside(
    make: Callable[[float], ErrorFeedbackScheme],
) -> None:
    """The paper accumulates rate * gradient; we rescale residual and thresholds when the rate changes. Rates are powers of two: exact."""
    n, P, steps = 300, 4, 9
    rates = [1.0, 1.0, 0.5, 0.5, 0.5, 0.125, 0.25, 0.25, 0.25]
    grads = [[heavy(n, r, t) for r in range(P)] for t in range(steps)]
    inside = [make(0.05).start() for _ in range(P)]
    paper = run(inside, [[rate * grad for grad in step] for rate, step in zip(rates, grads, strict=True)])
    outside = [make(0.05).start() for _ in range(P)]
    # Above a tenth of the highest rate, from where on residuals stay as they are.
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.zeros(n))], lr=rates[0])
    rescalers = [ResidualRescaler({id(weight): "w"}, optimizer) for _ in outside]
    for rescaler, state in zip(rescalers, outside, strict=True):
        rescaler.use(state)
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        for rescaler in rescalers:
            rescaler.rescale()
        ours = run(outside, [grads[step]], step)[0]
        assert torch.equal(rate * ours[0][0], paper[step][0][0])


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("nonfinite", [float("nan"), float("inf")])
def test_a_step_with_nan_or_inf_leaves_no_trace(nonfinite: float, make: Callable[[float], ErrorFeedbackScheme]) -> None:
    n, P = 300, 4
    grads = [[heavy(n, r, t) for r in range(P)] for t in range(3)]
    bad = [grad.clone() for grad in grads[1]]
    bad[2][17] = nonfinite
    clean = run([make(0.02).start() for _ in range(P)], [grads[0], grads[2]])
    struck = run([make(0.02).start() for _ in range(P)], [grads[0], bad, grads[2]])
    assert all(bool(x.isnan().all()) for x in struck[1][0])
    assert torch.equal(struck[2][0][0], clean[1][0][0])
    assert all(torch.equal(a, b) for a, b in zip(struck[2][2], clean[1][2], strict=True))


def test_regions_follow_the_survivors() -> None:
    """All large elements in one hundredth of the vector: the next regions share them out, so that they are what survives."""
    n, P, k = 20_000, 4, 80
    grads = [[one_region(n, r, t) for r in range(P)] for t in range(6)]
    steps = run([ExactOkTopk(k / n).start() for _ in range(P)], grads)
    large = [int(written[0][-n // 100 :].count_nonzero()) for written, _, _ in steps]
    assert large[0] == k // P
    assert large[-1] > 0.9 * k


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"density": 0.0}, "density must be in"),
        ({"imbalance": 0.5}, "imbalance must be at least 1"),
        ({"dense_steps": -1}, "dense_steps must be at least 0"),
        ({"threshold_steps": 0}, "threshold_steps must be at least 1"),
        ({"region_steps": 0}, "region_steps must be at least 1"),
        ({"program": "resnet"}, "program must be one of vgg, lstm, bert"),
    ],
)
def test_wrong_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OkTopk(**config)  # pyright: ignore[reportArgumentType]  # some are of the wrong type on purpose


def cancelling(n: int, rank: int, step: int) -> Tensor:
    """Whole numbers at few positions, many of which add up to zero over two ranks; more of them at the end of the vector."""
    drawn = generator(rank // 2, "cancelling", step)
    where = torch.rand(n, generator=drawn) < torch.linspace(0, 0.2, n) ** 2
    same = torch.rand(n, generator=generator(rank, "same", step)) < 0.2
    return torch.randint(1, 6, (n,), generator=drawn) * where * torch.where(same, 1.0, (-1.0) ** rank)


def waning(n: int, rank: int, step: int) -> Tensor:
    """Ever smaller, so that thresholds that are re-used select ever fewer."""
    return 0.8**step * heavy(n, rank, step)


@pytest.mark.parametrize("rule", ["exact", "paper", *get_args(Program)])
def test_every_rule_is_the_restated_algorithm_bit_for_bit(rule: Any) -> None:  # Any: a Literal
    """Thresholds are re-used and found again, regions move, sums cancel, survivors move to other ranks, and some steps are dense."""
    n, P, balanced = 320, 4, 0
    cases = ((heavy, 40, 0), (waning, 40, 0), (drifting, 50, 3), (cancelling, 30, 0), (heavy, 3, 1))
    for make, k, dense_steps in cases:
        settings: dict[str, Any] = {"dense_steps": dense_steps}
        settings |= {} if rule == "exact" else {"threshold_steps": 4, "region_steps": 3, "imbalance": 1.5}
        # The authors' programs balance never or always.
        own: dict[str, Any] = {"bert": {"imbalance": 1}, "vgg": NEVER, "lstm": NEVER}.get(rule, {})
        program = partial(OkTopk, bug_compatible=True, program=cast(Program, rule))
        scheme = {"exact": ExactOkTopk, "paper": OkTopk}.get(rule, program)
        grads = [[make(n, rank, step) for rank in range(P)] for step in range(11)]
        restated = Restated(n, P, k, rule, **(settings | own))
        schemes = [scheme(k / n, **settings).start() for _ in range(P)]
        for step, (written, reports, residuals) in zip(grads, run(schemes, grads), strict=True):
            assert torch.equal(written[0], restated.step(step))
            assert all(map(torch.equal, residuals, restated.residuals))
            assert [each.details.get("local_count", n) for each in reports] == [len(each) for each in restated.chosen]
            assert reports[0].details.get("balanced", False) == restated.balanced
            balanced += restated.balanced
        states = [scheme.state_dict() for scheme in schemes]
        locals_ = [
            each["own"]["own_control"]["w"]["state"] if "own" in each else {"threshold": None} for each in states
        ]
        controls = [each["shared"]["control"]["w"]["state"] for each in states]
        assert [each["threshold"] for each in locals_] == restated.local_thresholds
        assert [each.get("threshold") for each in controls] == [restated.global_threshold] * P
        assert [each["boundaries"] for each in controls] == [restated.begins] * P
    assert bool(balanced) == (rule in ("paper", "bert"))
