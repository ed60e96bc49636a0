"""`python -m studies elastic`: the events it draws, how it judges what ranks have written, and a short trial in real processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from studies.elastic.drawing import Event, Trial
from studies.elastic.supervisor import RankSeen, Struck, TrialSeen, observe
from studies.elastic.verdict import Outcome, changed_mass, dropped, ended_badly, judged, other_factors, split, unequal

TIMEOUT_S, PATIENT_S = 3.0, 30.0


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
    assert (judged(killed(), TIMEOUT_S, local=False), dropped(killed())) == ([Outcome("kill", 2.0, None)], 0)
    stuck = killed()
    stuck.ranks[2].away = []
    assert dropped(stuck) == 1  # although nothing had happened to it
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


def held(*numbers: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor(numbers)}


# The numbers that rank "b" holds back before and after the meeting of epoch 2, and its factor; what is wrong of
# the rank. Rank "a" has left, and handed over 0.2 and 1.0.
CHANGED = "what rank 1 holds back of w has changed in the meeting of epoch 2"
MASSES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "the sum": ([0.1, 0.0], [0.3, 1.0], {}, ""),
    "the sum times the factor": ([0.1, 0.0], [0.6, 2.0], {"factor": 2.0}, ""),
    "twice the sum": ([0.1, 0.0], [0.6, 2.0], {}, CHANGED),
    "nothing": (None, None, {}, "rank 1 has not got what another rank handed over in epoch 2"),
    "nothing, which it says": (None, None, {"lost": [["a", "lost on the way to another rank"]]}, ""),
    "another sum, of a rank that had failed a step": ([0.0, 0.0], [9.0, 9.0], {"behind": {"b": "c"}}, ""),
    "another sum, of a rank that comes back": ([0.0, 0.0], [9.0, 9.0], {"behind": {"b": "c"}, "away": True}, CHANGED),
}


@pytest.mark.parametrize("case", MASSES)
def test_an_heir_holds_back_the_sum_and_nothing_else_changes(case: str) -> None:
    before, after, changed, wrong = MASSES[case]
    first, second = (
        met(1.0, 1, "c" if changed.pop("away", False) else "bc"),
        met(2.0, 2, "bc", "mass" if before else ""),
    )
    second |= changed
    left = rank(0, {"t": 1.0, "left": 2, "heir": "b"})
    masses = {"mass": {"before": held(*before), "after": held(*after)}} if before else {}
    seen = TrialSeen([], [left, rank(1, first, second), rank(2, first, met(2.0, 2, "bc"))], masses, {0: held(0.2, 1.0)})
    assert [text for _, text in changed_mass(seen)] == ([wrong] if wrong else [])


def test_ranks_that_were_together_have_the_same_factor() -> None:
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


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rank_is_killed_and_another_one_joins() -> None:
    events = (Event("kill", 1.0, 0.0, 0.9), Event("join", 1.0, 0.0, 0.0))
    trial = Trial(0, 0, 3, "steps", "topk", events, finish_s=4.0)
    seen = observe(trial, PATIENT_S, rate_bits_per_s=None)
    assert [(each.kind, each.why) for each in judged(seen, PATIENT_S, local=False)] == [("kill", ""), ("join", "")]
    assert sorted(each.status or 0 for each in seen.ranks) == [-9, 0, 0, 0]
