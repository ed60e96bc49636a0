"""The command line as a user meets it: comparisons that finish, that are refused, that lose a rank, and that are interrupted."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sparsync.lab import cli
from sparsync.lab.scheme_choice import SchemeChoice, parse_schemes

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("signal_handlers_are_put_back")]
CLI = [sys.executable, "-m", "sparsync.lab.cli"]
PATIENCE_S = 60.0  # for events that come at once unless the machine is busy
THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
# Small enough to start fast; the batch of 4 windows gives each of 2 ranks two.
SMALL = ["--option", "vocabulary=16", "--option", "width=4", "--option", "batch_size=4", "--option", "windows=4"]

T = TypeVar("T")


def compare(play: Path, out: Path, *more: str) -> list[str]:
    base = [*CLI, "compare", "--data", str(play), "--out", str(out), *SMALL, "--ranks", "2", "--link", "none"]
    return [*base, "--steps", "4", "--eval-every", "2", *more]


def run(argv: list[str], timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]


def steps_recorded(out: Path) -> bool:
    """Return whether a step is in the records so far, of which the last line may be incomplete."""
    path = out / "results.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return any(json.loads(line)["kind"] == "step" for line in lines)


def children(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]


def workers(pid: int) -> dict[int, int]:
    """Return the process ids of the workers below `pid` by rank."""
    found: dict[int, int] = {}
    for child in children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        environment = Path(f"/proc/{child}/environ").read_bytes()
        rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + environment)
        if b"sparsync.lab.workers.process" in command and rank:
            found[int(rank[1])] = child
    return found


def wait_for(condition: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("the event that the test waits for did not happen")


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_all_schemes_start_from_the_same_weights_and_end_with_identical_replicas_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a job and a scheme in a file outside the package, which every worker process has to find for itself."""
    local = "local_steps(every=2:keep=0.0)/dense"
    schemes = f"dense,topk:density=0.25,{THIRD_PARTY}:Scaled:factor=0.5,{local}"
    # Wider than what DistributedDataParallel's buckets are sent whole below.
    size = f"--workload {THIRD_PARTY}:LineFit --option width=2000 --ranks 2 --link none"
    size = [*size.split(), "--steps", "3", "--eval-every", "2"]
    cli.main(["compare", "--out", str(tmp_path), *size, "--schemes", schemes, "--target", "1e9", "--seed", "3,4"])
    lines = records(tmp_path)
    ends = [line for line in lines if line["kind"] == "end"]
    assert len(ends) == 2 * 4
    assert all(end["replicas_identical"] and end["status"] == "finished" for end in ends)
    first = {(r["scheme"], r["seed"]): r["loss"] for r in lines if r["kind"] == "step" and r["step"] == 1}
    for seed in (3, 4):  # the first loss comes before any reduction, so it is the same for all
        assert len({first[end["scheme"], seed] for end in ends}) == 1
    assert first["dense", 3] != first["dense", 4]
    last = {r["scheme"]: r["loss"] for r in lines if r["kind"] == "step" and r["step"] == 3}
    assert len(set(last.values())) == 4
    exchanged = [r["sent_bytes"] > 0 for r in lines if r["kind"] == "step" and (r["scheme"], r["seed"]) == (local, 3)]
    assert exchanged == [False, True, True]  # at the end, too
    assert (lines[0]["workload"]["workload"], lines[0]["workload"]["parameters"]) == ("LineFit", 2001)
    assert "prove nothing" in capsys.readouterr().out
    assert "prove nothing" in (tmp_path / "report.html").read_text()

    for name in ("report.html", "quality_over_time.png", "quality_over_bytes.png", "step_breakdown.png"):
        assert (tmp_path / name).stat().st_size > 1000
        (tmp_path / name).unlink()
    cli.main(["report", str(tmp_path)])  # from the results alone
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_the_same_command_gives_the_same_losses(play: Path, tmp_path: Path) -> None:
    losses = []
    for name in ("a", "b"):
        done = run(compare(play, tmp_path / name, "--schemes", "topk:density=0.1,skip_reduce:skip=1"))
        assert done.returncode == 0, done.stderr
        losses.append([r["loss"] for r in records(tmp_path / name) if r["kind"] == "step"])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8


@pytest.mark.network
def test_over_limited_links_the_interface_counts_our_bytes_and_their_framing(play: Path, tmp_path: Path) -> None:
    argv = compare(play, tmp_path, "--link", "50mbit", "--schemes", "dense,topk:density=0.5", "--option", "width=128")
    done = run(argv)
    assert done.returncode == 0, done.stderr
    assert "prove nothing" not in done.stdout
    steps = [line for line in records(tmp_path) if line["kind"] == "step"]
    assert len(steps) == 8
    for scheme in ("dense", "topk:density=0.5"):
        counted = sum(step["sent_bytes"] for step in steps if step["scheme"] == scheme)
        seen = sum(step["interface_bytes"] for step in steps if step["scheme"] == scheme)
        # 66 header bytes for each frame of 1448, and the acknowledgements of the other rank's frames: see the package lab.netlab.
        assert 1.0456 < seen / counted < 1.09, (scheme, seen, counted)


