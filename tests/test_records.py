"""Records: runs are checked by the rules of docs/compare.md, the page has what they say, and examples/record.py makes such a run."""

import io
import json
import math
import runpy
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers import distributed
from sparsync.schemes import Dense
from sparsync_lab import workloads
from sparsync_lab.workloads.base import parameter_count
from sparsync_lab.workloads.gpt import Decoder
from sparsync_lab.workloads.one_process import train_with_scheme
from studies import parts, records

EXAMPLE = Path(__file__).parent.parent / "examples" / "record.py"
FIXED = records.TRACKS["gpt-tiny"].job
JOB = FIXED | {"options": FIXED["options"] | {"learning_rate": 0.003, "optimizer_name": "adamw"}}
RING = 4 * 1.5 * 107_584  # bytes that each of 4 ranks sends in a step
SIGNS = "two_shot:density=1.0:values=sign"


def row(seed: int, loss: float, **changed: Any) -> dict[str, Any]:
    """Return a run of 10 steps that keeps the rules, but for what is changed."""
    made = {
        "track": "gpt-tiny",
        "job": JOB,
        "scheme": "dense",
        "settings": "",
        "exchange": "Gradients()",
        "ranks": 4,
        "optimizer": "AdamW",
        "rate": 1.4,
        "schedule": "the job's",
        "seed": seed,
        "steps": 10,
        "tokens": 5120,
        "loss": loss,
        "bytes": 10 * RING,
        "bits": 48.0,
        "curve": [[5, 3.0, 5 * RING], [10, loss, 10 * RING]],
        "who": "us",
        "date": "2026-11-24",
        "device": "a CPU",
        "precision": "float32",
        "seconds": 1.0,
        "versions": {"torch": "2.13.0"},
    }
    return made | changed


