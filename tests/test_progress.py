"""Progress: nothing for what is short, and otherwise lines at intervals."""

import pytest

from sparsync_lab import progress as module
from sparsync_lab.compare.comparison import ComparisonDisplay
from sparsync_lab.compare.settings import CompareSettings
from sparsync_lab.progress import progress
from sparsync_lab.scheme_choice import parse_schemes


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


def test_what_takes_less_than_two_seconds_prints_nothing_unless_it_is_announced(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("steps", 20) as shown:
        clock.now += 1.9
        shown.at(19)
    with progress("reading", announced=True):
        pass
    assert capsys.readouterr().err == "reading\n"


def test_a_comparison_prints_a_line_for_each_evaluation_and_counts_the_steps_of_all_trainings(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    display = ComparisonDisplay(CompareSettings(parse_schemes("topk,dense", 0.01), steps=4), "perplexity")
    clock.now += 3.0
    display.update({"kind": "alive"})
    display.update({"kind": "scheme", "scheme": "topk"})
    display.update({"kind": "progress", "step": 4, "loss": 1.5})
    display.update({"kind": "quality", "scheme": "topk", "step": 4, "value": 7.25, "seconds": 2.0})
    display.update({"kind": "scheme", "scheme": "dense"})
    clock.now += 6.0
    display.update({"kind": "progress", "step": 2, "loss": 1.5})
    assert capsys.readouterr().err.splitlines() == [
        "starting the ranks",
        "steps of all trainings: 0/8  1/2 computing alone",
        "[1/2] topk  step 4/4  perplexity 7.25  2.0 s trained",
        "steps of all trainings: 6/8  0:03 left  2/2 dense",
    ]
