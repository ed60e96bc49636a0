"""Faults for ranks that train with `sparsync_elastic`: parse the user's text and inject them when due."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from sparsync_lab.netlab import MAX_RANKS, RunNetwork
from sparsync_lab.workers.descendants import die_with_parent
from sparsync_lab.workers.ranks import Ranks

KINDS = {  # whether it hits a rank, and whether it has a duration
    "kill": (True, False),  # SIGKILL
    "leave": (True, False),  # SIGTERM
    "freeze": (True, True),  # SIGSTOP, and SIGCONT
    "partition": (True, True),  # the link of a rank goes down and comes up again
    "join": (False, False),  # one more process
    "store": (False, True),  # the store's process is killed and restarted
}
_FORMS = ("kill:2@30s", "leave:1@60s", "freeze:3@20s+8s", "partition:0@70s+10s", "join@45s", "store@10s+3s")
STORE = "sparsync_elastic"
_NOT_GIVEN = "not given: "
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = rf"(\d+(?:\.\d+)?) *({'|'.join(_UNITS)})"
_FAULT = re.compile(rf"([a-z_]+)(?::(\d+))? *@ *{_TIME}(?: *\+ *{_TIME})?")


@dataclass(frozen=True)
class Fault:
    """One fault. Seconds count from the start of the ranks."""

    kind: str
    at_s: float
    rank: int | None = None
    lasts_s: float = 0.0

    @property
    def name(self) -> str:
        """The fault without its time, such as `freeze:3 for 8 s`."""
        rank = "" if self.rank is None else f":{self.rank}"
        return f"{self.kind}{rank}{f' for {self.lasts_s:.3g} s' if self.lasts_s else ''}"


def parse_fault(text: str) -> Fault:
    """Read a fault such as kill:2@30s, join@45s or freeze:3@20s+8s. Raises ValueError."""
    found = _FAULT.fullmatch(text.strip())
    kind, rank, at, at_unit, lasts, lasts_unit = found.groups() if found else ("", None, "", "", None, None)
    if KINDS.get(kind) != (rank is not None, lasts is not None):
        raise ValueError(
            f"--fault is one of {', '.join(_FORMS)}, with a number and {', '.join(_UNITS)} for a time, got {text!r}"
        )
    return Fault(
        kind,
        float(at) * _UNITS[at_unit],
        None if rank is None else int(rank),
        float(lasts) * _UNITS[lasts_unit] if lasts and lasts_unit else 0.0,
    )


def places(faults: Sequence[Fault], ranks: int) -> int:
    """Count the links: one per rank and, with faults, one per joining rank and a last one for the store."""
    return ranks + (sum(each.kind == "join" for each in faults) + 1 if faults else 0)


def check_faults(faults: Sequence[Fault], ranks: int, limited: bool) -> None:
    """Raise ValueError for a fault whose rank or link does not exist at its time."""
    joins = sorted(each.at_s for each in faults if each.kind == "join")
    if (needed := places(faults, ranks)) > MAX_RANKS:
        raise ValueError(
            f"--ranks {ranks}, {len(joins)} that join and the store need {needed} links, there are at most {MAX_RANKS}; start fewer ranks"
        )
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


@dataclass
class Injector:
    """Injects the faults of a run. Within its block the store runs, in the last network namespace."""

    faults: Sequence[Fault]
    count: int  # of initial ranks
    links: RunNetwork
    port: int
    ranks: Ranks
    start: Callable[[int, int], None]  # starts the next rank: its number, its place (network namespace)
    places: list[int] = field(default_factory=list)  # by rank
    # Ranks hit by a fault: their end stops no other rank, and their exit status is ignored.
    hit: set[int] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)  # faults so far, in words
    _leaving: set[int] = field(default_factory=set)
    _cut: set[int] = field(default_factory=set)  # places
    _ends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # of faults with a duration
    _store: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._pending = sorted(self.faults, key=lambda each: each.at_s)

    def __enter__(self) -> "Injector":
        self._start_store()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_store()

    def begin(self) -> None:
        """Start the initial ranks."""
        for rank in range(self.count):
            self._join(rank, rank)

    @property
    def store_ended(self) -> bool:
        """Whether the store has ended by itself."""
        return self._store is not None and self._store.poll() is not None

    def turn(self, now_s: float, stopped: bool) -> list[str]:
        """End and begin what is due, and describe it. Nothing begins once the run was stopped or a rank is done."""
        for each in [each for each in self._ends if each[0] <= now_s]:
            self._ends.remove(each)
            each[1]()
        over = stopped or not self.ranks.running
        over = over or any(rank.status == 0 and rank.number not in self._leaving for rank in self.ranks.all)
        due = [each for each in self._pending if each.at_s <= now_s]
        self._pending = [each for each in self._pending if each.at_s > now_s]
        new = [_told(each, now_s, f"{_NOT_GIVEN}the run ends" if over else self._give(each, now_s)) for each in due]
        self.begun += new
        return new

    def not_given(self) -> list[str]:
        """Describe the faults whose time has not come."""
        return [_told(each, each.at_s, f"{_NOT_GIVEN}the run has ended before") for each in self._pending]

    def _give(self, fault: Fault, now_s: float) -> str:
        """Begin a fault, and describe it."""
        if fault.kind == "join":
            place, number = self._free_place(), len(self.ranks.all)
            if place is None:
                return f"{_NOT_GIVEN}no network namespace is free"
            self._join(number, place)
            self.hit.add(number)
            return f"rank {number} starts"
        if fault.kind == "store":
            if self._store is None:
                return f"{_NOT_GIVEN}the store is down already"
            self._end_store()
            self._ends.append((now_s + fault.lasts_s, self._start_store))
            return "the store is killed"
        assert fault.rank is not None
        rank = next((each for each in self.ranks.all if each.number == fault.rank and each.running), None)
        if rank is None:
            return f"{_NOT_GIVEN}rank {fault.rank} does not run"
        self.hit.add(rank.number)
        if fault.kind == "partition":
            place = self.places[rank.number]
            self.links.cut(place)
            self._cut.add(place)
            self._ends.append((now_s + fault.lasts_s, partial(self._mend, place)))
            return f"the link of rank {rank.number} is cut"
        if fault.kind == "freeze":
            self._ends.append((now_s + fault.lasts_s, partial(rank.send, SIGCONT)))
        if fault.kind == "leave":
            self._leaving.add(rank.number)
        rank.send({"kill": SIGKILL, "leave": SIGTERM, "freeze": SIGSTOP}[fault.kind])
        return f"rank {rank.number} {({'kill': 'is killed', 'leave': 'is told to leave', 'freeze': 'is stopped'})[fault.kind]}"

    def _free_place(self) -> int | None:
        """Pick the place that has been free longest, preferring unused ones."""
        taken = self._cut | {self.places[rank.number] for rank in self.ranks.running}
        free = [place for place in range(places(self.faults, self.count) - 1) if place not in taken]
        last = {place: number for number, place in enumerate(self.places)}
        return min(free, key=lambda place: last.get(place, -1), default=None)

    def _join(self, number: int, place: int) -> None:
        self.places.append(place)
        self.start(number, place)

    def _mend(self, place: int) -> None:
        self.links.mend(place)
        self._cut.discard(place)

    def _start_store(self) -> None:
        place = places(self.faults, self.count) - 1
        argv = [sys.executable, "-m", STORE, "--port", str(self.port)]
        self._store = subprocess.Popen(
            self.links.command(place, argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # torch warns about each connection without a host name, in the middle of a command's output.
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            preexec_fn=die_with_parent,  # noqa: PLW1509  # one system call, which needs no lock of another thread
        )

    def _end_store(self) -> None:
        if self._store is not None:
            with suppress(ProcessLookupError):
                self._store.kill()
            self._store.wait()
        self._store = None


def _told(fault: Fault, at_s: float, what: str) -> str:
    return f"{at_s:.1f} s, {fault.name}: {what}"