def read(tmp_path: Path, rows: Sequence[Mapping[str, Any]]) -> list[records.Run]:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return records.read(path)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have 2.12 nats to reach on the track of the rows here, whatever it is on the page."""
    monkeypatch.setitem(records.TRACKS, "gpt-tiny", replace(records.TRACKS["gpt-tiny"], loss=2.12))


GOOD = [row(0, 2.0), row(1, 2.01), row(2, 1.99)]


def sparse(seed: int, **changed: Any) -> dict[str, Any]:
    """Return a run that sends a thirtieth of the bytes of `row`."""
    loss = 2.0 + seed / 128
    sent = {"bytes": RING / 3, "bits": 1.6, "curve": [[10, loss, RING / 3]]}
    return row(seed, loss, scheme=SIGNS, settings="TwoShot(...)", exchange="Steps(keep=0.5)", **sent, **changed)


def test_three_runs_well_below_the_target_are_an_entry(tmp_path: Path, target: None) -> None:
    text = records.tables(read(tmp_path, [*GOOD, *map(sparse, range(3))]))
    first, second = (line.split(" | ")[:9] for line in text.splitlines() if line.startswith("| AdamW"))
    by_signs = f"| AdamW, `{SIGNS}`, steps, rate 1.4"
    assert first == [by_signs, "float32", "4", "10", "1.6", "0.2152", "2.0078", "3", "0.0008"]
    assert second == ["| AdamW, `dense`, rate 1.4", "float32", "4", "10", "48", "6.455", "2.0000", "3", "0.001"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"track": "gpt-tine"}, "there is no track 'gpt-tine'"),
        (
            {"job": JOB | {"options": JOB["options"] | {"batch_size": 32}}},
            "job.options.batch_size = 16, and not 32, is fixed on track gpt-tiny",
        ),
        ({"job": JOB | {"options": JOB["options"] | {"dropout": 0.1}}}, "job.options.dropout = None, and not 0.1, is"),
        ({"job": JOB | {"data": JOB["data"] | {"sha256": "abd"}}}, "job.data.sha256 = '93d1.*', and not 'abd', is"),
        ({"job": {name: value for name, value in JOB.items() if name != "parameters"}}, "job.parameters = 107584, and"),
        ({"ranks": 1}, "ranks must be at least 2, got 1"),
        ({"bytes": RING, "bits": 4.8}, r"bytes must be 6.45504e\+06 after 10 steps, got 645504"),
        ({"tokens": 10240}, "tokens must be 5120 after 10 steps, got 10240"),
        ({"bits": 1.6}, "bits must be 48 after 10 steps, got 1.6"),
        ({"seed": 2}, "dense has two runs with seed 2"),
        ({"loss": float("nan")}, "loss: "),
    ],
)
def test_a_run_that_breaks_a_rule_is_refused_with_its_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"records.jsonl, line 4: .*{message}"):
        read(tmp_path, [*GOOD, row(3, 2.02) | changed])


@pytest.mark.parametrize("name", records.TRACKS)
def test_tracks_are_jobs_of_the_laboratory(name: str) -> None:
    track, job = records.TRACKS[name], workloads.get(name)
    has = vars(job)
    options = track.job["options"]
    assert {**options, **{free: has[free] for free in records.FREE}} == {
        option: value for option, value in has.items() if option != "data"
    }
    assert track.tokens == options["batch_size"] * options["context"]
    assert (track.job["workload"], track.job["metric"]) == (job.name, job.metric)
    vocabulary = 84 + 1  # one for characters that training has not
    shape = options["context"], options["width"], options["layers"], options["heads"]
    with torch.device("meta"):
        assert track.job["parameters"] == parameter_count(Decoder(vocabulary, *shape))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (GOOD[:2], "at least 3 seeds are needed, got 2"),
        ([*GOOD, row(3, 2.0, rate=1.0)], "at least 3 seeds are needed, got 1"),
        (
            [row(seed, 2.12 + seed / 128) for seed in range(3)],
            "a mean loss of 2.1278 over 3 seeds must be below 2.12 with p < 0.01",
        ),
        ([row(0, 2.0), row(1, 2.001), row(2, 2.2)], "got p = 0.25"),
        ([row(0, 2.0), row(1, 2.0), row(2, 1.99)], "two runs have the same loss to the last digit, so one is a copy"),
    ],
)
def test_runs_that_do_not_show_a_record_are_refused(
    rows: list[dict[str, Any]], message: str, tmp_path: Path, target: None
) -> None:
    with pytest.raises(ValueError, match=message):
        records.tables(read(tmp_path, rows))


@pytest.mark.parametrize(("freedom", "t"), [(1, 31.8205), (2, 6.96456), (29, 2.46202)])
def test_the_p_value_is_that_of_the_tables_of_student(freedom: int, t: float) -> None:
    n = freedom + 1
    losses = [1.0, -1.0, *([0.0] * (n - 2))]
    error = (2 / freedom / n) ** 0.5  # of the mean
    assert records.p_value(losses, t * error) == pytest.approx(0.01, rel=1e-4)
    assert records.p_value(losses, -t * error) == pytest.approx(0.99, rel=1e-4)
    assert records.p_value([1.0] * n, 1.5) == 1


def test_the_page_has_the_tables_of_the_rows_there_are() -> None:
    page = (parts.ROOT / records.PAGE).read_text("utf-8")
    runs = records.read(parts.ROOT / records.ROWS)
    assert f"<!-- begin records -->\n\n{records.tables(runs)}\n\n<!-- end records -->" in page
    for run in runs:
        assert "None" not in run.exchange


def made(folder: Path) -> None:
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    example = runpy.run_path(str(EXAMPLE))
    about = [
        "--out",
        str(folder / "runs.jsonl"),
        *["--job", "gpt-tiny", "--steps", "6", "--evaluations", "2", "--rate", "1.4"],
    ]
    local = f"local_steps(every=4)/{SIGNS}"
    for more in ("", f"--scheme {SIGNS}", f"--scheme {SIGNS} --gradients", f"--scheme {local}", "--scheme demo"):
        with redirect_stdout(io.StringIO()):
            example["main"]([*about, *more.split()])
    for wrong in ("0", "7"):
        with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit):
            example["main"]([*about, "--evaluations", wrong])
        assert f"--evaluations must be from 1 to --steps, 6, got {wrong}" in said.getvalue()


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_appends_runs_that_keep_the_rules(tmp_path: Path) -> None:
    distributed.run_fresh(made, 2, folder=tmp_path)
    dense, steps, gradients, local, demo = records.read(tmp_path / "runs.jsonl")
    assert (dense.scheme, dense.exchange, dense.tokens) == ("dense", "Gradients()", 6 * 16 * 32)
    assert dense.bytes == 6 * 4 * dense.job["parameters"]  # of a ring of two ranks
    assert dense.bits == 32
    alike = train_with_scheme(workloads.get("gpt-tiny").at_rate(1.4), Dense, 0, 6, 2, {6})
    assert math.exp(dense.loss) == pytest.approx(alike.quality[-1][1], rel=1e-5)  # both in float32
    assert [step for step, *_ in dense.curve] == [3, 6]
    assert [run.exchange.partition("(")[0] for run in (steps, gradients, local)] == ["Steps", "Gradients", "LocalSteps"]
    assert steps.exchange == (
        "Steps(keep=0.5, bucket_mb=inf, check_weights_every=100, block=64, measure_every=8, beta2=0.999, decay=1.0)"
    )
    assert 1 < steps.bits < 2
    assert 1 < gradients.bits < 1.2
    # 3 steps exchange nothing; the last one exchanges the rest.
    assert [nbytes for *_, nbytes in local.curve] == [0, local.bytes]
    assert (demo.optimizer, demo.exchange) == ("SGD", "Gradients()")
    assert len({run.loss for run in (dense, steps, gradients, local, demo)}) == 5
