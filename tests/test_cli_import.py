"""Imports: `import sparsync` and the lists of the command line load neither torch nor the whole package, and all public names exist."""

import subprocess
import sys
import textwrap

import pytest

import sparsync

COMMANDS = ("--help", "--version", "workloads", "schemes", "compare --help", "launch --help", "simulate --list")
HEAVY = {"torch", "numpy", "matplotlib"}


def loaded_after(statement: str) -> set[str]:
    """Return the modules that a new interpreter has loaded after it."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    return set(done.stdout.split())


def test_importing_the_package_does_not_import_torch_nor_does_listing_its_schemes_import_them() -> None:
    first = "import sys, sparsync; assert 'sparsync.schemes' not in sys.modules"
    loaded = loaded_after(f"{first}; sparsync.schemes.names(); sparsync.schemes.describe('topk')")
    assert "sparsync" in loaded
    assert not loaded & {"torch", "numpy", "jaxtyping", "matplotlib", "sparsync.core"}
    assert not loaded & {"sparsync.schemes.topk_allgather", "sparsync.schemes.skip_reduce"}


def test_the_command_line_answers_without_torch() -> None:
    statement = f"""
        import sys
        from sparsync_lab import cli
        for words in {COMMANDS!r}:
            try:
                cli.main(words.split())
            except SystemExit as ended:
                assert not ended.code, words
            assert not {HEAVY!r} & {{*sys.modules}}, words"""
    assert "sparsync_lab.cli" in loaded_after(textwrap.dedent(statement))


def test_what_stands_beside_the_ranks_of_a_launch_imports_neither_torch_nor_packages_of_the_lab() -> None:
    loaded = loaded_after("import sparsync_lab.launch.supervisor")
    assert "sparsync_lab.netlab" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib"}


@pytest.mark.slow
def test_the_library_does_not_import_the_lab() -> None:
    loaded = loaded_after("import sparsync\nfor name in sparsync.schemes.__all__: getattr(sparsync.schemes, name)")
    assert "sparsync.schemes.skip_reduce" in loaded
    assert not [name for name in loaded if name.startswith("sparsync_lab")]
    assert not loaded & {"matplotlib"}


@pytest.mark.parametrize("name", sparsync.__all__)
def test_every_public_name_is_there(name: str) -> None:
    found = getattr(sparsync, name)
    assert found is not None
    assert found.__name__.rpartition(".")[2] == name
