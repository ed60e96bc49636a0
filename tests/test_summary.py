"""Invariants of the derived numbers: every figure of a report from records whose numbers are exact, so that == decides."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.made_results import BF16, DENSE, RUN, SPARSE, Made, run, summary, write
from sparsync_lab.report.results import Quality, Run, RunRecords, SchemeStart, StepRecord, Trace, read
from sparsync_lab.report.summary import Ratio, SchemeFigures, Spread, reaching, summarise


def scheme(folder: Path, *made: Made, run: Run = RUN) -> SchemeFigures:
    """The figures of the first scheme made."""
    found = summary(folder, *made, run=run).scheme(made[0].scheme)
    assert found is not None
    return found


def evaluations(*values: float) -> list[Quality]:
    """At 10, 20, ... seconds."""
    return [
        Quality("one", "topk", 0, step=place, seconds=10.0 * place, value=value)
        for place, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("values", "target", "lower_is_better", "expected"),
    [
        ((400, 200, 100), 150, True, 25.0),
        ((400, 200, 100), 200, True, 20.0),
        ((400, 200, 100), 500, True, 10.0),
        ((400, 200, 100), 99, True, None),
        ((400, 100, 300, 50), 200, True, 50 / 3),
        ((10, 50, 90), 60, False, 22.5),
        ((10, 50, 90), 91, False, None),
        ((math.inf, 100), 150, True, 20.0),
        ((math.nan, 100), 150, True, 20.0),
        ((math.nan, math.inf), 150, True, None),
        ((), 150, True, None),
        ((400, 200, 100), None, True, None),
    ],
)
def test_a_target_is_reached_on_the_straight_line_between_two_evaluations(
    values: Sequence[float], target: float | None, lower_is_better: bool, expected: float | None
) -> None:
    goal = None if target is None else float(target)
    found = reaching(evaluations(*map(float, values)), goal, lower_is_better)
    assert found == (None if expected is None else pytest.approx(expected, rel=1e-15))


def test_speed_up_is_the_ratio_of_the_times_to_the_target(tmp_path: Path) -> None:
    found = summary(tmp_path, DENSE, BF16, SPARSE)
    assert [figures.target_s for figures in found.schemes] == [Spread(x, x, x) for x in (10.0, 5.0, 2.5)]
    assert [figures.speedup["dense"] for figures in found.schemes] == [Ratio(Spread(x, x, x)) for x in (1.0, 2.0, 4.0)]
    assert [figures.speedup["bf16"] for figures in found.schemes] == [Ratio(Spread(x, x, x)) for x in (0.5, 1.0, 2.0)]
    assert [figures.link_s for figures in found.schemes] == [3.0, 1.5, 0.001]


@pytest.mark.parametrize(
    ("sparse", "dense", "expected"),
    [
        ({}, {"values": (400.0, 300.0)}, Ratio(Spread(3.2, 3.2, 3.2), ">")),
        ({"values": (400.0, 300.0)}, {}, Ratio(Spread(5.0, 5.0, 5.0), "<")),
        ({"values": (400.0, 300.0)}, {"values": (400.0, 300.0)}, None),
        ({}, {"values": (400.0, 300.0), "status": "failed: rank 1 went away"}, None),
        ({}, {"values": (400.0, 300.0), "status": None}, None),
        ({"values": (400.0, 300.0), "status": "failed: rank 1 went away"}, {}, None),
        ({}, {"values": ()}, None),
        ({}, {"seed": 1}, None),
    ],
)
def test_a_target_that_one_side_missed_bounds_the_speed_up(
    tmp_path: Path, sparse: dict[str, object], dense: dict[str, object], expected: Ratio | None
) -> None:
    found = scheme(tmp_path, replace(SPARSE, **sparse), replace(DENSE, **dense))
    assert found.speedup["dense"] == expected


def test_seeds_that_miss_the_target_count_as_infinitely_late(tmp_path: Path) -> None:
    late = (400.0, 300.0)
    made = [replace(SPARSE, seed=0), replace(SPARSE, seed=1, step_s=2.0), replace(SPARSE, seed=2, values=late)]
    dense = [replace(DENSE, seed=seed) for seed in range(3)]
    found = scheme(tmp_path, *made, *dense)
    assert found.target_s == Spread(5.0, 2.5, math.inf)
    assert (found.reached, len(found.seeds), found.over_seeds("step_s")) == (2, 3, Spread(1.0, 1.0, 2.0))
    assert found.speedup["dense"] == Ratio(Spread(4.0, 2.0, 5.0), "<")
    most_missed = [replace(each, values=late) for each in made[1:]]
    assert scheme(tmp_path / "most", made[0], *most_missed, *dense).target_s is None


def test_the_components_of_a_step_are_medians_and_its_bytes_are_means(tmp_path: Path) -> None:
    records = read(write(tmp_path, DENSE)).runs[0]
    trace = records.traces["dense", 0]
    slow = replace(trace.steps[0], step_s=100.0, wait_s=64.0, reduce_s=80.0, sent_bytes=1.0e6, interface_bytes=0.0)
    changed = Trace(trace.start, [slow, *trace.steps[1:]], trace.quality, trace.end)
    (found,) = summarise(replace(records, traces={("dense", 0): changed})).schemes
    (seed,) = found.seeds
    assert (seed.step_s, seed.compute_s, seed.scheme_s, seed.wait_s, seed.other_s) == (4.0, 0.25, 0.5, 3.0, 0.25)
    assert seed.hidden_s == 0.0
    assert (seed.sent_bytes, seed.interface_bytes) == (2.5e6, 937.5)
    assert found.step_over_compute == Spread(16.0, 16.0, 16.0)
    assert seed.union_density == 0.5


@pytest.mark.parametrize("step_s", [0.5, 0.75, 0.875, 1.0, 4.0])
def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path, step_s: float) -> None:
    """Of 0.25 s of computing and 0.625 s of reduction, what the step does not show was hidden, and what it shows beyond them is other."""
    (seed,) = scheme(tmp_path, replace(SPARSE, step_s=step_s)).seeds
    assert seed.reduce_s is not None and seed.hidden_s is not None and seed.other_s is not None
    assert seed.own_compute_s + seed.reduce_s - seed.hidden_s + seed.other_s == step_s
    assert (seed.hidden_s, seed.other_s) == (max(0.0, 0.875 - step_s), max(0.0, step_s - 0.875))
    assert seed.hidden_share == seed.hidden_s / 0.625


def test_a_rank_that_waits_for_a_slower_one_hides_nothing_by_it(tmp_path: Path) -> None:
    """Two ranks compute for 1 s and 3 s, and exchange for 4 s: the step takes 7 s, and the mean in the communicator is 5 s."""
    made = replace(SPARSE, step_s=7.0, wait_s=5.0, reduce_s=5.0, compute_s=3.0, own_compute_s=2.0)
    (seed,) = scheme(tmp_path / "own", made).seeds
    assert (seed.hidden_s, seed.other_s) == (0.0, 0.0)
    (older,) = scheme(tmp_path / "older", replace(made, own_compute_s=None)).seeds
    assert older.hidden_s == 1.0


def test_failed_and_interrupted_trainings_are_told_above_all_else_and_others_noted(tmp_path: Path) -> None:
    made = (
        replace(SPARSE, status=None),
        replace(SPARSE, seed=1, status="failed: rank 2 went away"),
        replace(SPARSE, seed=2, replicas_identical=False),
        DENSE,
    )
    found = summary(tmp_path, *made)
    assert [(each.kind, each.text, each.why) for each in found.banners] == [
        (
            "failed",
            "topk DID NOT FINISH: ITS ROW IS NO RESULT.",
            "With seed 0 it ended after 4 steps: interrupted. With seed 1 it ended after 4 steps: rank 2 went away",
        )
    ]
    assert found.notes == ("topk (seed 2): the replicas were not identical at the end. Do not trust its quality.",)
    assert summary(tmp_path / "alone", SPARSE).notes == ("This run has no dense scheme to compare with.",)
    assert summary(tmp_path / "nothing").notes == (
        "This run has no scheme records: it was interrupted before any training.",
    )


@pytest.mark.parametrize(
    ("scheme", "union", "noted"),
    [("TopK(density=0.01)", 1.0, True), ("TopK(density=0.01)", 0.5, False), ("TwoShot(density=1.0)", 1.0, False)],
)
def test_a_scheme_with_a_density_that_summed_every_element_is_noted(
    tmp_path: Path, scheme: str, union: float, noted: bool
) -> None:
    records = read(write(tmp_path, DENSE, SPARSE)).runs[-1]
    trace = records.traces["topk", 0]
    steps = [replace(step, union_density=union) for step in trace.steps]
    start = replace(trace.start, config={"full": scheme})
    found = summarise(
        replace(records, traces={**records.traces, ("topk", 0): replace(trace, steps=steps, start=start)})
    )
    assert [note.startswith("topk summed every element, though its density is 0.01") for note in found.notes] == [
        True
    ] * noted


def test_a_machine_that_was_busy_with_other_things_has_a_banner(tmp_path: Path) -> None:
    quiet = summary(tmp_path / "quiet", DENSE, replace(SPARSE, compute_s=0.3125))
    assert (quiet.banners, quiet.disturbed) == ((), False)
    # The shortest step takes 1 s, of which 3 % are 30 ms.
    small = summary(tmp_path / "little", replace(DENSE, compute_s=0.0625), replace(SPARSE, compute_s=0.078125))
    assert (small.noise_s, small.disturbed) == (0.015625, False)
    busy = summary(tmp_path / "busy", DENSE, replace(SPARSE, compute_s=0.375))
    (banner,) = busy.banners
    assert (banner.kind, busy.disturbed) == ("disturbed", True)
    assert banner.why.startswith("A step that only computes took between 250 and 375 ms, though all schemes compute")


def test_behind_dense_is_the_worse_quality_in_percent_at_the_last_step_that_both_took(tmp_path: Path) -> None:
    worse = replace(SPARSE, values=(400.0, 250.0, 110.0))
    assert scheme(tmp_path / "a", worse, DENSE).behind_dense == Spread(10.0, 10.0, 10.0)
    assert scheme(tmp_path / "b", worse, BF16).behind_dense is None
    seeds = [replace(DENSE, seed=1), replace(worse, seed=1, values=(400.0, 250.0))]
    assert scheme(tmp_path / "c", worse, DENSE, *seeds).behind_dense == Spread(17.5, 10.0, 25.0)
    higher = run(target=None, workload={**RUN.workload, "better": "higher"})
    assert scheme(tmp_path / "d", worse, DENSE, run=higher).behind_dense == Spread(-10.0, -10.0, -10.0)


def test_a_step_of_local_steps_is_a_mean_over_the_steps_of_a_round() -> None:
    who: dict[str, Any] = {"run": "one", "scheme": "local", "seed": 0}
    trace = Trace(SchemeStart(**who, config={"local_steps": {"every": 2}}, compute_s=0.25), [], [])
    for number, step_s in enumerate((1.0, 5.0, 1.0, 7.0, 1.0, 3.0, 100.0), start=1):
        sent: dict[str, Any] = {"sent_bytes": 0.0, "interface_bytes": None, "messages": 0.0, "union_density": 0.0}
        trace.steps.append(
            StepRecord(**who, step=number, loss=0.0, seconds=1.0, step_s=step_s, wait_s=0.5, reduce_s=1.5, **sent)
        )
    (found,) = summarise(RunRecords(RUN, {("local", 0): trace})).schemes
    assert (found.seeds[0].step_s, found.seeds[0].scheme_s) == (3.0, 1.0)
