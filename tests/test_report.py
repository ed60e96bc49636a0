"""Invariants of the report: the same numbers in table and picture, and every warning in both."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from helpers.made_results import BF16, DENSE, RUN, SPARSE, UNLIMITED, Made, run, write
from sparsync_lab.report.format import (
    bytes_text,
    rate_text,
    ratio_text,
    seconds_text,
    significant,
)
from sparsync_lab.report.page import PICTURE, report
from sparsync_lab.report.results import FILE_NAME, Run, read
from sparsync_lab.report.summary import RunSummary, summarise
from sparsync_lab.report.tables import as_text

LOUD = "THE LINKS HAD NO LIMIT: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A NETWORK."
WARNING_COLOUR = (0xB0, 0x00, 0x20)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the picture empty, where a test is about the rest: it takes most of the time."""
    monkeypatch.setattr("sparsync_lab.report.plots.picture", lambda *_: b"")


def summary(folder: Path, *made: Made, run: Run = RUN) -> RunSummary:
    results = read(write(folder, *made, run=run))
    return summarise(results.runs[-1])


def printed(folder: Path) -> str:
    """Make the whole report; return its output for a file or a pipe."""
    output = io.StringIO()
    with redirect_stdout(output):
        report(folder)
    return output.getvalue()


def columns(text: str, scheme: str) -> list[list[str]]:
    """Return the rows of a scheme, a list for each table."""
    return [line.split()[1:] for line in text.splitlines() if line.startswith(f" {scheme} ")]


def warning_pixels(picture: Path) -> int:
    pixels = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(int)
    return int((pixels == np.array(WARNING_COLOUR)).all(axis=2).sum())


def test_the_tables_hold_the_derived_numbers(tmp_path: Path) -> None:
    text = as_text(summary(tmp_path, DENSE, BF16, SPARSE))
    # sent | bits | those on the interface | step | seconds to the target | over bf16 | at the end | % behind
    # step | compute | scheme | communicate | hidden | other | link needs | step / compute
    assert columns(text, "dense") == [
        ["3.00", "MB", "48.0", "0.0200", "4000", "10.0", "0.50x", "90.00", "-"],
        ["4000", "250", "500", "3000", "0", "250", "3000", "16x"],
    ]
    assert columns(text, "topk") == [
        ["1.00", "kB", "0.0160", "0.0200", "1000", "2.50", "2.0x", "90.00", "0"],
        ["1000", "250", "125", "500", "0", "125", "1.00", "4.0x"],
    ]
    assert "What each scheme reached: shakespeare, 4 ranks, 8 Mbit/s links" in text


def test_a_target_that_was_missed_says_so(tmp_path: Path) -> None:
    late = (400.0, 300.0)
    text = as_text(summary(tmp_path, replace(DENSE, values=late), SPARSE, replace(BF16, values=late)))
    assert columns(text, "dense")[0][5:] == ["not", "reached", "-", "300.0", "-"]
    assert columns(text, "topk")[0][5:] == ["2.50", ">", "1.6x", "90.00", "-33.3"]


def test_several_seeds_show_how_far_they_differ(tmp_path: Path) -> None:
    ends = (90.0, 99.0, 81.0)
    made = [replace(each, seed=seed) for each in (DENSE, SPARSE) for seed in (0, 1, 2)]
    made[3:] = [replace(each, values=(400.0, 200.0, 100.0, end)) for each, end in zip(made[3:], ends, strict=True)]
    late = replace(SPARSE, scheme="late", seed=0), replace(SPARSE, scheme="late", seed=1, values=(400.0,))
    text = as_text(summary(tmp_path, *made, *late))
    assert columns(text, "topk")[0][-4:] == ["0", "(-10.0", "to", "+10.0)"]
    assert "1 of 2 seeds" in text


@pytest.mark.parametrize("label", ["topk", "skip_reduce:skip=2:form=direct:feedback=true:protect=*.bias+norm.*"])
def test_plain_text_fits_120_columns_and_has_no_colours(tmp_path: Path, label: str) -> None:
    made = [replace(each, seed=seed) for each in (DENSE, BF16, replace(SPARSE, scheme=label)) for seed in (0, 1)]
    found = summary(tmp_path, *made)
    text = as_text(found)
    assert max(map(len, text.splitlines())) <= 120
    assert "\x1b" not in text


def test_a_terminal_gets_colours_and_no_line_longer_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    found = summary(tmp_path, DENSE, SPARSE, run=UNLIMITED)
    text = as_text(found, width=80, colour=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert plain != text
    assert max(map(len, plain.splitlines())) <= 80


@pytest.mark.slow
def test_links_without_limit_give_a_warning_in_every_output(tmp_path: Path) -> None:
    text = printed(write(tmp_path, DENSE, SPARSE, run=UNLIMITED))
    assert text.count(LOUD) == 2
    # A strip across the picture, not a stray pixel.
    assert warning_pixels(tmp_path / PICTURE) > 20_000


@pytest.mark.usefixtures("undrawn")
def test_a_training_without_an_end_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, DENSE, SPARSE) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    text = printed(tmp_path)
    said = "topk DID NOT FINISH: ITS ROW IS NO RESULT. With seed 0 it ended after 4 steps: interrupted"
    assert said in " ".join(text.split())


@pytest.mark.usefixtures("undrawn")
def test_the_newest_run_is_shown(tmp_path: Path) -> None:
    write(tmp_path, replace(SPARSE, scheme="older"), run=run(run="first"))
    write(tmp_path, replace(SPARSE, scheme="newer"), run=run(run="second"))
    text = printed(tmp_path)
    assert columns(text, "newer") and not columns(text, "older")


def test_numbers_are_written_without_powers_of_ten() -> None:
    assert [significant(value) for value in (0.0, 0.012345, 0.9999, 9.996, 35.14, 999.6, 123456.0, -0.125)] == [
        *("0", "0.0123", "1.00", "10.0", "35.1", "1000", "123456", "-0.125")
    ]
    assert [significant(value) for value in (float("nan"), float("inf"))] == ["nan", "inf"]
    assert [seconds_text(value) for value in (0.043, 3.3, 1012.0, 19080.0)] == ["43.0 ms", "3.30 s", "1012 s", "5.30 h"]
    assert [bytes_text(value) for value in (12.0, 679_200.0, 3.4e7, 8.88e9)] == [
        "12.0 B",
        "679 kB",
        "34.0 MB",
        "8.88 GB",
    ]
    assert [rate_text(value) for value in (1e8, 2.5e9, 500.0)] == ["100 Mbit/s", "2.5 Gbit/s", "500 bit/s"]
    assert [ratio_text(0.956), ratio_text(7.44, "<"), ratio_text(16.44, ">")] == ["0.96x", "< 7.4x", "> 16.4x"]
