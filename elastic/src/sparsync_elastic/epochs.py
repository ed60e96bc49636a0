"""The epochs that members of a run agree on: the next one follows from the last one and the notes of a meeting."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

TRIES = 3  # successive failures of the same members, before the rank that they wait for is left out
LAST_TRIES = 2 * TRIES  # before all raise, if the cause is unknown
_LATER_S = 0.5  # by which a slow rank fails later than those that wait for it


@dataclass(frozen=True)
class Epoch:
    """The members of a run from one meeting to the next."""

    number: int = 0  # 0: nobody has met yet
    members: tuple[str, ...] = ()  # in the order of their ranks
    behind: Mapping[str, str] = field(default_factory=dict)  # members that lack the last step, and their sources
    leaving: Mapping[str, str] = field(
        default_factory=dict
    )  # leaving members, and the members that take over their unsent updates
    gone: tuple[str, ...] = ()  # members of the last epoch that did not come
    step: int = 0  # number of steps done
    ahead: tuple[str, ...] = ()  # members behind that already have most of the state from their source
    since: Mapping[str, int] = field(default_factory=dict)  # step of the first residual, also for leaving members
    refused: Mapping[str, str] = field(default_factory=dict)  # members that may not go on or join, and the reason

    def rank(self, member: str) -> int:
        """Look up the rank of a member."""
        return self.members.index(member)

    def factors_after(self, last: "Epoch", full_after: int) -> "Factors":
        """Compute the factors for the residuals of a member of the epoch `last`.

        With them the residuals move the weights as far as before: a mean over more ranks shrinks them, a mean over fewer enlarges them.
        Lost ranks count as if they had held back the mean of the others. A new rank counts in full after `full_after` steps.
        """

        def full(epoch: Epoch, members: Collection[str]) -> int:
            return sum(min(full_after, max(0, self.step - epoch.since[each])) for each in members)

        ranks, before, there = len(self.members), len(last.members), [*self.members, *self.leaving]
        held_before, held = full(last, last.members), full(self, there)
        learnt = sum(each in last.members or self.since[each] < self.step for each in there)
        return Factors(
            (ranks * held_before) / (before * held) if held_before and held else ranks / before,
            ranks / before,
            ranks / learnt if learnt else 1.0,
        )

    @property
    def text(self) -> str:
        """The epoch as one line, the same on all members."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def read(text: str | bytes) -> "Epoch":
        """Read an epoch from its text."""
        fields = json.loads(text)
        return Epoch(**{**fields, **{key: tuple(fields[key]) for key in ("members", "gone", "ahead")}})


class Factors(NamedTuple):
    """The factors for the unsent updates of a rank after ranks have come or gone."""

    held: float  # residuals
    still: float  # residuals of parameters that do not move now
    learnt: float  # updates of local steps since the last exchange


@dataclass(frozen=True)
class Note:
    """The note of a rank that comes to a meeting."""

    position: list[int]  # common updates applied, by handle; -1: it does not have the state of the run
    step: int  # number of steps done
    whole: bool  # it has lost nobody: the connections of the last epoch still work
    leaves: bool = False
    source: str = ""  # the member that has sent it most of the state
    since: int = -1  # step of its first residual; -1: it holds back nothing
    failures: int = 0  # successive epochs with the same members and without a step
    error: str = ""  # of the last failure
    waited_for: str = ""  # the member that it waited for until the timeout
    lasted_s: float = 0.0  # seconds until the last epoch failed

    @property
    def knows(self) -> bool:
        """True if it has the state of the run."""
        return min(self.position) >= 0


