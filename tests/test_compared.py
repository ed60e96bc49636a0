"""What ranks compare besides what is reduced: settings of optimizers, and digests of weights. Without other ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsync.runtime.comparison import Compared, Comparison, OptimizerSettings, weight_lines
from test_local_steps_state import Wrapper


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(each): name for name, each in model.named_parameters()}


def told(change: Callable[[Any], None], **options: Any) -> list[str]:
    """The lines that a change of an optimizer's groups has changed, with their number."""
    model = layers()
    groups = [{"params": list(each.parameters())} for each in model]
    optimizer = torch.optim.AdamW(groups, **options)
    settings = OptimizerSettings([optimizer], names_of(model))
    before, lines = settings.read()
    assert settings.read() == (before, lines)
    change(optimizer.param_groups)
    after, changed = settings.read()
    assert (after == before) == (changed == lines)
    return [line for line in changed if line not in lines]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("lr", 0.5),
        ("lr", torch.tensor(0.5)),
        ("betas", (0.5, 0.75)),
        ("weight_decay", 0.25),
        ("amsgrad", True),
        ("eps", 0.5),
    ],
)
def test_each_setting_of_each_group_is_compared(setting: str, value: Any) -> None:
    shown = 0.5 if isinstance(value, Tensor) else value
    assert told(lambda groups: groups[1].update({setting: value})) == [
        f"{setting}={shown!r} in parameter group 1 of AdamW"
    ]


def test_equal_numbers_of_other_types_and_what_an_optimizer_learns_are_no_difference() -> None:
    changed = told(
        lambda groups: groups[0].update(weight_decay=0, betas=[0.5, 0], d=0.5, k=3, initial_lr=0.1),
        weight_decay=0.0,
        betas=(0.5, 0.0),
    )
    assert changed == []
    changed = told(lambda groups: groups[0]["lr"].fill_(0.25), lr=torch.tensor(0.5))
    assert changed == [f"lr=0.25 in parameter group {group} of AdamW" for group in (0, 1)]  # the same tensor in both


def test_parameters_that_are_in_another_group_are_named() -> None:
    def swap(groups: Any) -> None:
        groups[0]["params"][0], groups[1]["params"][0] = groups[1]["params"][0], groups[0]["params"][0]

    assert told(swap) == [f"parameter '{i}.weight' in parameter group {1 - i} of AdamW" for i in (0, 1)]
    assert told(lambda groups: groups[0]["params"].append(groups[1]["params"].pop())) == [
        "parameter '1.bias' in parameter group 0 of AdamW"
    ]


def test_a_parameter_that_is_frozen_is_named_and_one_that_is_trained_again_is_no_difference() -> None:
    model = layers()
    settings = OptimizerSettings([torch.optim.SGD(model.parameters())], names_of(model))
    trained, lines = settings.read()
    model[1].requires_grad_(False)
    frozen, changed = settings.read()
    assert frozen != trained
    assert [line for line in changed if line not in lines] == [
        f"parameter '1.{name}' in parameter group 0 of SGD, frozen" for name in ("bias", "weight")
    ]
    assert [line.removesuffix(", frozen") for line in changed] == lines  # each in its place
    model[1].requires_grad_(True)
    assert settings.read() == (trained, lines)


class Readymade(torch.optim.Optimizer):
    """Takes groups with all of their settings, and no setting as an argument."""

    def __init__(self, param_groups: Any) -> None:
        super().__init__(param_groups, {})


def test_rates_of_optimizers_that_take_no_arguments_or_wrap_another_one_are_compared() -> None:
    model = layers()
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.25)
    for optimizer, wanted in (
        (
            Readymade([{"params": list(model.parameters()), "lr": 0.5, "scale": 3}]),
            "lr=0.5 in parameter group 0 of Readymade",
        ),
        (Wrapper(plain), "momentum=0.25 in parameter group 0 of SGD"),
    ):
        assert wanted in OptimizerSettings([optimizer], names_of(model)).read()[1]


def weights_of(compared: Compared) -> list[str]:
    return [line for told in compared.told for line in told.lines if line.startswith("weights ")]


def test_weights_are_due_every_so_many_steps_and_never_with_zero() -> None:
    weights = [("w", torch.ones(2))]

    def due(every: int, steps: int = 1) -> list[int]:
        comparison = Comparison([], {}, lambda: weights, every)
        return [step for step in range(13) if weights_of(comparison.at(step, steps))]

    assert due(5) == [0, 5, 10]
    assert due(0) == []
    assert due(5, steps=0) == []
    assert due(5, steps=4) == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11, 12]  # a check was due in one of the last 4 steps
    for wrong in (-1, True):
        with pytest.raises(ValueError, match=f"check_weights_every must be a whole number .* got {wrong}"):
            due(wrong)


def test_a_check_reads_what_the_optimizer_has_left() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    comparison = Comparison([optimizer], {}, lambda: [("w", weight)], 4, where_stepped=True)

    def lines(step: int) -> list[str]:
        return weights_of(comparison.at(step))

    assert not lines(0)  # a backward pass, for which the loop may have moved the weights
    optimizer.step()
    with torch.no_grad():
        weight.add_(1)
    assert lines(1) == [f"{each} before step 1" for each in weight_lines([("w", torch.ones(2))])]
    assert not lines(2)
    optimizer.step()
    assert not lines(3)
    optimizer.step()
    assert lines(4) == [f"{each} before step 4" for each in weight_lines([("w", torch.full((2,), 2.0))])]
    assert not [step for step in range(5, 30) if lines(step)]  # no optimizer has stepped
    assert weights_of(comparison.at(30, steps=31))  # after a failure at once
