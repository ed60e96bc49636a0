"""Judge a trial: every surviving rank must raise in time, with a message that names the fault."""

import re
from collections.abc import Callable, Mapping
from typing import Literal

from studies.campaign.striking import CAUSE
from studies.campaign.supervisor import RankEnd, TrialSeen
from studies.campaign.training import WrongResultError
from studies.campaign.trials import DIFFERENT, GONE, RAISED, SAME_BITS, Trial

Verdict = Literal["right", "wrong", "torch", "hung", "silent", "crashed", "missed"]
# From worst to best; a trial is as good as its worst rank. "missed": the fault did not strike, which proves nothing.
VERDICTS: Mapping[Verdict, str] = {
    "hung": "hung",
    "crashed": "crashed",
    "silent": "silent",
    "wrong": "wrong name",
    "torch": "torch's own collective",
    "right": "error within the timeout, right name",
    "missed": "did not strike",
}

# Phrases for an absent rank in messages.
_ABSENT = r"(?:do(?:es)? not answer|did not (?:come|answer)|has (?:gone|left|ended)|(?:is|are) (?:gone|missing|silent)|left|ended)"
_RANKS = r"ranks? (\d+(?:(?:, | and |, and )\d+)*)"
_KEYWORDS = {
    "other_step": "step",
    "other_state": "step|state",
    "other_sizes": "element|parameter|layout|size|shape|length|byte",
    "other_order": "parameter|layout|order|name",
    "other_dtype": "type|float|byte|parameter|layout|length",
    "other_settings": "density|skip|form|setting",
    "other_groups": "group",
    "other_rate": r"\blr\b|learning rate",
    "frozen": r"\bfirst\.(weight|bias)'.*, frozen",
    "loaded_late": "weights",
}


def judged(trial: Trial, seen: TrialSeen, undisturbed: Callable[[], str]) -> tuple[Verdict, str]:
    """Judge a trial, and explain why. `undisturbed` returns the digest of the same training without the fault."""
    if not seen.struck:
        return "missed", "; ".join(f"rank {end.rank} {end.state}: {end.said}" for end in seen.ranks)
    if trial.survivable:
        return _survived(trial, seen, undisturbed)
    found = [_of_rank(trial, end) for end in seen.ranks if not _is_victim(trial, end)]
    return _worst(found)


def _is_victim(trial: Trial, end: RankEnd) -> bool:
    return end.rank == trial.victim and trial.fault in GONE and trial.fault != "partition"


def _of_rank(trial: Trial, end: RankEnd) -> tuple[Verdict, str]:
    about = f"rank {end.rank}: "
    if end.state == "hung":
        return "hung", about + "neither an error nor an end"
    if end.state == "crashed":
        return "crashed", about + end.said
    if end.state != "error":
        return "silent", about + "no error"
    if _names(trial, end):
        return "right", ""
    return ("wrong" if end.ours else "torch"), about + end.said


def _survived(trial: Trial, seen: TrialSeen, undisturbed: Callable[[], str]) -> tuple[Verdict, str]:
    """Judge a trial that all ranks survive: replicas stay equal, a delay changes nothing, and all skip or all refuse NaN and Inf."""
    found: list[tuple[Verdict, str]] = []
    for end in seen.ranks:
        if end.state == "error" and end.said.startswith(WrongResultError.__name__):
            found.append(("silent", f"rank {end.rank}: {end.said}"))
        elif end.state == "error" and trial.fault == "nan" and re.search("NaN|Inf|finite", end.said):
            found.append(("right", ""))
        elif end.state == "error":
            found.append(("wrong" if end.ours else "torch", f"rank {end.rank}: {end.said}"))
        elif end.state != "done":
            found.append(("hung" if end.state == "hung" else "crashed", f"rank {end.rank}: {end.said}"))
    if found and not all(verdict == "right" for verdict, _ in found):
        return _worst(found)
    if found:
        return ("right", "") if len(found) == trial.ranks else ("silent", "some ranks raise, and the others go on")
    digests = {end.said for end in seen.ranks}
    if trial.integration != "fsdp_shard" and len(digests) > 1:
        return "silent", f"replicas differ: {', '.join(end.said for end in seen.ranks)}"
    if trial.fault in SAME_BITS and (wanted := undisturbed()) != seen.ranks[0].said:
        return "silent", f"another result than without the fault: {seen.ranks[0].said}, not {wanted}"
    return "right", ""


def _worst(found: list[tuple[Verdict, str]]) -> tuple[Verdict, str]:
    return min(found, key=lambda each: list(VERDICTS).index(each[0]))


def _names(trial: Trial, end: RankEnd) -> bool:
    """Tell whether the error of a rank names the fault."""
    if trial.fault in DIFFERENT:
        return _tells_apart(end.said, _KEYWORDS[trial.fault])
    if trial.fault in RAISED and (CAUSE in end.said or trial.integration != "collectives"):
        return CAUSE in end.said  # without an integration, the cause is not passed on
    absent = absent_ranks(end.said) - {end.rank} or _named(end.said) - {end.rank}
    if trial.fault == "partition" and end.rank == trial.victim:
        return bool(absent)
    return absent == {trial.victim}


def absent_ranks(message: str) -> set[int]:
    """Extract the absent ranks from a message."""
    found = re.findall(rf"{_RANKS} {_ABSENT}", message)
    found += re.findall(r"store of the process group (?:has not answered|is gone)[^\n]*?\brank (0)\b", message)
    # A rank may close its connections because it has heard of another absent rank.
    found = found or re.findall(r"waiting for rank (\d+): [^\n]*?(?:Connection closed|Connection reset)", message)
    return {int(number) for numbers in found for number in re.findall(r"\d+", numbers)}


def _named(message: str) -> set[int]:
    return {int(number) for number in re.findall(r"\brank (\d+)\b(?! of)", message)}


def _tells_apart(message: str, keyword: str) -> bool:
    """Tell whether a message names two ranks with different values."""
    if not re.search(r"agree|apart|differ|the same", message) or not re.search(keyword, message):
        return False
    parts = re.split(r"\brank (\d+)\b", message)
    said: dict[str, set[str]] = {}
    for rank, clause in zip(parts[1::2], parts[2::2], strict=True):
        said.setdefault(rank, set()).add(re.split(r"; | and $|, $", clause)[0].strip(" ,.;"))
    ranks = list(said.items())
    return any(one != other for i, (_, one) in enumerate(ranks) for _, other in ranks[i + 1 :])
