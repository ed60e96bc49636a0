"""The choice of a report: what to use at these ranks and links, why, with its quality, and when the plain all-reduce is better."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made_results import BF16, DENSE, NETWORK, RUN, SPARSE, UNLIMITED, Made, run, write
from sparsync_lab.report.lead import behind_words, details, failure, first_line, headline, lead
from sparsync_lab.report.results import Run, read
from sparsync_lab.report.summary import RunSummary, summarise
from sparsync_lab.report.tables import as_text, tables
from sparsync_lab.report.verdict import speed_baseline, verdict

HERE = "On shakespeare (4 ranks, 8 Mbit/s links)"
NO_TARGET = run(target=None)
BEHIND = replace(SPARSE, values=(400.0, 200.0, 100.0, 99.0))  # 10 % behind dense at the end


def summary(folder: Path, *made: Made, run: Run = RUN) -> RunSummary:
    return summarise(read(write(folder, *made, run=run)).runs[-1])


def chosen(found: RunSummary) -> str | None:
    scheme = verdict(found).chosen
    return None if scheme is None else scheme.label


def test_with_a_target_the_scheme_that_reaches_it_soonest_is_chosen_and_its_quality_stands_beside_the_time(
    tmp_path: Path,
) -> None:
    found = summary(tmp_path, DENSE, BF16, SPARSE, replace(SPARSE, scheme="slower", step_s=1.5))
    assert lead(found) == (
        f"{HERE} choose topk: it reached perplexity 150 after 2.50 s of training, 2.0 times as fast as bf16 (5.00 s), and sends "
        "0.0160 bits per parameter per step instead of 24.0; after 4 steps its perplexity is as good as dense (one seed: its spread "
        "is unknown). Use dense bf16 where links are so fast that a step takes hardly longer than computing."
    )
    assert headline(found) == "perplexity 150: topk in 2.50 s, bf16 in 5.00 s (2.0x), as good as dense"


def test_the_first_line_says_what_to_use_how_fast_it_is_and_what_it_costs(tmp_path: Path) -> None:
    def first(name: str, *made: Made, run: Run = RUN) -> str:
        found = summary(tmp_path / name, *made, run=run)
        assert first_line(found) == "" or as_text(found).startswith(first_line(found) + "\n")
        return first_line(found)

    assert first("a", DENSE, BF16, SPARSE) == (
        "Use topk: 2.0x as fast as bf16 to perplexity 150, as good as dense after 4 steps."
    )
    assert first("b", DENSE, BF16, BEHIND) == (
        "Use topk: 2.0x as fast as bf16 to perplexity 150, 10.0 % worse than dense after 4 steps."
    )
    assert (
        first("c", DENSE, BF16, SPARSE, run=NO_TARGET)
        == "Use topk: 2.0x as fast as bf16, as good as dense after 4 steps."
    )
    slow = replace(SPARSE, step_s=3.0)
    assert first("d", DENSE, BF16, slow) == "Use dense bf16: nothing faster was found that ends within 2 % of dense."
    assert (
        first("e", BF16, SPARSE)
        == "Use topk: 2.0x as fast as bf16 to perplexity 150; its quality beside dense is unknown."
    )
    assert first("f", DENSE, BF16, SPARSE, run=UNLIMITED) == ""
    assert first("g", DENSE, BF16, replace(SPARSE, compute_s=0.5)) == ""  # disturbed


def test_all_speed_ups_of_a_report_are_over_the_same_baseline(tmp_path: Path) -> None:
    slow = replace(BF16, step_s=8.0)
    for name, made, baseline in (("a", BF16, "bf16"), ("b", slow, "dense")):
        found = summary(tmp_path / name, DENSE, made, SPARSE)
        assert speed_baseline(found) == baseline
        assert f" {baseline} in " in (headline(found) or "")
        assert f"fast as {baseline} " in first_line(found)
        assert tables(found)[0].heads.count(f"speed-up\nover {baseline}") == 1
        assert sum(head.startswith("speed-up") for head in tables(found)[0].heads) == 1


def test_a_speed_up_never_stands_without_the_quality_that_it_costs(tmp_path: Path) -> None:
    found = summary(tmp_path / "a", DENSE, BF16, BEHIND)
    said = lead(found)
    assert "choose topk if only the target counts: it reached perplexity 150 after 2.50 s" in said
    assert "its perplexity is 10.0 % behind dense" in said
    assert said.endswith("To end within 2 % of dense use dense bf16: no faster scheme came so near.")
    assert headline(found) == "perplexity 150: topk in 2.50 s, bf16 in 5.00 s (2.0x), 10.0 % behind dense"
    near = summary(tmp_path / "b", DENSE, BF16, BEHIND, replace(SPARSE, scheme="near", step_s=1.25))
    assert "To end within 2 % of dense choose near: it reached perplexity 150 after 3.12 s" in lead(near)
    assert lead(near, within=10.0).startswith(f"{HERE} choose topk: ")


def test_without_a_target_the_shortest_step_near_dense_is_chosen(tmp_path: Path) -> None:
    faster = replace(BEHIND, scheme="worse", step_s=0.875)
    found = summary(tmp_path / "a", DENSE, BF16, SPARSE, faster, run=NO_TARGET)
    assert lead(found).startswith(
        f"{HERE} choose topk: a step takes 1.00 s, 2.0 times as fast as bf16 (2.00 s), and sends"
    )
    assert headline(found) == "topk: 1.00 s a step, bf16 2.00 s (2.0x), as good as dense"
    only = summary(tmp_path / "b", DENSE, BF16, faster, run=NO_TARGET)
    assert lead(only) == (
        f"{HERE} use dense bf16: no scheme was faster by more than the noise (0 ms a step) and within 2 % of dense's perplexity. "
        "The fastest other one is worse: a step takes 875 ms, 2.3 times as fast as bf16 (2.00 s), and sends 0.0160 bits per "
        "parameter per step instead of 24.0; after 4 steps its perplexity is 10.0 % behind dense (one seed: its spread is unknown)."
    )
    assert headline(only) is None


@pytest.mark.parametrize(
    ("step_s", "compute_s", "expected"),
    [
        (1.95, 0.25, None),  # 2.6 %, less than counts as a difference
        (1.9, 0.25, "topk"),
        (1.5, 1.25, None),  # the computing steps of the run differ by half of a step of bf16
        (0.5, 0.5, "topk"),
        (2.0, 0.25, None),
        (3.0, 0.25, None),
    ],
)
def test_what_is_not_faster_than_bf16_beyond_the_noise_is_not_chosen(
    tmp_path: Path, step_s: float, compute_s: float, expected: str | None
) -> None:
    made = (DENSE, BF16, replace(SPARSE, step_s=step_s, compute_s=compute_s))
    for at, where in enumerate((RUN, NO_TARGET)):
        found = summary(tmp_path / str(at), *made, run=where)
        assert chosen(found) == expected
        if expected is None:
            use = "this disturbed run points to" if compute_s == 1.25 else "use"
            assert lead(found).startswith(f"{HERE} {use} dense bf16: no scheme ")


def test_it_must_be_faster_with_every_seed_and_the_range_is_told(tmp_path: Path) -> None:
    seeds = [replace(each, seed=seed) for each in (DENSE, BF16) for seed in (0, 1, 2)]
    mixed = [replace(SPARSE, seed=seed, step_s=step_s) for seed, step_s in enumerate((1.0, 1.25, 2.5))]
    assert chosen(summary(tmp_path / "a", *seeds, *mixed)) is None
    always = [*mixed[:2], replace(mixed[2], step_s=1.0, values=(400.0, 200.0, 100.0, 91.8))]
    said = lead(summary(tmp_path / "b", *seeds, *always))
    assert "2.0 times as fast as bf16 (5.00 s; 1.6 to 2.0 over 3 seeds)" in said
    assert "is as good as dense (median of 3 seeds; from as good as dense to 2.0 % behind dense)" in said


def test_schemes_that_failed_or_missed_the_target_with_a_seed_are_not_chosen(tmp_path: Path) -> None:
    fast = replace(SPARSE, scheme="fast", step_s=0.5)
    for at, bad in enumerate(
        (
            replace(fast, status="failed: rank 1 went away"),
            replace(fast, status=None),
            replace(fast, replicas_identical=False),
            replace(fast, values=(400.0, 300.0)),
            replace(fast, values=()),
        )
    ):
        found = summary(tmp_path / str(at), DENSE, BF16, SPARSE, bad)
        assert chosen(found) == "topk"
        assert ("fast DID NOT FINISH: ITS ROW IS NO RESULT." in as_text(found)) == (bad.status != "finished")
    seeds = [replace(each, seed=seed) for each in (DENSE, BF16, SPARSE) for seed in (0, 1)]
    partly = [fast, replace(fast, seed=1, values=(400.0, 300.0))]
    assert chosen(summary(tmp_path / "partly", *seeds, *partly)) == "topk"
    failed = [replace(each, status="failed: x") for each in (DENSE, BF16, SPARSE)]
    assert lead(summary(tmp_path / "none", *failed)) == (
        f"{HERE} there is nothing to choose from: no scheme finished with every seed."
    )


@pytest.mark.parametrize(
    ("missed", "why"), [(0, "ended before its first exchange"), (4, "4 of 4 exchanges were left out")]
)
def test_a_scheme_that_exchanged_nothing_takes_no_part_and_is_told_above_everything(
    tmp_path: Path, missed: int, why: str
) -> None:
    """Its quality is dense's and its steps are the shortest, as it looks where ranks train alone and are compared by what they share."""
    alone = replace(SPARSE, scheme="local_steps(every=9)/topk", step_s=0.25, exchanges=0, missed=missed)
    found = summary(tmp_path, DENSE, BF16, SPARSE, alone)
    assert chosen(found) == "topk"
    text = " ".join(as_text(found).split())
    assert text.startswith("!!! local_steps/topk EXCHANGED NOTHING: ITS ROW IS NO RESULT. With seed 0")
    assert text.count(why) == 2
    assert "local_steps/topk exchanged - 0.0160 - - - 4 nothing" in text
    assert failure(found) == "local_steps/topk exchanged nothing; the report says why, and the other rows count"
    assert chosen(summary(tmp_path / "one", DENSE, BF16, SPARSE, replace(alone, exchanges=1))) == alone.scheme


