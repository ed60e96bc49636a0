"""Judge a trial: ranks continue, replicas are equal, no residual is silently lost, and only one membership takes steps."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from studies.elastic.rank import EVERY, differing
from studies.elastic.supervisor import RankSeen, Struck, TrialSeen

GO_ON_S = 20.0  # beyond the timeout, since the last event
STEPS = 5  # that show that a rank continues
LATE_S = 2.0  # beyond the timeout: how long steps of an old epoch may overlap with the next one
Entry = Mapping[str, Any]  # Any: JSON; a rank's record
Problem = tuple[float, str]  # time and description


@dataclass(frozen=True)
class Outcome:
    """The verdict on an event."""

    kind: str
    seconds: float | None  # until all remaining ranks have taken a step with the new membership
    back_s: float | None  # from a rank's return until it takes steps with the others
    why: str = ""  # "": survived

    @property
    def survived(self) -> bool:
        return not self.why


def judged(seen: TrialSeen, timeout_s: float, local: bool) -> list[Outcome]:
    """Return the outcome of each event. A problem counts for the last event before it."""
    outcomes: list[Outcome] = []
    problems = [
        *ended_badly(seen.ranks),
        *unequal(seen.ranks),
        *changed_mass(seen),
        *other_factors(seen.ranks),
        *split(seen, timeout_s, local),
    ]
    for place, struck in enumerate(seen.struck):
        later = [each.at for each in seen.struck[place + 1 :]]
        until = min((each for each in later if each > struck.at), default=float("inf"))
        why = [text for at, text in problems if struck.at <= at < until]
        if place == 0:
            why += [text for at, text in problems if at < struck.at]
        if struck.at in later:
            why = []  # of simultaneous events, the second one counts
        seconds, back_s, stuck = went_on(struck, seen, timeout_s)
        outcomes.append(Outcome(struck.kind, seconds, back_s, "; ".join([*stuck, *why])))
    return outcomes


def went_on(struck: Struck, seen: TrialSeen, timeout_s: float) -> tuple[float | None, float | None, list[str]]:
    """Compute the seconds of an Outcome, and describe ranks that took no further steps or had the wrong members."""
    ranks = {each.number: each for each in seen.ranks}
    members = {each.number: member_of(each) for each in seen.ranks}
    gone = {members[each] for each in struck.victims} if struck.kind in _GONE else set[str | None]()
    found, wrong = list[float](), list[str]()
    for rank in seen.ranks:
        if rank.number in struck.victims or not _there(rank, struck.at):
            continue
        seconds, why = _steps_after(
            rank, struck.at, seen, timeout_s, lambda entry: not gone & set(_members(seen, entry))
        )
        found += [] if seconds is None else [seconds]
        wrong += [why] if why else []
    if struck.kind == "join":
        found.clear()
    at = struck.at if struck.kind == "join" else struck.back_at if struck.kind in _COMING else None
    back = list[float]()
    for number in struck.victims if at is not None else []:
        right = partial(_with, members[number], seen)
        seconds, why = _steps_after(ranks[number], at or 0.0, seen, timeout_s, right)
        back += [] if seconds is None else [seconds]
        wrong += [why] if why else []
    if struck.kind == "join":
        found, back = back, []
    return max(found, default=None), max(back, default=None), wrong


_GONE = ("kill", "kill_first", "leave", "freeze", "partition", "store_first")
_COMING = ("join", "freeze", "pause", "partition")


def ended_badly(ranks: Sequence[RankSeen]) -> Iterator[Problem]:
    """Yield ranks that failed or hang, except those that came after the last step and were told so."""
    done_at = min((each["t"] for rank in ranks for each in rank.entries if "done" in each), default=float("inf"))
    for rank in ranks:
        last: Entry = rank.entries[-1] if rank.entries else {"t": rank.started_at}
        if rank.hung:
            yield last["t"], f"rank {rank.number} hangs: {rank.said}"
        elif "error" in last and not ("this run has ended" in last["error"] and last["t"] >= done_at):
            yield last["t"], f"rank {rank.number}: {last['error'].partition(chr(10))[0]}"
        elif rank.status not in (0, 1, -9):
            yield last["t"], f"rank {rank.number} ended by signal {-(rank.status or 0)}"


def unequal(ranks: Sequence[RankSeen]) -> Iterator[Problem]:
    """Yield positions at which the common weights of two ranks differ."""
    found = defaultdict[tuple[int, int], dict[str, tuple[float, int]]](dict)
    for rank in ranks:
        for entry in rank.entries:
            if "digest" in entry:
                found[entry["epoch"], entry["position"]].setdefault(entry["digest"], (entry["t"], rank.number))
    for (epoch, position), digests in found.items():
        if len(digests) > 1:
            numbers = ", ".join(str(number) for _, number in digests.values())
            yield (
                min(at for at, _ in digests.values()),
                f"replicas of ranks {numbers} differ in epoch {epoch} at update {position}",
            )
            return


def changed_mass(seen: TrialSeen) -> Iterator[Problem]:
    """Yield meetings that changed a rank's residual other than by its factor and residuals handed over by leaving ranks.

    A rank that failed a step which others applied is exempt: `run.lost` names it, and the weights have what it sent in that step.
    """
    heirs = [
        (entry["left"], entry["heir"], member_of(rank), seen.left[rank.number])
        for rank in seen.ranks
        for entry in rank.entries
        if "left" in entry and entry["heir"] is not None
    ]
    for rank in seen.ranks:
        own, last, members = member_of(rank), 0, set[str]()
        for entry in (each for each in rank.entries if "change" in each):
            lost = {member for member, what in entry["lost"] if "on the way" in what}
            due = [
                held
                for epoch, heir, leaver, held in heirs
                if heir == own and last < epoch <= entry["change"] and leaver not in lost
            ]
            last, lacked = entry["change"], own in members and own in entry["behind"]
            members = set(entry["members"])
            if lacked:
                continue
            mass = seen.masses.get(entry["mass"])
            if mass is None:
                if any(each.any() for held in due for each in held.values()):
                    yield entry["t"], f"rank {rank.number} has not got what another rank handed over in epoch {last}"
                continue
            # From here on the mean is over other ranks.
            expected = {name: entry["factor"] * each for name, each in _summed([mass["before"], *due]).items()}
            wrong = differing(expected, mass["after"])
            if entry["factor"] != 1.0:
                wrong = [each for each in wrong if not _near(expected.get(each), mass["after"].get(each))]
            if wrong:
                yield (
                    entry["t"],
                    f"what rank {rank.number} holds back of {wrong[0]} has changed in the meeting of epoch {last}",
                )


def other_factors(ranks: Sequence[RankSeen]) -> Iterator[Problem]:
    """Yield meetings in which ranks that were together before multiplied their residuals by different factors."""
    found = dict[tuple[int, int], float]()
    for rank in ranks:
        for before, entry in pairwise(each for each in rank.entries if "change" in each):
            # The factor may result from several meetings, each with a rounding.
            if not math.isclose(
                found.setdefault((before["change"], entry["change"]), entry["factor"]), entry["factor"]
            ):
                yield (
                    entry["t"],
                    f"rank {rank.number} has another factor than others in the meeting of epoch {entry['change']}",
                )


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.allclose(one, other, rtol=1e-6, atol=0.0)


def dropped(seen: TrialSeen) -> int:
    """Count the unaffected members that an epoch dropped; they return, but lose time."""
    met: dict[int, Entry] = {}
    for rank in seen.ranks:
        met.update({each["change"]: each for each in rank.entries if "change" in each})
    named = {member_of(rank): rank for rank in seen.ranks}
    epochs = [met[each] for each in sorted(met)]
    return sum(
        not any(begin < entry["t"] and end > before["t"] for begin, end in named[member].away)
        for before, entry in pairwise(epochs)
        for member in before["members"]
        if member not in entry["members"] and member in named
    )


def split(seen: TrialSeen, timeout_s: float, local: bool) -> Iterator[Problem]:
    """Yield steps of an old epoch after a newer one began, except the step in progress, and epochs with two memberships."""
    begun, met = dict[int, float](), dict[int, list[str]]()
    for rank in seen.ranks:
        for entry in (each for each in rank.entries if "change" in each):
            begun[entry["change"]] = min(begun.get(entry["change"], entry["t"]), entry["t"])
            if met.setdefault(entry["change"], entry["members"]) != entry["members"]:
                yield entry["t"], f"epoch {entry['change']} has two memberships"
    for rank in seen.ranks:
        late = defaultdict[int, int](int)
        for entry in (each for each in rank.entries if "rank" in each):
            newer = [at for epoch, at in begun.items() if epoch > entry["epoch"]]
            if newer and entry["t"] > min(newer) + timeout_s + LATE_S:
                late[entry["epoch"]] += 1
                if late[entry["epoch"]] == (EVERY if local else 1) + 1:
                    yield entry["t"], f"rank {rank.number} takes steps in epoch {entry['epoch']} while a later one does"


def member_of(rank: RankSeen) -> str | None:
    """Find the name of a rank in epochs; None if it has not got one."""
    return next((each["member"] for each in rank.entries if "member" in each), None)


def _there(rank: RankSeen, at: float) -> bool:
    """Tell whether a rank takes steps at a time."""
    first = next((each["t"] for each in rank.entries if "rank" in each), float("inf"))
    ended = any("done" in each and each["t"] < at for each in rank.entries)
    return first < at and not ended and not any(begin <= at < end for begin, end in rank.away)


def _steps_after(
    rank: RankSeen, at: float, seen: TrialSeen, timeout_s: float, right: Any
) -> tuple[float | None, str]:  # Any: a function of an entry
    """Compute the seconds until a rank took a step with the right members, and explain if it did not continue."""
    times = [each["t"] for each in rank.entries if "rank" in each and each["t"] > at and right(each)]
    seconds = times[0] - at if times else None
    bound = at + timeout_s + GO_ON_S
    happened = [time for each in seen.struck for time in (each.at, each.back_at) if time is not None]
    for time in sorted(happened):
        if at < time < bound:
            bound = max(bound, time + timeout_s + GO_ON_S)
    if len(times) >= STEPS and times[STEPS - 1] <= bound:
        return seconds, ""
    if any(at <= begin for begin, _ in rank.away) or any("done" in each or "left" in each for each in rank.entries):
        return seconds, ""  # another event has struck it, or the run has ended
    if rank.entries and "this run has ended" in rank.entries[-1].get("error", ""):
        return seconds, ""
    return seconds, f"rank {rank.number} did not go on within {bound - at:.0f} s"


def _with(member: str | None, seen: TrialSeen, entry: Entry) -> bool:
    return member in _members(seen, entry)


def _members(seen: TrialSeen, entry: Entry) -> list[str]:
    """Look up the members of the epoch of a step."""
    return next(
        (
            each["members"]
            for rank in seen.ranks
            for each in rank.entries
            if "change" in each and each["change"] == entry["epoch"]
        ),
        [],
    )


def _summed(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Add up vectors by name, in order."""
    found = dict[str, Tensor]()
    for state in states:
        for name, each in state.items():
            found[name] = found[name] + each if name in found else each
    return found
