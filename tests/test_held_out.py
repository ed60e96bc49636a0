"""The jobs set apart: they are causal, read their packages' texts, and nothing of the library was chosen on them."""

import io
import re
import zipfile
from pathlib import Path

import pytest
import torch

from sparsync.base.registry import locate
from sparsync_lab import workloads
from sparsync_lab.workloads import bible, python_source
from sparsync_lab.workloads.base import Workload
from sparsync_lab.workloads.gpt import Gpt

ROOT = Path(__file__).parent.parent
HELD_OUT = [name for name, entry in workloads.WORKLOADS.items() if locate(entry.spec, "workload").held_out]


def test_one_job_on_prose_and_one_on_code_are_held_out() -> None:
    assert HELD_OUT == ["bible", "bible-10m", "sympy", "sympy-10m", "sympy-110m"]


def test_no_setting_was_chosen_on_a_held_out_job() -> None:
    files = [
        ROOT / "docs/log.md",
        *(file for house in ("src", "elastic", "studies") for file in (ROOT / house).rglob("*.py")),
    ]
    assert len(files) > 100
    assert not [file for file in files if re.search(rf"\b({'|'.join(HELD_OUT)})\b", file.read_text("utf-8"))]


@pytest.fixture
def jobs(tmp_path: Path) -> list[Workload]:
    """Make both jobs on small texts."""
    (tmp_path / "a.txt").write_text("In the beginning, the end. " * 60)
    for number in range(200):  # one of 50 is held out
        (tmp_path / f"{number}.py").write_text(f"x = {number}\n" * 9)
    small = {"width": 16, "layers": 4, "context": 9, "windows": 4, "data": str(tmp_path)}
    return [workloads.get("bible", **small, vocabulary=6), workloads.get("sympy", **small)]


def test_a_model_does_not_read_what_it_is_to_predict(jobs: list[Workload]) -> None:
    for job in (*jobs, Gpt(width=16, layers=2, heads=2, context=9)):
        job.prepare()
        model, text = job.model(0), torch.randint(6, (1, 9), generator=torch.Generator().manual_seed(0))
        other = text.clone()
        other[0, 5:] = 0
        with torch.no_grad():
            before, after = model(text), model(other)
        assert torch.equal(before[:, :5], after[:, :5])
        assert not torch.equal(before[:, 5:], after[:, 5:])


def test_muon_takes_the_matrices_of_the_blocks_and_every_parameter_is_trained_once(jobs: list[Workload]) -> None:
    for job in jobs:
        muon = workloads.get(job.name, **{**vars(job), "optimizer_name": "muon"})
        model = muon.model(0)
        optimizer, _ = muon.optimizer(model, 10)
        by_muon = {id(each) for each in optimizer.members[0].param_groups[0]["params"]}  # pyright: ignore[reportAttributeAccessIssue]
        assert by_muon == {id(each) for each in model.blocks.parameters() if each.dim() == 2}  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        everything = [each for group in optimizer.param_groups for each in group["params"]]
        assert len(everything) == len({id(each) for each in everything}) == len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("bible", 1_100_448), ("bible-10m", 10_583_712), ("sympy", 955_648), ("sympy-10m", 10_440_192)],
)
def test_the_packages_give_the_texts_that_the_figures_were_made_on(name: str, parameters: int) -> None:
    described = workloads.get(name).describe()
    assert described["parameters"] == parameters
    assert (
        described["data"]["sha256"]
        == {
            "bible": "59f90bce2b2f31bb93eba210685576f86c4b716490419e0bc68404b7d845da7b",
            "sympy": "10dc4b9017ab15a98b06a0d06a2234a5c4914acc8a701cb5855386e4f37956ed",
        }[described["workload"]]
    )


def test_verse_numbers_and_python_around_the_text_are_left_out() -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(bible.MEMBER, 'bible = Bible(\n    """<sup>1</sup> God`s Spirit. <sup>12</sup> It""", {})')
        archive.writestr("b/a.py", "x = 1\n")
    assert bible.package_text(content.getvalue()) == "God's Spirit. It"
    assert python_source.package_files(content.getvalue())["b/a.py"] == b"x = 1\n"
