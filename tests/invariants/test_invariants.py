"""Every invariant of sparsync.testing on every row of the table of schemes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import pytest
from _pytest.mark import ParameterSet

from invariants.table import FIRST_OF_FAMILIES, LARGE_WORLDS, ROWS, SMALLEST_WORLDS, Row
from sparsync.testing import INVARIANTS, check

OF_TRACES = ("conservation", "replicas", "traffic")


def each_of_each() -> Iterator[ParameterSet]:
    """Yield each row with each invariant.

    Every tenth invariant of a row that is not slow is quick, with an offset per row; for the first row of a family, every fourth one.
    """
    quick = count()
    for row in ROWS:
        first = 0 if row.slow else next(quick)
        for place, invariant in enumerate(INVARIANTS, first):
            slow = row.slow or place % (4 if row.id in FIRST_OF_FAMILIES else 10) != 0
            yield pytest.param(row, invariant, id=f"{row.id}-{invariant}", marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("row", "invariant"), list(each_of_each()))
def test_the_invariant_holds(row: Row, invariant: str) -> None:
    check(invariant, row.subject)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worlds", "invariants"),
    [(SMALLEST_WORLDS, tuple(INVARIANTS)), (LARGE_WORLDS, OF_TRACES)],
    ids=["smallest", "large"],
)
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS if row.id in FIRST_OF_FAMILIES])
def test_the_invariants_hold_in_other_worlds(row: Row, worlds: tuple[int, ...], invariants: tuple[str, ...]) -> None:
    subject = row.subject_in(row.worlds(worlds))
    for invariant in invariants:
        check(invariant, subject)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS if row.without])
def test_no_row_leaves_out_what_it_would_pass(row: Row) -> None:
    for invariant in row.without:
        with pytest.raises(AssertionError, match=f"^{invariant}: "):
            check(invariant, replace(row, without={}).subject)


def test_the_table_knows_which_schemes_have_a_residual() -> None:
    assert {row.id: row.has_residual for row in ROWS} == {row.id: row.make().has_residual for row in ROWS}
