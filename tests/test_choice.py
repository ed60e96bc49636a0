"""The choice of a report: what to use at these ranks and links, with its speed and its quality, and what is said where there is none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.made_results import BF16, DENSE, RUN, SPARSE, UNLIMITED, Made, run, summary
from sparsync_lab.report.choice import choose, failure, sentences, speed_baseline
from sparsync_lab.report.results import Run
from sparsync_lab.report.summary import RunSummary
from sparsync_lab.report.tables import as_text, tables

NAN, NO_TARGET = float("nan"), run(target=None)
# 10 % behind dense at the end.
BEHIND = replace(SPARSE, scheme="worse", values=(400.0, 200.0, 100.0, 99.0), step_s=0.875)
SLOW = replace(SPARSE, step_s=3.0)
ONE_SEED = "This is one seed: how far another one would differ is unknown."
SLOW_KERNELS = replace(RUN, versions={**RUN.versions, "kernels": "reference"})


def chosen(found: RunSummary) -> str | None:
    scheme = choose(found).chosen
    return None if scheme is None else scheme.label


def seeds(*made: Made, count: int = 3) -> list[Made]:
    return [replace(each, seed=seed) for each in made for seed in range(count)]


ALWAYS = [
    replace(SPARSE, seed=seed, step_s=step_s, values=(400.0, 200.0, 100.0, last))
    for seed, (step_s, last) in enumerate(((1.0, 90.0), (1.25, 90.0), (1.0, 91.8)))
]


DIVERGED = "dense diverged with seed 0 (first at step {}), so there is nothing to compare with; "
USE_TOPK = "Use topk: 2.0x as fast as bf16 to perplexity 150, as good as dense after 4 steps."


@pytest.mark.parametrize(
    ("made", "where", "said"),
    [
        ([DENSE, BF16, SPARSE, replace(SPARSE, scheme="slower", step_s=1.5)], RUN, [USE_TOPK]),
        ([DENSE, BF16, SPARSE, BEHIND], RUN, [USE_TOPK, "The fastest scheme is worse: 2.3x as fast as bf16 to"]),
        ([DENSE, BF16, BEHIND], NO_TARGET, ["Use dense bf16: nothing", "The fastest scheme is worse: 2.3x"]),
        (
            [replace(each, values=(400.0, 300.0, 290.0, 280.0)) for each in (DENSE, BF16)] + [SPARSE],
            RUN,
            ["Use topk: more than 3.2x as fast as bf16 to perplexity 150, 67.9 % better than dense after 4 steps."],
        ),
        (
            [replace(each, values=(400.0, 300.0)) for each in (DENSE, BF16, SPARSE)],
            RUN,
            ["Use topk: 2.0x as fast as bf16, as good", "No scheme reached perplexity 150 with every seed, so steps"],
        ),
        (
            [DENSE, BF16, replace(SPARSE, values=(400.0, NAN, NAN, NAN))],
            NO_TARGET,
            ["Use dense bf16: nothing", "The fastest scheme is topk: 2.0x as fast as bf16, diverged after 4 steps."],
        ),
    ],
)
def test_the_choice_is_said_and_that_one_seed_is_few(
    tmp_path: Path, made: Sequence[Made], where: Run, said: Sequence[str]
) -> None:
    found = summary(tmp_path, *made, run=where)
    for sentence, begin in zip(sentences(found), [*said, ONE_SEED], strict=True):
        assert sentence.startswith(begin)
    assert " ".join(sentences(found)) in " ".join(as_text(found).split())


def test_several_seeds_give_a_range_and_what_has_not_run_is_named(tmp_path: Path) -> None:
    (told,) = sentences(summary(tmp_path / "a", *seeds(DENSE, BF16), *ALWAYS))
    assert "2.0x (1.6 to 2.0) as fast" in told and "dense (as good as dense to 2.0 % worse than dense) after" in told
    told, _, missing = sentences(summary(tmp_path / "b", DENSE, SLOW, run=NO_TARGET))
    assert told == "Use topk: 1.3x as fast as dense, as good as dense after 4 steps." and missing.startswith("bf16, ")


@pytest.mark.parametrize(
    ("made", "where", "why"),
    [
        ([DENSE, BF16, SPARSE], UNLIMITED, "the times of this run prove nothing."),
        ([DENSE, BF16, SPARSE], SLOW_KERNELS, "the times of this run prove nothing."),
        ([DENSE, BF16, replace(SPARSE, compute_s=0.5)], RUN, "measure again on a quiet machine."),
        ([DENSE, SPARSE], replace(RUN, config={**RUN.config, "ranks": 1}), "one rank sends nothing; "),
        ([BF16, SPARSE], RUN, "dense has not run, so no loss of quality is known; "),
        ([replace(each, status="failed: x") for each in (DENSE, BF16, SPARSE)], RUN, "neither bf16 nor dense finished"),
        ([replace(DENSE, values=(*DENSE.values[:-1], float("inf"))), BF16, SPARSE], NO_TARGET, DIVERGED.format(4)),
        ([replace(DENSE, loss=NAN), SPARSE], RUN, DIVERGED.format(1)),
    ],
)
def test_where_nothing_can_be_chosen_one_sentence_says_why(
    tmp_path: Path, made: Sequence[Made], where: Run, why: str
) -> None:
    (told,) = sentences(summary(tmp_path, *made, run=where))
    assert told.startswith(f"No choice: {why}")


def test_all_speed_ups_of_a_report_are_over_the_plain_all_reduce_that_is_faster_and_near_dense(tmp_path: Path) -> None:
    slow, worse = replace(BF16, step_s=8.0), replace(BF16, values=BEHIND.values)
    for name, made, baseline in (("a", BF16, "bf16"), ("b", slow, "dense"), ("c", worse, "dense")):
        found = summary(tmp_path / name, DENSE, made, SPARSE)
        assert speed_baseline(found) == baseline
        assert f"fast as {baseline} " in sentences(found)[0]
        assert [head for head in tables(found)[0].heads if head.startswith("speed-up")] == [
            f"speed-up\nover {baseline}"
        ]


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
        assert chosen(summary(tmp_path / str(at), *made, run=where)) == expected


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
    partly = [fast, replace(fast, seed=1, values=(400.0, 300.0))]
    assert chosen(summary(tmp_path / "partly", *seeds(DENSE, BF16, SPARSE, count=2), *partly)) == "topk"


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
    assert text.startswith("!!! local_steps(every=9)/topk EXCHANGED NOTHING: ITS ROW IS NO RESULT. With seed 0")
    assert text.count(why) == 2
    assert (
        failure(found) == "local_steps(every=9)/topk exchanged nothing; the report says why, and the other rows count"
    )
    assert chosen(summary(tmp_path / "one", DENSE, BF16, SPARSE, replace(alone, exchanges=1))) == alone.scheme


def test_where_the_slow_reference_kernels_ran_a_banner_stands_above_everything(tmp_path: Path) -> None:
    found = summary(tmp_path, DENSE, BF16, SPARSE, run=SLOW_KERNELS)
    assert [banner.kind for banner in found.banners] == ["reference"]
    shown = as_text(found)
    assert shown.startswith("!!! THE SLOW REFERENCE KERNELS RAN: ")
    assert "Install a C++ compiler such as g++" in " ".join(shown.split())
    fast = replace(RUN, run="two", versions={**RUN.versions, "kernels": "cpp/avx2"})
    assert summary(tmp_path, DENSE, BF16, SPARSE, run=fast).banners == ()