def test_missed_exchanges_are_noted(tmp_path: Path) -> None:
    some = replace(SPARSE, scheme="adamw_steps/topk", exchanges=3, missed=1)
    assert summary(tmp_path, DENSE, BF16, some).notes == (
        "adamw_steps/topk (seed 0) missed 1 of 4 exchanges: weights or gradients were NaN or infinite.",
    )


def test_a_disturbed_run_does_not_choose_but_points(tmp_path: Path) -> None:
    made = [replace(each, compute_s=0.25 + 0.125 * (each is SPARSE)) for each in (DENSE, BF16, SPARSE)]
    found = summary(tmp_path, *made)
    assert lead(found).startswith(f"{HERE} this disturbed run points to topk: it reached")
    assert lead(found).endswith(" Measure again on a quiet machine before you choose.")
    assert headline(found) is None
    assert as_text(found).startswith("!!! SOMETHING ELSE KEPT THE MACHINE BUSY: THE TIMES OF THIS RUN ARE UNCERTAIN.")


def test_where_no_scheme_reached_the_target_steps_are_compared(tmp_path: Path) -> None:
    late = [replace(each, values=(400.0, 300.0)) for each in (DENSE, BF16, SPARSE)]
    assert lead(summary(tmp_path, *late)).startswith(
        f"{HERE} choose topk: a step takes 1.00 s, 2.0 times as fast as bf16"
    )


