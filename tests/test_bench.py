"""Benchmarks: the loop and the JSON lines that all share, the figures of `overlap`, and a small run of two of them."""

import json

import pytest

from sparsync.comm.announcement import announcement_cost
from studies.bench import overlap, reductions
from studies.bench.overlap import Round


@pytest.mark.parametrize(("backward", "reduction"), [(4.0, 2.0), (2.0, 4.0), (8.0, 8.0)])
def test_the_bound_is_that_of_a_line_of_two_machines(backward: float, reduction: float) -> None:
    done = reduced = 0.0
    for _ in range(8):  # each bucket waits for its layer and for the bucket before it
        done += backward / 8
        reduced = max(done, reduced) + reduction / 8
    at_best = Round(backward, reduction, reduced, 0.0)
    assert (at_best.bound_s(8), at_best.hidden) == (reduced, 1 - 1 / 8)


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
