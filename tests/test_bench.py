"""Benchmarks: the loop and the JSON lines that all share, the figures of `overlap`, and a small run of two of them."""

import json
from itertools import pairwise

import pytest

from sparsync.comm.announcement import announcement_cost
from studies.bench import overlap, reductions
from studies.bench.frame import interleaved, percentiles, write
from studies.bench.overlap import Round


def test_every_case_is_measured_once_per_round_in_an_order_that_changes() -> None:
    calls: list[tuple[str, int]] = []

    def measure(case: str, number: int) -> str:
        calls.append((case, number))
        return f"{case}{number}"

    assert interleaved("abc", measure, rounds=4, warmup=2) == [[f"{case}{n}" for n in range(2, 6)] for case in "abc"]
    rounds = [[case for case, number in calls if number == each] for each in range(6)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert {after for each in rounds for case, after in pairwise(each) if case == "a"} == {"b", "c"}


def test_numbers_are_written_with_six_digits_and_bytes_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    assert percentiles([1.0, 2.0, 3.0, 4.0]) == {"p20": 1.0, "p50": 2.5, "p80": 4.0}
    write([{"seconds": 0.123456789, "ratios": [1 / 3, 2.0], "p50": {"low": 1234567.8, "bytes": 1234567.0}}])
    found = json.loads(capsys.readouterr().out)
    assert found == {"seconds": 0.123457, "ratios": [0.333333, 2.0], "p50": {"low": 1234570.0, "bytes": 1234567.0}}


@pytest.mark.parametrize(("backward", "reduction"), [(4.0, 2.0), (2.0, 4.0), (8.0, 8.0)])
def test_the_bound_is_that_of_a_line_of_two_machines(backward: float, reduction: float) -> None:
    done = reduced = 0.0
    for _ in range(8):  # each bucket waits for its layer and for the bucket before it
        done += backward / 8
        reduced = max(done, reduced) + reduction / 8
    at_best = Round(backward, reduction, reduced, 0.0)
    assert (at_best.bound_s(8), at_best.hidden) == (reduced, 1 - 1 / 8)


def test_what_cannot_run_is_refused_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="names one twice"):
        overlap.main(["--schemes", "dense,dense"])
    with pytest.raises(ValueError, match="cannot run on 4 ranks"):
        overlap.main(["--schemes", "skip_reduce:skip=9"])
    with pytest.raises(SystemExit):
        overlap.main(["--ranks", "1"])
    assert "--ranks must be in [2, 64], got 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_over_loopback_has_a_row_for_each_case_and_says_that_its_times_prove_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    size = "--ranks 2 --link none --schemes dense,topk --mbytes 0.1 --buckets 3 --backward-s 0.03 --rounds 4"
    overlap.main(size.split())
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["case"] for row in rows] == ["DDP's own", "dense", "topk"]
    assert "says nothing about a network" in printed.err
    announced = 3 * announcement_cost(2).nbytes  # one for each bucket
    assert rows[0]["payload_bytes"] == rows[1]["payload_bytes"] - announced > 10 * rows[2]["payload_bytes"]


def test_reductions_have_a_row_for_each_scheme_the_hook_and_each_number_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reductions.main(["--n", "3000", "--ranks", "1,3", "--rounds", "1"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    for ranks in (1, 3):
        cases = [row["case"] for row in rows if row["ranks"] == ranks]
        assert {reductions.HOOK, "bf16", "quantized:values=sign"} <= set(cases)
        assert len(cases) == len(set(cases)) == 8
    assert all(row["passes"] > 0 for row in rows)
