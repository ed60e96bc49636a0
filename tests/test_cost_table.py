"""The table of costs in docs/traffic.md is what `python -m studies cost_table` counts."""

import pytest

from sparsync import schemes
from studies import cost_table, parts


def on_the_page() -> str:
    page = (parts.ROOT / cost_table.PAGE).read_text()
    return page.partition("<!-- begin costs -->")[2].partition("<!-- end costs -->")[0].strip()


def committed() -> list[list[list[str]]]:
    """The table of the page: rows of cells of one figure for each number of ranks."""
    return [
        [cell.strip().split(", ") for cell in line.strip("|").split("|")] for line in on_the_page().splitlines()[2:]
    ]


@pytest.mark.slow
def test_the_committed_table_is_what_is_counted_on_4_ranks() -> None:
    counted = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in cost_table.table((4,)).splitlines()[2:]
    ]
    assert [[cell[0] for cell in row] for row in committed()] == counted


@pytest.mark.slow
def test_the_committed_table_is_what_is_counted() -> None:
    assert on_the_page() == cost_table.table()


def test_the_table_has_every_scheme() -> None:
    named = {row[0][0].strip("`").partition(":")[0] for row in committed()}
    assert set(schemes.names()) <= named
