"""Every invariant of sparsync.testing on every row of the table of schemes."""

from dataclasses import replace

import pytest

from invariants.table import LARGE_WORLDS, ROWS, SMALLEST_WORLDS, Row, rows
from sparsync.testing import INVARIANTS, check

OF_TRACES = ("conservation", "replicas", "traffic")


@pytest.mark.parametrize("invariant", INVARIANTS)
@rows()
def test_the_invariant_holds(row: Row, invariant: str) -> None:
    check(invariant, row.subject)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_the_invariants_hold_in_the_smallest_worlds(row: Row) -> None:
    subject = row.subject_in(row.worlds(SMALLEST_WORLDS))
    for invariant in INVARIANTS:
        check(invariant, subject)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS])
def test_the_invariants_of_traces_hold_in_larger_worlds(row: Row) -> None:
    subject = row.subject_in(row.worlds(LARGE_WORLDS))
    for invariant in OF_TRACES:
        check(invariant, subject)


@pytest.mark.slow
@pytest.mark.parametrize("row", [pytest.param(row, id=row.id) for row in ROWS if row.without])
def test_no_row_leaves_out_what_it_would_pass(row: Row) -> None:
    for invariant in row.without:
        with pytest.raises(AssertionError, match=f"^{invariant}: "):
            check(invariant, replace(row, without={}).subject)


def test_the_table_knows_which_schemes_have_a_residual() -> None:
    assert {row.id: row.has_residual for row in ROWS} == {row.id: row.make().has_residual for row in ROWS}