def test_a_plain_all_reduce_that_missed_the_target_bounds_the_ratio(tmp_path: Path) -> None:
    late = [replace(each, values=(400.0, 300.0, 290.0, 280.0)) for each in (DENSE, BF16)]
    found = summary(tmp_path, *late, SPARSE)
    assert "more than 3.2 times as fast as bf16 (not in 8.00 s)" in lead(found)
    assert headline(found) == "perplexity 150: topk in 2.50 s, bf16 not in 8.00 s (> 3.2x), 67.9 % ahead of dense"


def test_dense_is_the_plain_all_reduce_where_bf16_is_slower_worse_or_not_there(tmp_path: Path) -> None:
    for at, bf16 in enumerate((replace(BF16, step_s=5.0), replace(BF16, values=BEHIND.values))):
        assert "4.0 times as fast as dense (10.0 s)" in lead(summary(tmp_path / str(at), DENSE, bf16, SPARSE))
    alone = summary(tmp_path / "alone", DENSE, SPARSE)
    assert lead(alone).endswith("bf16, which sends half of it, has not run: add it to --schemes.")
    slow = summary(tmp_path / "slow", DENSE, replace(SPARSE, step_s=4.0))
    assert lead(slow).startswith(f"{HERE} use dense: no scheme reached perplexity 150 sooner by more than the noise")


