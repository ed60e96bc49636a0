"""Faults as a user writes them and as a seed draws them. No process is touched here."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from sparsync_lab.netlab import MAX_RANKS

KINDS = {  # whether each is of one rank, and whether it lasts
    "kill": (True, False),  # SIGKILL
    "leave": (True, False),  # SIGTERM
    "freeze": (True, True),  # SIGSTOP, and SIGCONT
    "partition": (True, True),  # the link of a rank goes down, and up
    "join": (False, False),  # one more process
    "store": (False, True),  # the store's process is killed, and started again
}
SETTLED_S = 20.0  # after which a rank is taken to be one of the run
LEAST_GAP_S, MEAN_GAP_S = 5.0, 20.0  # between two drawn faults
_LASTS_S = {"freeze": (2.0, 15.0), "partition": (2.0, 15.0), "store": (1.0, 5.0)}
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = rf"(\d+(?:\.\d+)?) *({'|'.join(_UNITS)})"
_FAULT = re.compile(rf"([a-z_]+)(?::(\d+))? *@ *{_TIME}(?: *\+ *{_TIME})?")


@dataclass(frozen=True)
class Fault:
    """One fault. Seconds are those of the run: since its ranks were started, or since their first step, as the command says."""

    kind: str
    at_s: float
    rank: int | None = None
    lasts_s: float = 0.0

    @property
    def name(self) -> str:
        """The fault without its time, such as `freeze:3 for 8 s`."""
        rank = "" if self.rank is None else f":{self.rank}"
        return f"{self.kind}{rank}{f' for {self.lasts_s:.3g} s' if self.lasts_s else ''}"


@dataclass(frozen=True)
class FaultPlan:
    """The faults of a run: those that are listed, and those that a seed draws. True where there are any."""

    faults: tuple[Fault, ...] = ()
    chaos: int | None = None  # the seed of faults that are drawn
    until_s: float | None = None  # after which no fault is drawn

    def __bool__(self) -> bool:
        return bool(self.faults) or self.chaos is not None

    @property
    def joins(self) -> int:
        """The listed processes that join, each with a place of its own."""
        return sum(each.kind == "join" for each in self.faults)

    def places(self, ranks: int) -> int:
        """Return the number of links: of ranks, and, with faults, of those that join and of the store, which has the last one."""
        return ranks + (self.joins + 1 if self else 0)

    def check(self, ranks: int, limited: bool) -> None:
        """Raise ValueError for a fault that cannot be given to so many ranks, and for an end of faults where there are none."""
        if self:
            check_faults(self.faults, ranks, limited, self.until_s)
        elif self.until_s is not None:
            raise ValueError("--faults-until is the end of faults, and none were asked for; give --chaos or --fault")


NO_FAULTS = FaultPlan()


@dataclass(frozen=True)
class Situation:
    """What a drawn fault can be of."""

    healthy: Sequence[int]  # ranks that run, and that no fault has hit that is not over
    place: bool  # a network namespace is free for one more process
    store: bool  # the store runs
    limited: bool  # ranks have links


class Chaos:
    """Draws faults. Their times follow from the seed alone, and what they are also from which ranks are there."""

    def __init__(self, seed: int) -> None:
        self._times, self._choices = random.Random(f"{seed}/times"), random.Random(f"{seed}/choices")
        self.at_s = SETTLED_S  # when the next one is due
        self._wait()

    def draw(self, now: Situation) -> Fault | None:
        """Return the fault that is due; None where nothing is possible. One healthy rank is always left."""
        at_s, kinds = self.at_s, []
        self._wait()
        if len(now.healthy) > 1:
            kinds += ["kill", "leave", "freeze", *(["partition"] if now.limited else [])]
        if now.store:
            kinds.append("store")
        if now.place:
            kinds += ["join", "join"]  # as often as kill and leave
        if not kinds:
            return None
        kind = self._choices.choice(kinds)
        of_rank, lasts = KINDS[kind]
        rank = self._choices.choice(now.healthy) if of_rank else None
        return Fault(kind, at_s, rank, round(self._choices.uniform(*_LASTS_S[kind]), 1) if lasts else 0.0)

    def _wait(self) -> None:
        self.at_s += LEAST_GAP_S + self._times.expovariate(1 / (MEAN_GAP_S - LEAST_GAP_S))


def parse_fault(text: str) -> Fault:
    """Return the fault of a text such as kill:2@30s, join@45s or freeze:3@20s+8s. Raises ValueError."""
    found = _FAULT.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"--fault is KIND:RANK@TIME+TIME, with a number and {', '.join(_UNITS)} for a time, such as kill:2@30s, leave:1@60s, join@45s, "
            f"freeze:3@20s+8s, partition:0@70s+10s or store@10s+3s, got {text!r}"
        )
    kind, rank, at, at_unit, lasts, lasts_unit = found.groups()
    if kind not in KINDS:
        near = get_close_matches(kind, KINDS, 1)
        raise ValueError(
            f"--fault {text}: unknown kind {kind!r}, there are {', '.join(KINDS)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    of_rank, does_last = KINDS[kind]
    if of_rank != (rank is not None):
        raise ValueError(
            f"--fault {text}: {kind} {f'needs a rank, such as {kind}:1@{at}{at_unit}' if of_rank else 'is of no rank; leave it out'}"
        )
    if does_last != (lasts is not None):
        needs = f"needs the time that it lasts, such as {text}+8s" if does_last else "does not last; leave +TIME out"
        raise ValueError(f"--fault {text}: {kind} {needs}")
    return Fault(
        kind,
        float(at) * _UNITS[at_unit],
        None if rank is None else int(rank),
        float(lasts) * _UNITS[lasts_unit] if lasts else 0.0,
    )


def parse_faults(listed: Sequence[str], chaos: int | None, until: str | None) -> FaultPlan:
    """Return the plan of --fault, --chaos and --faults-until. Raises ValueError."""
    return FaultPlan(tuple(parse_fault(each) for each in listed), chaos, time_of(until))


def plan_of_json(content: dict[str, Any]) -> FaultPlan:  # Any: JSON
    """Return the plan that `dataclasses.asdict` has written."""
    return FaultPlan(**{**content, "faults": tuple(Fault(**each) for each in content["faults"])})


def check_faults(faults: Sequence[Fault], ranks: int, limited: bool, until_s: float | None) -> None:
    """Raise ValueError for a fault of a rank that is not there by then, of a link that is not there, or after the last moment."""
    joins = sorted(each.at_s for each in faults if each.kind == "join")
    if ranks + len(joins) >= MAX_RANKS:
        raise ValueError(
            f"--ranks {ranks}, {len(joins)} that join and the store need {ranks + len(joins) + 1} links, at most {MAX_RANKS} are there; "
            "start fewer ranks"
        )
    if until_s is not None and not 0 < until_s < float("inf"):
        raise ValueError(f"--faults-until must be in (0, inf) seconds, got {until_s:g}")
    for each in faults:
        there = ranks + sum(at_s < each.at_s for at_s in joins)
        if each.rank is not None and each.rank >= there:
            raise ValueError(
                f"--fault {each.name} at {each.at_s:g} s: the rank must be in [0, {there - 1}], the {ranks} of --ranks and those that join "
                f"before, got {each.rank}"
            )
        if each.kind == "partition" and not limited:
            raise ValueError(
                f"--fault {each.name}: ranks without a rate share loopback, where there is no link to cut; give --link a rate"
            )
        if until_s is not None and each.at_s > until_s:
            raise ValueError(
                f"--fault {each.name} at {each.at_s:g} s is after --faults-until, {until_s:g} s; leave one of them out"
            )


def time_of(text: str | None) -> float | None:
    """Return the seconds of --faults-until. Raises ValueError."""
    if text is None:
        return None
    found = re.fullmatch(_TIME, text.strip())
    if found is None:
        raise ValueError(
            f"--faults-until is a number with one of the units {', '.join(_UNITS)}, such as 300s, got {text!r}"
        )
    return float(found[1]) * _UNITS[found[2]]
