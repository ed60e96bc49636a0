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

from sparsync_lab import cli, environment

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("signal_handlers_are_put_back")]
CLI = [sys.executable, "-m", "sparsync_lab.cli"]
PATIENCE_S = 300.0  # for events that come at once unless the machine is busy
THIRD_PARTY = Path(__file__).with_name("helpers") / "third_party.py"
PLAIN_JOBS = THIRD_PARTY.with_name("plain_jobs.py")
EXAMPLES = Path(__file__).parent.parent / "examples"
# Small enough to start fast; the batch of 4 windows gives each of 2 ranks two.
SMALL = ["--option", "vocabulary=16", "--option", "width=4", "--option", "batch_size=4", "--option", "windows=4"]

T = TypeVar("T")


def compare(play: Path, out: Path, *more: str) -> list[str]:
    base = [*CLI, "compare", "--data", str(play), "--out", str(out), *SMALL, "--ranks", "2", "--link", "none"]
    return [*base, "--steps", "4", "--eval-every", "2", *more]


def run(argv: list[str], timeout: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
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
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            environment = Path(f"/proc/{child}/environ").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        rank = re.search(rb"\0RANK=(\d+)\0", b"\0" + environment)
        if b"sparsync_lab.workers.process" in command and rank:
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


LOCAL = "local_steps(every=2:keep=0.0)/dense"


@pytest.mark.slow
def test_all_schemes_start_from_the_same_weights_and_end_with_identical_replicas_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a job and a scheme in a file outside the package, which every worker process has to find for itself."""
    seeds = (3, 4)
    schemes = ("dense", f"{THIRD_PARTY}:Scaled:factor=0.5", LOCAL, "topk:density=0.25", "dgc:density=0.25")
    # Wider than what DistributedDataParallel's buckets are sent whole below.
    size = f"--workload {THIRD_PARTY}:LineFit --option width=2000 --ranks 2 --link none"
    size = [*size.split(), "--steps", "3", "--eval-every", "2", "--seed", ",".join(map(str, seeds))]
    cli.main(["compare", "--out", str(tmp_path), *size, "--schemes", ",".join(schemes), "--target", "1e9"])
    lines = records(tmp_path)
    ends = [line for line in lines if line["kind"] == "end"]
    assert len(ends) == len(schemes) * len(seeds)
    assert all(end["replicas_identical"] and end["status"] == "finished" for end in ends)
    first = {(r["scheme"], r["seed"]): r["loss"] for r in lines if r["kind"] == "step" and r["step"] == 1}
    for seed in seeds:  # the first loss comes before any reduction, so it is the same for all
        assert len({first[end["scheme"], seed] for end in ends}) == 1
    assert len({first["dense", seed] for seed in seeds}) == len(seeds)
    last = {r["scheme"]: r["loss"] for r in lines if r["kind"] == "step" and r["step"] == 3}
    assert len(set(last.values())) == len(schemes)
    exchanged = [r["sent_bytes"] > 0 for r in lines if r["kind"] == "step" and (r["scheme"], r["seed"]) == (LOCAL, 3)]
    assert exchanged == [False, True, True]  # at the end, too
    assert (lines[0]["workload"]["workload"], lines[0]["workload"]["parameters"]) == ("LineFit", 2001)
    assert lines[0]["versions"]["kernels"] == environment.kernels()
    printed = capsys.readouterr().out
    assert "prove nothing" in printed
    assert "because the scheme has its own momentum: dgc:density=0.25 by SGD." in " ".join(printed.split())

    picture = tmp_path / "quality_over_time.png"
    assert picture.stat().st_size > 1000
    picture.unlink()
    cli.main(["report", str(tmp_path)])  # from the results alone
    assert picture.exists()


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("link", ["none", pytest.param("100mbit", marks=pytest.mark.network)])
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
    ("link", "sign"), [("none", signal.SIGINT), ("100mbit", signal.SIGTERM), ("100mbit", signal.SIGKILL)]
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


def compare_job(job: str, out: Path, *more: str, schemes: str = "dense", steps: int = 6) -> list[str]:
    base = [*CLI, "compare", "--workload", job, "--out", str(out), "--ranks", "2", "--link", "none"]
    return [*base, "--schemes", schemes, "--steps", str(steps), "--eval-every", "3", *more]


@pytest.mark.slow
def test_a_job_with_batch_normalisation_and_dicts_runs_with_gradients_and_with_steps(tmp_path: Path) -> None:
    schemes = "dense,topk,local_steps(every=2)/topk,steps(keep=0.5)/topk"
    done = run(compare_job(f"{EXAMPLES / 'own_job_batchnorm.py'}:Stripes", tmp_path, schemes=schemes))
    assert done.returncode == 0, done.stderr
    ends = [line for line in records(tmp_path) if line["kind"] == "end"]
    assert [(end["scheme"], end["replicas_identical"]) for end in ends] == [(name, True) for name in schemes.split(",")]
    assert records(tmp_path)[0]["workload"]["metric"] == "held-out loss"


@pytest.mark.slow
def test_an_installed_job_is_listed_and_runs_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its data end with the training, its schedule cannot be longer, and its quality is a buffer: that of rank 0, on all ranks."""
    about = tmp_path / "site" / "their_jobs-1.0.dist-info"
    about.mkdir(parents=True)
    name = "a-name-that-is-longer-than-all-others"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-jobs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[sparsync.workloads]\n{name} = their_jobs:Normalised\n")
    (tmp_path / "site" / "their_jobs.py").write_text((THIRD_PARTY.parent / "plain_jobs.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    listed = run([*CLI, "workloads"]).stdout
    assert f"{name}  installed, their_jobs:Normalised\n" in listed
    assert f"{'gpt':<{len(name)}}  character-level transformer" in listed
    schemes = "dense,local_steps(every=2)/dense"
    done = run(compare_job(name, tmp_path / "out", schemes=schemes))
    assert done.returncode == 0, done.stderr
    ends = [line for line in records(tmp_path / "out") if line["kind"] == "end"]
    assert [end["status"] for end in ends] == ["finished"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("Unreadable", "rank 1 failed: Unreadable.batch failed (step 5, rank 1 of 2): OSError: no sample 5 ("),
        ("Leaving", "rank 1 ended with exit status 0 before its task was done: something in it has ended the process"),
        (
            "Hanging",
            "rank 1 hangs, or its step takes longer than --timeout: it still runs, and has reported no error; ",
        ),
    ],
)
def test_a_rank_that_fails_leaves_or_hangs_is_named_and_not_the_one_that_waits_for_it(
    tmp_path: Path, job: str, told: str
) -> None:
    done = run(compare_job(f"{PLAIN_JOBS}:{job}", tmp_path, "--timeout", "15"))
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if line.startswith("sparsync: error: "))
    assert error.removeprefix("sparsync: error: ").startswith(told)


@pytest.mark.slow
def test_records_are_kept_until_a_job_fails(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(PLAIN_JOBS.parent)!r})\n"
        "from plain_jobs import Least\n"
        "class Third(Least):\n"
        "    calls = 0\n"
        "    def batch(self, step, rank, ranks):\n"
        "        self.calls += 1\n"
        "        if self.calls > 23 + 4 and rank == 1:\n"
        "            raise KeyError('fifth')\n"
        "        return super().batch(step, rank, ranks)\n"
        "    def evaluate(self, model):\n"
        "        return 0.0\n"
    )
    done = run(compare_job(f"{job}:Third", tmp_path / "out", schemes="dense,topk"))
    assert done.returncode == 1
    shown = " ".join(run([*CLI, "report", str(tmp_path / "out")]).stdout.split())
    assert "dense DID NOT FINISH: ITS ROW IS NO RESULT. With seed 0 it ended after 3 steps: rank 1" in shown
    assert "rank 1 failed: Third.batch failed (step 4, rank 1 of 2): KeyError: 'fifth'" in done.stderr
    kept = records(tmp_path / "out")
    assert [line["step"] for line in kept if line["kind"] == "step"] == [1, 2, 3]
    assert kept[-1]["status"].startswith("failed: rank 1 failed: Third.batch failed (step 4")


@pytest.mark.slow
def test_a_job_whose_loss_is_nan_from_the_first_step_on_ends_with_an_error_and_a_report_that_says_so(
    tmp_path: Path,
) -> None:
    done = run(compare_job(f"{PLAIN_JOBS}:Undefined", tmp_path, schemes="dense,topk"))
    assert done.returncode == 1
    assert "sparsync: error: dense's training loss or held-out loss never was finite, not even at step 1" in done.stderr
    said = " ".join(done.stdout.split())
    assert "dense diverged with seed 0 (first at step 1)" in said
    assert "topk (seed 0): its training loss or quality is NaN or infinite, first at step 1." in said
    assert re.findall(r"(?<![\w-])[+-]?(?:nan|inf)(?!\w)", done.stdout) == []
    assert (tmp_path / "quality_over_time.png").exists()
