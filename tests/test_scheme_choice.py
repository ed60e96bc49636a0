"""Methods as a command names them: schemes with their settings, and steps around them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from sparsync import LocalSteps, OuterSGD, Steps
from sparsync.comm import LocalWorld
from sparsync.schemes import TopK
from sparsync_lab.recipes import SYSTEMS
from sparsync_lab.scheme_choice import SchemeChoice, parse_schemes, try_out

THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"


def one(text: str, **settings: Any) -> SchemeChoice:
    (choice,) = parse_schemes(text, density=0.25, **settings)
    return choice


def test_a_text_names_a_scheme_and_the_exchange_around_it() -> None:
    plain = one("topk:values=int8")
    assert (plain.label, plain.name, plain.local, plain.exchange()) == ("topk:values=int8", "topk", None, None)
    assert plain.make() == TopK(0.25, values="int8")
    assert plain.described() == {"scheme": repr(TopK(0.25, values="int8"))}
    assert one("steps(keep=0.25)/topk").exchange() == Steps(keep=0.25)
    text = "local_steps(every=4:keep=0.0:outer_rate=0.5)/topk:values=int8"
    choice = one(text)
    assert (choice.label, choice.local) == (text, {"every": 4, "keep": 0.0, "outer_rate": 0.5})
    assert choice.exchange() == LocalSteps(every=4, keep=0.0, outer=OuterSGD(rate=0.5))
    assert choice.make() == TopK(0.25, values="int8")
    described = choice.described()["local_steps"]
    assert (described["every"], described["keep"], described["fragments"]) == (4, 0.0, 1)


def test_local_steps_leave_unexchanged_weights_between_exchanges() -> None:
    plain, every = one("topk"), one("local_steps(every=4)/topk")
    assert [plain.leaves_rest(7), every.leaves_rest(7), every.leaves_rest(8)] == [False, True, False]
    assert one("local_steps(every=4:fragments=2)/topk").leaves_rest(8)
    assert one("local_steps(every=4:delay=1)/topk").leaves_rest(8)


def test_steps_have_the_name_of_what_attach_takes() -> None:
    steps = one("steps(keep=0.5)/topk")
    assert (steps.label, steps.local) == ("steps(keep=0.5)/topk", {"keep": 0.5})
    try_out(steps, 2)


def test_steps_are_described_with_what_their_defaults_are() -> None:
    def described(text: str) -> dict[str, Any]:
        return one(text).described()["adamw_steps"]

    found = described("steps/two_shot:density=0.012:values=sign")
    made = one("two_shot:density=0.012:values=sign").make()
    assert found["keep"] == Steps().keep_for(made)
    assert found["decay"] == Steps().decay_for(made)
    assert found["beta2"] == "at least 0.999"
    assert described(f"steps(keep={found['keep']}:decay={found['decay']})/two_shot:density=0.012:values=sign") == found
    assert described("steps/two_shot:density=1.0:values=sign")["keep"] == "0.5, with Muon 0.2"
    given = described("steps(keep=1.0:decay=0.5:beta2=0.75)/topk")
    assert (given["keep"], given["decay"], given["beta2"]) == (1.0, 0.5, 0.75)
    whole = SchemeChoice("", "topk", {"density": 0.25}, {"decay": 1}, "adamw_steps")
    assert whole.described() == one("steps(decay=1.0)/topk").described()  # 1 is 1.0, in JSON too
    assert isinstance(whole.described()["adamw_steps"]["decay"], float)


def test_a_file_may_be_called_as_steps_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps.py").write_text("from sparsync.schemes import TopK\n")
    monkeypatch.chdir(tmp_path)
    assert one("steps.py:TopK").make() == TopK(0.25)


def test_the_outer_optimizer_is_made_of_its_rate_and_momentum() -> None:
    choice = one("local_steps(every=1:outer_rate=0.5:outer_momentum=0)/dense")

    def body(comm: Any) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = SGD(model.parameters(), lr=1.0)
        local = choice.make_local(model, optimizer, comm=comm)
        model.weight.grad = torch.full_like(model.weight, comm.rank)
        optimizer.step()
        local.step()
        return model.weight.item()

    # The ranks moved by 0 and by 1, on average by 1/2, of which half counts.
    assert LocalWorld(2).run(body) == [0.75, 0.75]


def test_published_systems_are_methods_under_their_own_name() -> None:
    assert set(SYSTEMS) == {"diloco", "streaming_diloco", "sparseloco"}
    for choice in parse_schemes(",".join(SYSTEMS), 0.01):
        assert choice.label in SYSTEMS
        assert choice.local is not None
        try_out(choice, 2)


def test_the_densities_of_the_lab_leave_how_much_published_tiles_send_alone() -> None:
    """They set `density` wherever a scheme has one, which had the recipe send 1 % of a tile in place of 64 of 4096 elements."""
    assert [vars(one(name).make())["per_tile"] for name in ("sparseloco", "demo", "demo:per_tile=8")] == [64, 32, 8]


def test_a_strangers_scheme_with_a_momentum_must_say_so_before_it_is_compared() -> None:
    with pytest.raises(ValueError, match=r"HeavyBall keeps a gradient outside its residual .* set has_momentum = True"):
        try_out(one(f"{THIRD_PARTY}:HeavyBall"), 2)
    try_out(one(f"{THIRD_PARTY}:DeclaredHeavyBall"), 2)
