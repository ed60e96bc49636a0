"""Faults of `sparsync launch`: as they are written and drawn, what they do to processes, and a training that goes on through them."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.rights import builds
from sparsync_lab.faults.pauses import Pause, longest_pause, usual_rate
from sparsync_lab.faults.plan import KINDS, Chaos, Fault, FaultPlan, Situation, parse_fault, parse_faults, time_of
from sparsync_lab.launch.settings import LaunchSettings, settings_of_json
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
    assert (time_of(None), time_of("300s"), time_of("5min")) == (None, 300.0, 300.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "--fault is KIND:RANK@TIME"),
        ("kill:2@30", r"with a number and ms, s, min, h for a time.* got 'kill:2@30'"),
        ("kil:2@30s", "unknown kind 'kil', there are kill, leave, freeze, partition, join, store; did you mean 'kill'"),
        ("kill@30s", "kill needs a rank, such as kill:1@30s"),
        ("join:2@30s", "join is of no rank; leave it out"),
        ("freeze:1@30s", r"freeze needs the time that it lasts, such as freeze:1@30s\+8s"),
        ("kill:1@30s+8s", r"kill does not last; leave \+TIME out"),
    ],
)
def test_a_malformed_fault_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_fault(text)


@pytest.mark.parametrize(
    ("faults", "more", "message"),
    [
        (["kill:4@30s"], {}, r"must be in \[0, 3\], the 4 of --ranks and those that join before, got 4"),
        (["join@30s", "kill:4@20s"], {}, r"must be in \[0, 3\]"),
        (["join@1s"] * 60, {}, "need 65 links, at most 64 are there"),
        (["partition:0@1s+1s"], {"rate": None}, "no link to cut; give --link a rate"),
        (["kill:0@30s"], {"until": "20s"}, "at 30 s is after --faults-until, 20 s"),
        ([], {"chaos": 1, "until": "0s"}, r"--faults-until must be in \(0, inf\) seconds, got 0"),
        ([], {"until": "1s"}, "none were asked for"),
    ],
)
def test_a_fault_that_cannot_be_given_is_refused(faults: list[str], more: dict[str, Any], message: str) -> None:
    rate = more.get("rate", 1e8)
    with pytest.raises(ValueError, match=message):
        LaunchSettings(("x",), 4, rate, rate, faults=parse_faults(faults, more.get("chaos"), more.get("until")))


def test_settings_keep_their_faults_and_have_a_link_for_each_that_joins_and_for_the_store() -> None:
    settings = LaunchSettings(("x",), 4, 1e8, 1e8, faults=parse_faults(["join@1s", "kill:4@2s"], None, "9s"))
    assert settings_of_json(json.loads(json.dumps(settings.as_json()))) == settings
    assert (settings.places, LaunchSettings(("x",), 4, 1e8, 1e8, faults=FaultPlan(chaos=0)).places) == (6, 5)
    assert LaunchSettings(("x",), 4, 1e8, 1e8).places == 4


def drawn(seed: int, now: Situation, count: int = 200) -> list[Fault | None]:
    chaos = Chaos(seed)
    return [chaos.draw(now) for _ in range(count)]


def test_drawn_faults_follow_from_the_seed_and_come_about_every_20_seconds() -> None:
    now = Situation((0, 2, 5), place=True, store=True, limited=True)
    found = [each for each in drawn(1, now) if each is not None]
    assert found == drawn(1, now) != drawn(2, now)
    assert {each.kind for each in found} == set(KINDS)
    assert {each.rank for each in found} == {0, 2, 5, None}
    assert all((each.rank is not None, each.lasts_s > 0) == KINDS[each.kind] for each in found)
    times = [each.at_s for each in found]
    assert times[0] > 20 and 15 < times[-1] / len(times) < 25
    assert min(later - earlier for earlier, later in pairwise(times)) >= 5


def test_the_last_healthy_rank_is_never_hit_and_nothing_is_drawn_that_cannot_be() -> None:
    last = drawn(0, Situation((3,), place=True, store=True, limited=True))
    assert {each.kind for each in last if each} == {"join", "store"}
    assert set(drawn(0, Situation((3,), place=False, store=False, limited=True))) == {None}
    loopback = drawn(0, Situation((0, 1), place=False, store=True, limited=False))
    assert {each.kind for each in loopback if each} == {"kill", "leave", "freeze", "store"}


def test_a_pause_is_the_longest_time_with_less_than_a_tenth_of_the_usual_traffic() -> None:
    moved = [0, 100, 100, 9, 0, 100, 5, 100, 0, 0]
    looks = [(float(second), second + 1.0, nbytes) for second, nbytes in enumerate(moved)]
    assert usual_rate(looks, 3.0) == 100.0
    assert longest_pause(looks, 2.5, 8.0, done=False) == Pause(3.0, 5.0, False)
    assert longest_pause(looks, 3.5, 8.0, done=False) == Pause(3.5, 5.0, False)
    assert longest_pause(looks, 5.0, 10.0, done=False) == Pause(8.0, 10.0, True)
    assert longest_pause(looks, 5.0, 10.0, done=True) == Pause(6.0, 7.0, False)
    assert longest_pause(looks, 0.5, 8.0, done=False) is None  # no traffic before
    assert longest_pause(looks, 9.8, 20.0, done=False) is None  # the rank has ended


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
    said = err[err.index("faults, and the longest pause") :]
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
    faults = [f"--fault={each}" for each in ("kill:1@15s", "join@20s", "partition:0@22s+1s", "store@30s+1s")]
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
