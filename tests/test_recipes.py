"""Recipes: what `attach` takes for an optimizer and a number of bits, what that sends, and what it says of it."""

import logging
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Muon

import sparsync
from helpers.distributed import run
from sparsync import Gradients, LocalSteps, Options, Steps
from sparsync.base.scheme_text import VARIABLE
from sparsync.exchanges.choice import Choice, choose, family_of, method_of
from sparsync.recipes import FAMILIES, TABLE, Family, Recipe, recipe, rows
from sparsync.schemes import Dense, TopK, TwoShot
from sparsync_lab import advise, cli
from sparsync_lab.predict import schemes as plans
from sparsync_lab.scheme_choice import parse_schemes

STEPS_ROW = "steps(keep=0.0)/two_shot:density=1.0:values=int3"
N = 2**18


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, 2))]


def planned_bits(each: Recipe, ranks: int) -> float:
    """Return what a rank sends by the closed forms, with what the integration sends besides."""
    scheme, how = method_of(each.text)
    plan = (
        plans.adamw_steps(scheme, [N], ranks, how, each.family == "muon")
        if isinstance(how, Steps)
        else plans.plan(scheme, N, ranks)
    )
    return 8 * sum(one.nbytes for one in plan.exchanges) / N


@pytest.mark.parametrize("each", TABLE, ids=str)
def test_the_bits_of_a_row_are_what_the_closed_forms_count_with_four_ranks(each: Recipe) -> None:
    assert round(planned_bits(each, 4), 1) == each.bits


def test_the_bits_of_other_numbers_of_ranks_follow_from_those_of_four() -> None:
    for each in TABLE:
        for ranks in (2, 8, 16) if each.most_ranks > 4 else ():
            assert each.bits_with(ranks) == pytest.approx(planned_bits(each, ranks), abs=0.06)


def test_the_first_row_of_a_family_is_its_default_and_none_is_as_large_by_mistake() -> None:
    assert {family: recipe(family, 4).bits for family in FAMILIES} == {
        "steps": 4.6,
        "muon": 4.6,
        "linear": 6.1,
        "other": 6.1,
        "shard": 6.1,
    }
    for family in FAMILIES:
        assert len({each.bits for each in rows(family, 4)}) == len(rows(family, 4))


def cases() -> Iterator[tuple[Family, Any]]:
    yield "steps", AdamW(weights())
    yield "steps", Adam(weights())
    yield "muon", [Muon(weights()), AdamW(weights())]
    yield "linear", SGD(weights(), momentum=0.9, nesterov=True)
    yield "linear", [SGD(weights()), SGD(weights())]
    yield "other", AdamW(weights(), amsgrad=True)
    yield "other", torch.optim.Adafactor(weights())
    yield "other", type("Lars", (SGD,), {"step": lambda self: None})(weights())
    yield "other", [SGD(weights()), AdamW(weights(), amsgrad=True)]
    yield "other", None


@pytest.mark.parametrize(("family", "optimizer"), list(cases()), ids=str)
def test_the_family_follows_from_what_can_be_exchanged_of_the_optimizer(family: Family, optimizer: Any) -> None:
    assert family_of(optimizer) == family
    assert family_of(optimizer, sharded=True) == "shard"
    assert family_of(optimizer, gradients=True) in ("linear", "other")


@pytest.mark.parametrize(
    ("family", "ranks", "bits", "text"),
    [
        ("steps", 4, None, STEPS_ROW),
        ("steps", 4, 100.0, STEPS_ROW),
        ("steps", 4, 4.5, "steps(measure_every=16)/two_shot:density=1.0:values=sign:values_down=int3"),
        ("steps", 4, 1.6, "steps(measure_every=16)/two_shot:density=1.0:values=sign"),
        ("steps", 16, 1.6, "steps/two_shot:density=0.06:values=sign:density_down=0.3"),
        ("steps", 16, 0.3, "steps(keep=0.1:measure_every=16)/two_shot:density=0.005:values=sign:density_down=0.02"),
        ("muon", 4, 4.6, STEPS_ROW),
        ("muon", 4, 1.6, "steps/in_turn:every=2"),
        ("linear", 4, 0.7, "topk:density=0.01:values=int8"),
        ("other", 4, 20.0, "two_shot:density=1.0:values=int8"),
    ],
)
def test_the_row_with_the_most_bits_that_is_not_above_those_asked_for_is_taken(
    family: Family, ranks: int, bits: float | None, text: str
) -> None:
    assert recipe(family, ranks, bits).text == text


