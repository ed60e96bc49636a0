"""Faults of `sparsync launch`: as they are written, what they do to processes, and a training that goes on through them."""

import re
import sys
from pathlib import Path

import pytest

from helpers.rights import builds
from sparsync_lab.launch.faults import Fault, parse_fault
from sparsync_lab.launch.settings import LaunchSettings
from test_launch import PYTHON, launched

EXAMPLE = Path(__file__).parent.parent / "examples" / "elastic.py"


def test_faults_are_read_as_they_are_written() -> None:
    assert parse_fault("kill:2@30s") == Fault("kill", 30.0, 2)
    assert parse_fault("leave:1@1min") == Fault("leave", 60.0, 1)
    assert parse_fault("freeze:3@20s+8s") == Fault("freeze", 20.0, 3, 8.0)
    assert parse_fault(" partition:0 @ 0.5h + 500ms ") == Fault("partition", 1800.0, 0, 0.5)
    assert parse_fault("join@45s") == Fault("join", 45.0)
    assert parse_fault("store@10s+3s") == Fault("store", 10.0, None, 3.0)
    assert parse_fault("freeze:3@20s+8s").name == "freeze:3 for 8 s"


def test_there_is_a_link_for_each_rank_that_joins_and_for_the_store() -> None:
    for faults, expected in ((["join@1s", "kill:4@2s"], 6), (["kill:0@1s"], 5), ([], 4)):
        assert LaunchSettings(("x",), 4, 1e8, 1e8, faults=tuple(map(parse_fault, faults))).places == expected


# Without the store, which takes long to start: ranks that print what they find, and end when one that joined has written a file.
ENDS_AFTER_JOIN = """
import os, pathlib, sys, time
names = "RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"
print(*(os.environ[name] for name in names))
there = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "3":
    there.touch()
    sys.exit(5)
while not there.exists():
    time.sleep(0.05)
time.sleep(0.5 * int(os.environ["RANK"] == "0"))
"""


@pytest.mark.slow
def test_ranks_that_faults_have_hit_end_nothing_and_have_no_say_in_the_exit_status(tmp_path: Path) -> None:
    faults = [
        f"--fault={each}"
        for each in ("kill:1@500ms", "leave:2@600ms", "freeze:0@700ms+300ms", "join@800ms", "kill:0@1h")
    ]
    with launched(
        "--ranks", "3", "--link", "none", *faults, "--", *PYTHON, ENDS_AFTER_JOIN, str(tmp_path / "there")
    ) as run:
        status, out, err = run.finish()
    assert status == 0, err
    assert {f"[rank {rank}] {rank} 3 127.0.0.1 True" for rank in (0, 3)} <= set(out.splitlines())
    for number, ending in enumerate(("exit status 0", "signal 9", "signal 15", "exit status 5")):
        assert f"rank {number}: {ending}\n" in err
    said = err[err.rindex("faults\n") :]
    for text in (
        "kill:1: rank 1 is killed",
        "leave:2: rank 2 is told to leave",
        "freeze:0 for 0.3 s: rank 0 is stopped",
        "join: rank 3 starts",
    ):
        assert re.search(rf"\d\.\d s, {text}\n", said), text
    assert "3600.0 s, kill:0: not given: the run has ended before" in said


def test_a_rank_that_fails_without_a_fault_ends_the_others_as_ever(tmp_path: Path) -> None:
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(1000)"
    with launched("--ranks", "2", "--link", "none", "--grace", "0", "--fault", "join@1h", "--", *PYTHON, code) as run:
        status, _, err = run.finish()
    assert status == 3
    assert "rank 1 failed first, with exit status 3" in err


@pytest.mark.slow
@builds
def test_a_training_goes_on_while_a_rank_is_killed_another_joins_and_a_link_is_cut() -> None:
    faults = [f"--fault={each}" for each in ("kill:1@40s", "join@45s", "partition:0@47s+1s", "store@55s+1s")]
    command = [sys.executable, str(EXAMPLE), "--steps", "400"]
    with launched("--ranks", "3", "--link", "1mbit", "--delay", "5ms", *faults, "--", *command) as run:
        status, out, err = run.finish()
    assert status == 0, err
    ended = re.findall(r"\[rank (\d)\] done after (\d+) steps", out)
    assert sorted(ended) == [("0", "400"), ("2", "400"), ("3", "400")]
    assert re.search(r"\[rank 3\] goes on at step [1-9]\d* as rank \d of 3", out)
    steps = [int(step) for step in re.findall(r"\] step (\d+): loss", out)]
    assert steps == sorted(steps)
    assert max(steps) == 400
    for text in ("kill:1: rank 1 is killed", "join: rank 3 starts", "the link of rank 0 is cut", "the store is killed"):
        assert text in err
