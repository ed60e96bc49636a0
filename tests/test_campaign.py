"""`python -m studies campaign`: which trials it draws, how it judges them, what it keeps; and a few of its trials, in real processes."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from helpers.programs import run
from sparsync import LocalWorld, schemes
from sparsync.core import Bucket, Comm, recorded_phases
from sparsync_lab.netlab import Delay
from studies.campaign import command, records
from studies.campaign.records import FinishedTrial
from studies.campaign.supervisor import RankEnd, TrialSeen, observe
from studies.campaign.training import CHECK_EVERY
from studies.campaign.trials import (
    ALL,
    DIFFERENT,
    FAULTS,
    INTEGRATIONS,
    ONE,
    PHASES,
    RAISED,
    SCHEMES,
    Trial,
    cells,
    drawn,
    phases_of,
)
from studies.campaign.verdict import Verdict, absent_ranks, judged

GRACE_S = 60.0  # the machine that runs tests may be busy


def made(fault: str = "kill", integration: str = "ddp", scheme: str = "topk", **changes: object) -> Trial:
    trial = Trial(fault, integration, scheme, ranks=2, victim=1, when="before", step=3, message=0, after_s=0.0)
    return replace(trial, **changes)  # pyright: ignore[reportArgumentType]


def test_the_same_seed_draws_the_same_trials_and_every_pair_comes_once_before_any_comes_again() -> None:
    pairs = {(fault, integration) for fault, integration, _ in cells()}
    trials = drawn(3, 2 * len(pairs))
    assert drawn(3, 7) == trials[:7]
    assert drawn(4, 7) != trials[:7]
    counted = Counter((trial.fault, trial.integration) for trial in trials)
    assert counted == Counter(dict.fromkeys(pairs, 2))
    assert {fault for fault, _ in pairs} == FAULTS.keys()
    assert {integration for _, integration in pairs} == INTEGRATIONS.keys()
    assert all(trial.victim < trial.ranks for trial in trials)


def test_only_keeps_what_is_named_of_each_kind() -> None:
    assert set(cells(["freeze", "kill", "ddp", "topk"])) == {("kill", "ddp", "topk"), ("freeze", "ddp", "topk")}
    with pytest.raises(ValueError, match=r"got .freze.; did you mean .freeze.\?"):
        cells(["freze"])


def phases_seen(comm: Comm, scheme: str) -> set[str]:
    """Return the phases that a scheme passes in a few steps."""
    made, seen = schemes.get(scheme, **SCHEMES[scheme][0]).start(), set()
    for step in range(3):
        with recorded_phases("bucket") as spent:
            made.reduce(Bucket("bucket", torch.ones(2000), step), comm)
        seen |= spent.keys()
    return seen


@pytest.mark.parametrize("scheme", SCHEMES)
def test_exceptions_are_drawn_for_phases_that_the_scheme_passes(scheme: str) -> None:
    for seen in LocalWorld(2).run(lambda comm: phases_seen(comm, scheme)):
        assert set(phases_of(scheme)) <= seen <= set(PHASES)


SAID = {
    "rank 1 does not answer": {1},
    "rank 0 of 3: send_recv, sending to rank 1, receiving from rank 2, failed (rank 2 does not answer)": {2},
    "ranks 1, 2 did not come to make a private group within 3 s": {1, 2},
    "the store of the process group has not answered for 5 s; the process that hosts it, which is rank 0's, hangs": {0},
    "rank 1 reports ValueError: no": set(),
}


@pytest.mark.parametrize("message", SAID)
def test_ranks_that_a_message_calls_absent(message: str) -> None:
    assert absent_ranks(message) == SAID[message]


def verdict(trial: Trial, *ends: tuple[str, str], undisturbed: str = "") -> Verdict:
    ranks = [RankEnd(rank, state, said) for rank, (state, said) in enumerate(ends)]
    return judged(trial, TrialSeen("somewhere", ranks, 1.0), lambda: undisturbed)[0]


GONE, DIED = ("error", "rank 0 of 2: all_gather failed (rank 1 does not answer)"), ("victim", "")
STEPS = ("error", "ranks differ: rank 0 has step 3, rank 1 has step 6; load the same checkpoint")


def test_a_verdict_is_that_of_the_worst_surviving_rank() -> None:
    assert verdict(made(), GONE, DIED) == "right"
    assert verdict(made(), ("error", "Connection reset by peer"), DIED) == "wrong"
    assert verdict(made(), ("hung", ""), DIED) == "hung"
    assert verdict(made(), ("done", "abc"), DIED) == "silent"
    assert verdict(made(), ("crashed", "exit status -6"), DIED) == "crashed"
    three = made(ranks=3, victim=1)
    assert verdict(three, GONE, DIED, ("error", "rank 2 of 3: failed (rank 1 does not answer)")) == "right"
    assert verdict(three, GONE, DIED, ("error", "rank 2 of 3: failed (rank 0 does not answer)")) == "wrong"
    assert verdict(three, GONE, DIED, ("error", "rank 2 of 3: failed (ranks 0, 1 did not come)")) == "wrong"
    assert verdict(three, GONE, DIED, ("hung", "")) == "hung"
    assert judged(made(), TrialSeen("", [RankEnd(0, "done")], 1.0), str)[0] == "missed"


def test_ranks_that_differ_are_told_apart_by_what_each_has() -> None:
    assert verdict(made("other_step"), STEPS, STEPS) == "right"
    assert verdict(made("other_step"), STEPS, ("error", "a packet cannot be decoded; ranks must agree")) == "wrong"
    same = "ranks must agree, but rank 0 has step 3 and rank 1 has step 3"
    assert verdict(made("other_step"), STEPS, ("error", same)) == "wrong"
    assert verdict(made("other_sizes"), STEPS, STEPS) == "wrong"


def test_every_rank_must_name_the_cause_of_an_exception_and_not_only_who_raised_it() -> None:
    cause = ("error", "rank 1 reports FaultError: no luck today")
    for fault in RAISED:
        assert verdict(made(fault), cause, cause) == "right"
        assert verdict(made(fault), GONE, cause) == "wrong"
    assert verdict(made("raise", ranks=3), cause, cause, ("error", "rank 1 has left")) == "wrong"
    # Where no integration tells the others of it, they see that the rank is gone.
    alone = made("raise_at_message", "collectives", "none")
    assert verdict(alone, GONE, cause) == verdict(alone, cause, cause) == "right"
    assert verdict(alone, ("error", "Connection reset by peer"), cause) == "wrong"


# What the library says of each fault that makes one rank differ; and the same without what matters of it.
APART = "ranks must agree, but rank 0 has {}, and rank 1 has {}; give all ranks the same"
DIFFER = {
    "other_rate": (APART.format("lr=0.01 in parameter group 0", "lr=0.02 in parameter group 0"), "ranks differ"),
    "other_groups": (
        APART.format("'first.bias' in parameter group 0", "'first.bias' in parameter group 1"),
        APART.format("lr=0.01", "lr=0.02"),
    ),
    "frozen": (
        APART.format("'first.bias' in parameter group 0", "'first.bias' in parameter group 0, frozen"),
        APART.format("step 3", "step 4"),
    ),
    "loaded_late": (
        APART.format("weights 'first.bias' with digest 0a", "weights 'first.bias' with digest 0b"),
        APART.format("weights 'first.bias' with digest 0a", "weights 'first.bias' with digest 0a"),
    ),
}


@pytest.mark.parametrize("fault", DIFFER)
def test_one_rank_that_is_changed_must_be_told_with_what_differs_on_all_ranks(fault: str) -> None:
    right, wrong = (("error", said) for said in DIFFER[fault])
    trial = made(fault, when="setup", detail=ONE)
    assert verdict(trial, right, right) == "right"
    assert verdict(trial, right, wrong) == "wrong"
    assert verdict(trial, ("done", "abc"), ("done", "xyz")) == "silent"


@pytest.mark.parametrize("fault", ["frozen", "loaded_late"])
def test_what_is_changed_on_all_ranks_must_leave_replicas_the_same_and_raise_nothing(fault: str) -> None:
    trial = made(fault, when="setup", detail=ALL)
    assert verdict(trial, ("done", "abc"), ("done", "abc"), undisturbed="xyz") == "right"
    assert verdict(trial, ("done", "abc"), ("done", "xyz")) == "silent"
    assert verdict(trial, STEPS, STEPS) == "wrong"
    moved = ("error", "WrongResultError: first.bias has moved, although it is frozen")
    assert verdict(trial, moved, moved) == "silent"


def test_a_forked_child_and_a_checkpoint_after_an_error_must_change_no_bit() -> None:
    for fault in ("forked_gc", "retry_after_error"):
        trial = made(fault, when="setup")
        assert verdict(trial, ("done", "abc"), ("done", "abc"), undisturbed="abc") == "right"
        assert verdict(trial, ("done", "abc"), ("done", "abc"), undisturbed="xyz") == "silent"
        assert verdict(trial, ("done", "abc"), ("crashed", "exit status -6")) == "crashed"
        assert verdict(trial, ("done", "abc"), ("hung", "")) == "hung"


def test_one_rank_or_all_are_changed_long_enough_before_the_end_for_weights_to_be_compared() -> None:
    trials = [trial for trial in drawn(3, 500) if trial.fault in ("frozen", "loaded_late")]
    assert {(trial.fault, trial.detail) for trial in trials} == set(product(("frozen", "loaded_late"), (ONE, ALL)))
    assert all(
        trial.detail == ALL for trial in trials if (trial.fault, trial.integration) == ("loaded_late", "fsdp_shard")
    )
    assert all(trial.step <= CHECK_EVERY <= trial.steps - 2 for trial in trials)  # LocalSteps compares every other step


def test_a_training_that_ends_with_nan_is_not_right_whatever_the_fault() -> None:
    ended = ("error", "WrongResultError: the training has ended with NaN or Inf in 'first.bias'")
    assert verdict(made("nan"), ended, ended) == "silent"


def test_a_delay_must_change_nothing_and_nan_must_leave_replicas_the_same() -> None:
    for fault in ("delay", "nan"):
        assert verdict(made(fault), ("done", "abc"), ("done", "abc"), undisturbed="abc") == "right"
        assert verdict(made(fault), ("done", "abc"), ("done", "xyz"), undisturbed="abc") == "silent"
    assert verdict(made("delay"), ("done", "abc"), ("done", "abc"), undisturbed="xyz") == "silent"
    assert verdict(made("delay"), GONE, GONE) == "wrong"
    assert verdict(made("nan"), ("error", "NaN or Inf"), ("error", "NaN or Inf")) == "right"
    assert verdict(made("nan"), ("error", "NaN or Inf"), ("done", "abc")) == "silent"


def stub(trial: Trial, timeout_s: float, delay: Delay) -> TrialSeen:
    """Return what no process has seen: ranks that name what happened, but in trials of LocalSteps."""
    if trial.integration == "local_steps":
        return TrialSeen("here", [RankEnd(rank, "hung", "<stacks>") for rank in range(trial.ranks)], 1.0)
    return TrialSeen("here", [RankEnd(rank, "error", "no luck today", after_s=0.1) for rank in range(trial.ranks)], 1.0)


@pytest.mark.usefixtures("signal_handlers_are_put_back")
def test_a_stopped_campaign_goes_on_where_it_was_and_writes_its_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsync_lab.netlab.restart_with_rights", lambda *_: None)
    monkeypatch.setattr(command, "observe", stub)
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin campaign -->\n<!-- end campaign -->\nbelow\n")
    argv = f"studies campaign --only raise,ddp,local_steps --seed 5 --out {tmp_path} --trials"
    run(f"{argv} 2")
    with (tmp_path / records.FILE_NAME).open("a") as file:
        file.write('{"trial": {"fault": "ki')  # as a campaign that was killed leaves it
    run(f"{argv} 4 --page {page}")
    assert "[1/2]" in (told := capsys.readouterr().err) and "[2/2]" in told and "[3/" not in told
    found = records.read(tmp_path)
    assert [each.trial for each in found[:2]] == drawn(5, 2, ["raise", "ddp", "local_steps"])
    assert sorted(each.verdict for each in found) == ["hung", "hung", "right", "right"]
    text = page.read_text()
    assert text.startswith(
        "above\n<!-- begin campaign -->\n\n```text\npython -m studies campaign --only raise,ddp,local_steps"
    )
    assert text.endswith("<!-- end campaign -->\nbelow\n")
    assert "| raise: an exception in a phase | 4 | 2 | 2 |" in text
    assert "| local_steps: LocalSteps | 2 | 0 | 2 |" in text
    assert "- hung: raise, rank " in text
    run(f"{argv} 1 --delay 25ms")  # is another campaign
    assert "[1/1]" in capsys.readouterr().err
    assert [each.delay.one_way_s for each in records.read(tmp_path)] == [0, 0, 0, 0, 0.025]


def test_a_line_that_is_no_trial_is_refused_with_its_number(tmp_path: Path) -> None:
    finished = FinishedTrial(made(), 3.0, None, "right", "", {})
    records.append(tmp_path, finished)
    assert records.read(tmp_path) == [finished]
    path = tmp_path / records.FILE_NAME
    path.write_text(json.dumps({"trial": 1}) + "\n" + path.read_text())
    with pytest.raises(ValueError, match=r"line 1 is no finished trial .*; delete it, or choose another --out"):
        records.read(tmp_path)


def tried(trials: list[Trial]) -> dict[str, str]:
    """Run the trials, several at a time, and return those that are not right, and why."""

    def one(trial: Trial) -> tuple[Verdict, str]:
        seen = observe(trial, 2.0, grace_s=GRACE_S)
        return judged(trial, seen, lambda: observe(trial, 2.0, undisturbed=True).ranks[0].said)

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(trials, pool.map(one, trials), strict=True))
    return {f"{verdict}: {trial.label}": why for trial, (verdict, why) in found.items() if verdict != "right"}


QUICK = [
    made("kill", "reducer", when="select"),
    made("freeze", "local_steps", "two_shot", when="message", victim=0),
    made("leave", "steps", "dense"),
    made("delay", "ddp", "oktopk", when="apply"),
    made("raise", "ddp", "micro", when="encode"),
    made("raise_late", "reducer", "dense", when="late"),
    made("nan", "ddp", "skip_reduce", when="setup", detail="nan"),
    made("other_settings", "reducer", "exdyna", when="setup"),
    made("other_rate", "local_steps_delayed", "topk", when="setup", detail=ONE),
    made("frozen", "ddp", "two_shot", when="setup", detail=ONE),
    made("loaded_late", "fsdp_replicate", "oktopk", when="setup", detail=ONE),
    made("loaded_late", "steps", "two_shot", when="setup", detail=ALL),
    made("forked_gc", "ddp", "exdyna", when="setup"),
    made("retry_after_error", "reducer", "micro", when="late"),
]


@pytest.mark.slow
@pytest.mark.distributed
def test_one_trial_of_each_kind_ends_as_it_should() -> None:
    assert not tried(QUICK)


@pytest.mark.slow
@pytest.mark.distributed
def test_no_rank_hangs_crashes_or_goes_on_as_if_nothing_had_happened() -> None:
    # Not the sharded axis, whose forward pass is torch's own, and no comparisons, which have tests of their own.
    named = ["kill", "freeze", "leave", "delay", "raise", "raise_at_message", "raise_late", "nan", *DIFFERENT]
    where = ["ddp", "reducer", "local_steps", "local_steps_delayed", "steps", "fsdp_replicate"]
    found = tried(drawn(1, 40, [*named, *where]))
    assert not {label: why for label, why in found.items() if not label.startswith(("wrong", "missed"))}
