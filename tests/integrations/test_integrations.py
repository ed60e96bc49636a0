"""docs/integrations.md has a verdict for every situation, integration and scheme; some of them are run again."""

import re
from pathlib import Path

import pytest

from integrations.page import INTEGRATIONS, page
from integrations.table import ABSENT, FAILS, REFUSED, SCHEMES, SITUATIONS, WORKS, RefusedError, Verdict, verdict

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
QUICK = ("a loss scaler skips a step (GradScaler)",)  # the whole takes some minutes
Cells = dict[
    str, dict[str, dict[str, str]]
]  # integration -> situation -> scheme -> cell, its reason in place of its number


def cells(text: str) -> Cells:
    """Return the tables of the page."""
    found: Cells = {}
    for section in text.split("\n## ")[1:]:
        reasons: dict[str, str] = dict(re.findall(r"^(\d+)\. (.+)$", section, re.MULTILINE))
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        integration = section.splitlines()[0]
        found[integration] = {
            row[0]: {
                scheme: re.sub(r"\((\d+)\)", lambda number, reasons=reasons: reasons[number[1]], cell)
                for scheme, cell in zip(rows[0][2:], row[2:], strict=True)
            }
            for row in rows[2:]
        }
    return found


def test_the_page_has_a_verdict_for_everything_and_nothing_fails() -> None:
    found = cells(PAGE.read_text())
    assert list(found) == list(INTEGRATIONS)
    for integration, situations in found.items():
        assert set(INTEGRATIONS[integration]) == set(SITUATIONS)
        assert list(situations) == list(SITUATIONS)
        for row in situations.values():
            assert list(row) == list(SCHEMES)
            for cell in row.values():
                assert re.fullmatch(rf"{WORKS}|({REFUSED}|{ABSENT}) .+", cell)


@pytest.mark.slow
@pytest.mark.distributed
def test_what_is_run_again_is_what_the_page_says() -> None:
    committed = cells(PAGE.read_text())
    for integration, situations in cells(page(QUICK)).items():
        assert situations == {situation: committed[integration][situation] for situation in QUICK}


def right(values: list[object]) -> None:
    assert values == [1, 1], "not both 1"


def test_a_wrong_result_an_error_and_a_refusal_on_some_ranks_only_are_failures() -> None:
    no, other = RefusedError("no"), RefusedError("other")
    assert verdict([1, 1], right) == Verdict(WORKS)
    assert verdict([no, no], right) == Verdict(REFUSED, "no")
    assert verdict([1, 2], right).word == FAILS
    assert verdict([1, ValueError("lost")], right) == Verdict(FAILS, "lost")
    assert verdict([1, no], right).word == FAILS
    assert verdict([no, other], right).word == FAILS
