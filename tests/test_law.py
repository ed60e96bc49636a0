"""The law of docs/frontier.md: what a point is, what is fitted, and that a prediction stands."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsync_lab.frontier import runs
from sparsync_lab.frontier.runs import Finished, Key
from sparsync_lab.scheme_choice import parse_schemes
from sparsync_lab.workloads.one_process import Trained
from studies import law
from studies.law import Point

TINY = Point("gpt", 107_584, 512, 1000, 4, 0.2, gap=0.02, deviation=1e-4, seeds=3)


def points() -> list[Point]:
    """Make points of an exact law without scatter."""
    made = [
        replace(TINY, parameters=size, tokens_per_step=tokens, ranks=ranks, recipe=bits)
        for size in (100_000, 1_000_000, 10_000_000)
        for tokens in (512, 2048)
        for ranks in (4, 16)
        for bits in (0.2, 0.8, 4.6)
    ]
    return [replace(point, gap=exact(point)) for point in made]


def exact(point: Point) -> float:
    return -0.03 + 0.01 / point.recipe * (point.parameters / 1e6) ** 0.25 * (point.ranks / 4) ** 0.5


def test_a_law_without_scatter_is_recovered_and_extended_to_a_larger_size() -> None:
    target = Point("", 100_000_000, 16_384, 1000, 4, 0.2, seeds=3)
    middle, low, high = law.quantiles(law.law_of(points()).measured(target))
    assert [round(each, 2) for each in (middle, low, high)] == [round(exact(target), 2)] * 3


def test_points_to_compare_do_not_change_the_law_and_larger_models_end_the_fit() -> None:
    small = points()
    others = [replace(TINY, parameters=111_000_000, gap=0.5), replace(TINY, job="other", gap=0.5)]
    together = law.updated(small, [], [*others, replace(small[0], gap=0.5)])
    assert len(together) == len(small) + 2
    assert torch.equal(law.law_of(together).draws, law.law_of(small).draws)
    with pytest.raises(ValueError, match="--fit would change a prediction"):
        _ = law.updated(together, [replace(TINY, gap=0.0)], [])


def test_a_point_is_the_gap_at_each_methods_best_rate_seed_by_seed_whatever_its_label(tmp_path: Path) -> None:
    options = {"batch_size": 16, "context": 32, "optimizer_name": "adamw"}
    job = runs.described({"workload": "gpt", "metric": "perplexity", "parameters": 107_584, "options": options})
    dense, signs = (runs.described(choice.described()) for choice in parse_schemes("dense,bits=0.8", 0.01))
    ends = {
        dense: {(1.0, 0): 9.0, (2.0, 0): 8.0, (4.0, 0): math.nan, (2.0, 1): 4.0},
        signs: {(1.0, 0): 4.0, (2.0, 0): 16.0, (0.5, 0): 32.0, (1.0, 1): 8.0},
    }
    for method, by_run in ends.items():
        for (rate, seed), end in by_run.items():
            trained = Trained(((1000, end),), 1.0, 1.0, 1.0, 1.0)
            runs.append(tmp_path, Finished(Key(job, method, 4, 1000, seed, rate), 107_584, 1.0, trained), "a label")
    (point,) = law.points_of([tmp_path])
    assert replace(point, deviation=None) == replace(TINY, recipe=0.8, gap=0.0, deviation=None, seeds=2)
    assert point.deviation == pytest.approx(math.log(2) * math.sqrt(2))
