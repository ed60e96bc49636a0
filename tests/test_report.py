"""Invariants of the report: the same numbers in table, page and pictures, every warning in all of them, nothing loaded from outside."""

import io
import re
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from helpers.made_results import BF16, DENSE, RUN, SPARSE, UNLIMITED, Made, run, write
from sparsync_lab.report.page import render, report
from sparsync_lab.report.results import FILE_NAME, Run, read
from sparsync_lab.report.summary import RunSummary, summarise
from sparsync_lab.report.tables import as_text

DRAWN = ["quality_over_time", "quality_over_steps"]
PICTURES = [f"{name}.png" for name in DRAWN]
UNDRAWN = dict.fromkeys(DRAWN, b"")
LOUD = "THE LINKS HAD NO LIMIT: THE TIMES OF THIS RUN PROVE NOTHING ABOUT A NETWORK."
WARNING_COLOUR = (0xB0, 0x00, 0x20)


def summary(folder: Path, *made: Made, run: Run = RUN) -> RunSummary:
    results = read(write(folder, *made, run=run))
    return summarise(results.runs[-1])


def page(found: RunSummary) -> str:
    """Return the page with empty pictures, which take a second to draw."""
    return render(found, UNDRAWN)


def printed(folder: Path) -> str:
    """Make the whole report; return its output for a file or a pipe."""
    output = io.StringIO()
    with redirect_stdout(output):
        report(folder)
    return output.getvalue()


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with a whole report of a run over limited links, and what was printed: the pictures take most of the time."""
    folder = write(tmp_path_factory.mktemp("drawn"), DENSE, BF16, SPARSE)
    return folder, printed(folder)


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
    assert "No dense float32 all-reduce can take less than 3.00 s a step" in text


def test_a_target_that_was_missed_says_so(tmp_path: Path) -> None:
    late = (400.0, 300.0)
    text = as_text(summary(tmp_path, replace(DENSE, values=late), SPARSE, replace(BF16, values=late)))
    assert columns(text, "dense")[0][5:] == ["not", "reached", "-", "300.0", "-"]
    assert columns(text, "topk")[0][5:] == ["2.50", ">", "1.6x", "90.00", "-33.3"]


@pytest.mark.slow
def test_links_without_limit_give_a_warning_in_every_output(tmp_path: Path) -> None:
    text = printed(write(tmp_path, DENSE, SPARSE, run=UNLIMITED))
    assert text.count(LOUD) == 2
    assert LOUD in (tmp_path / "report.html").read_text()
    # A strip across the picture, not a stray pixel.
    assert all(warning_pixels(tmp_path / name) > 20_000 for name in PICTURES)


class Loaded(HTMLParser):
    """Everything in a page that a browser would fetch or run, and its images."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "iframe", "object", "embed", "base", "form", "a"):
            self.found.append(tag)
        for name, value in attrs:
            if name == "src" and (value or "").startswith("data:image/png;base64,"):
                self.images += 1
            elif name in ("src", "href", "srcset", "action", "background", "poster", "data") or name.startswith("on"):
                self.found.append(f"{tag} {name}")


@pytest.mark.slow
def test_the_page_loads_nothing_and_holds_the_pictures(drawn: tuple[Path, str]) -> None:
    folder, _ = drawn
    html = (folder / "report.html").read_text()
    loaded = Loaded(html)
    assert (loaded.found, loaded.images) == ([], len(PICTURES))
    assert not re.search(r"https?:|url\([^#]|@import", html)
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in PICTURES)


def test_text_of_a_record_never_becomes_markup(tmp_path: Path) -> None:
    evil = "<script>run(1)</script>"
    made = replace(SPARSE, scheme=evil, status=f"failed: {evil}")
    changed = run(machine={evil: evil}, command=(evil,), workload={**RUN.workload, "metric": evil})
    html = page(summary(tmp_path, made, run=changed))
    assert Loaded(html).found == []
    assert html.count("&lt;script&gt;") > 5


def test_a_training_without_an_end_is_told_in_table_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsync_lab.report.plots.pictures", lambda *_: UNDRAWN)
    path = write(tmp_path, DENSE, SPARSE) / FILE_NAME
    path.write_bytes(path.read_bytes()[:-20])
    text = printed(tmp_path)
    for output in (" ".join(text.split()), (tmp_path / "report.html").read_text()):
        assert "topk DID NOT FINISH: ITS ROW IS NO RESULT. With seed 0 it ended after 4 steps: interrupted" in output
