"""What importing costs: `import sparsync` loads neither torch nor itself whole, and still has every public name."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import sparsync


def loaded_after(statement: str) -> set[str]:
    """The modules a fresh interpreter has after it."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    return set(done.stdout.split())


def test_importing_the_package_does_not_import_torch() -> None:
    loaded = loaded_after("import sparsync")
    assert "sparsync" in loaded
    assert not loaded & {"torch", "numpy", "jaxtyping", "matplotlib", "sparsync.core", "sparsync.schemes"}


def test_listing_the_schemes_by_name_does_not_import_them() -> None:
    loaded = loaded_after("import sparsync; sparsync.schemes.names(); sparsync.schemes.describe('topk')")
    assert not loaded & {"sparsync.schemes.topk_allgather", "sparsync.schemes.skip_reduce"}


def test_the_library_does_not_import_the_laboratory() -> None:
    loaded = loaded_after("import sparsync\nfor name in sparsync.__all__: getattr(sparsync, name)")
    assert "sparsync.schemes.skip_reduce" in loaded
    assert not [name for name in loaded if name.startswith("sparsync.lab")]
    assert not loaded & {"matplotlib", "jinja2", "rich"}


@pytest.mark.parametrize("name", sparsync.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(sparsync, name)
    assert found is not None
    assert name in ("schemes", "testing") or found.__name__ == name


def test_an_unknown_name_is_told_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"module 'sparsync' has no attribute 'Topk'; it has .*TopK"):
        _ = sparsync.Topk  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_the_installed_one() -> None:
    assert sparsync.__version__ == version("sparsync")
