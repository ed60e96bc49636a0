"""The packages that the distributions ask for are those that they import."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "src" / "sparsync"
TRAINERS = (LIBRARY / "adapters", LIBRARY / "kernels" / "cuda")
OURS = {"sparsync", "sparsync_elastic", "sparsync_lab"}
# Packages that come with others.
BROUGHT_BY = {"PIL": "matplotlib", "annotated_types": "pydantic"}


@pytest.mark.slow
def test_each_distribution_asks_for_what_it_imports() -> None:
    everywhere = _names(ROOT / "pyproject.toml")
    lab = _used((ROOT / "lab" / "src").rglob("*.py"))
    assert lab - everywhere == _names(ROOT / "lab" / "pyproject.toml") - OURS
    elastic = _used((ROOT / "elastic" / "src").rglob("*.py"))
    assert elastic - {"torch"} == _names(ROOT / "elastic" / "pyproject.toml") - OURS
    library = (path for path in LIBRARY.rglob("*.py") if not any(path.is_relative_to(each) for each in TRAINERS))
    assert _used(library) == everywhere


def test_the_extension_takes_no_headers_of_torch_so_that_one_wheel_serves_every_version() -> None:
    sources = (ROOT / "csrc").rglob("*.?pp")
    included = {
        name for path in sources for name in re.findall(r'^#include [<"]([^>"/]+)/', path.read_text(), re.MULTILINE)
    }
    assert included & {"torch", "ATen", "c10"} == set()
    assert "nanobind" in included


def _names(project: Path) -> set[str]:
    """Return the packages that a project depends on. Read as text, because Python 3.10 cannot read TOML."""
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", project.read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    return {name.replace("-", "_") for name in re.findall(r'^ *"([\w-]+)', listed[1], re.MULTILINE)}


def _used(paths: Iterator[Path]) -> set[str]:
    """Return the packages that the modules use, by their imports; `.numpy()` of a tensor fails without that package."""
    found: set[str] = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Attribute) and node.attr in ("numpy", "all_gather_object"):
                found.add("numpy")
    return {BROUGHT_BY.get(name, name) for name in found} - sys.stdlib_module_names - OURS
