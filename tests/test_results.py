"""Invariants of results.jsonl: records are read back as appended, a line cut off by a crash is left out, other errors are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made_results import DENSE, NETWORK, RUN, SPARSE, UNLIMITED, run, write
from sparsync_lab.netlab import Delay
from sparsync_lab.report.format import links_text, place_text
from sparsync_lab.report.results import FILE_NAME, read


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    write(tmp_path, DENSE, SPARSE)
    write(tmp_path, SPARSE, run=replace(NETWORK, run="two"))
    records, other = read(tmp_path).runs
    assert (other.run, other.run.times_count, RUN.times_count, UNLIMITED.times_count) == (
        replace(NETWORK, run="two"),
        True,
        True,
        False,
    )
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


@pytest.mark.parametrize("line", ["{", '{"kind": "end", "run": "one", "scheme": "topk", "seed": 0}'])
def test_a_line_that_is_no_record_is_refused_with_its_number(tmp_path: Path, line: str) -> None:
    path = write(tmp_path, SPARSE) / FILE_NAME
    assert len(path.read_text().splitlines()) == 11
    path.write_text(path.read_text() + line + '\n{"kind": "weather"}\n')
    with pytest.raises(ValueError, match=r"results\.jsonl, line 12 is no record"):
        read(tmp_path)


def test_a_delay_is_kept_and_shown(tmp_path: Path) -> None:
    links = links_text(1e8, 1e8, Delay(0.025, 0.005))
    delayed = replace(RUN, config={**RUN.config, "delay_s": 0.025, "jitter_s": 0.005, "links": links})
    path = write(tmp_path, DENSE, run=delayed)
    (found,) = read(path).runs
    assert (found.run.delay_s, found.run.jitter_s) == (0.025, 0.005)
    assert "100 Mbit/s links, 25 +- 5 ms one way" in place_text(found.run)
