"""`python -m studies gpu` measures on a CPU what it can, and lists the rest."""

import pytest

from studies.gpu import command


def test_a_cpu_measures_wall_times_and_what_fails_or_needs_a_gpu_is_listed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "METHODS", ("fused AdamW", "default", "no_such_scheme", "exact_micro"))
    command.main(["--device", "cpu", "--layers", "1", "--width", "32", "--rounds", "1"])
    told = capsys.readouterr().out
    rows = [line.split(" | ") for line in told.splitlines() if line.startswith("| `")]
    assert [row[0] for row in rows] == ["| `fused AdamW`", "| `default`", "| `exact_micro`"]
    assert all(float(row[1]) > 0 and row[4] == "-" for row in rows)
    assert told.count("no GPU") == 1
    assert "| `default` | " in told and "- no_such_scheme: ValueError: unknown scheme 'no_such_scheme'" in told
