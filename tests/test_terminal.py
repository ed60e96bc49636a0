"""Tables on terminals: short names that are told apart, no line longer than the screen, and no name broken within a word."""

import re

import pytest

from sparsync_lab.terminal import Table, lines_of

LONG = Table(
    "A title that is longer than a narrow screen is wide, and so it goes on in another line",
    ("method", "first\nnumber", "second", "third\nof them", "last"),
    (("adamw_steps/two_shot 7 % sign", "1.25", "x" * 9, "2", "3\n1..5"), ("dense", "10", "-", "4", "5")),
    less=("second",),
)


@pytest.mark.parametrize("width", [*range(34, 70, 5), 80, 120])
def test_no_line_is_longer_than_the_screen_and_no_name_or_number_is_broken(width: int) -> None:
    text = lines_of([LONG], [("above " * 40, "")], [("below " * 40, "")], width=width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert {"adamw_steps/two_shot", "sign", "dense", "1.25", "10"} <= set(words)
    assert not re.search(r"adamw_steps/two_shot\S", text)
