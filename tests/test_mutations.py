"""The faults that `python -m studies mutations` puts into the library fit its sources and its tests, and what does not is told."""

import ast
import re
from dataclasses import replace
from typing import Any

import pytest

from studies import mutations, parts

ALL = mutations.mutations()


def test_every_mutation_applies_to_the_sources_and_leaves_a_program() -> None:
    assert len({each.name for each in ALL}) == len(ALL) >= 24
    for each in ALL:
        source = (mutations.PACKAGES[each.package] / each.file).read_text("utf-8")
        assert ast.dump(ast.parse(each.applied_to(source))) != ast.dump(ast.parse(source)), each.name


def test_every_test_that_is_named_is_there() -> None:
    for test in {test for each in ALL for test in each.tests}:
        file, name = test.split("::")
        assert re.search(rf"^def {name}\(", (parts.ROOT / file).read_text("utf-8"), re.MULTILINE), test


@pytest.mark.parametrize(
    ("status", "output", "told"),
    [
        (1, "FAILED tests/a.py::test_b[c d] - x\n", (mutations.CAUGHT, "    tests/a.py::test_b[c d]")),
        (0, "", (mutations.NOT_CAUGHT, "")),
        (4, "not found", (mutations.DO_NOT_RUN, "not found")),
    ],
)
def test_a_mutation_is_caught_where_a_test_fails_and_not_where_none_runs(
    status: int, output: str, told: tuple[str, str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    each, sources = ALL[0], list[str]()
    (file := tmp_path / "unchanged" / "sparsync" / each.file).parent.mkdir(parents=True)
    file.write_text(each.old)

    def run(folder: Any, _: object) -> tuple[int, str]:
        sources.append((folder / "sparsync" / each.file).read_text())
        return status, output

    monkeypatch.setattr(mutations, "run", run)
    assert mutations.tried(each, tmp_path / "unchanged") == told
    assert (sources, file.read_text()) == ([each.new], each.old)
    file.write_text("")
    result, why = mutations.tried(replace(each, name="again"), tmp_path / "unchanged")
    assert result == mutations.DOES_NOT_APPLY and "must occur once" in why
