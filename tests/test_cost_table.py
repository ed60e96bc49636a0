"""The table of costs in docs/traffic.md is what `python -m studies cost_table` counts."""

import pytest

from sparsync import schemes
from studies import cost_table, parts


def on_the_page() -> str:
    page = (parts.ROOT / cost_table.PAGE).read_text()
    return page.partition("<!-- begin costs -->")[2].partition("<!-- end costs -->")[0].strip()


@pytest.mark.slow
def test_the_committed_table_is_what_is_counted() -> None:
    assert on_the_page() == cost_table.table()


def test_the_table_has_every_scheme() -> None:
    named = {line.split("`")[1].partition(":")[0] for line in on_the_page().splitlines()[2:]}
    assert set(schemes.names()) <= named
