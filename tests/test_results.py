"""Invariants of results.jsonl: records are read back as appended, a line cut off by a crash is noted, other errors are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made_results import DENSE, NETWORK, RUN, SPARSE, UNLIMITED, run, write
from sparsync_lab.netlab import Delay
from sparsync_lab.report.format import links_text, place_text
from sparsync_lab.report.results import FILE_NAME, Carried, Quality, Run, append, read
from sparsync_lab.report.summary import summarise


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, DENSE, SPARSE)
    results = read(tmp_path)
    assert results.notes == ()
    (records,) = results.runs
    assert records.run == RUN
    assert list(records.traces) == [("dense", 0), ("topk", 0)]
    trace = records.traces["dense", 0]
    assert [trace.start, *trace.steps, *trace.quality, trace.end] == sorted(
        DENSE.records(), key=lambda record: ["scheme", "step", "quality", "end"].index(record.kind)
    )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinity_and_not_a_number_survive_in_strict_json(tmp_path: Path, value: float) -> None:
    write(tmp_path, replace(SPARSE, values=(value,)))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for line in (tmp_path / FILE_NAME).read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (point,) = read(tmp_path).runs[0].traces["topk", 0].quality
    assert repr(point.value) == repr(value)


def test_runs_stand_in_the_order_they_were_appended(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write(tmp_path, SPARSE, run=run(run=name))
    assert [records.run.run for records in read(tmp_path).runs] == ["b", "a", "c"]


def test_every_way_to_break_off_the_last_line_costs_that_line_and_leaves_a_note(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", DENSE, SPARSE) / FILE_NAME
    lines = whole.read_bytes().splitlines(keepends=True)
    *before, last = lines
    for length in range(1, len(last) - 1):
        (tmp_path / FILE_NAME).write_bytes(b"".join(before) + last[:length])
        results = read(tmp_path)
        assert results.runs[0].traces["topk", 0].end is None
        assert len(results.runs[0].traces["topk", 0].quality) == len(SPARSE.values)
        assert results.notes == (
            f"Line {len(lines)} of results.jsonl breaks off: the run was interrupted while it was written. "
            "The line is left out.",
        )


def test_a_last_line_without_its_line_feed_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    results = read(tmp_path)
    assert results.notes == ()
    assert results.runs[0].traces["topk", 0].end is not None


def test_a_run_appended_after_a_crash_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    write(tmp_path, DENSE, run=run(run="two"))
    results = read(tmp_path)
    assert [records.run.run for records in results.runs] == ["one", "two"]
    assert results.runs[1].traces["dense", 0].end is not None
    assert [note.split(" of ")[0] for note in results.notes] == ["Line 11"]


def test_records_of_unknown_kind_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, SPARSE)
    before = read(tmp_path)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"kind": "weather", "run": 7}\n\n')
    assert read(tmp_path) == before


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 12: not a JSON object"),
        ("3", "line 12: a record must be a JSON object with a 'kind'"),
        ('{"run": "one"}', "line 12: a record must be a JSON object with a 'kind'"),
        ('{"kind": "end", "run": "one", "scheme": "topk", "seed": 0}', "end record needs replicas_identical"),
        (
            '{"kind": "end", "run": "one", "scheme": "topk", "seed": "0", "replicas_identical": true, "status": ""}',
            "end record: seed must be a whole number, got '0'",
        ),
        (
            '{"kind": "end", "run": "no", "scheme": "topk", "seed": 0, "replicas_identical": true, "status": ""}',
            "end record of run 'no', which has no run record before it",
        ),
        (
            '{"kind": "end", "run": "one", "scheme": "no", "seed": 0, "replicas_identical": true, "status": ""}',
            "end record of scheme 'no', seed 0, which has no scheme record before it",
        ),
        (
            '{"kind": "end", "run": "one", "scheme": "topk", "seed": 0, "replicas_identical": true, "status": ""}',
            "end record of scheme 'topk', seed 0, after its end record",
        ),
        (
            '{"kind": "scheme", "run": "one", "scheme": "topk", "seed": 0, "config": {}, "compute_s": 1}',
            "scheme 'topk' with seed 0 begins a second time in one run",
        ),
    ],
)
def test_a_line_that_does_not_fit_is_refused_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    assert len(path.read_text().splitlines()) == 11
    path.write_text(path.read_text() + line + '\n{"kind": "weather"}\n')
    with pytest.raises(ValueError, match="line 12") as error:
        read(tmp_path)
    assert complaint in str(error.value)


def test_steps_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    write(tmp_path, replace(SPARSE, status=None))
    append(tmp_path, Quality("one", "topk", 0, step=4, seconds=9.0, bytes=None, value=1.0))
    with pytest.raises(ValueError, match="quality records must ascend by step: 4 after 4"):
        read(tmp_path)


def test_a_run_id_used_twice_is_refused(tmp_path: Path) -> None:
    append(tmp_path, RUN, RUN)
    with pytest.raises(ValueError, match="run 'one' begins a second time"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"<html>\n", b"<html>\n</html>\n", b'{"kind": "run', b'{"kind": "x"}\n']
)
def test_a_file_without_a_run_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"results\.jsonl"):
        read(tmp_path)


def test_a_folder_without_results_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file.*give the folder a comparison wrote"):
        read(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write .*; choose another folder with --out"):
        append(tmp_path / "file" / "folder", RUN)


@pytest.mark.parametrize(
    ("where", "key", "value", "complaint"),
    [
        ("config", "ranks", "4", "run record: config.ranks must be a whole number, got '4'"),
        ("config", "rate_bits_per_s", None, "must be positive in a run over limited links, got None"),
        ("config", "target", True, "must be a number, got True"),
        ("workload", "better", "up", "must be 'lower' or 'higher', got 'up'"),
        ("workload", "parameters", None, "must be a whole number, got None"),
    ],
)
def test_a_run_that_could_not_be_reported_is_refused_when_made(
    where: str, key: str, value: object, complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        replace(RUN, **{where: {**getattr(RUN, where), key: value}})
    with pytest.raises(ValueError, match=f"{where} needs {key}"):
        replace(RUN, **{where: {name: each for name, each in getattr(RUN, where).items() if name != key}})


def test_fields_that_older_records_lack_have_their_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("network", None)
        line.pop("own_compute_s", None)
        line.get("config", {}).pop("delay_s", None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (found,) = read(tmp_path).runs
    assert (found.run.network, found.traces["topk", 0].start.own_compute_s) == ("", None)
    assert (found.run.delay_s, found.run.jitter_s, found.carried) == (0.0, 0.0, None)


def test_a_delay_is_kept_and_shown_with_what_it_cost(tmp_path: Path) -> None:
    links = links_text(1e8, 1e8, Delay(0.025, 0.005))
    delayed = replace(RUN, config={**RUN.config, "delay_s": 0.025, "jitter_s": 0.005, "links": links})
    path = write(tmp_path, DENSE, run=delayed)
    append(path, Carried(delayed.run, 3, 5_000_000, 0.5))
    (found,) = read(path).runs
    assert (found.run.delay_s, found.run.jitter_s) == (0.025, 0.005)
    assert "100 Mbit/s links, 25 +- 5 ms one way" in place_text(found.run)
    assert "25 +- 5 ms one way, made by a program that carried 5.00 MB and took 0.500 s" in summarise(found).notes[0]


def test_times_count_over_limited_links_and_over_a_real_network(tmp_path: Path) -> None:
    assert [each.times_count for each in (RUN, NETWORK, UNLIMITED)] == [True, True, False]
    assert read(write(tmp_path, run=NETWORK)).runs[0].run == NETWORK


def test_a_run_reads_its_settings() -> None:
    assert isinstance(RUN, Run)
    assert (RUN.ranks, RUN.rate_bits_per_s, RUN.target, RUN.metric, RUN.lower_is_better) == (
        4,
        8_000_000,
        150.0,
        "perplexity",
        True,
    )
