"""`python -m studies elastic`: which events it draws, how it judges what ranks have written down; and a short trial in real processes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.elastic import command
from studies.elastic.drawing import EXCHANGES, KINDS, SCHEMES, Event, Trial, drawn
from studies.elastic.supervisor import RankSeen, Struck, TrialSeen, observe, places
from studies.elastic.verdict import Outcome, changed_mass, dropped, ended_badly, judged, other_factors, split, unequal

TIMEOUT_S, PATIENT_S = 3.0, 30.0


def test_the_same_seed_draws_the_same_events_of_all_kinds() -> None:
    trials = [drawn(5, number, TIMEOUT_S) for number in range(60)]
    assert trials == [drawn(5, number, TIMEOUT_S) for number in range(60)]
    assert trials != [drawn(6, number, TIMEOUT_S) for number in range(60)]
    events = [event for trial in trials for event in trial.events]
    assert {each.kind for each in events} == KINDS.keys()
    assert {trial.exchange for trial in trials} == EXCHANGES.keys()
    assert {trial.scheme for trial in trials} == set(SCHEMES)
    assert all(5 <= len(trial.events) <= 8 and 3 <= trial.ranks <= 6 for trial in trials)
    assert all(event.lasts_s < TIMEOUT_S for event in events if event.kind == "pause")
    assert all(event.lasts_s > TIMEOUT_S for event in events if event.kind in ("freeze", "partition"))


def test_only_keeps_some_kinds() -> None:
    assert {each.kind for each in drawn(0, 0, TIMEOUT_S, ["kill", "join"]).events} <= {"kill", "join"}
    with pytest.raises(ValueError, match=r"--only takes kill, .*, got 'die'"):
        drawn(0, 0, TIMEOUT_S, ["die"])


def rank(number: int, *entries: dict[str, Any]) -> RankSeen:
    return RankSeen(number, 0.0, [{"t": 0.0, "member": "abc"[number]}, *entries], status=0)


def met(at: float, epoch: int, members: str, mass: str = "", lost: Any = (), factor: float = 1.0) -> dict[str, Any]:
    more = {"behind": {}, "mass": mass, "lost": list(lost), "factor": factor}
    return {"t": at, "change": epoch, "members": list(members), **more}


def steps(first: int, last: int, epoch: int, at: float, digest: str = "same") -> list[dict[str, Any]]:
    """A step each second, from a time on."""
    return [
        {"t": at + place, "step": step, "position": step, "epoch": epoch, "rank": 0, "digest": digest}
        for place, step in enumerate(range(first, last + 1))
    ]


DONE = {"t": 99.0, "done": 20}


def killed() -> TrialSeen:
    """Of three ranks one is killed after three seconds, and the others go on two seconds later."""
    two = [met(0.5, 1, "abc"), *steps(1, 3, 1, 1.0), met(5.0, 2, "ab"), *steps(4, 12, 2, 5.5), DONE]
    victim = rank(2, met(0.5, 1, "abc"), *steps(1, 3, 1, 1.0))
    victim.status, victim.away = -9, [(3.5, float("inf"))]
    return TrialSeen([Struck("kill", 3.5, [2])], [rank(0, *two), rank(1, *two), victim], {}, {})


def test_an_event_is_survived_where_the_others_take_steps_without_the_rank() -> None:
    assert judged(killed(), TIMEOUT_S, local=False) == [Outcome("kill", 2.0, None)]
    stuck = killed()
    stuck.ranks[1].entries = stuck.ranks[1].entries[:5]
    (outcome,) = judged(stuck, TIMEOUT_S, local=False)
    assert outcome.why == "rank 1 did not go on within 23 s"


def test_one_that_was_frozen_is_to_take_steps_with_the_others_again() -> None:
    seen = killed()
    seen.ranks[2].away, seen.ranks[2].status = [(3.5, 10.0)], 0
    seen.struck = [Struck("freeze", 3.5, [2], 10.0)]
    assert [each.why for each in judged(seen, TIMEOUT_S, local=False)] == ["rank 2 did not go on within 23 s"]
    seen.ranks[2].entries += [met(11.0, 3, "abc"), *steps(13, 18, 3, 12.0), DONE]
    assert judged(seen, TIMEOUT_S, local=False) == [Outcome("freeze", 2.0, 2.0)]


def test_an_error_a_hang_and_a_crash_are_told() -> None:
    seen = killed()
    seen.ranks[0].entries[-1] = {"t": 6.0, "error": "ValueError: no\nOSError: its cause"}
    seen.ranks[1].hung, seen.ranks[1].said = True, "stacks"
    assert list(ended_badly(seen.ranks)) == [(6.0, "rank 0: ValueError: no"), (99.0, "rank 1 hangs: stacks")]
    assert list(ended_badly([replace(rank(0), status=-6)])) == [(0.0, "rank 0 ended by signal 6")]
    late = {"t": 100.0, "error": "RuntimeError: this run has ended: all"}
    assert list(ended_badly([rank(0, DONE), rank(1, late)])) == []


def test_replicas_differ_where_one_update_has_two_digests() -> None:
    ranks = [rank(0, *steps(1, 2, 1, 1.0)), rank(1, *steps(1, 2, 1, 1.0, "other"))]
    assert list(unequal(ranks)) == [(1.0, "replicas of ranks 0, 1 differ in epoch 1 at update 1")]
    ranks[1] = rank(1, *steps(1, 2, 2, 1.0, "other"))
    assert list(unequal(ranks)) == []


def test_an_heir_has_the_sum_and_nobody_else_anything_new() -> None:
    before, held, added = ({"w": torch.tensor(each)} for each in ([0.1, 0.0], [0.2, 1.0], [0.1, 0.0]))
    added["w"] = before["w"] + held["w"]
    seen = TrialSeen(
        [],
        [rank(0, {"t": 1.0, "left": 2, "heir": "b"}), rank(1, met(2.0, 2, "b", "mass")), rank(2, met(2.0, 2, "b"))],
        {"mass": {"before": before, "after": added}},
        {0: held},
    )
    assert list(changed_mass(seen)) == []
    added["w"] = added["w"] * 2
    seen.ranks[1] = rank(1, met(2.0, 2, "b", "mass", factor=2.0))
    assert list(changed_mass(seen)) == []
    seen.ranks[1] = rank(1, met(2.0, 2, "b", "mass"))
    assert list(changed_mass(seen)) == [(2.0, "what rank 1 holds back of w has changed in the meeting of epoch 2")]
    seen.ranks[1] = rank(1, met(2.0, 2, "b"))
    assert list(changed_mass(seen)) == [(2.0, "rank 1 has not got what another rank handed over in epoch 2")]
    seen.ranks[1] = rank(1, met(2.0, 2, "b", lost=[["a", "lost on the way to another rank"]]))
    assert list(changed_mass(seen)) == []


def test_only_a_rank_that_had_failed_a_step_which_others_applied_may_hold_back_something_else() -> None:
    masses = {"mass": {"before": {"w": torch.zeros(2)}, "after": {"w": torch.ones(2)}}}
    first, second = met(1.0, 1, "ab"), met(2.0, 2, "ab", "mass")
    told = "what rank 0 holds back of w has changed in the meeting of epoch 2"
    assert list(changed_mass(TrialSeen([], [rank(0, first, second)], masses, {}))) == [(2.0, told)]
    second["behind"] = {"a": "b"}
    assert list(changed_mass(TrialSeen([], [rank(0, first, second)], masses, {}))) == []
    first["members"] = ["b"]  # it comes back
    assert list(changed_mass(TrialSeen([], [rank(0, first, second)], masses, {}))) == [(2.0, told)]


def test_ranks_that_were_together_multiply_what_they_hold_back_alike() -> None:
    ranks = [rank(each, met(1.0, 1, "ab"), met(2.0, 3, "abc", factor=1.5)) for each in (0, 1)]
    late = rank(2, met(1.0, 2, "c"), met(2.0, 3, "abc"))
    assert list(other_factors([*ranks, late])) == []
    ranks[1] = rank(1, met(1.0, 1, "ab"), met(2.0, 3, "abc"))
    told = "rank 1 has another factor than others in the meeting of epoch 3"
    assert list(other_factors([*ranks, late])) == [(2.0, told)]


def test_two_memberships_must_not_both_take_steps() -> None:
    newer = rank(0, met(1.0, 2, "a"), *steps(1, 9, 2, 2.0))
    under_way = rank(1, *steps(1, 1, 1, 7.0))
    goes_on = rank(1, *steps(1, 3, 1, 7.0))
    assert list(split(TrialSeen([], [newer, under_way], {}, {}), TIMEOUT_S, local=False)) == []
    told = (8.0, "rank 1 takes steps in epoch 1 while a later one does")
    assert list(split(TrialSeen([], [newer, goes_on], {}, {}), TIMEOUT_S, local=False)) == [told]
    twice = rank(1, met(1.0, 2, "b"))
    assert list(split(TrialSeen([], [newer, twice], {}, {}), TIMEOUT_S, local=False)) == [
        (1.0, "epoch 2 has two memberships")
    ]


def test_a_rank_that_is_dropped_although_nothing_had_happened_to_it_is_counted() -> None:
    seen = killed()
    assert dropped(seen) == 0
    seen.ranks[2].away = []
    assert dropped(seen) == 1


def test_the_page_counts_events_and_has_a_line_for_each_exception() -> None:
    outcomes = [
        {"kind": "kill", "seconds": 2.0, "back_s": None, "why": ""},
        {"kind": "freeze", "seconds": 4.0, "back_s": 1.0, "why": "rank 2 did not go on"},
    ]
    label = "trial 3, 4 ranks, steps, topk"
    record = {"number": 3, "exchange": "steps", "label": label, "loopback": "", "dropped": 0, "outcomes": outcomes}
    text = "\n".join(command.content([record]))
    assert "| kill: SIGKILL of a rank | 1 | 1 | 2.0 | 2.0 | - | - |" in text
    assert "| all | 2 | 1 | 3.0 | 4.0 | 1.0 | 1.0 |" in text
    assert "- trial 3, 4 ranks, steps, topk: freeze: rank 2 did not go on" in text


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_is_killed_and_another_one_joins(tmp_path: Path) -> None:
    events = (Event("kill", 1.0, 0.0, 0.9), Event("join", 1.0, 0.0, 0.0))
    trial = Trial(0, 0, 3, "steps", "topk", events, finish_s=4.0)
    with places() as (links, _):
        seen = observe(trial, PATIENT_S, links, tmp_path)
    assert [(each.kind, each.why) for each in judged(seen, PATIENT_S, local=False)] == [("kill", ""), ("join", "")]
    assert sorted(each.status or 0 for each in seen.ranks) == [-9, 0, 0, 0]
