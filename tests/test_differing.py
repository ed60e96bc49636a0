"""What errors say of ranks that differ: what differs, of both, and nothing else."""

from typing import Any

import pytest
import torch
from torch import nn

from sparsync import AdamWSteps, Dense, LocalWorld, TopK, TwoShot
from sparsync.base.scheme import Scheme
from sparsync.comm.announcement import LONGEST, NAMED, differences
from sparsync.core import Comm
from sparsync.exchanges.local_steps import LocalTraining
from sparsync.schemes import PerParameter


def test_of_two_schemes_only_the_settings_that_differ_are_named() -> None:
    def of(*schemes: Scheme) -> str:
        here, there = (repr(each) for each in schemes)
        return differences([here], [there], 0, 1)

    assert of(TopK(0.01), TopK(0.02)) == "rank 0 has TopK(density=0.01), rank 1 has TopK(density=0.02)"
    assert of(TwoShot(0.01, values="int8"), TwoShot(0.5, values="int4")) == (
        "rank 0 has TwoShot(density=0.01), rank 1 has TwoShot(density=0.5); "
        "rank 0 has TwoShot(values='int8'), rank 1 has TwoShot(values='int4')"
    )
    inside = [PerParameter(TopK(0.5), {"*bias": Dense(each)}) for each in ("float32", "bfloat16")]
    assert of(*inside) == "rank 0 has Dense(wire='float32'), rank 1 has Dense(wire='bfloat16')"
    assert of(Dense(), TopK(0.5)) == f"rank 0 has {Dense()}, rank 1 has {TopK(0.5)}"


def test_of_a_long_text_the_place_is_shown_where_it_differs() -> None:
    here, there = ("x" * 5 * LONGEST + each for each in "ab")
    found = differences([here], [there], 2, 3)
    assert found.endswith(f"{'x' * (LONGEST // 4)}b") and len(found) < LONGEST


def test_many_differences_are_counted_and_missing_lines_are_said_to_be_missing() -> None:
    here, there = [f"line {i}" for i in range(NAMED)], [f"line {i + 1}" for i in range(NAMED + 2)]
    assert differences(here, there, 0, 1).endswith("rank 0 has line 2, rank 1 has line 3; and 2 more")
    assert differences(here[:1], here[:2], 0, 1) == "rank 0 has nothing more, rank 1 has line 1"


@pytest.mark.parametrize(
    ("settings", "width", "wanted"),
    [
        ([{"bucket_mb": 1.0}, {"bucket_mb": 2.0}], (4, 4), "has {}(bucket_mb=1.0), rank 1 has {}(bucket_mb=2.0); give"),
        (
            [{}, {}],
            (4, 5),
            "rank 0 has a model of 8 parameters, rank 1 has a model of 10 parameters; rank 0 has parameter 'weight' of [2, 4]",
        ),
    ],
)
@pytest.mark.parametrize("kind", [AdamWSteps, LocalTraining])
def test_ranks_whose_settings_or_models_differ_name_only_what_does(
    kind: Any, settings: list[dict[str, Any]], width: tuple[int, int], wanted: str
) -> None:
    def body(comm: Comm) -> str:
        made = nn.Linear(width[comm.rank], 2, bias=False)
        every = {"every": 2} if kind is LocalTraining else {}
        with pytest.raises(RuntimeError, match="ranks must agree, but rank") as error:
            kind(made, torch.optim.AdamW(made.parameters()), TopK(0.5), comm=comm, **every, **settings[comm.rank])
        return str(error.value)

    first, second = LocalWorld(2).run(body)
    options = "LocalSteps" if kind is LocalTraining else "Steps"
    assert wanted.format(options, options) in first
    assert "rank 1 has" in second and "density" not in first + second