def test_without_dense_the_quality_is_unknown_and_said_to_be(tmp_path: Path) -> None:
    found = summary(tmp_path / "a", BF16, SPARSE)
    assert "how far its perplexity is behind dense is unknown: dense has not run" in lead(found)
    assert lead(summary(tmp_path / "b", BF16, SPARSE, run=NO_TARGET)) == (
        f"{HERE} nothing can be chosen by time alone: dense has not run, so no loss of quality is known; add it to --schemes."
    )
    assert lead(summary(tmp_path / "c", SPARSE)).endswith(
        "Neither bf16 nor dense finished in this run: add them to --schemes before you choose."
    )


def test_times_that_prove_nothing_choose_nothing(tmp_path: Path) -> None:
    found = summary(tmp_path, DENSE, BF16, SPARSE, run=UNLIMITED)
    assert lead(found) == (
        "The links of this run had no limit, so its times prove nothing about a network, and it does not show what to choose. "
        "Of the schemes within 2 % of dense, topk sent the least, 0.0160 bits per parameter per step: after 4 steps its perplexity "
        "is as good as dense (one seed: its spread is unknown)."
    )
    assert headline(found) is None


def test_where_the_slow_reference_kernels_ran_a_banner_stands_in_place_of_a_choice(tmp_path: Path) -> None:
    slow = replace(RUN, versions={**RUN.versions, "kernels": "reference"})
    found = summary(tmp_path, DENSE, BF16, SPARSE, run=slow)
    assert [banner.kind for banner in found.banners] == ["reference"]
    assert lead(found) == (
        "The slow reference kernels ran, so the times of this run prove nothing about a scheme, and it does not show what to choose. "
        "Of the schemes within 2 % of dense, topk sent the least, 0.0160 bits per parameter per step: after 4 steps its perplexity "
        "is as good as dense (one seed: its spread is unknown)."
    )
    assert headline(found) is None
    shown = as_text(found)
    assert shown.startswith("!!! THE SLOW REFERENCE KERNELS RAN: ")
    assert "Install a C++ compiler such as g++" in " ".join(shown.split())
    fast = replace(RUN, run="two", versions={**RUN.versions, "kernels": "cpp/avx2"})
    assert summary(tmp_path, DENSE, BF16, SPARSE, run=fast).banners == ()


def test_times_over_a_real_network_count(tmp_path: Path) -> None:
    found = summary(tmp_path, DENSE, BF16, SPARSE, run=NETWORK)
    assert lead(found).startswith("On shakespeare (4 ranks, 4 hosts, TCP over eth0) choose topk: ")
    assert found.banners == ()
    assert "PROVE NOTHING" not in as_text(found)
    assert found.dense_link_s is None


def test_one_rank_has_nothing_to_choose(tmp_path: Path) -> None:
    one = replace(RUN, config={**RUN.config, "ranks": 1})
    assert "one rank sends nothing" in lead(summary(tmp_path, DENSE, SPARSE, run=one))


def test_the_rate_from_which_on_bf16_is_as_fast_makes_both_steps_equal(tmp_path: Path) -> None:
    """On links of 8 Mbit/s: bf16 takes 1 s for 1 MB and 1 s besides, the scheme 0.125 s and 1.375 s; both take 1.4375 s at 16 / 7 of it."""
    bf16 = replace(BF16, step_s=2.0, sent_bytes=1e6, interface_bytes=1e6)
    sparse = replace(SPARSE, step_s=1.5, sent_bytes=125_000.0, interface_bytes=125_000.0)
    rate = verdict(summary(tmp_path, DENSE, bf16, sparse, run=NO_TARGET)).enough_from
    assert rate is not None
    assert rate == pytest.approx(8e6 / 0.375 * 0.875)
    for step_s, nbytes in ((2.0, 1e6), (1.5, 125_000.0)):
        assert step_s - 8 * nbytes / 8e6 + 8 * nbytes / rate == pytest.approx(1.0 + 8e6 / rate)
    said = lead(summary(tmp_path / "b", DENSE, bf16, sparse, run=NO_TARGET))
    assert said.endswith("Use dense bf16 where links are faster than about 20 Mbit/s (extrapolated from these times).")


