"""Records: runs are checked by the rules of docs/records.md, the page has what they say, and examples/record.py makes such a run."""

import io
import json
import runpy
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from helpers import distributed
from sparsync_lab import workloads
from studies import parts, records

EXAMPLE = Path(__file__).parent.parent / "examples" / "record.py"
JOB = {"options": {"batch_size": 16, "context": 32}, "parameters": 1000, "data": {"sha256": "abc", "source": "package"}}
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
        "bytes": 60000.0,
        "bits": 48.0,
        "curve": [[5, 3.0, 30000.0], [10, loss, 60000.0]],
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


GOOD = [row(0, 2.0), row(1, 2.01), row(2, 1.99)]


def test_three_runs_well_below_the_target_are_an_entry(tmp_path: Path) -> None:
    fewer = {"scheme": SIGNS, "settings": "TwoShot(...)", "exchange": "Steps(keep=0.5)", "bytes": 2000.0, "bits": 1.6}
    sparse = [row(seed, 2.0 + seed / 128, **fewer) for seed in range(3)]
    for each in sparse:
        each["curve"] = [[10, each["loss"], 2000.0]]
    text = records.tables(read(tmp_path, [*GOOD, *sparse]))
    first, second = (line.split(" | ")[:8] for line in text.splitlines() if line.startswith("| AdamW"))
    assert first == [f"| AdamW, `{SIGNS}`, steps, rate 1.4", "4", "10", "1.6", "0.002", "2.0078", "3", "0.0008"]
    assert second == ["| AdamW, `dense`, rate 1.4", "4", "10", "48", "0.06", "2.0000", "3", "0.001"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"track": "gpt-tine"}, "there is no track 'gpt-tine'"),
        ({"track": "code-86m"}, "the loss of track code-86m is not fixed yet"),
        ({"job": JOB | {"options": {"batch_size": 32, "context": 32}}}, "job.options.batch_size = 16, and not 32, is"),
        (
            {"job": JOB | {"data": {"sha256": "abd"}}},
            "job.data.sha256 = 'abc', and not 'abd', is fixed on track gpt-tiny",
        ),
        ({"job": JOB | {"parameters": 999}}, "job.parameters = 1000, and not 999, is fixed"),
        ({"tokens": 10240}, "tokens must be 5120 after 10 steps, got 10240"),
        ({"bits": 1.6}, "bits must be 48 after 10 steps, got 1.6"),
        ({"curve": [[10, 1.5, 60000.0]]}, r"curve must ascend, and end with \[10, 2.02, 60000.0\]"),
        ({"curve": []}, "curve must ascend"),
        ({"seed": 2}, "dense has two runs with seed 2"),
        ({"date": "24.11.2026"}, "date must be as 2026-01-31"),
        ({"loss": float("nan")}, "loss must be"),
        ({"note": "best"}, "has no 'note'"),
    ],
)
def test_a_run_that_breaks_a_rule_is_refused_with_its_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"records.jsonl, line 4: .*{message}"):
        read(tmp_path, [*GOOD, row(3, 2.02) | changed])


def test_a_line_that_is_no_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"track"')
    with pytest.raises(ValueError, match="line 1"):
        records.read(tmp_path / "records.jsonl")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (GOOD[:2], "at least 3 seeds are needed, got 2"),
        ([*GOOD, row(3, 2.0, rate=1.0)], "at least 3 seeds are needed, got 1"),
        (
            [row(seed, 2.12 + seed / 128) for seed in range(3)],
            "a mean loss of 2.1278 over 3 seeds must be below 2.12 with p < 0.01",
        ),
        ([row(0, 2.0), row(1, 2.0), row(2, 2.2)], "got p = 0.25"),
    ],
)
def test_runs_that_do_not_show_a_record_are_refused(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        records.tables(read(tmp_path, rows))


@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 31.8205), (2, 6.96456), (3, 4.54070), (4, 3.74695), (9, 2.82144), (10, 2.76377), (29, 2.46202)],
)
def test_the_p_value_is_that_of_the_tables_of_student(freedom: int, t: float) -> None:
    n = freedom + 1
    losses = [1.0, -1.0, *([0.0] * (n - 2))]
    error = (2 / freedom / n) ** 0.5  # of the mean
    assert records.p_value(losses, t * error) == pytest.approx(0.01, rel=1e-4)
    assert records.p_value(losses, -t * error) == pytest.approx(0.99, rel=1e-4)
    assert records.p_value([1.0] * n, 1.5) == 0
    assert records.p_value([1.0] * n, 1.0) == 1


def test_the_page_has_the_tables_of_the_rows_there_are() -> None:
    page = (parts.ROOT / records.PAGE).read_text("utf-8")
    runs = records.read(parts.ROOT / records.ROWS)
    assert f"<!-- begin records -->\n\n{records.tables(runs)}\n\n<!-- end records -->" in page
    for run in runs:
        assert run.job["data"]["sha256"]
        if run.track in workloads.WORKLOADS:
            now = vars(workloads.get(run.track))
            assert run.job["options"] == {name: now[name] for name in run.job["options"]}


def made(folder: Path) -> None:
    dist.init_process_group = dist.destroy_process_group = lambda *_, **__: None
    example = runpy.run_path(str(EXAMPLE))
    about = [
        "--job",
        "gpt-tiny",
        "--steps",
        "6",
        "--evaluations",
        "2",
        "--rate",
        "1.4",
        "--out",
        str(folder / "runs.jsonl"),
    ]
    local = f"local_steps(every=4)/{SIGNS}"
    for more in ("", f"--scheme {SIGNS}", f"--scheme {SIGNS} --gradients", f"--scheme {local}", "--scheme demo"):
        with redirect_stdout(io.StringIO()):
            example["main"]([*about, *more.split()])


@pytest.mark.distributed
def test_the_example_appends_runs_that_keep_the_rules(tmp_path: Path) -> None:
    distributed.run(made, 2, folder=tmp_path)
    dense, steps, gradients, local, demo = records.read(tmp_path / "runs.jsonl")
    assert (dense.scheme, dense.exchange, dense.tokens) == ("dense", "Gradients()", 6 * 16 * 32)
    assert dense.bytes == 6 * 4 * dense.job["parameters"]  # of a ring of two ranks
    assert dense.bits == 32
    assert [step for step, *_ in dense.curve] == [3, 6]
    assert [run.exchange.partition("(")[0] for run in (steps, gradients, local)] == ["Steps", "Gradients", "LocalSteps"]
    assert "keep=0.5" in steps.exchange
    assert 1 < steps.bits < 2
    assert 1 < gradients.bits < 1.2
    assert [nbytes for *_, nbytes in local.curve] == [
        0,
        local.bytes,
    ]  # 3 steps exchange nothing; the last one exchanges the rest
    assert (demo.optimizer, demo.exchange) == ("PlainSGD", "Gradients()")
    assert len({run.loss for run in (dense, steps, gradients, local, demo)}) == 5
