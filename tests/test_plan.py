"""The closed form of a scheme is what the messages of its algorithm add up to, exchange by exchange, on the busiest rank.

For schemes that decide at run time how much they send, it has as many messages, and nearly as many bytes.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch

from helpers.quick import one_in
from helpers.recorded_exchanges import RecordedStep, busiest, recorded_step
from sparsync import Bucket, Comm, Report, Steps, schemes
from sparsync.base.scheme import Scheme
from sparsync.comm import Cost
from sparsync.comm.announcement import announcement_cost
from sparsync.core import ParameterSpan, laid_out
from sparsync.schemes import AutoProtect, State
from sparsync_lab import predict
from sparsync_lab.predict.exchanges import Given
from sparsync_lab.predict.schemes import measurement
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes
from sparsync_lab.traffic.stream import Synthetic

# What settings alone determine.
EXACT = (
    "two_shot:density=1.0:values=sign:values_down=int3,dense,dense:form=ring,dense:wire=float32,bf16,bf16:form=ring,topk,topk:density=0.3:values=int4,topk:density=1.0,two_shot,"
    "two_shot:density=0.3:values=float32,two_shot:density=0.5:values=sign:divide_by=contributors,two_shot:density=1.0,"
    "two_shot:density=0.1:values=sign:density_down=0.4,"
    "two_shot:density=1.0:density_down=0.3,two_shot:density=0.2:density_down=1.0:values_down=float32,"
    "in_turn,in_turn:every=1,in_turn:every=3:values=float32:values_down=bfloat16,in_turn:every=16:values_down=sign,"
    "skip_reduce,skip_reduce:skip=1,skip_reduce:protect=*.bias,skip_reduce:form=direct:mode=naive,"
    "skip_reduce:form=direct:mode=naive:protect=*.bias,skip_reduce:feedback=true,skip_reduce:divide_by=ranks,ring_pruning,"
    "quantized,quantized:values=sign,int4,onebit_adam:warmup_steps=1"
)
NODES = "skip_reduce:node_size=2,skip_reduce:node_size=2:form=direct:mode=naive,skip_reduce:node_size=2:protect=*.bias"
# What also depends on figures of the step.
GIVEN = "auto_protect:observe_steps=1:share=0.3,micro,micro:bug_compatible=true,exdyna"
QUICK = ((3, 997), (5, 12))
WORLDS = ((1, 97), (4, 2), (8, 5000), (13, 1), (64, 2048))


def layout_of(n: int) -> tuple[ParameterSpan, ...]:
    """A matrix, a vector, and a parameter whose shape is not known; with few elements some are empty."""
    a = max(1, int(n**0.5) // 2)
    b, bias = n // 2 // a, n // 8
    return laid_out([("m.weight", (a, b)), ("m.bias", (bias,)), ("rest", n - a * b - bias)])


def given_of(scheme: Scheme, recorded: RecordedStep, given: Given) -> Given:
    """`given` with the figures of a step."""
    reports = recorded.reports
    if isinstance(scheme, AutoProtect):
        return replace(given, figures={"protected": reports[0].details["protected"]})
    return replace(given, figures={"selected": [report.selected for report in reports]})


def check(
    choice: SchemeChoice, P: int, n: int, given_figures: bool, steps: int = 2, dtype: torch.dtype = torch.float32
) -> None:
    layout, made = layout_of(n), [choice.make().start() for _ in range(P)]
    drawn = torch.randn(steps, P, n, generator=torch.Generator().manual_seed(7 * P + n))
    drawn *= torch.linspace(0.2, 3.0, n)
    for step in range(steps):
        recorded = recorded_step(made, [each.to(dtype, copy=True) for each in drawn[step]], step, layout)
        for rank, report in enumerate(recorded.reports):
            assert report.cost == recorded.counted(rank), f"{choice.label}: the report of rank {rank}"
        if step == 0:  # of which warm-ups consist
            continue
        given, scheme = Given(n, P, dtype.itemsize, layout, step), made[0].scheme
        plan = predict.plan_of(scheme, given_of(scheme, recorded, given) if given_figures else given)
        where = f"{choice.label}, P = {P}, n = {n}, step {step}"
        assert list(plan.exchanges) == busiest(recorded, plan.exchanges), where
        most = [max(cost) for cost in zip(*(astuple(report.cost) for report in recorded.reports), strict=True)]
        assert all(form >= counted for form, counted in zip(astuple(plan.cost()), most, strict=True)), where
        kept = {rank: sum(each.nbytes for each in tensors(scheme.state_dict())) for rank, scheme in enumerate(made)}
        assert set(kept.values()) == {plan.state_nbytes}, where


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors in a state dict."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for each in state.values():
            yield from tensors(each)


def cases(text: str) -> list[Any]:
    return [pytest.param(choice, id=choice.label) for choice in parse_schemes(text, 0.05)]


TABLE = [
    *one_in(5, [pytest.param(each.values[0], False, QUICK, id=each.id) for each in cases(EXACT)]),
    *one_in(4, [pytest.param(each.values[0], True, QUICK, id=each.id) for each in cases(GIVEN)]),
    *[pytest.param(each.values[0], False, ((4, 97), (6, 23)), id=each.id) for each in cases(NODES)],
]
LARGE = [
    *[pytest.param(*each.values, False, WORLDS, id=each.id) for each in cases(EXACT)],
    *[pytest.param(*each.values, True, WORLDS, id=each.id) for each in cases(GIVEN)],
    *[pytest.param(*each.values, False, ((4, 3), (16, 5), (64, 1027)), id=each.id) for each in cases(NODES)],
]


@pytest.mark.parametrize(("choice", "given_figures", "worlds"), TABLE)
def test_the_closed_form_is_what_is_counted(choice: SchemeChoice, given_figures: bool, worlds: Any) -> None:
    for P, n in worlds:
        check(choice, P, n, given_figures)


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "given_figures", "worlds"), LARGE)
def test_the_closed_form_is_what_is_counted_to_64_ranks(choice: SchemeChoice, given_figures: bool, worlds: Any) -> None:
    for P, n in worlds:
        check(choice, P, n, given_figures, steps=3)


@pytest.mark.parametrize("choice", cases("dense,topk,two_shot,skip_reduce:feedback=true,onebit_adam:warmup_steps=1"))
def test_gradients_in_16_bits_are_what_is_counted(choice: SchemeChoice) -> None:
    check(choice, 3, 997, given_figures=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("P", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_every_scheme_of_the_library_has_a_form_at_any_number_of_ranks(P: int) -> None:
    for name in schemes.names():
        made = schemes.get(name)
        if type(made).__module__.startswith("sparsync."):
            plan = predict.plan(made, 10**11, P)
            assert plan.exchanges and plan.passes > 0 and plan.kernels.keys() == plan.calls.keys()


# How far estimates are from what is counted on 4 ranks, for gradients drawn as `sparsync traffic` draws them; in docs/advise.md.
TOLERANCE = {"exact_micro": 0.05, "micro": 0.15, "exact_exdyna": 0.03, "exact_oktopk": 0.2, "oktopk": 0.4}


@pytest.mark.parametrize("name", TOLERANCE)
def test_estimates_are_near_what_drawn_gradients_make_a_scheme_send(name: str) -> None:
    P, n = 4, 20_000
    stream, made = Synthetic(P, n), [schemes.get(name, density=0.01).start() for _ in range(P)]
    reports = [recorded_step(made, stream.gradients(step), step, stream.layout).reports for step in range(2)][-1]
    form = predict.plan(made[0].scheme, n, P, layout=stream.layout).cost()
    assert form.nbytes == pytest.approx(max(report.cost.nbytes for report in reports), rel=TOLERANCE[name])
    assert all((form.steps, form.messages) == (each.cost.steps, each.cost.messages) for each in reports)


def test_an_announcement_travels_beside_the_exchanges() -> None:
    plan = predict.plan(schemes.get("topk"), 1000, 8)
    (beside,) = plan.beside
    assert Cost(round(beside.rounds), round(beside.messages), round(beside.nbytes)) == announcement_cost(8)
    assert plan.cost() == Cost(1, 7, 7 * (10 * 4 + 12))


def test_local_steps_are_the_mean_of_the_steps_between_two_exchanges() -> None:
    def scheme() -> Scheme:
        return schemes.get("dense")

    alone, local = predict.plan(scheme(), 1000, 4), predict.local_steps(scheme(), [1000, 1000], 4, every=5)
    sent = sum(exchange.nbytes for exchange in local.exchanges)
    assert sent == pytest.approx((2 * alone.cost().nbytes + 3 * 24) / 5)


def test_steps_of_adamw_add_a_measurement_every_few_steps() -> None:
    plan, bare = (predict.adamw_steps(schemes.get("dense"), [6400], 4, Steps(keep=keep)) for keep in (None, 0.0))
    assert sum(exchange.nbytes for exchange in plan.exchanges) == 4 * 6400 * 1.5 + 2 * 2 * 100 * 1.5 / 8
    assert plan.state_nbytes - bare.state_nbytes == 4 * (6400 + 2 * 100)  # common weights, and means of blocks
    more = measurement(schemes.get("topk"), [6400], 4, Steps()).exchanges[0].nbytes
    assert more == 2 * 2 * 100 * 1.5


def test_numbers_that_make_no_plan_are_refused() -> None:
    for n, P in ((-1, 4), (100, 0), (100, 100_001)):
        with pytest.raises(ValueError, match=f"n >= 0 elements and at most 100,000 ranks, got P = {P}, n = {n}"):
            predict.plan(schemes.get("topk"), n, P)


def test_your_scheme_needs_a_form_and_has_the_one_that_is_registered_for_its_class() -> None:
    class Own(Scheme):
        name = "own"

        def reduce(self, state: State, bucket: Bucket, comm: Comm) -> Report:
            return self.report(bucket)

    with pytest.raises(
        ValueError, match=r"own has no closed form .*; leave it out, or write one: @sparsync_lab\.predict"
    ):
        predict.plan(Own(), 10, 2)

    @predict.form.register
    def _(scheme: Own, given: Given) -> predict.Plan:
        return predict.Plan(passes=given.n)

    assert predict.plan_of(Own(), Given(7, 2)).passes == 7
