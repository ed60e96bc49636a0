"""Invariants of the report: the same numbers in table and picture, and every warning in both."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from helpers.made_results import BF16, DENSE, SPARSE, UNLIMITED, summary, write
from sparsync_lab.report.page import PICTURE, report
from sparsync_lab.report.tables import as_text

LOUD = "THE LINKS HAD NO LIMIT: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A NETWORK."
WARNING_COLOUR = (0xB0, 0x00, 0x20)


def printed(folder: Path) -> str:
    """Make the whole report; return its output for a file or a pipe."""
    output = io.StringIO()
    with redirect_stdout(output):
        report(folder)
    return output.getvalue()


def columns(text: str, scheme: str) -> list[list[str]]:
    """Return the rows of a scheme, a list for each table."""
    return [line.split()[1:] for line in text.splitlines() if line.startswith(f" {scheme} ")]


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


@pytest.mark.slow
def test_links_without_limit_give_a_warning_in_every_output(tmp_path: Path) -> None:
    text = printed(write(tmp_path, DENSE, SPARSE, run=UNLIMITED))
    assert text.count(LOUD) == 2
    # A strip across the picture, not a stray pixel.
    pixels = (matplotlib.image.imread(tmp_path / PICTURE)[:, :, :3] * 255).round().astype(int)
    assert (pixels == np.array(WARNING_COLOUR)).all(axis=2).sum() > 20_000
