"""The limits of the house. Where one is not met yet, today's figure stands in its place: it may only fall, and is lowered with the code."""

import ast
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch import nn

import sparsync

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "sparsync"
SOURCES = {path: path.read_text() for path in sorted(LIBRARY.rglob("*.py"))}
NODES = {path: list(ast.walk(ast.parse(source))) for path, source in SOURCES.items()}
MOST_LINES = {  # of Python by house; the goals are 15,000, 2,000, 12,000, 6,000 and 20,000
    "src": 22_352,
    "elastic": 1_991,
    "lab": 13_275,
    "studies": 8_609,
    "tests": 30_111,
}
LONGER_FILES = 1  # of more than 400 lines; goal 0
LONGER_SCHEMES = 0  # of more than 200 lines
LARGER_CLASSES = 5  # of more than 20 methods; goal 0
HACKS = 15  # goal 10
PUBLIC_NAMES = 22


@pytest.mark.parametrize("house", MOST_LINES)
def test_a_house_has_no_more_lines_than_it_may(house: str) -> None:
    assert sum(map(lines, (ROOT / house).rglob("*.py"))) <= MOST_LINES[house]


def test_no_more_files_are_longer_than_400_lines_or_a_scheme_than_200() -> None:
    longer = [path.name for path in SOURCES if lines(path) > 400]
    schemes = [path.name for path in SOURCES if path.parent.name == "schemes" and lines(path) > 200]
    assert len(longer) <= LONGER_FILES, longer
    assert len(schemes) <= LONGER_SCHEMES, schemes


def test_no_more_classes_have_more_than_20_methods() -> None:
    larger = [
        each.name
        for nodes in NODES.values()
        for each in nodes
        if isinstance(each, ast.ClassDef) and sum(isinstance(part, ast.FunctionDef) for part in each.body) > 20
    ]
    assert len(larger) <= LARGER_CLASSES, larger


def test_there_are_no_more_hacks() -> None:
    assert sum(source.count("HACK:") for source in SOURCES.values()) <= HACKS


def test_no_module_uses_a_private_attribute_that_another_one_defines() -> None:
    defined = {path: set(private_names(nodes)) for path, nodes in NODES.items()}
    everywhere = set[str]().union(*defined.values()) - set(dir(nn.Module()))
    used = [
        f"{path.relative_to(LIBRARY)}:{each.lineno} {ast.unparse(each)}"
        for path, nodes in NODES.items()
        for each in nodes
        if isinstance(each, ast.Attribute)
        and each.attr in everywhere - defined[path]
        and not (isinstance(each.value, ast.Name) and each.value.id in ("self", "cls"))
    ]
    assert used == []


def test_attach_takes_8_arguments_and_there_are_no_more_public_names() -> None:
    assert len(inspect.signature(sparsync.attach).parameters) == 8
    assert len(sparsync.__all__) <= PUBLIC_NAMES


def private_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Return the private names of functions, classes and attributes that a module defines."""
    for each in nodes:
        name = getattr(each, "name", "") if isinstance(each, (ast.FunctionDef, ast.ClassDef)) else ""
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            name = each.attr
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            name = each.target.id
        if name.startswith("_") and not name.startswith("__"):
            yield name


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())
