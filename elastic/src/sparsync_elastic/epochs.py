"""What the members of a run agree on: an epoch, which follows from the one before and from the notes of those who meet."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

TRIES = 3  # how often the same members may fail to take a step before the one that they wait for is left out
LAST_TRIES = 2 * TRIES  # before all raise, where nobody is known to be the cause


@dataclass(frozen=True)
class Epoch:
    """The members of a run from one meeting to the next."""

    number: int = 0  # 0: nobody has met yet
    members: tuple[str, ...] = ()  # in the order of their ranks
    behind: Mapping[str, str] = field(default_factory=dict)  # members that lack the last step, and who sends it to them
    leaving: Mapping[str, str] = field(default_factory=dict)  # who goes, and the member that takes over what is unsent
    gone: tuple[str, ...] = ()  # members of the epoch before that did not come
    step: int = 0  # steps that are done
    ahead: tuple[str, ...] = ()  # of those behind, who has got most of it from its source before
    # The step since which each of these, or who leaves, holds back.
    since: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # who may not go on, or not join, and why

    def rank(self, member: str) -> int:
        """Return the rank of a member."""
        return self.members.index(member)

    def factors_after(self, last: "Epoch", full_after: int) -> "Factors":
        """Return the factors for what a rank holds back from the others, where it was there in an earlier epoch.

        It then moves the weights as far as it would have: a mean over more ranks would make less of it, and one over fewer more. What lost
        ranks held back is taken to be the mean of those that are left. A rank that began with nothing counts in full after
        `full_after` steps.
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
    def read(text: str | bytes | None) -> "Epoch | None":
        """Return the epoch of a text; None where there is none, or it cannot be read."""
        try:
            found = json.loads(text or "")
            return Epoch(**{**found, **{key: tuple(found[key]) for key in ("members", "gone", "ahead")}})
        except (ValueError, TypeError, KeyError):
            return None


class Factors(NamedTuple):
    """By what a rank multiplies what it has for the others when ranks have come or gone; see Handle.multiply."""

    held: float
    still: float
    learnt: float


@dataclass(frozen=True)
class Note:
    """What a rank says when it comes to a meeting."""

    position: list[int]  # of each handle: how many common updates it has applied; -1: it has no state of the run yet
    step: int  # steps that it has done
    whole: bool  # it has lost nobody: the connections of the epoch before still serve
    leaves: bool = False
    source: str = ""  # the member from which it has got most of the state already
    since: int = -1  # the step since which it holds back; -1: it holds back nothing
    failures: int = 0  # epochs in a row, with the same members, in which it could not take a step
    error: str = ""  # why, the last time
    waited_for: str = ""  # the member that it waited for then, until the timeout

    @staticmethod
    def read(found: Any) -> "Note | None":  # Any: JSON
        """Return the note that was read from a store; None where it is none."""
        try:
            note = Note(**found)
            return note if note.position and all(isinstance(each, int) for each in note.position) else None
        except TypeError:
            return None

    @property
    def knows(self) -> bool:
        """Whether it has the state of the run, and not only asked for it."""
        return min(self.position) >= 0


def proposed(last: Epoch, notes: Mapping[str, Note], asking: Sequence[str], least: int = 1) -> Epoch:
    """Return the epoch that follows `last` when these notes are there; `asking` want to join.

    Who has applied most sends the state to the others: there, what all ranks have sent in the last step is in the weights. Nobody leaves
    where connections have failed, because what a leaving rank holds back travels over them: it asks again. Where the same members fail
    again and again, those that are the cause are refused; all are where fewer than `least` would be left.
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
        staying = present[:1]  # the last one has nobody to leave to
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
    """Return who is the cause where the same members have failed too often, and why."""
    there = [*present, *joining]
    failing = [each for each in there if notes[each].failures >= TRIES]
    waits = Counter(notes[each].waited_for for each in failing if notes[each].waited_for in there).most_common(2)
    if waits and (len(waits) == 1 or waits[0][1] > waits[1][1]):
        awaited = waits[0][0]
        told = [each for each in failing if notes[each].waited_for == awaited]
        return {awaited: _told(f"the others waited for {awaited}", [*told[:1], awaited], step, notes)}
    # One that cannot connect to all others never gets the weights.
    knowing = any(notes[each].knows for each in there)
    late = [each for each in failing if each in joining or (knowing and not notes[each].knows)]
    if late:
        return {each: _told(f"the others went on without {each}", [each], step, notes) for each in late}
    if all(notes[each].failures >= LAST_TRIES for each in there):
        return dict.fromkeys(there, _told("none of them is known to be the cause", there, step, notes))
    return {}


def _told(cause: str, who: Sequence[str], step: int, notes: Mapping[str, Note]) -> str:
    """Return why ranks are refused: the cause, and what those say that know of it."""
    tries = max(notes[each].failures for each in who)
    errors = "; ".join(f"{each} says: {notes[each].error}" for each in dict.fromkeys(who) if notes[each].error)
    return (
        f"the same members have failed {tries} times to take a step after step {step}, and {cause} ({errors}); pass a timeout_s that is "
        "longer than the longest step of every rank, and call the same collectives on all ranks"
    )