def test_a_row_that_fails_on_large_models_is_for_small_ones_and_the_error_says_why() -> None:
    assert recipe("steps", 4, 0.2, parameters=21_000_000).bits == 0.2
    for there in (rows("steps", 16, parameters=111_000_000), rows("muon", 4, parameters=111_000_000)):
        assert 0.2 not in [each.bits for each in there]
    assert [each.bits for each in rows("steps", 4, parameters=111_000_000)] == [4.6, 3.1, 1.6, 0.8]
    with pytest.raises(
        ValueError,
        match=r"bits=0\.2 is for models of up to 21\.6 million .* this one has 111: in an earlier form with AdamW and 4 ranks 42 % behind",
    ):
        recipe("steps", 4, 0.2, parameters=111_000_000)


@pytest.mark.parametrize(("parameters", "warned"), [(10_800_000, False), (111_000_000, True)])
def test_a_larger_model_than_a_rows_quality_was_shown_for_is_warned_of(parameters: int, warned: bool) -> None:
    with torch.device("meta"):
        model = nn.Linear(parameters, 1, bias=False)
    optimizer = AdamW(model.parameters())
    found = [
        each for each in sparsync.doctor(model, bits=0.8, optimizer=optimizer) if "million parameters" in each.what
    ]
    assert [each.refused for each in found] == [None] * warned
    assert ("7 % behind" in recipe("steps", 4, 0.8).quality_at(parameters)) == warned


def test_gradients_alone_take_a_recipe_for_these_and_steps_alone_need_a_scheme() -> None:
    adamw = AdamW(weights())
    assert choose(None, None, Gradients(), adamw) == Choice(
        TwoShot(density=1.0, values="int4"), Gradients(), recipe("other", 4)
    )
    for exchange in (Steps(), LocalSteps(every=2)):
        with pytest.raises(
            ValueError, match=r"goes with a scheme; pass one, such as sparsync\.schemes\.Dense\(\), or leave"
        ):
            choose(None, None, exchange, adamw)


@pytest.mark.parametrize(
    ("text", "scheme", "exchange", "bits"),
    [
        ("", TwoShot(density=1.0, values="int3"), Steps(keep=0.0), 4.6),
        (" ", TwoShot(density=1.0, values="int3"), Steps(keep=0.0), 4.6),
        ("default", TwoShot(density=1.0, values="int3"), Steps(keep=0.0), 4.6),
        ("bits=2", TwoShot(density=1.0, values="sign"), Steps(measure_every=16), 1.6),
        ("steps(keep=0.25)/topk:density=0.5", TopK(density=0.5), Steps(keep=0.25), None),
        ("topk:density=0.5", TopK(density=0.5), Steps(), None),
        ("dense", Dense(), Gradients(), None),
        ("local_steps(every=4)/dense", Dense(), LocalSteps(every=4), None),
    ],
)
def test_the_environment_has_a_recipe_a_scheme_or_one_with_steps_around_it(
    text: str, scheme: Any, exchange: Any, bits: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, text)
    found = choose(None, None, None, AdamW(weights()))
    assert (found.scheme, found.exchange) == (scheme, exchange)
    assert (None if found.recipe is None else found.recipe.bits) == bits


def test_commands_take_the_default_and_bits_of_the_jobs_optimizer() -> None:
    default, few, scheme = parse_schemes("default,bits=0.8,topk", 0.01)
    assert (default.label, default.exchange(), default.make()) == (
        "default",
        Steps(keep=0.0),
        TwoShot(density=1.0, values="int3"),
    )
    assert (few.label, few.make()) == ("bits=0.8", TwoShot(0.03, "sign", density_down=0.12))
    assert scheme.make() == TopK(0.01)
    (sgd,) = parse_schemes("default", 0.01, family="linear")
    assert (sgd.exchange(), sgd.make()) == (None, TwoShot(density=1.0, values="int4"))
    with pytest.raises(ValueError, match=r"'bits=1\.6' is .* with 4 and 16 ranks; name one"):
        parse_schemes("bits=1.6", 0.01, ranks=(4, 16))


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def attached() -> dict[str, Any]:
    """Attach with recipes and without, and return what was said of each, and of a state of another recipe."""
    log, lines = logging.getLogger("sparsync"), Lines()
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    found: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {  # Any: arguments of attach
        "few": {"bits": 0.8},
        "default": {},
        "same scheme": {"scheme": TwoShot(0.03, "sign", density_down=0.12)},
        "other scheme": {"scheme": TwoShot(0.05, "sign")},
        "gradients": {"exchange": Gradients(), "options": Options(timeout_s=60)},
    }
    for name, given in ways.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 8))
        lines.lines.clear()
        with sparsync.attach(model, optimizer=AdamW(model.parameters()), **given) as handle:
            state = handle.state_dict()
            said = list(lines.lines)
            saved = saved or state
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with pytest.raises(ValueError) if name == "gradients" else nullcontext():
                    handle.load_state_dict(saved)
            told = [str(each.message) for each in caught]
            found[name] = (handle.recipe and handle.recipe.bits, handle.exchange, state["recipe"], said, told)
    return found


