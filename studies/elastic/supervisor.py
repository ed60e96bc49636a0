"""Run one trial: start the store and the ranks, cause the events, and read what the ranks have recorded."""

import heapq
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync_lab.netlab import RunNetwork, network
from studies.elastic.drawing import Event, Trial
from studies.elastic.rank import run, serve
from studies.trials.process import Entry, Seat, Worker, await_all, stacks, stop

PLACES = 12  # for ranks in the network; the store has another
MOST_RANKS = 7  # at a time: then a rank leaves instead of another joining
RATE_BITS_PER_S = 1e10
START_S = 60.0  # for all ranks to take their first step
END_S = 40.0  # from the last event until the ranks' processes have ended
STORE = 999  # the number of the first process of the store


@dataclass
class Struck:
    """An event that has struck."""

    kind: str
    at: float
    victims: list[int]  # numbers of processes; for "join" the started one
    back_at: float | None = None  # when the victims, their links or the store returned


@dataclass
class RankSeen:
    """A rank and its records."""

    number: int
    started_at: float
    entries: list[Entry] = field(default_factory=list)
    away: list[tuple[float, float]] = field(default_factory=list)  # when it was dead, frozen or cut off
    said: str = ""  # stacks, if it hangs
    hung: bool = False
    status: int | None = None


@dataclass
class TrialSeen:
    """A finished trial, with residuals by file: of ranks whose residual changed in a meeting, and of those that left."""

    struck: list[Struck]
    ranks: list[RankSeen]
    masses: dict[str, dict[str, Any]]  # Any: vectors by name, before and after
    left: dict[int, dict[str, Tensor]]


class _Rank(Worker):
    """The process of a rank, and when it was away."""

    def __init__(self, seat: Seat, *given: object) -> None:
        super().__init__(seat, run, *given)
        self.seen = RankSeen(seat.number, time.monotonic())
        self.since = self.seen.started_at  # a later step shows that it is present
        self.up = True

    @property
    def healthy(self) -> bool:
        """Whether it is present, and has taken a step since it came or returned."""
        last = self.last_step
        return self.alive and self.up and last is not None and last["t"] > self.since

    @property
    def last_step(self) -> Entry | None:
        return next((each for each in reversed(self.entries) if "position" in each and "rank" in each), None)

    def goes(self, at: float) -> None:
        self.up = False
        self.seen.away.append((at, float("inf")))

    def comes_back(self, at: float) -> None:
        self.up, self.since = True, at
        self.seen.away[-1] = self.seen.away[-1][0], at


