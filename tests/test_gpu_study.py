"""`python -m studies gpu` measures on a CPU what it can, and lists the rest."""

import json
from pathlib import Path

import pytest

from studies.gpu import command


def test_a_cpu_measures_wall_times_and_what_fails_or_needs_a_gpu_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "METHODS", ("fused AdamW", "default", "no_such_scheme", "exact_micro"))
    command.main([*["--device", "cpu", "--layers", "1", "--width", "32", "--rounds", "1", "--out"], str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["text"] for row in found["step"]] == ["fused AdamW", "default", "exact_micro"]
    assert all(row["wall_ms"] > 0 and row["launches"] is None for row in found["step"])
    assert ["no GPU" in each for each in found["problems"]] == [True, False]
    told = capsys.readouterr().out
    assert "| `default` | " in told and "- no_such_scheme: ValueError: unknown scheme 'no_such_scheme'" in told