def test_percent_behind_in_words() -> None:
    assert [behind_words(gap) for gap in (3.0, -0.44, 0.04, float("inf"))] == [
        *("3.0 % behind dense", "0.4 % ahead of dense", "as good as dense", "infinitely far behind dense")
    ]


@pytest.mark.parametrize("end", [float("nan"), float("inf")])
@pytest.mark.parametrize("made", [RUN, NO_TARGET, UNLIMITED])
def test_where_dense_diverged_the_report_says_so_first_and_chooses_nothing(
    tmp_path: Path, made: Run, end: float
) -> None:
    diverged = replace(DENSE, values=(*DENSE.values[:-1], end))
    found = summary(tmp_path, diverged, BF16, SPARSE, run=made)
    said = "dense diverged with seed 0 (first at step 4): at the end its training loss or perplexity is NaN or infinite. So there is"
    assert said in lead(found)
    assert lead(found).endswith("give the job a lower learning rate, or clip its gradients.")
    assert not any(word in lead(found) for word in ("times as fast", "behind", "use dense"))
    assert headline(found) is None


def test_a_scheme_that_diverged_is_said_to_have_diverged(tmp_path: Path) -> None:
    diverged = replace(SPARSE, values=(400.0, 200.0, float("nan"), float("nan")))
    said = lead(summary(tmp_path, DENSE, BF16, diverged, run=NO_TARGET))
    assert "use dense bf16: no scheme was faster" in said
    assert said.endswith("; it diverged within 4 steps (one seed: its spread is unknown).")


def test_a_loss_that_is_nan_at_the_first_step_is_told_and_not_blamed_on_the_learning_rate(tmp_path: Path) -> None:
    """Also where the quality, such as an accuracy, stays finite."""
    nan = float("nan")
    for at, values in enumerate(((nan,) * 4, DENSE.values)):
        found = summary(tmp_path / str(at), replace(DENSE, values=values, loss=nan), SPARSE)
        assert "dense diverged with seed 0 (first at step 1)" in lead(found)
        assert lead(found).endswith("look for NaN in the job's data and weights, or in its loss.")
        assert "dense (seed 0): its training loss or quality is NaN or infinite, first at step 1." in found.notes
        assert failure(found) == (
            "dense's training loss or perplexity never was finite, not even at step 1, so nothing was compared; the report says more"
        )


def test_what_was_finite_with_one_seed_or_evaluation_was_compared(tmp_path: Path) -> None:
    nan = replace(DENSE, loss=float("nan"))
    assert failure(summary(tmp_path / "a", nan, replace(DENSE, seed=1))) is None
    once = replace(DENSE, values=(400.0, *[float("nan")] * 3))
    assert failure(summary(tmp_path / "b", once)) is None
    assert failure(summary(tmp_path / "c", replace(nan, scheme="topk"))) is None
    assert failure(summary(tmp_path / "d", replace(nan, values=()))) is None
    never = replace(DENSE, values=(float("inf"),) * 4)
    assert "never was finite, not even at step 1" in (failure(summary(tmp_path / "e", never)) or "")


def test_tables_have_no_nan_and_no_infinity(tmp_path: Path) -> None:
    diverged = replace(SPARSE, values=(float("inf"),) * 4, loss=float("nan"))
    for at, made in enumerate(([DENSE, diverged], [replace(DENSE, values=diverged.values), SPARSE])):
        found = summary(tmp_path / str(at), *made)
        assert not re.search(r"\b(nan|inf)\b", as_text(found))
    assert "At the end the perplexity was 90.00 with dense, NaN or infinite with topk." in details(
        summary(tmp_path / "words", DENSE, diverged, run=NO_TARGET)
    )
