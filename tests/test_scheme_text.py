"""Schemes as a text, from a program and from the environment: what is made, and what an error says."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsync
from helpers import distributed
from sparsync.base.registry import check_names_no_code
from sparsync.base.scheme_text import COMMAND_LINE, NOTE, VARIABLE, text_of_environment
from sparsync.exchanges.choice import choose
from sparsync_lab.launch.settings import LaunchSettings, environment


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("dense", sparsync.schemes.Dense()),
        ("bf16", sparsync.schemes.Dense.bf16()),
        ("exact_oktopk:density=0.05:values=int4", sparsync.schemes.ExactOkTopk(density=0.05, values="int4")),
        ("skip_reduce:skip=1:protect=*.bias+norm.*", sparsync.schemes.SkipReduce(skip=1, protect=["*.bias", "norm.*"])),
        ("skip_reduce:protect=*.bias", sparsync.schemes.SkipReduce(protect=["*.bias"])),
        ("sparsync.schemes.topk_allgather:TopK:density=0.5", sparsync.schemes.TopK(density=0.5)),
    ],
)
def test_a_text_is_the_scheme_that_the_constructor_makes(text: str, made: sparsync.Scheme) -> None:
    assert sparsync.schemes.from_text(text) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("topk:densty=0.1", r"'topk' has no setting 'densty'.*did you mean 'density'"),
        ("topk:values=int4:density", r"'density' has no value in 'topk:values=int4:density'"),
        ("topk:0.1", r"settings of the scheme 'topk' are written topk:KEY=VALUE, got 'topk:0\.1'"),
        ("topk:density=some", r"density must be a number in \(0, 1\].*got 'some' of type str"),
        ("topk:density=0.1:density=0.2", r"'density' stands twice in 'topk:density=0\.1:density=0\.2'"),
        ("dense,topk", r"one scheme is asked for, got 'dense,topk'"),
        ("local_steps(every=4)/topk", r"sparsync\.attach\(model, scheme, .*exchange=sparsync\.LocalSteps\("),
        ("steps/topk", r"sparsync\.attach\(model, scheme, .*exchange=sparsync\.Steps\("),
        ("diloco", r"'diloco', which is local_steps\(every=50.*sparsync\.LocalSteps"),
    ],
)
def test_a_text_that_names_no_scheme_is_refused_with_the_cure(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparsync.schemes.from_text(text)


def test_a_module_or_file_may_be_called_as_a_scheme_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "topk_dsa.py").write_text("from sparsync.schemes import TopK\ndensity = TopK\nmake = TopK\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in ("topk_dsa:make", "topk_dsa.py:make", "topk_dsa:density"):
        assert sparsync.schemes.from_text(f"{name}:density=0.5") == sparsync.schemes.TopK(density=0.5)
    assert sparsync.schemes.from_text("topk_dsa:density=0.5").name == "topk_dsa"
    monkeypatch.delitem(sys.modules, "topk_dsa")


@pytest.mark.parametrize("density", ["0.1", None, True, [0.1]])
def test_a_density_of_another_type_is_an_error_that_names_it(density: Any) -> None:
    for kind in (sparsync.schemes.TopK, sparsync.schemes.MiCRO, sparsync.schemes.ExactOkTopk, sparsync.schemes.TwoShot):
        with pytest.raises(ValueError, match=rf"density must be a number in \(0, 1\].*type {type(density).__name__}"):
            kind(density=density)


def scheme_of_environment() -> sparsync.Scheme:
    return choose(None, None, None, None).scheme


@pytest.fixture
def code_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a module with a scheme, on the path of modules. Each execution leaves a file `executed` beside it."""
    file = tmp_path / "telling.py"
    file.write_text(
        "from pathlib import Path\nfrom sparsync.schemes import TopK\nPath(__file__).with_name('executed').touch()\n"
        "class Telling(TopK): ...\nclass Other:\n    def __init__(self): Path(__file__).with_name('called').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield file
    sys.modules.pop("telling", None)


@pytest.mark.parametrize("form", ["telling:Telling", "{file}:Telling", "{file}", "os:system:command=touch {file}.ran"])
def test_the_environment_has_no_code_executed(
    form: str, code_that_tells: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, form.format(file=code_that_tells))
    for command_line in (None, "topk", "sparsync.schemes:TopK"):
        if command_line is not None:
            monkeypatch.setenv(COMMAND_LINE, command_line)
        with pytest.raises(ValueError, match="the environment takes names of `sparsync schemes` only"):
            scheme_of_environment()
    assert sorted(code_that_tells.parent.iterdir()) == [code_that_tells]


def test_a_rank_takes_the_class_that_the_command_line_of_launch_names(
    code_that_tells: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LaunchSettings(("x",), 1, None, None, scheme=f"{code_that_tells}:Telling:density=0.5")
    for name, value in environment(settings, 0, "lo", "127.0.0.1", 1, "id", code_that_tells.with_name("note")).items():
        monkeypatch.setenv(name, value)
    assert type(scheme_of_environment()).__name__ == "Telling"


def test_what_is_no_scheme_is_refused_before_it_is_called(code_that_tells: Path) -> None:
    for name in (
        "os:system:command=touch {folder}/called",
        "telling:Other",
        "builtins:dict",
        "sparsync.schemes:from_text",
    ):
        with pytest.raises(ValueError, match=r"not a sparsync.Scheme; name a class that subclasses it"):
            sparsync.schemes.from_text(name.format(folder=code_that_tells.parent))
    assert not code_that_tells.with_name("called").exists()


def test_a_name_of_an_installed_package_loads_what_its_metadata_say(
    code_that_tells: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = code_that_tells.parent / "telling-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: telling\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sparsync.schemes]\ntells = telling:Telling\nother = telling:Other\n")
    executed = code_that_tells.with_name("executed")
    for name in ("tells", "other", "topk.bf16"):
        check_names_no_code(name, "a file")
    assert not executed.exists()
    monkeypatch.setenv(VARIABLE, "tells:density=0.5")
    assert type(scheme_of_environment()).__name__ == "Telling"
    assert executed.exists()
    monkeypatch.setenv(VARIABLE, "other")
    with pytest.raises(ValueError, match=r"'other' is <class 'telling.Other'>, not a sparsync.Scheme"):
        scheme_of_environment()


def test_what_reads_the_scheme_notes_it_in_a_file_that_is_there_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note"
    monkeypatch.setenv(VARIABLE, "topk:density=0.5")
    monkeypatch.setenv(NOTE, str(note))
    text_of_environment()
    assert not note.exists()
    note.touch()
    text_of_environment()
    assert note.read_text() == "topk:density=0.5\n"


def attached_in_each_way() -> list[object]:
    """Reduce one step in each way without naming a scheme, and return the schemes that did it."""
    patch = pytest.MonkeyPatch()
    patch.setenv(VARIABLE, "topk:density=0.5")
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    with sparsync.attach(wrapped) as handle:
        wrapped(torch.ones(1, 4)).sum().backward()
        found: list[object] = [handle.scheme]
    with sparsync.attach(nn.Linear(4, 2), exchange=sparsync.Gradients()) as reducer:
        found.append(reducer.scheme)
    patch.setenv(VARIABLE, "skip_reduce:protect=*.bais")
    (finding,) = sparsync.doctor(nn.parallel.DistributedDataParallel(nn.Linear(4, 2)))
    assert "protect='*.bais' matches no parameter" in str(finding)
    with pytest.raises(TypeError, match=r"got 'topk'; pass sparsync.schemes.from_text\('topk'\)"):
        sparsync.attach(wrapped, "topk")  # pyright: ignore[reportArgumentType]
    patch.undo()
    return found


@pytest.mark.distributed
def test_every_integration_and_the_doctor_take_the_scheme_of_the_environment() -> None:
    assert distributed.run(attached_in_each_way, 1) == [[sparsync.schemes.TopK(density=0.5)] * 2]
