"""Comparisons with faults: what is refused, how a training is made of what its ranks tell, and one that loses a rank and gets another."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from helpers.made_results import DENSE, RUN, SPARSE, Made, run
from sparsync_lab import cli
from sparsync_lab.compare.merged import Clock, Told, faults
from sparsync_lab.compare.settings import CompareSettings, settings_from_json
from sparsync_lab.faults.injector import Begun
from sparsync_lab.faults.plan import Fault, parse_faults
from sparsync_lab.report.plots import quality_over_time
from sparsync_lab.report.results import GivenFault, Meeting, Record, append, read
from sparsync_lab.report.rows import compared
from sparsync_lab.report.summary import RunSummary, named_faults, summarise
from sparsync_lab.report.tables import as_text
from sparsync_lab.scheme_choice import parse_schemes

pytestmark = pytest.mark.usefixtures("signal_handlers_are_put_back")
PATIENCE_S = 300.0
ZERO = dict.fromkeys(
    ("step_s", "wait_s", "reduce_s", "accumulate_s", "select_s", "encode_s", "decode_s", "apply_s"), 0.0
)
OF_STEP = {**ZERO, "sent_bytes": 8.0, "interface_bytes": 16.0, "messages": 2.0, "union_density": 1.0}


def refused(play: Path, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    small = ["--option", "vocabulary=16", "--option", "width=4", "--option", "batch_size=4", "--option", "windows=4"]
    base = ["compare", "--data", str(play), "--out", str(out), *small, "--ranks", "2", "--link", "none", "--steps", "4"]
    with pytest.raises(SystemExit) as ended:
        cli.main([*base, *more])
    assert ended.value.code == 2
    assert not out.exists()
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--fault", "kil:1@3s"], "did you mean 'kill'?"),
        (["--fault", "kill:2@3s"], "the rank must be in [0, 1], the 2 of --ranks and those that join before, got 2"),
        (["--fault", "partition:0@3s+1s"], "there is no link to cut; give --link a rate"),
        (["--faults-until", "5s"], "none were asked for; give --chaos or --fault"),
        (
            ["--ranks", "4", "--chaos", "1", "--schemes", "dense,skip_reduce:skip=3"],
            "skip must be in [0, 1] for 2 ranks, got 3; with these faults between 1 and 4 ranks may train",
        ),
        (
            ["--fault", "kill:1@3s", "--schemes", "local_steps(every=4:delay=1)/dense"],
            "with faults local steps have no delay, got 'local_steps(every=4:delay=1)/dense'",
        ),
        (
            ["--fault", "kill:1@3s", "--schemes", "sparsync_lab.rivals.torch_ddp:TorchDDP"],
            "which sparsync_elastic cannot take over; name dense",
        ),
    ],
)
def test_what_cannot_go_on_through_faults_is_refused_before_anything_is_written(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    schemes = [] if "--schemes" in more else ["--schemes", "dense"]
    assert said in refused(play, tmp_path / "out", capsys, *schemes, *more)


def test_faults_are_refused_under_torchrun(
    play: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    said = refused(play, tmp_path / "out", capsys, "--schemes", "dense", "--fault", "kill:1@3s")
    assert "--fault kill:1@3s is for ranks that compare starts, and torchrun" in said


def test_settings_keep_their_faults_in_another_process() -> None:
    plan = parse_faults(["kill:1@3s", "join@4s"], 7, "60s")
    settings = CompareSettings(parse_schemes("dense", 0.01), faults=plan)
    assert settings_from_json(json.loads(json.dumps(asdict(settings)))) == settings


def test_the_clock_begins_with_the_first_step_and_stands_still_while_a_rank_evaluates() -> None:
    clock = Clock()
    assert (clock.seconds(100.0), clock.runs) == (0.0, False)
    clock.begin(100.0)
    clock.begin(105.0)
    assert clock.seconds(104.0) == 4.0
    clock.stop(106.0)
    assert (clock.seconds(109.0), clock.runs) == (6.0, False)
    clock.go_on(110.0)
    assert [clock.seconds(t) for t in (103.0, 107.0, 110.0, 111.0)] == [3.0, 6.0, 6.0, 7.0]


def told(counted: bool = True) -> Told:
    made = Told(counted)
    made.clock.begin(100.0)
    return made


def step(number: int, t: float, epoch: int, place: int, loss: float = 1.0) -> dict:
    return {"kind": "step", "step": number, "t": t, "epoch": epoch, "place": place, "ranks": 2, "loss": loss, **OF_STEP}


def test_of_a_step_that_was_taken_again_the_last_epoch_counts_whoever_tells_first() -> None:
    found = told()
    found.heard += [(0, step(1, 101.0, 1, 0, 2.0)), (1, step(1, 101.5, 1, 1, 4.0))]
    # The first rank took step 2 and died; the others take it again, and one that joined takes the next one with them.
    found.heard += [(0, step(2, 102.0, 1, 0, 9.0)), (1, step(2, 105.0, 2, 0, 1.0))]
    found.heard += [(3, step(3, 106.5, 3, 1, 7.0)), (1, step(3, 106.0, 3, 0, 5.0))]
    steps = found.steps()
    assert [(each["step"], each["seconds"], each["loss"]) for each in steps] == [
        (1, 1.0, 3.0),
        (2, 5.0, 1.0),
        (3, 6.0, 6.0),
    ]
    assert [each["interface_bytes"] for each in steps] == [16.0] * 3
    uncounted = told(counted=False)
    uncounted.heard = found.heard
    assert uncounted.steps()[0]["interface_bytes"] is None


def test_evaluations_and_meetings_count_once_with_the_bytes_until_then() -> None:
    found = told()
    found.heard += [(0, step(1, 101.0, 1, 0)), (0, step(2, 102.0, 1, 0))]
    quality = {"kind": "quality", "step": 2, "value": 5.0, "t": 102.0, "epoch": 1, "place": 0}
    found.heard += [(0, quality), (1, {**quality, "t": 107.0, "epoch": 2, "value": 4.0})]
    first = {"kind": "meeting", "epoch": 1, "step": 0, "ranks": 2, "place": 0, "t": 100.5}
    meeting = {"kind": "meeting", "epoch": 2, "step": 2, "ranks": 1, "place": 0, "t": 106.0}
    found.heard += [(0, first), (2, {**meeting, "place": 1, "t": 106.5}), (1, meeting)]
    assert found.qualities(found.steps()) == [{"step": 2, "seconds": 7.0, "bytes": 32.0, "value": 4.0}]
    assert found.meetings() == [{"step": 0, "seconds": 0.0, "ranks": 2}, {"step": 2, "seconds": 6.0, "ranks": 1}]


def test_ranks_that_end_with_other_weights_are_named() -> None:
    found = told()
    found.heard += [(rank, {"kind": "finished", "digest": digest}) for rank, digest in ((0, "a"), (2, "b"), (3, "a"))]
    assert found.different == [2]


def test_a_fault_has_the_longest_pause_that_began_before_the_next_one_and_what_became_of_who_joined() -> None:
    seconds = [1.0, 2.0, 3.0, 4.0, 9.0, 10.0, 11.0, 17.0, 18.0]
    given = [
        Begun(Fault("kill", 4.5, 1), 4.5, "rank 1 is killed"),
        Begun(Fault("kill", 5.0, 1), 5.0, "not given: rank 1 does not run"),
        Begun(Fault("join", 8.0), 8.0, "rank 3 starts"),
        Begun(Fault("join", 17.5), 17.5, "rank 4 starts"),
    ]
    found = faults(given, [{"seconds": each} for each in seconds], {4: "too late"}, ranks=3)
    assert [(each["name"], each.get("pause_s"), each.get("paused_s")) for each in found] == [
        ("kill 1", 4.5, 4.5),
        ("kill 1", None, None),
        ("join", 6.0, 11.0),
        ("join", None, None),
    ]
    assert [each["given"] for each in found] == [True, False, True, True]
    assert [each["what"] for each in found][2:] == ["rank 3 starts", "rank 4 starts; it failed: too late"]


def records(made: Made, name: str = "kill 1", failed: str = "") -> list[Record]:
    """The records of a training with a kill after two steps, of which the third takes twice as long."""
    of = made.records()
    who = {"run": "one", "scheme": made.scheme, "seed": made.seed}
    met = [Meeting(**who, step=0, seconds=0.0, ranks=4), Meeting(**who, step=2, seconds=2.5, ranks=3)]
    hit = GivenFault(
        **who, seconds=2.0, name=name, what=f"rank 1 is killed{failed}", given=True, pause_s=0.5, paused_s=2.0
    )
    late = GivenFault(**who, seconds=60.0, name="join", what="not given: the run has ended before", given=False)
    return [*of[:-1], *met, hit, late, of[-1]]


def summary(folder: Path, *made: Record, batch_size: int | None = 16) -> RunSummary:
    config = {**RUN.config, "faults": ["kill:1 at 2 s"], "chaos": None, "batch_size": batch_size}
    append(folder, replace(run(None), config={**config, "target": None}), *made)
    return summarise(read(folder).runs[-1])


def test_the_report_has_the_samples_in_the_weights_and_each_fault_with_its_pauses(tmp_path: Path) -> None:
    found = summary(tmp_path, *records(SPARSE), *records(replace(DENSE, step_s=1.0), failed="; it failed: x"))
    text = " ".join(as_text(found).split())
    # 2 steps of 4 ranks and 2 of 3, 16 samples by 4, in 4 s; 4 ranks for 2.5 s and 3 for 1.5 s.
    assert "topk 14.0 3.62 2 0.500 0.500" in text
    assert (
        "Fault at 2.0 s, kill 1: rank 1 is killed. Longest pause that began before the next: topk 0.5 s, dense 0.5 s (rank 1 is killed; it"
        in text
    )
    assert "Fault at 60.0 s, join: not given: the run has ended before (topk)." in text
    assert "4 ranks, 8 Mbit/s links, 1 fault" in text
    assert named_faults(found.schemes) == [(2.0, "kill 1")]
    row = compared(found)[0]
    assert (row["faults"], row["meetings"], row["batches"], row["paused_s"]) == (1, 2, 3.5, 0.5)


def test_without_a_size_of_the_batch_batches_are_counted(tmp_path: Path) -> None:
    text = " ".join(as_text(summary(tmp_path, *records(SPARSE), batch_size=None)).split())
    assert "batches in" in text
    assert "topk 0.875 3.62 2" in text


def test_the_picture_over_time_names_the_faults_and_those_of_a_run_without_have_none(tmp_path: Path) -> None:
    append(tmp_path / "plain", run(None), *SPARSE.records())
    plain = summarise(read(tmp_path / "plain").runs[-1])
    assert not plain.run.faults and "faults" not in compared(plain)[0]
    made = records(SPARSE)
    for each, marked in ((summary(tmp_path, *made), True), (plain, False)):
        figure = Figure()
        quality_over_time(each, figure)
        names = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert names.count("kill 1") == marked
        assert [axes.get_ylabel() for axes in figure.axes].count("ranks") == marked


JOB = """
import os, time
from pathlib import Path
import torch