@pytest.mark.distributed
def test_a_handle_has_its_recipe_says_so_once_and_warns_of_the_state_of_another() -> None:
    for found in run(attached, 2):
        bits, exchange, saved, said, told = found["default"]
        assert (bits, exchange, saved) == (4.6, Steps(keep=0.0), "bits=4.6")
        assert [each for each in said if "bits per parameter" in each] == [
            f"bits=4.6 for Adam and AdamW: {STEPS_ROW}; a rank sends 3.07 bits per parameter per step with 2 ranks; on the page "
            "'Quality and bits': 0.7 % ahead (gpt-10m-1000), held out 0.7 % ahead to 0.9 % behind"
        ]
        assert not any("own weights" in each for each in said)
        assert told == [
            "this state was saved with bits=0.8, and this handle has bits=4.6; attach with bits=0.8 to go on as before"
        ]
        bits, exchange, saved, said, told = found["few"]
        assert (bits, exchange, saved, told) == (0.8, Steps(), "bits=0.8", [])
        assert sum("with bits=0.8 every rank trains its own weights" in each for each in said) == 1
        bits, exchange, saved, said, told = found["same scheme"]
        assert (bits, exchange, saved, told) == (None, Steps(), "", [])
        assert not any("bits per parameter" in each for each in said)
        assert "this handle has a scheme that was given; attach with bits=0.8" in found["other scheme"][4][0]
        assert found["gradients"][:3] == (6.1, Gradients(), "bits=6.1")
        assert found["gradients"][4] == []


@pytest.mark.parametrize(
    ("label", "family", "line"),
    [
        ("default", "linear", "sparsync.attach(model, optimizer=optimizer)"),
        (STEPS_ROW, "steps", "sparsync.attach(model, optimizer=optimizer)"),
        ("bits=1", "steps", "sparsync.attach(model, optimizer=optimizer, bits=0.8)"),
        (recipe("steps", 4, 0.2).text, "steps", "sparsync.attach(model, optimizer=optimizer, bits=0.2)"),
        ("two_shot:density=1.0:values=int4", "steps", ""),  # of gradients, which such an optimizer does not get
        ("bf16", "steps", ""),
    ],
)
def test_advice_ends_in_the_call_that_takes_its_method(label: str, family: Family, line: str) -> None:
    assert advise.attach_line(label, family, 4) == line


def test_a_command_asks_for_the_recipes_of_the_jobs_optimizer() -> None:
    def made(workload: str | None) -> list[sparsync.Scheme]:
        options = Namespace(schemes="dense,default", density=0.01, skip=None, workload=workload, option=[], data=None)
        return [each.make() for each in cli._choices(options, (4,))]

    assert made(None) == [Dense(), TwoShot(density=1.0, values="int3")]
    assert made("examples/own_job.py:MyJob")[1] == TwoShot(density=1.0, values="int4")


def test_what_is_exchanged_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "steps/topk")
    with pytest.raises(ValueError, match="it says what is exchanged, and so does"):
        choose(None, None, Gradients(), AdamW(weights()))


def test_bits_exclude_a_scheme_and_an_exchange() -> None:
    for scheme, exchange, named in ((TopK(0.1), None, "a scheme"), (None, Gradients(), "exchange=")):
        with pytest.raises(ValueError, match=f"bits=0.8 stands for .*; leave bits or {named} out"):
            choose(scheme, 0.8, exchange, AdamW(weights()))
