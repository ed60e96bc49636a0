"""Gives faults to ranks when their time has come, and keeps the store over which ranks find each other."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from sparsync_lab.faults.plan import SETTLED_S, Chaos, Fault, FaultPlan, Situation
from sparsync_lab.netlab import RunNetwork
from sparsync_lab.workers.descendants import die_with_parent
from sparsync_lab.workers.ranks import Ranks

STORE = "sparsync_elastic"
_NOT_GIVEN = "not given: "


@dataclass(frozen=True)
class Begun:
    """A fault that was given, or could not be."""

    fault: Fault
    at_s: float
    what: str

    @property
    def given(self) -> bool:
        return not self.what.startswith(_NOT_GIVEN)


@dataclass
class Injector:
    """The faults of a run. In its block the store runs, in the last network namespace."""

    plan: FaultPlan
    count: int  # of the first ranks
    links: RunNetwork
    port: int
    ranks: Ranks
    start: Callable[[int, int], None]  # starts the next rank: its number, its place (network namespace)
    places: list[int] = field(default_factory=list)  # by rank
    # Ranks whose end ends nothing else, and that have no say in the exit status.
    hit: set[int] = field(default_factory=set)
    begun: list[Begun] = field(default_factory=list)
    _joined_s: list[float] = field(default_factory=list)  # by rank
    _leaving: set[int] = field(default_factory=set)
    _frozen: set[int] = field(default_factory=set)
    _cut: set[int] = field(default_factory=set)  # places
    _ends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # of faults that last
    _store: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._pending = sorted(self.plan.faults, key=lambda each: each.at_s)
        self._chaos = None if self.plan.chaos is None else Chaos(self.plan.chaos)

    def __enter__(self) -> "Injector":
        self._start_store()
        return self

    def __exit__(self, *_: object) -> None:
        self._end_store()

    def begin(self) -> None:
        """Start the first ranks."""
        for rank in range(self.count):
            self._join(rank, rank, 0.0)

    @property
    def due_s(self) -> float:
        """When something is to be done next."""
        times = [at_s for at_s, _ in self._ends] + [each.at_s for each in self._pending[:1]]
        drawn = float("inf") if self._chaos is None else self._chaos.at_s
        return min([*times, drawn])

    @property
    def store_ended(self) -> bool:
        """Whether the store has ended by itself."""
        return self._store is not None and self._store.poll() is not None

    def turn(self, now_s: float, stopped: bool) -> list[Begun]:
        """End and begin what is due, and return what was begun: nothing any more once the run was stopped, or a rank is done."""
        for each in [each for each in self._ends if each[0] <= now_s]:
            self._ends.remove(each)
            each[1]()
        over = stopped or not self.ranks.running
        over = over or any(rank.status == 0 and rank.number not in self._leaving for rank in self.ranks.all)
        until_s = self.plan.until_s
        due = [each for each in self._pending if each.at_s <= now_s]
        self._pending = [each for each in self._pending if each.at_s > now_s]
        if self._chaos is not None and self._chaos.at_s <= now_s:
            late = until_s is not None and self._chaos.at_s > until_s
            drawn = None if over or late else self._chaos.draw(self._situation(now_s))
            if over or late:
                self._chaos = None
            due += [] if drawn is None else [drawn]
        new = [Begun(each, now_s, f"{_NOT_GIVEN}the run ends" if over else self._give(each, now_s)) for each in due]
        self.begun += new
        return new

    def not_given(self) -> list[Begun]:
        """Return the faults whose time has not come."""
        return [Begun(each, each.at_s, f"{_NOT_GIVEN}the run has ended before") for each in self._pending]

    def _give(self, fault: Fault, now_s: float) -> str:
        """Begin a fault, and return what was done."""
        if fault.kind == "join":
            place, number = self._free_place(), len(self.ranks.all)
            if place is None:
                return f"{_NOT_GIVEN}no network namespace is free"
            self._join(number, place, now_s)
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
            self._frozen.add(rank.number)
            self._ends.append((now_s + fault.lasts_s, partial(self._thaw, rank.number)))
        if fault.kind == "leave":
            self._leaving.add(rank.number)
        rank.send({"kill": SIGKILL, "leave": SIGTERM, "freeze": SIGSTOP}[fault.kind])
        return f"rank {rank.number} {({'kill': 'is killed', 'leave': 'is told to leave', 'freeze': 'is stopped'})[fault.kind]}"

    def _situation(self, now_s: float) -> Situation:
        healthy = [
            rank.number
            for rank in self.ranks.running
            if rank.number not in self._leaving
            and rank.number not in self._frozen
            and self.places[rank.number] not in self._cut
            and now_s - self._joined_s[rank.number] >= SETTLED_S
        ]
        return Situation(healthy, self._free_place() is not None, self._store is not None, self.links.limited)

    def _free_place(self) -> int | None:
        """Return the place that has been without a process for longest, those first that never had one."""
        taken = self._cut | {self.places[rank.number] for rank in self.ranks.running}
        free = [place for place in range(self.plan.places(self.count) - 1) if place not in taken]
        last = {place: number for number, place in enumerate(self.places)}
        return min(free, key=lambda place: last.get(place, -1), default=None)

    def _join(self, number: int, place: int, now_s: float) -> None:
        self.places.append(place)
        self._joined_s.append(now_s)
        self.start(number, place)

    def _mend(self, place: int) -> None:
        self.links.mend(place)
        self._cut.discard(place)

    def _thaw(self, number: int) -> None:
        self._frozen.discard(number)
        self.ranks.all[number].send(SIGCONT)

    def _start_store(self) -> None:
        place = self.plan.places(self.count) - 1
        argv = [sys.executable, "-m", STORE, "--host", self.links.address(place), "--port", str(self.port)]
        self._store = subprocess.Popen(
            self.links.command(place, argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Without names of hosts torch warns about each connection, in the middle of what a command shows.
            env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"},
            preexec_fn=die_with_parent,  # noqa: PLW1509  # one system call, which needs no lock of another thread
        )

    def _end_store(self) -> None:
        if self._store is not None:
            with suppress(ProcessLookupError):
                self._store.kill()
            self._store.wait()
        self._store = None