class _Trial:
    """A trial under way."""

    def __init__(self, trial: Trial, timeout_s: float, links: RunNetwork, folder: Path) -> None:
        self.trial, self.timeout_s, self.links, self.folder = trial, timeout_s, links, folder
        self.ranks: list[_Rank] = []
        self.stores: list[Worker] = []  # the last one is in use
        self.struck: list[Struck] = []
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._port = links.free_port()
        self._start_store()
        for _ in range(trial.ranks):
            self._start_rank()

    def watch(self) -> None:
        """Cause all events, and wait until ranks end or hang."""
        await_all(lambda: all(each.healthy for each in self.ranks), time.monotonic() + START_S)
        at = time.monotonic()
        for event in self.trial.events:
            at += event.after_s
            self._at(at, partial(self._strike, event))
        self._at(at + self.trial.finish_s, (self.folder / "finish").touch)
        last = at
        while self._due:
            at, _, action = heapq.heappop(self._due)
            time.sleep(max(0.0, at - time.monotonic()))
            action()
            last = time.monotonic()
        await_all(lambda: not any(each.alive for each in self.ranks), last + self.timeout_s + END_S)
        hung = stacks([each for each in self.ranks if each.alive])
        for each in self.ranks:
            each.seen.said = hung.get(each.seat.number, "")
            each.seen.hung = each.seat.number in hung

    def stop(self) -> None:
        """End all processes."""
        stop([*self.ranks, *self.stores])
        for each in self.ranks:
            each.seen.status, each.seen.entries = each.process.exitcode, each.entries

    def _at(self, at: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._due, (at, next(self._order), action))

    def _strike(self, event: Event) -> None:
        kind, healthy = event.kind, self._healthy()
        victims = self._victims(event, healthy)
        is_full = sum(each.alive for each in self.ranks) >= MOST_RANKS
        if kind == "join" and is_full and len(healthy) > 1:
            kind, victims = "leave", [healthy[int(event.share * len(healthy))]]
        elif not victims and kind not in ("join", "store"):
            if is_full:
                return
            kind = "join"
        struck = Struck(kind, time.monotonic(), [each.seat.number for each in victims])
        self.struck.append(struck)
        if kind in ("store", "store_first"):
            self.stores[-1].stop()
            self._at(struck.at + event.lasts_s, partial(self._back, struck, self._start_store))
        if kind == "join":
            struck.victims = [self._start_rank().seat.number]
        elif kind in ("kill", "kill_first", "store_first", "leave"):
            for each in victims:
                each.goes(struck.at)
                each.signal(signal.SIGTERM if kind == "leave" else signal.SIGKILL)
        elif kind == "partition":
            self._away(struck, victims, event.lasts_s, self.links.cut, self.links.mend)
        elif kind in ("pause", "freeze"):
            stopped, continued = victims[0].signal, victims[0].signal
            self._away(
                struck, victims, event.lasts_s, lambda _: stopped(signal.SIGSTOP), lambda _: continued(signal.SIGCONT)
            )

    def _healthy(self) -> list[_Rank]:
        """List the present ranks, except those that the others dropped and did not readmit."""
        epochs = {each.seat.number: last["epoch"] for each in self.ranks if (last := each.last_step)}
        return [each for each in self.ranks if each.healthy and epochs[each.seat.number] == max(epochs.values())]

    def _victims(self, event: Event, healthy: list[_Rank]) -> list[_Rank]:
        """Choose the victims of the event: never all present ranks."""
        cannot = event.kind in ("join", "store") or (event.kind == "partition" and not self.links.limited)
        if cannot or len(healthy) < 2:
            return []
        if event.kind in ("kill_first", "store_first"):
            return [min(healthy, key=lambda each: (each.last_step or {})["rank"])]
        first = int(event.share * len(healthy))
        others = healthy[first + 1 :] + healthy[:first]
        return [healthy[first], *(others[:1] if event.two and len(healthy) > 2 else [])]

    def _away(
        self,
        struck: Struck,
        victims: list[_Rank],
        lasts_s: float,
        begin: Callable[[int], object],
        end: Callable[[int], object],
    ) -> None:
        """Keep victims away for `lasts_s`; `begin` and `end` get their places in the network."""
        for each in victims:
            begin(each.seat.place)
            each.goes(struck.at)

        def back() -> None:
            for each in victims:
                end(each.seat.place)
                each.comes_back(time.monotonic())

        self._at(struck.at + lasts_s, partial(self._back, struck, back))

    def _back(self, struck: Struck, action: Callable[[], object]) -> None:
        action()
        struck.back_at = time.monotonic()

    def _start_rank(self) -> _Rank:
        taken = {each.seat.place for each in self.ranks if each.alive}
        place = next(each for each in range(PLACES) if each not in taken)
        seat = Seat(len(self.ranks), place, self.folder, self.links)
        self.ranks.append(_Rank(seat, self.trial, f"{self.links.addresses[PLACES]}:{self._port}", self.timeout_s))
        return self.ranks[-1]

    def _start_store(self) -> None:
        if not self.stores or not self.stores[-1].alive:  # an earlier event may have restarted it
            seat = Seat(STORE + len(self.stores), PLACES, self.folder, self.links)
            self.stores.append(Worker(seat, serve, self._port))


def observe(trial: Trial, timeout_s: float, rate_bits_per_s: float | None = RATE_BITS_PER_S) -> TrialSeen:
    """Run a trial; no process is left. Without a rate, over loopback."""
    with tempfile.TemporaryDirectory(prefix="sparsync-elastic-") as name, network(PLACES + 1, rate_bits_per_s) as links:
        folder = Path(name)
        running = _Trial(trial, timeout_s, links, folder)
        try:
            running.watch()
        finally:
            running.stop()
        load = partial(torch.load, weights_only=True)
        masses = {each.name: load(each) for each in folder.glob("mass*.pt")}
        left = {int(each.stem.removeprefix("left")): load(each) for each in folder.glob("left*.pt")}
        return TrialSeen(running.struck, [each.seen for each in running.ranks], masses, left)
