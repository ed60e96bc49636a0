"""What errors say of ranks that differ: what differs, of both, and nothing else."""

from sparsync.base.scheme import Scheme
from sparsync.comm.announcement import LONGEST, NAMED, differences
from sparsync.schemes import Dense, PerParameter, TopK, TwoShot


def test_of_two_schemes_only_the_settings_that_differ_are_named() -> None:
    def of(*schemes: Scheme) -> str:
        here, there = (repr(each) for each in schemes)
        return differences([here], [there], 0, 1)

    assert of(TopK(0.01), TopK(0.02)) == "rank 0 has TopK(density=0.01), rank 1 has TopK(density=0.02)"
    assert of(TwoShot(0.01, values="int8"), TwoShot(0.5, values="int4")) == (
        "rank 0 has TwoShot(density=0.01), rank 1 has TwoShot(density=0.5); "
        "rank 0 has TwoShot(values='int8'), rank 1 has TwoShot(values='int4')"
    )
    inside = [PerParameter(TopK(0.5), {"*bias": Dense(each)}) for each in ("float32", "bfloat16")]
    assert of(*inside) == "rank 0 has Dense(wire='float32'), rank 1 has Dense(wire='bfloat16')"
    assert of(Dense(), TopK(0.5)) == f"rank 0 has {Dense()}, rank 1 has {TopK(0.5)}"


def test_of_a_long_text_the_place_is_shown_where_it_differs() -> None:
    here, there = ("x" * 5 * LONGEST + each for each in "ab")
    found = differences([here], [there], 2, 3)
    assert found.endswith(f"{'x' * (LONGEST // 4)}b") and len(found) < LONGEST


def test_many_differences_are_counted_and_missing_lines_are_said_to_be_missing() -> None:
    here, there = [f"line {i}" for i in range(NAMED)], [f"line {i + 1}" for i in range(NAMED + 2)]
    assert differences(here, there, 0, 1).endswith("rank 0 has line 2, rank 1 has line 3; and 2 more")
    assert differences(here[:1], here[:2], 0, 1) == "rank 0 has nothing more, rank 1 has line 1"
