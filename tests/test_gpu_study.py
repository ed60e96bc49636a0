"""`python -m studies gpu` measures here what a CPU can, and says of the rest that it was not measured."""

import json
from pathlib import Path

import pytest

from studies.gpu import command
from studies.gpu.methods import STEP

TINY = ["--device", "cpu", "--layers", "1", "--width", "32", "--only", "step"]


def test_a_cpu_measures_wall_times_and_says_that_the_rest_is_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.main([*TINY, "--rounds", "8", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["text"] for row in found["step"]] == list(STEP)
    assert all(row["wall_ms"] > 0 and row["launches"] is None for row in found["step"])
    assert ["no GPU" in each for each in found["problems"]] == [True]
    assert "| `default` | " in capsys.readouterr().out


def test_what_fails_is_told_and_the_rest_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STEP", ("fused AdamW", "no_such_scheme"))
    command.main([*TINY, "--rounds", "1", "--out", str(tmp_path)])
    assert "- step, no_such_scheme: ValueError: unknown scheme 'no_such_scheme'" in capsys.readouterr().out
