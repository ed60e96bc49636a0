"""`bits="auto"`: which recipe the first steps choose, and that ranks go on by it together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import sparsync
from helpers.distributed import run
from sparsync.exchanges.auto_bits import STEPS, Choosing, StepTimes
from sparsync.recipes import bits_of, candidates, rows

STEPS_ROWS = rows("steps", 4)


@pytest.mark.parametrize(
    ("computing_ms", "waiting_ms", "latency_ms", "bits"),
    [
        (100, 2, 1, 4.6),  # a fast link
        (100, 11, 0, 4.6),
        (100, 12, 0, 3.1),
        (50, 92, 0, 0.2),  # 0.8 bits would wait for 16 ms
        (50, 20, 1, 0.8),
        (90, 75, 5, 0.8),  # 18 ms at 0.8 bits, and a step of 98 ms at the fewest
        (10, 3, 3, 4.6),  # latency alone is above a tenth, and fewer bits gain nothing
    ],
)
def test_the_most_bits_are_chosen_for_which_a_step_waits_a_tenth_of_its_time(
    computing_ms: float, waiting_ms: float, latency_ms: float, bits: float
) -> None:
    times = StepTimes(computing_ms / 1e3, waiting_ms / 1e3, latency_ms / 1e3, 4.6)
    assert times.chosen(STEPS_ROWS).bits == bits


def test_auto_chooses_among_recipes_with_as_many_bits_as_the_default_or_the_floor() -> None:
    assert [each.bits for each in candidates("steps", 4, "auto")] == [
        each.bits for each in STEPS_ROWS if each.bits >= STEPS_ROWS[0].bits
    ]
    assert {each.bits for each in candidates("steps", 4, ("auto", 0.8))} == {
        each.bits for each in STEPS_ROWS if each.bits >= 0.8
    }
    assert candidates("steps", 4, 0.8) == candidates("linear", 4, None) == []
    assert bits_of("bits=auto") == "auto"
    assert bits_of("bits=auto:0.2") == ("auto", 0.2)


def chosen_by_two(folder: Path) -> list[Any]:
    """Train over a link that is slow, as both ranks are told: with the fewest bits after the first steps."""

    def times(choosing: Choosing, bits: float) -> StepTimes:
        rank = torch.distributed.get_rank()
        own = torch.tensor([0.01 * (rank + 1), 0.1 * (2 - rank), 0.001], dtype=torch.float64)
        rows = choosing._gathered(own)[1]
        assert rows[:, 0].tolist() == [0.01, 0.02]
        return StepTimes(float(rows[:, 0].max()), float(rows[:, 1].min()), 0.001, bits)

    measured: Any = Choosing.times
    kind: Any = Choosing  # whose method is another one here
    kind.times = times

    def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32)))
        optimizer = AdamW(model.parameters(), lr=0.01)
        return model, optimizer, sparsync.attach(model, optimizer=optimizer, bits=("auto", 0.8))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * number + torch.distributed.get_rank()))
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    try:
        model, optimizer, handle = trained()
        bits = []
        for number in range(STEPS + 4):
            step(model, optimizer, number)
            bits.append(handle.recipe.bits)
            if number in (1, STEPS + 1):
                sparsync.checkpoint.save(handle, folder)
        state, drift = handle.state_dict(), handle.stats()["drift"]
        again, its_optimizer, its_handle = trained()
        its_handle.load_state_dict(state)
        for number in (90, 91):
            step(model, optimizer, number)
            step(again, its_optimizer, number)
        same = all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
        weights = [each.clone() for each in model.state_dict().values()]
        handle.detach()
        its_handle.detach()
        return [bits, drift > 0, its_handle.recipe.bits, same, weights]
    finally:
        kind.times = measured


@pytest.mark.distributed
def test_ranks_take_the_chosen_recipe_together_and_a_resumed_run_keeps_it(tmp_path: Path) -> None:
    first, second = run(chosen_by_two, 2, folder=tmp_path)
    default = STEPS_ROWS[0].bits
    assert first[0] == second[0] == [default] * (STEPS - 1) + [0.8] * 5
    assert first[1:4] == second[1:4] == [True, 0.8, True]
    assert all(map(torch.equal, first[4], second[4]))
