"""`python -m studies campaign`: the trials it draws, how it judges and keeps them, and a few of them in real processes."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.programs import run
from studies.campaign import command
from studies.campaign.supervisor import RankEnd, TrialSeen, observe
from studies.campaign.trials import ALL, FAULTS, INTEGRATIONS, ONE, RAISED, SAME_BITS, Trial, cells, drawn
from studies.campaign.verdict import Verdict, absent_ranks, judged
from studies.trials import page

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


SAID = {
    "rank 1 does not answer": {1},
    "rank 0 of 3: send_recv, sending to rank 1, receiving from rank 2, failed (rank 2 does not answer)": {2},
    "ranks 1, 2 did not come to make a private group within 3 s": {1, 2},
    "the store of the process group has not answered for 5 s; the process that hosts it, which is rank 0's, hangs": {0},
    "rank 1 reports ValueError: no": set(),
    "receiving from rank 0, failed: waiting for rank 0: [/pair.cc:553] Connection closed by peer": {0},
    "failed: waiting for rank 0: Connection reset by peer. (rank 1 does not answer)": {1},
}


@pytest.mark.parametrize("message", SAID)
def test_ranks_that_a_message_calls_absent(message: str) -> None:
    assert absent_ranks(message) == SAID[message]


GONE, DIED = ("error", "rank 0 of 2: all_gather failed (rank 1 does not answer)"), ("victim", "")
STEPS = ("error", "ranks differ: rank 0 has step 3, rank 1 has step 6; load the same checkpoint")
CAUSE = ("error", "rank 1 reports FaultError: no luck today")
SAME, OTHER, HUNG = ("done", "abc"), ("done", "xyz"), ("hung", "")
RESET, CRASHED = ("error", "Connection reset by peer"), ("crashed", "exit status -6")
MOVED = ("error", "WrongResultError: first.bias has moved, although it is frozen")
NAN = ("error", "NaN or Inf")
THIRD_NAMES_1 = ("error", "rank 2 of 3: failed (rank 1 does not answer)")
THIRD_NAMES_0 = ("error", "rank 2 of 3: failed (ranks 0, 1 did not come)")

# For faults that make one rank differ: an error of the library, and one without what matters.
APART = "ranks must agree, but rank 0 has {}, and rank 1 has {}; give all ranks the same"
DIFFER = {
    "other_step": (STEPS[1], APART.format("step 3", "step 3")),
    "other_sizes": ("ranks differ: rank 0 has 32 elements, rank 1 has 16", STEPS[1]),
    "other_rate": (APART.format("lr=0.01 in parameter group 0", "lr=0.02 in parameter group 0"), "ranks differ"),
    "other_groups": (
        APART.format("'w' in parameter group 0", "'w' in parameter group 1"),
        APART.format("lr=1", "lr=2"),
    ),
    "frozen": (APART.format("'first.bias'", "'first.bias' in group 0, frozen"), APART.format("step 3", "step 4")),
    "loaded_late": (APART.format("weights 0a", "weights 0b"), APART.format("weights 0a", "weights 0a")),
}
ALONE = made("raise_at_message", "collectives", "none")
ON_ALL = made("frozen", when="setup", detail=ALL)
# What ranks of a trial do, and the verdict; an undisturbed training ends with the digest abc.
JUDGED: list[tuple[Trial, list[list[tuple[str, str]]], Verdict]] = [
    (made(), [[GONE, DIED]], "right"),
    (made(), [[RESET, DIED]], "wrong"),
    (made(), [[HUNG, DIED]], "hung"),
    (made(), [[SAME, DIED]], "silent"),
    (made(), [[CRASHED, DIED]], "crashed"),
    (made(ranks=3), [[GONE, DIED, THIRD_NAMES_1]], "right"),
    (made(ranks=3), [[GONE, DIED, THIRD_NAMES_0]], "wrong"),
    (made(ranks=3), [[GONE, DIED, HUNG]], "hung"),
    *((made(fault), [[CAUSE, CAUSE]], "right") for fault in RAISED),
    *((made(fault), [[GONE, CAUSE]], "wrong") for fault in RAISED),
    # Without an integration nobody tells the others of an exception, so they see that the rank is gone.
    (ALONE, [[GONE, CAUSE], [CAUSE, CAUSE]], "right"),
    (ALONE, [[RESET, CAUSE]], "wrong"),
    *((made(fault, detail=ONE), [[("error", right)] * 2], "right") for fault, (right, _) in DIFFER.items()),
    *((made(fault, detail=ONE), [[("error", each) for each in both]], "wrong") for fault, both in DIFFER.items()),
    (made("other_rate", detail=ONE), [[SAME, OTHER]], "silent"),
    (ON_ALL, [[OTHER, OTHER]], "right"),
    (ON_ALL, [[SAME, OTHER], [MOVED, MOVED]], "silent"),
    (ON_ALL, [[STEPS, STEPS]], "wrong"),
    (made("nan"), [[OTHER, OTHER], [NAN, NAN]], "right"),
    (made("nan"), [[SAME, OTHER], [NAN, SAME], [MOVED, MOVED]], "silent"),
    *((made(fault), [[SAME, SAME]], "right") for fault in SAME_BITS),
    *((made(fault), [[OTHER, OTHER]], "silent") for fault in SAME_BITS),
    *((made(fault), [[SAME, CRASHED]], "crashed") for fault in SAME_BITS),
    *((made(fault), [[SAME, HUNG]], "hung") for fault in SAME_BITS),
    (made("delay"), [[GONE, GONE]], "wrong"),
]


@pytest.mark.parametrize(("trial", "cases", "due"), JUDGED)
def test_a_verdict_is_that_of_the_worst_surviving_rank(
    trial: Trial, cases: list[list[tuple[str, str]]], due: Verdict
) -> None:
    for case in cases:
        ranks = [RankEnd(rank, state, said) for rank, (state, said) in enumerate(case)]
        assert judged(trial, TrialSeen("somewhere", ranks, 1.0), lambda: "abc")[0] == due
        assert judged(trial, TrialSeen("", ranks, 1.0), str)[0] == "missed"  # the fault did not strike


def stub(trial: Trial, timeout_s: float) -> TrialSeen:
    """Return what no process has seen: ranks that name what happened, except in trials of LocalSteps."""
    end = ("hung", "<stacks>") if trial.integration == "local_steps" else ("error", "no luck today")
    return TrialSeen("here", [RankEnd(rank, *end, after_s=0.1) for rank in range(trial.ranks)], 1.0)


def test_a_stopped_campaign_continues_where_it_was_and_writes_its_part_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(page, "restart_with_rights", lambda *_: None)
    monkeypatch.setattr(command, "observe", stub)
    written = tmp_path / "page.md"
    written.write_text("above\n<!-- begin campaign -->\n<!-- end campaign -->\nbelow\n")
    argv = f"studies campaign --only raise,ddp,local_steps --seed 5 --out {tmp_path} --trials"
    run(f"{argv} 2")
    with (tmp_path / page.FILE_NAME).open("a") as file:
        file.write('{"trial": {"fault": "ki')  # as a campaign that was killed leaves it
    run(f"{argv} 4 --page {written}")
    assert "[1/2]" in (told := capsys.readouterr().err) and "[2/2]" in told and "[3/" not in told
    text = written.read_text()
    begin = "above\n<!-- begin campaign -->\n\n```text\npython -m studies campaign --only raise,ddp,local_steps"
    assert text.startswith(begin) and text.endswith("<!-- end campaign -->\nbelow\n")
    assert "| raise: an exception in a phase | 4 | 2 | 2 |" in text
    assert "the last error came 0.1 s after its fault: raise, rank " in text
    assert "- hung: raise, rank " in text


QUICK = [
    made("kill", "reducer", when="select"),
    made("freeze", "local_steps", "two_shot", when="message", victim=0),
    made("leave", "steps", "dense"),
    made("delay", "ddp", "exact_oktopk", when="apply"),
    made("raise", "ddp", "exact_micro", when="encode"),
    made("raise_late", "reducer", "dense", when="late"),
    made("nan", "ddp", "skip_reduce", when="setup", detail="nan"),
    made("other_settings", "reducer", "exact_exdyna", when="setup"),
    made("other_rate", "local_steps_delayed", "topk", when="setup", detail=ONE),
    made("frozen", "ddp", "two_shot", when="setup", detail=ONE),
    made("loaded_late", "fsdp_replicate", "exact_oktopk", when="setup", detail=ONE),
    made("loaded_late", "steps", "two_shot", when="setup", detail=ALL),
    made("forked_gc", "ddp", "exact_exdyna", when="setup"),
    made("retry_after_error", "reducer", "exact_micro", when="late"),
]


@pytest.mark.slow
@pytest.mark.distributed
def test_one_trial_of_each_kind_ends_as_it_should() -> None:
    def verdict(trial: Trial) -> tuple[Verdict, str]:
        seen = observe(trial, 2.0, grace_s=GRACE_S)
        return judged(trial, seen, lambda: observe(trial, 2.0, undisturbed=True).ranks[0].said)

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(QUICK, pool.map(verdict, QUICK), strict=True))
    assert {trial.label: each for trial, each in found.items() if each[0] != "right"} == {}
