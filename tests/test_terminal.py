"""Tables on terminals: no line longer than the screen, and nothing left out."""

import pytest

from sparsync_lab.terminal import Table, lines_of

LONG = Table(
    "A title that is longer than a narrow screen is wide, and so it goes on in another line",
    ("method", "first\nnumber", "second", "third\nof them", "last"),
    (("adamw_steps/two_shot 7 % sign", "1.25", "x" * 9, "2", "3\n1..5"), ("dense", "10", "-", "4", "5")),
)


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_longer_than_the_screen_and_nothing_is_left_out(width: int) -> None:
    text = lines_of([LONG], [("above " * 40, "")], [("below " * 40, "")], width=width)
    assert max(map(len, text.splitlines())) <= width
    shown = "".join(text.split())
    assert all(cell in shown for cell in ("dense", "1.25", "10")), text
    if width == 120:
        assert {"adamw_steps/two_shot", "x" * 9, "1..5"} <= set(text.split())