@pytest.mark.parametrize("link", ["none", pytest.param("100mbit", marks=[pytest.mark.network, pytest.mark.slow])])
def test_a_killed_rank_is_named_and_nothing_is_left(play: Path, tmp_path: Path, link: str) -> None:
    argv = compare(play, tmp_path, "--link", link, "--schemes", "dense", "--steps", "100000")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: steps_recorded(tmp_path))
        started = children(process.pid)
        os.kill(workers(process.pid)[1], signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "rank 1 was killed by signal 9" in said
    wait_for(lambda: gone(started))
    assert "rank 1 was killed" in records(tmp_path)[-1]["status"]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("link", "sign"),
    [
        ("none", signal.SIGINT),
        ("none", signal.SIGKILL),
        ("100mbit", signal.SIGINT),
        ("100mbit", signal.SIGTERM),
        ("100mbit", signal.SIGKILL),
    ],
)
def test_an_interrupted_comparison_leaves_nothing_running_and_no_folder(
    play: Path, tmp_path: Path, link: str, sign: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = compare(play, tmp_path, "--link", link, "--schemes", "dense", "--steps", "100000")
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: steps_recorded(tmp_path))
        started = children(process.pid)
        assert len(workers(process.pid)) == 2
        process.send_signal(sign)
        process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == (-9 if sign == signal.SIGKILL else 130)
    wait_for(lambda: gone(started))
    assert list(tmp_path.glob("sparsync-lab-*")) == []
    if sign != signal.SIGKILL:
        assert records(tmp_path)[-1]["status"] == "failed: interrupted"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--schemes", "skip_reduce:skip=5"], "skip must be in [0, 1] for 2 ranks, got 5"),
        (["--schemes", "topk", "--density", "0"], "density must be in (0, 1]"),
        (["--schemes", "topk", "--density", "1.5"], "density must be in (0, 1]"),
        (["--schemes", "tpok"], "did you mean 'topk'?"),
        (["--schemes", "topk:densty=0.1"], "did you mean 'density'?"),
        (["--schemes", "dense,dense"], "names one twice"),
        (["--workload", "shakespear"], "did you mean 'shakespeare'?"),
        (["--workload", "nowhere.py:Job"], "no file nowhere.py for the workload"),
        (["--ranks", "3"], "cannot be split evenly over 3 ranks"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--link", "fast"], "fast"),
        (["--option", "width"], "--option takes KEY=VALUE"),
        (["--option", "widht=3"], "did you mean 'width'?"),
    ],
)
def test_settings_that_cannot_run_are_refused_before_anything_is_written(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        cli.main(compare(play, out, *more)[len(CLI) :])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused_before_training(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as ended:
        cli.main(compare(play, tmp_path / "file" / "out", "--schemes", "dense")[len(CLI) :])
    assert ended.value.code == 1
    assert "cannot write" in capsys.readouterr().err


def test_lists_of_names_are_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("schemes", "dense random_pruning"), ("workloads", "shakespeare-small fashion")):
        cli.main([command])
        listed, _, cure = capsys.readouterr().out.partition("\n\n")
        starts = {line.index(re.split(r"\S+ +", line, maxsplit=1)[1]) for line in listed.splitlines()}
        assert len(starts) == 1
        assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in names.split())
        assert "path/to/file.py:Class" in cure


def test_the_settings_of_a_scheme_are_listed_with_their_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["schemes", "topk"])
    assert re.search(r"^density +default 0.01$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("topk", "topk", {}),
        ("topk.published:density=0.5", "topk.published", {"density": 0.5}),
        ("package.module:Class", "package.module:Class", {}),
        ("package.module:Class:a=1:b=x", "package.module:Class", {"a": 1, "b": "x"}),
        ("some/dir=1/file.py:Class:a=true", "some/dir=1/file.py:Class", {"a": True}),
        ("some/file.py:Class:protect=*.bias", "some/file.py:Class", {"protect": ["*.bias"]}),
    ],
)
def test_the_name_of_a_scheme_ends_at_its_first_setting(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str, config: dict[str, object]
) -> None:
    monkeypatch.setattr("sparsync.schemes.settings", lambda name: {})
    monkeypatch.setattr(SchemeChoice, "make", lambda self: None)
    assert parse_schemes(text, 0.1) == (SchemeChoice(text, name, config),)
