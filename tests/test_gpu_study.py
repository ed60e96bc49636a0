"""`python -m studies gpu` measures here what a CPU can, and says of the rest that it was not measured."""

import json
from pathlib import Path

import pytest

from sparsync_lab import cli
from studies.gpu import command, goals
from studies.gpu.launched import METHODS, of_ranks
from studies.gpu.measured import STEP, Measured
from studies.gpu.methods import DDP, Shape

TINY = Shape("cpu", layers=1, width=32, vocabulary=50, context=16)


def test_a_cpu_measures_wall_times_and_says_that_the_rest_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main(
        ["--device", "cpu", "--layers", "1", "--width", "32", "--rounds", "8", "--only", "step", "--out", str(tmp_path)]
    )
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["text"] for row in found["step"]] == list(STEP)
    assert all(row["wall_ms"][0] > 0 for row in found["step"])
    # Number 16 of the steps 0 to 16 measures the ratio.
    assert [row["text"] for row in found["step"] if row["wall_ms"][1] is not None] == ["default", "bits=0.8"]
    assert ["no GPU" in each for each in found["problems"]] == [True]
    printed = capsys.readouterr().out
    assert "| `default` | " in printed
    assert printed.count("not measured") == sum(limit is not None for goal in goals.GOALS for limit in goal.limits)


def test_goals_stand_beside_the_most_that_a_step_of_their_kind_took() -> None:
    found = command.Found("a GPU", parameters=1_000_000, copy_bytes_per_s=1e12)
    found.step = [
        Measured("fused AdamW", (1.0, None), (1.0, None), (0.032, None), (11, None), (0, None), 0.0),
        Measured("default", (2.0, 3.0), (2.0, 3.0), (0.05, 0.06), (30, 41), (0, 1), 4.5),
        Measured("micro", (9.0, None), (9.0, None), (0.09, None), (140, None), (7, None), 4.0),
        Measured("oktopk", (8.0, None), (8.0, None), (0.08, None), (150, None), (9, None), 5.0),
    ]
    found.whole = [
        Measured(DDP, (40.0, None), (1.0, None), (38.0, None), (900, None), (2, None), None),
        Measured("powersgd 8", (91.0, None), (2.2, None), (38.2, None), (2000, None), (50, None), None),
    ]
    _, default, _, _, papers = zip(*goals.table(command._of_goals(found)), strict=True)
    assert default == ("60: 60", "40: 41", "0: 1", "2.5: 3", "5: 4.5", "0.25: 0.3")
    assert papers == ("100: 90", "150: 150", "9", "9", "5: 5", "0.45")


def test_what_fails_is_told_and_the_rest_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STEP", ("fused AdamW", "no_such_scheme"))
    command.main(
        ["--device", "cpu", "--layers", "1", "--width", "32", "--rounds", "1", "--only", "step", "--out", str(tmp_path)]
    )
    assert "- step, no_such_scheme: ValueError: unknown scheme 'no_such_scheme'" in capsys.readouterr().out


def test_the_training_of_quality_is_a_study_that_the_lab_takes(tmp_path: Path) -> None:
    given = command._options(["--quality", "--device", "cpu", "--width", "64", "--data", "src", "--out", str(tmp_path)])
    words = command._of_quality(given)
    options = cli._parser().parse_args(words)
    assert options.workload == "code-86m"
    assert {"heads=1", "width=64", "layers=10", "data=src"} <= set(words)


@pytest.mark.slow
@pytest.mark.distributed
def test_several_ranks_take_the_steps_of_each_method_and_end_with_the_same_bits() -> None:
    rows = {row["method"]: row for row in of_ranks(2, "none", TINY, 1, trained=10)}
    assert set(METHODS) <= set(rows)
    assert {"bits=3.1", "bits=0.2"} <= set(rows)
    assert [name for name, row in rows.items() if row["same bits"] is not True] == ["bf16 hook"]  # which needs NCCL