THERE = Path({there!r})

class Waits:
    '''Steps are slow from the 40th on until a process that was not there at first takes one.'''
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    def batch(self, step, rank, ranks):
        if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
            THERE.touch()
        if step >= 40 and step % 1000 < 900 and not THERE.exists():
            time.sleep(0.2)
        x = torch.randn(16, 8)
        return x, x.sum(1, keepdim=True)
    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_training_goes_on_without_a_rank_that_is_killed_and_with_one_that_joins(tmp_path: Path) -> None:
    """The killed one is that which evaluates, so the records are of several ranks."""
    job, out = tmp_path / "job.py", tmp_path / "out"
    job.write_text(JOB.format(there=str(tmp_path / "there")))
    argv = [sys.executable, "-m", "sparsync_lab.cli", "compare", "--workload", f"{job}:Waits", "--link", "none"]
    argv += [
        "--ranks",
        "3",
        "--schemes",
        "topk:density=0.25",
        "--steps",
        "600",
        "--eval-every",
        "20",
        "--out",
        str(out),
    ]
    argv += ["--fault", "kill:0@2s", "--fault", "join@3s", "--fault", "kill:1@1h"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    by_kind = {kind: [each for each in found if each["kind"] == kind] for kind in {each["kind"] for each in found}}
    assert (by_kind["end"][0]["status"], by_kind["end"][0]["replicas_identical"]) == ("finished", True)
    assert [each["ranks"] for each in by_kind["meeting"]] == [3, 2, 3]
    assert [(each["name"], each["given"]) for each in by_kind["fault"]] == [
        ("kill 0", True),
        ("join", True),
        ("kill 1", False),
    ]
    steps, qualities = ([each["step"] for each in by_kind[kind]] for kind in ("step", "quality"))
    assert steps == list(range(1, 601))
    assert qualities[-1] == 600 and len(qualities) >= 28  # the killed rank may have kept one to itself
    times = [each["seconds"] for each in by_kind["step"]]
    assert times == sorted(times)
    assert by_kind["quality"][-1]["value"] < 0.5 * by_kind["quality"][0]["value"]
    assert "s, kill:0: rank 0 is killed" in done.stderr
    assert "What faults did" in done.stdout
    assert "kill 0" in (out / "report.html").read_text()
