"""Tables on terminals: short names that are told apart, no line longer than the screen, and no name broken within a word."""

import re

import pytest

from sparsync_lab.labels import short_labels
from sparsync_lab.terminal import Table, lines_of, markdown


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        ("dense,two_shot:density=0.022:values=int4", "dense,two_shot 2.2 % int4"),
        ("topk,topk:density=0.05:values=int4", "topk,topk 5 % int4"),
        ("skip_reduce:skip=1", "skip_reduce"),
        ("skip_reduce:skip=1,skip_reduce:skip=2", "skip_reduce skip=1,skip_reduce skip=2"),
        ("powersgd,powersgd:rank=8", "powersgd,powersgd rank=8"),
        ("adamw_steps(keep=0.2)/two_shot:density=0.07:values=sign", "adamw_steps/two_shot 7 % signs"),
        ("two_shot:density=0.03:values=sign:density_down=0.13", "two_shot 3 % up; 13 % down; signs"),
        ("two_shot:density=1.0:values=sign:values_down=int3", "two_shot 100 %; signs up; int3 down"),
        ("steps(keep=0.2)/two_shot:density=0.07:values=sign", "steps/two_shot 7 % signs"),
        (
            "local_steps(every=4:keep=0.5)/dense,local_steps(every=8:keep=0.5)/dense",
            "local_steps(every=4)/dense,local_steps(every=8)/dense",
        ),
        ("package.module:Mine:factor=0.5,path/to/file.py:Other", "Mine,Other"),
        ("one.py:Mine,other.py:Mine", "one.py:Mine,other.py:Mine"),
        ("topk:density=0.01,topk:density=0.010", "topk:density=0.01,topk:density=0.010"),
        ("diloco,a$b_$,topk:density", "diloco,a$b_$,density"),
    ],
)
def test_short_names_have_what_tells_their_methods_apart(labels: str, names: str) -> None:
    assert list(short_labels(labels.split(",")).values()) == names.replace(",", "\n").replace(";", ",").split("\n")


LONG = Table(
    "A title that is longer than a narrow screen is wide, and so it goes on in another line",
    ("method", "first\nnumber", "second", "third\nof them", "last"),
    (("adamw_steps/two_shot 7 % sign", "1.25", "x" * 9, "2", "3\n1..5"), ("dense", "10", "-", "4", "5")),
    less=("second",),
)


@pytest.mark.parametrize("width", [*range(34, 70), 80, 120])
def test_no_line_is_longer_than_the_screen_and_no_name_or_number_is_broken(width: int) -> None:
    text = lines_of([LONG], [("above " * 40, "")], [("below " * 40, "")], width=width)
    assert max(map(len, text.splitlines())) <= width
    words = text.split()
    assert {"adamw_steps/two_shot", "sign", "dense", "1.25", "10"} <= set(words)
    assert not re.search(r"adamw_steps/two_shot\S", text)


def test_the_least_important_columns_go_first_and_are_named() -> None:
    def left_out(width: int) -> list[str]:
        found = re.findall(r"no room for: (.*)", " ".join(lines_of([LONG], width=width).split()))
        return found[0].split(", ") if found else []

    assert left_out(120) == []
    assert left_out(50) == ["second"]
    assert left_out(42) == ["second", "last"]  # and the name stands in two lines
    assert left_out(38) == ["second", "third of them", "last"]


def test_a_table_in_markdown_has_each_cell_in_one_line() -> None:
    assert markdown(LONG).splitlines() == [
        "| method | first number | second | third of them | last |",
        "| --- | --- | --- | --- | --- |",
        f"| `adamw_steps/two_shot 7 % sign` | 1.25 | {'x' * 9} | 2 | 3 1..5 |",
        "| `dense` | 10 | - | 4 | 5 |",
    ]
