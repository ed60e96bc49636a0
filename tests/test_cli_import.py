"""Imports: `import sparsync` and the lists of the command line load neither torch nor the whole package, and all public names exist."""

import subprocess
import sys
import textwrap
from importlib.metadata import version

import pytest

import sparsync


def loaded_after(statement: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after it."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


def test_importing_the_package_does_not_import_torch() -> None:
    loaded = loaded_after("import sparsync")
    assert "sparsync" in loaded
    assert not loaded & {"torch", "numpy", "jaxtyping", "matplotlib", "sparsync.core", "sparsync.schemes"}


def test_listing_the_schemes_by_name_does_not_import_them() -> None:
    loaded = loaded_after("import sparsync; sparsync.schemes.names(); sparsync.schemes.describe('topk')")
    assert not loaded & {"sparsync.schemes.topk_allgather", "sparsync.schemes.skip_reduce"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["workloads"],
        ["schemes"],
        ["compare", "--help"],
        ["launch", "--help"],
        ["simulate", "--list"],
    ],
)
def test_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    statement = f"""
        from sparsync_lab import cli
        try:
            cli.main({arguments!r})
        except SystemExit as ended:
            assert not ended.code"""
    loaded = loaded_after(textwrap.dedent(statement))
    assert "sparsync_lab.cli" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "rich"}


def test_what_stands_beside_the_ranks_of_a_launch_imports_neither_torch_nor_packages_of_the_lab() -> None:
    loaded = loaded_after("import sparsync_lab.launch.command, sparsync_lab.launch.supervisor")
    assert "sparsync_lab.netlab" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "rich", "jinja2"}


@pytest.mark.slow
def test_the_library_does_not_import_the_lab() -> None:
    loaded = loaded_after("import sparsync\nfor name in sparsync.__all__: getattr(sparsync, name)")
    assert "sparsync.schemes.skip_reduce" in loaded
    assert not [name for name in loaded if name.startswith("sparsync_lab")]
    assert not loaded & {"matplotlib", "jinja2", "rich"}


@pytest.mark.parametrize("name", sparsync.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(sparsync, name)
    assert found is not None
    assert found.__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("name", sparsync.schemes.__all__)
def test_every_scheme_is_in_one_namespace(name: str) -> None:
    assert getattr(sparsync.schemes, name).__name__ == name


def test_the_public_names_are_few_and_each_is_listed_once() -> None:
    assert len(sparsync.__all__) == len(set(sparsync.__all__)) <= 35
    assert sparsync.schemes.TopK is sparsync.TopK


def test_an_unknown_name_is_an_error_with_all_names() -> None:
    with pytest.raises(AttributeError, match=r"module 'sparsync' has no attribute 'Topk'; it has .*TopK"):
        _ = sparsync.Topk  # pyright: ignore[reportAttributeAccessIssue]


def test_the_version_is_the_installed_one() -> None:
    assert sparsync.__version__ == version("sparsync")
    done = subprocess.run(
        [sys.executable, "-m", "sparsync_lab.cli", "--version"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == f"sparsync {sparsync.__version__}\n"
