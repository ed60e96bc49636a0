"""The table of costs in docs/schemes.md is what runs/cost_table.py counts."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sparsync import schemes

SCRIPT = Path(__file__).parent.parent / "runs" / "cost_table.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cost_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def committed(script: ModuleType) -> list[list[list[str]]]:
    """The table of the page: rows of cells of one figure for each number of ranks."""
    text = script.PAGE.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    return [[cell.strip().split(", ") for cell in line.strip("|").split("|")] for line in text.strip().splitlines()[2:]]


@pytest.mark.slow
def test_the_committed_table_is_what_is_counted_on_4_ranks(script: ModuleType) -> None:
    counted = [[cell.strip() for cell in line.strip("|").split("|")] for line in script.table((4,)).splitlines()[2:]]
    assert [[cell[0] for cell in row] for row in committed(script)] == counted


@pytest.mark.slow
def test_the_committed_table_is_what_is_counted(script: ModuleType) -> None:
    text = script.PAGE.read_text().partition(script.BEGIN)[2].partition(script.END)[0]
    assert text.strip() == script.table()


def test_the_table_has_every_scheme(script: ModuleType) -> None:
    named = {row[0][0].strip("`").partition(":")[0] for row in committed(script)}
    assert set(schemes.names()) <= named
