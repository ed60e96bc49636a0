"""The command line itself: helps with examples, the word that was probably meant, results as values, and files that are checked first."""

import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import sparsync_lab
from helpers import programs
from helpers.made_results import BF16, DENSE, SPARSE, run, write
from sparsync.kernels import dispatch
from sparsync_lab import cli, environment
from sparsync_lab.doctor import command
from sparsync_lab.slow_kernels import SLOW_KERNELS

pytestmark = pytest.mark.usefixtures("signal_handlers_are_put_back")


@pytest.mark.parametrize("name", cli.commands())
def test_each_help_has_a_sentence_and_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    said = capsys.readouterr().out
    _, what, shown = cli.commands()[name]
    assert f"{what[0].upper()}{what[1:]}." in " ".join(said.split())
    examples = said[said.index("example:\n") :].splitlines()[1:]
    assert [line.strip() for line in examples if line.strip()] == [line.strip() for line in shown.splitlines()]
    assert max(map(len, examples)) < 80
    for words in map(shlex.split, shown.replace("\\\n", "").splitlines()):
        cli._parser().parse_args(words[1:])
        assert words[0] == "sparsync"
    assert any(line.startswith(f"sparsync {name}") for line in shown.splitlines())


def test_read_results_returns_a_dict_for_each_training(tmp_path: Path) -> None:
    write(tmp_path, DENSE, BF16, run=run(run="older"))
    late = replace(SPARSE, values=(400.0, 300.0), seed=1)
    write(tmp_path, *(replace(each, seed=1) for each in (DENSE, BF16)), late)
    found = sparsync_lab.read_results(tmp_path)
    assert [(row["run"], row["scheme"], row["seed"]) for row in found] == [
        *(("older", "dense", 0), ("older", "bf16", 0)),
        *(("one", "dense", 1), ("one", "bf16", 1), ("one", "topk", 1)),
    ]
    dense, bf16, sparse = found[2:]
    assert (dense["quality"], dense["target_s"], dense["behind_dense"], dense["step_s"]) == (90.0, 10.0, 0.0, 4.0)
    assert (bf16["speedup_over_dense"], bf16["speedup_over_bf16"], bf16["bits"]) == (2.0, 1.0, 24.0)
    assert (sparse["target_s"], sparse["speedup_over_dense"], sparse["behind_dense"]) == (None, None, 50.0)
    assert all(value is None or isinstance(value, str | int | float) for row in found for value in row.values())


@pytest.mark.parametrize(
    "words",
    ["frontier --out {file}", "probe --link none --out {there}", "demo --out {file}", "studies campaign --out {file}"],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there" / "x.png").parent.mkdir()
    (tmp_path / "there" / "x.png").touch()
    (tmp_path / "file").touch()
    for name in (
        "compare.comparison.compare",
        "frontier.study.train",
        "workers.group.network",
        "netlab.restart_with_rights",
    ):
        monkeypatch.setattr(f"sparsync_lab.{name}", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(SystemExit) as ended:
        programs.run(words.format(there=tmp_path / "there", file=tmp_path / "file"))
    assert ended.value.code == 1
    assert re.search(r"cannot write .*; choose another (file |folder )?with --out", capsys.readouterr().err)


# doctor


@pytest.fixture
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which links can be limited, and nothing else runs."""
    monkeypatch.setattr(command, "_links", lambda: command.Check("limited links", "two were made"))


@pytest.mark.usefixtures("sound")
def test_doctor_of_a_sound_machine_has_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor"])
    said = capsys.readouterr().out
    assert said.endswith("Nothing to do. Try it: sparsync demo\n")
    for name in ("python", "torch", "kernels", "limited links", "packages"):
        assert re.search(rf"^  {name}  ", said, re.MULTILINE)


def test_the_kernels_of_a_machine_without_the_compiled_ones_are_the_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.kernels() == dispatch.backends()[0]
    monkeypatch.setattr(dispatch, "_cpu", None)
    monkeypatch.setattr(dispatch, "_triton", lambda: None)
    assert environment.kernels() == environment.kernels("cuda:0") == SLOW_KERNELS
    monkeypatch.setattr(dispatch, "_triton", lambda: dispatch)
    assert (environment.kernels(), environment.kernels("cuda:0")) == (SLOW_KERNELS, "triton")


@pytest.mark.network
def test_doctor_makes_two_limited_links() -> None:
    assert command._links().to_do == ""
    assert command._links().found.startswith("two were made")


SCRIPT = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters())
if "own" in sys.argv:
    import sparsync
    sparsync.attach(model, sparsync.schemes.TopK(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
if "failing" in sys.argv:
    raise OSError("no data")
model(torch.zeros(1, 4)).sum().backward()
if "stepping" in sys.argv:
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--scheme topk -- {script} stepping",
            "optimizer AdamW scheme topk found nothing that would not work Nothing to do.",
        ),
        (
            "-- {script} own",
            "optimizer the script's own scheme TopK, by sparsync.attach in the script, which has checked it",
        ),
        ("-- {script} failing", "failed it ended with OSError: no data before its first optimizer step To do: 1."),
        ("-- {script} idle", "failed it ended without a step of a torch optimizer, so there was nothing to look at"),
    ],
)
def test_doctor_looks_at_a_script_up_to_its_first_step(tmp_path: Path, words: str, said: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "sparsync_lab.cli", "doctor", *words.format(script=script).split()]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert said in " ".join(done.stdout.split()), done.stderr
    assert ("OSError: no data" in done.stderr) == ("failing" in words)
    assert done.returncode == (0 if "Nothing to do" in done.stdout else 1)


def test_frontier_rows_are_those_of_its_file(tmp_path: Path) -> None:
    from sparsync_lab.frontier import runs
    from sparsync_lab.frontier.runs import Finished, Key
    from sparsync_lab.workloads.one_process import Trained

    key = Key(runs.described({"workload": "gpt"}), "{}", 4, 30, 0, 0.5)
    quality = ((15, 9.0), (30, math.inf))
    trained = Trained(quality, nbytes=100.0, rounds=2.0, messages=6.0, union=0.5, exchanges=3)
    runs.append(tmp_path, Finished(key, 400, 1.5, trained), "topk")
    (row,) = sparsync_lab.read_results(tmp_path)
    assert (row["workload"], row["scheme"], row["rate"], row["quality"]) == ("gpt", "topk", 0.5, math.inf)
    assert (row["bits"], row["exchanges"], row["seed"]) == (2.0, 3, 0)


@pytest.mark.usefixtures("sound")
@pytest.mark.parametrize(
    ("change", "value", "said"),
    [
        ("sparsync_lab.doctor.command.NEEDED", ("no_such_package",), "packages: install what is missing: "),
        ("sparsync.kernels.dispatch.why_missing", "No module", r"kernels: install a C\+\+ compiler such as g\+\+"),
        (
            "sparsync_lab.doctor.command._version",
            lambda name: None if name == "torch" else "1",
            "torch: .* -m pip install torch",
        ),
        ("sparsync_lab.doctor.command._version", lambda name: "2.7.1+cpu", "torch: install torch 2.8 or later"),
    ],
)
def test_doctor_ends_with_what_to_do(
    change: str, value: object, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(change, value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == 1
    assert re.search(rf"To do:\n1\. +{said}", capsys.readouterr().out)
