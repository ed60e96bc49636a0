"""docs/what_works.md has a verdict for every situation, integration and scheme; some of them are repeated here."""

import re
from pathlib import Path

import pytest

from integrations.page import INTEGRATIONS, PART, SITUATIONS, part
from integrations.table import ABSENT, FAILS, REFUSED, SCHEMES, WORKS, RefusedError, TrialVerdict, verdict

PAGE = Path(__file__).parents[2] / "docs" / "what_works.md"
QUICK = ("a loss scaler skips a step (GradScaler)",)  # all of them take some minutes
Cells = dict[str, dict[str, tuple[str, ...]]]  # situation -> integration -> verdict and notes


def committed() -> str:
    """Read the generated part of the page."""
    return PAGE.read_text().partition(f"<!-- begin {PART} -->")[2].partition(f"<!-- end {PART} -->")[0]


def cells(text: str) -> Cells:
    """Parse the table, with notes in place of their numbers."""
    notes: dict[str, str] = dict(re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    head, _, *rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]

    def told(cell: str) -> tuple[str, ...]:
        word, _, numbers = cell.partition(" (")
        return (word, *(notes[number] for number in re.findall(r"\d+", numbers)))

    return {
        situation: {
            name: told(cell) for names, cell in zip(head[1:], row[1:], strict=True) for name in names.split("; ")
        }
        for row in rows
        for situation in row[0].split("; ")
    }


def test_the_page_has_a_verdict_for_everything_and_nothing_fails() -> None:
    found = cells(committed())
    assert all(sorted(each) == sorted(SITUATIONS) for each in (found, *INTEGRATIONS.values()))
    for by_integration in found.values():
        assert sorted(by_integration) == sorted(INTEGRATIONS)
        for word, *notes in by_integration.values():
            assert word in (WORKS, REFUSED, ABSENT)
            assert word == WORKS or notes


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_run_again_is_what_the_page_says() -> None:
    found = cells(committed())
    assert cells(part(QUICK)) == {situation: found[situation] for situation in QUICK}


@pytest.mark.distributed
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "integration",
    [pytest.param(each, marks=[] if each == "`attach`, DDP" else pytest.mark.slow) for each in INTEGRATIONS],
)
def test_in_every_situation_a_scheme_works_or_is_refused_behind_every_integration(
    integration: str, compiles: bool
) -> None:
    cases, id = INTEGRATIONS[integration], SCHEMES["TwoShot"]
    chosen = [each for each in SITUATIONS if (each == "torch.compile") == compiles]  # torch's compiler takes seconds
    verdicts = {situation: cases[situation].trial([id])[id] for situation in chosen}
    assert {situation: each for situation, each in verdicts.items() if each.word == FAILS} == {}


def right(values: list[object]) -> None:
    assert values == [1, 1], "not both 1"


def test_a_wrong_result_an_error_and_a_refusal_on_some_ranks_only_are_failures() -> None:
    no, other = RefusedError("no"), RefusedError("other")
    assert verdict([1, 1], right) == TrialVerdict(WORKS)
    assert verdict([no, no], right) == TrialVerdict(REFUSED, "no")
    assert verdict([1, 2], right).word == FAILS
    assert verdict([1, ValueError("lost")], right) == TrialVerdict(FAILS, "lost")
    assert verdict([1, no], right).word == FAILS
    assert verdict([no, other], right).word == FAILS
