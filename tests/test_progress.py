"""Progress: nothing for what is short, and otherwise lines at intervals."""

import pytest

from sparsync_lab import progress as module
from sparsync_lab.progress import progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    return made


def test_the_first_line_comes_after_two_seconds_and_then_one_every_five(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("steps", 20) as shown:
        for _ in range(20):
            clock.now += 1.0
            shown.advance()
    assert capsys.readouterr().err.splitlines() == [
        *("steps: 2/20  0:18 left", "steps: 7/20  0:13 left", "steps: 12/20  0:08 left", "steps: 17/20  0:03 left")
    ]