def proposed(last: Epoch, notes: Mapping[str, Note], asking: Sequence[str], least: int = 1) -> Epoch:
    """Propose the epoch that follows `last` after a meeting with these notes; `asking` want to join.

    The members that have applied most send the state to the others: their weights contain all that was sent in the last step. Nobody leaves
    if connections have failed, because residuals of a leaving rank travel over them; it asks again. If the same members fail again and
    again, the cause is refused, or all are refused if fewer than `least` would be left.
    """
    present = [each for each in last.members if each in notes]
    joining = [each for each in dict.fromkeys(asking) if each in notes and each not in last.members]
    refused = _refused(present, joining, notes, last.step)
    there = [each for each in (*present, *joining) if each not in refused]
    if refused and len(there) < least:
        why = f"{'; '.join(refused.values())}; {len(there)} ranks would be left, and at least {least} are to go on (least={least})"
        refused = dict.fromkeys([*present, *joining], why)
    elif any(notes[each].knows for each in refused) and not any(notes[each].knows for each in there):
        refused = dict.fromkeys([*present, *joining], "; ".join(dict.fromkeys(refused.values())))
    else:
        present = [each for each in present if each not in refused]
        joining = [each for each in joining if each not in refused]
    whole = len(present) == len(last.members) and all(notes[each].whole for each in present)
    staying = [each for each in present if not (whole and notes[each].leaves)]
    if present and not staying:
        staying = present[:1]  # the last rank has nobody to leave to
    heads = staying or joining[:1]
    furthest = max(notes[each].position for each in heads)
    sources = [each for each in heads if notes[each].position == furthest]
    sources = sources if min(furthest) >= 0 else sources[:1]
    members = [*staying, *joining]
    late = [each for each in members if each not in sources]
    served = {each: notes[each].source for each in late if notes[each].source in sources}
    leaving = [each for each in present if each not in staying]
    step = max(notes[each].step for each in sources)
    since = {each: notes[each].since for each in [*members, *leaving]}
    return Epoch(
        last.number + 1,
        tuple(members),
        {each: served.get(each, sources[place % len(sources)]) for place, each in enumerate(late)},
        {each: staying[place % len(staying)] for place, each in enumerate(leaving)},
        tuple(each for each in last.members if each not in present),
        step,
        tuple(served),
        {each: step if begun < 0 else min(begun, step) for each, begun in since.items()},
        refused,
    )


def _refused(present: Sequence[str], joining: Sequence[str], notes: Mapping[str, Note], step: int) -> dict[str, str]:
    """Find the cause if the same members have failed too often: the members to refuse, and the reason."""
    there = [*present, *joining]
    failing = [each for each in there if notes[each].failures >= TRIES]
    waits = Counter(notes[each].waited_for for each in failing if notes[each].waited_for in there).most_common(2)
    awaited = waits[0][0] if waits and (len(waits) == 1 or waits[0][1] > waits[1][1]) else ""
    # A slow rank finds its connections closed, later than the others. One of them may wait for it in a collective of torch, namelessly.
    *_, before, last = "", *(sorted(failing, key=lambda each: notes[each].lasted_s) or [""])
    waited = [each for each in failing if notes[each].waited_for or re.search("imed out|timeout", notes[each].error)]
    if waited and last not in waited and notes[last].lasted_s > notes[before].lasted_s + _LATER_S:
        awaited = last
    if awaited:
        told = [each for each in failing if each != awaited and notes[each].waited_for in (awaited, "")]
        return {awaited: _told(f"the others waited for {awaited}", [*told[:1], awaited], step, notes)}
    # A rank that cannot connect to all others never gets the weights.
    knowing = any(notes[each].knows for each in there)
    if late := [each for each in failing if each in joining or (knowing and not notes[each].knows)]:
        return {each: _told(f"the others went on without {each}", [each], step, notes) for each in late}
    if all(notes[each].failures >= LAST_TRIES for each in there):
        return dict.fromkeys(there, _told("none of them is known to be the cause", there, step, notes))
    return {}


def _told(cause: str, who: Sequence[str], step: int, notes: Mapping[str, Note]) -> str:
    """Write the message for refused ranks: the cause, and the errors of the ranks that know it."""
    tries = max(notes[each].failures for each in who)
    errors = "; ".join(f"{each} says: {notes[each].error}" for each in dict.fromkeys(who) if notes[each].error)
    return (
        f"the same members have failed {tries} times to take a step after step {step}, and {cause} ({errors}); pass a timeout_s that is "
        "longer than the longest step of every rank, and call the same collectives on all ranks"
    )
