"""What errors say of ranks that differ: the lines that differ, of both."""

from sparsync.comm.announcement import LONGEST, NAMED, differences


def test_of_a_long_text_the_place_is_shown_where_it_differs() -> None:
    here, there = ("x" * 5 * LONGEST + each for each in "ab")
    found = differences([here], [there], 2, 3)
    assert found.endswith(f"{'x' * (LONGEST // 4)}b") and len(found) < LONGEST


def test_many_differences_are_counted_and_missing_lines_are_said_to_be_missing() -> None:
    here, there = [f"line {i}" for i in range(NAMED)], [f"line {i + 1}" for i in range(NAMED + 2)]
    assert differences(here, there, 0, 1).endswith("rank 0 has line 2, rank 1 has line 3; and 2 more")
    assert differences(here[:1], here[:2], 0, 1) == "rank 0 has nothing more, rank 1 has line 1"
