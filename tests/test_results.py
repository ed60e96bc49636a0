"""Invariants of results.jsonl: records are read back as appended, a line cut off by a crash is left out, other errors are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made_results import DENSE, NETWORK, RUN, SPARSE, UNLIMITED, run, write
from sparsync_lab.netlab import Delay
from sparsync_lab.report.format import links_text, place_text
from sparsync_lab.report.results import FILE_NAME, Carried, append, read
from sparsync_lab.report.summary import summarise


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, DENSE, SPARSE)
    results = read(tmp_path)
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


def test_every_way_to_break_off_the_last_line_costs_that_line_and_the_next_run_is_whole(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", DENSE, SPARSE) / FILE_NAME
    *before, last = whole.read_bytes().splitlines(keepends=True)
    for length in range(1, len(last) - 1):
        (tmp_path / FILE_NAME).write_bytes(b"".join(before) + last[:length])
        broken = read(tmp_path).runs[0].traces["topk", 0]
        assert (broken.end, len(broken.quality)) == (None, len(SPARSE.values))
    write(tmp_path, DENSE, run=run(run="two"))
    assert [records.run.run for records in read(tmp_path).runs] == ["one", "two"]
    assert read(tmp_path).runs[1].traces["dense", 0].end is not None


def test_records_of_unknown_kind_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, SPARSE)
    before = read(tmp_path)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"kind": "weather", "run": 7}\n\n')
    assert read(tmp_path) == before


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "3",
        '{"run": "one"}',
        '{"kind": "end", "run": "one", "scheme": "topk", "seed": 0}',
        '{"kind": "end", "run": "no", "scheme": "topk", "seed": 0, "replicas_identical": true, "status": ""}',
    ],
)
def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    assert len(path.read_text().splitlines()) == 11
    path.write_text(path.read_text() + line + '\n{"kind": "weather"}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 12 is no record"):
        read(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"<html>\n", b"<html>\n</html>\n", b'{"kind": "run', b'{"kind": "x"}\n']
)
def test_a_file_without_a_run_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ValueError, match=r"results\.jsonl"):
        read(tmp_path)


def test_a_folder_without_results_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run; give the folder a comparison wrote"):
        read(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"cannot write .*; choose another folder with --out"):
        append(tmp_path / "file" / "folder", RUN)


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
