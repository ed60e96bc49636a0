"""One trial: starts the store and the ranks, has the events strike, and reads what the ranks have written down."""

import heapq
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync_lab.netlab import NetworkUnavailableError, RunNetwork, network
from sparsync_lab.netlab.namespaces import run_batches
from studies.elastic.drawing import Event, Trial
from studies.elastic.rank import Order, run, serve

PLACES = 12  # of ranks in the network; the store has one more
MOST_RANKS = 7  # at a time: then a rank leaves where one would join
RATE_BITS_PER_S = 1e10
PACE_S = 0.06
START_S = 60.0  # for all ranks to take their first step
END_S = 40.0  # from the last that is done to the ranks until their processes have ended
LOOK_S = 0.1
STACKS = 5000  # characters of the stacks of a rank that hangs
PRELOADED = ["torch._dynamo", "torch.nn.parallel", "torch.distributed.device_mesh", "studies.elastic.rank"]
PORT = 29400


@dataclass
class Struck:
    """An event that has struck."""

    kind: str
    at: float
    victims: list[int]  # numbers of processes; of "join" the one that was started
    back_at: float | None = None  # when the victims, their links or the store were back


@dataclass
class RankSeen:
    """A rank, and what it has written down."""

    number: int
    started_at: float
    entries: list[dict[str, Any]] = field(default_factory=list)  # Any: JSON
    away: list[tuple[float, float]] = field(default_factory=list)  # when it was gone, frozen or cut off
    said: str = ""  # stacks, where it hangs
    hung: bool = False
    status: int | None = None


@dataclass
class TrialSeen:
    """What became of a trial. Residuals by name of their file: of ranks where they have changed in a meeting, and of those that left."""

    struck: list[Struck]
    ranks: list[RankSeen]
    masses: dict[str, dict[str, Any]]  # Any: vectors by name, before and after
    left: dict[int, dict[str, Tensor]]


@contextmanager
def places() -> Iterator[tuple[RunNetwork, str]]:
    """Yield a network for trials, one after the other; over loopback where this user cannot have one, and why."""
    try:
        with network(PLACES + 1, RATE_BITS_PER_S) as links:
            yield links, ""
            return
    except NetworkUnavailableError as error:
        why = str(error)
    with network(PLACES + 1, None) as links:
        yield links, why


class _Worker:
    """The process of a rank."""

    def __init__(self, order: Order) -> None:
        self.order, self.seen = order, RankSeen(order.number, time.monotonic())
        self.since = self.seen.started_at  # a step after this says that it is there
        self.up = True
        self.process = _context().Process(target=run, args=(order,))
        self.process.start()
        self._read = 0

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    @property
    def healthy(self) -> bool:
        """Whether it is there, and has taken a step since it came or came back."""
        last = self.last_step
        return self.alive and self.up and last is not None and last["t"] > self.since

    @property
    def last_step(self) -> dict[str, Any] | None:  # Any: JSON
        return next((each for each in reversed(self.entries) if "position" in each and "rank" in each), None)

    @property
    def entries(self) -> list[dict[str, Any]]:  # Any: JSON
        """What it has written down."""
        path = self.order.folder / f"log{self.order.number}"
        if path.exists():
            with path.open("rb") as log:
                log.seek(self._read)
                whole = log.read().rpartition(b"\n")[0]
            self._read += len(whole) + bool(whole)
            self.seen.entries += [json.loads(each) for each in whole.splitlines() if each]
        return self.seen.entries

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

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
        self.workers: list[_Worker] = []
        self.struck: list[Struck] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._port = PORT + trial.number % 1000 if links.limited else _free_port()
        self._store: Any = None  # Any: see _context
        self._start_store()
        for _ in range(trial.ranks):
            self._start_rank()

    def watch(self) -> None:
        """Have all events strike, and wait for the ranks to end, or to hang."""
        deadline = time.monotonic() + START_S
        while not all(each.healthy for each in self.workers) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
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
        while any(each.alive for each in self.workers) and time.monotonic() < last + self.timeout_s + END_S:
            time.sleep(LOOK_S)
        self._end()

    def _at(self, at: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (at, next(self._order), action))

    def _strike(self, event: Event) -> None:
        kind, healthy = event.kind, self._healthy()
        victims = self._victims(event, healthy)
        if kind == "join" and sum(each.alive for each in self.workers) >= MOST_RANKS and len(healthy) > 1:
            kind, victims = "leave", [healthy[int(event.share * len(healthy))]]
        elif not victims and kind not in ("join", "store"):
            if sum(each.alive for each in self.workers) >= MOST_RANKS:
                return
            kind = "join"
        now, struck = time.monotonic(), Struck(kind, time.monotonic(), [each.order.number for each in victims])
        self.struck.append(struck)
        if kind in ("store", "store_first"):
            self._store.kill()
            self._store.join()
            self._at(now + event.lasts_s, partial(self._back, struck, self._start_store))
        if kind == "join":
            struck.victims = [self._start_rank().order.number]
        elif kind in ("kill", "kill_first", "store_first", "leave"):
            for each in victims:
                each.goes(now)
                each.signal(signal.SIGTERM if kind == "leave" else signal.SIGKILL)
        elif kind == "partition":
            self._set_links(victims, "down")
            self._away(struck, victims, event.lasts_s, lambda: self._set_links(victims, "up"))
        elif kind in ("pause", "freeze"):
            victims[0].signal(signal.SIGSTOP)
            self._away(struck, victims, event.lasts_s, lambda: victims[0].signal(signal.SIGCONT))

    def _healthy(self) -> list[_Worker]:
        """Return the ranks that are there, without those that the others have dropped and not let in again."""
        there = [each for each in self.workers if each.healthy]
        epochs = [each.last_step["epoch"] for each in self.workers if each.last_step]
        return [each for each in there if each.last_step and each.last_step["epoch"] == max(epochs)]

    def _victims(self, event: Event, healthy: list[_Worker]) -> list[_Worker]:
        """Return whom the event strikes: never all that are there."""
        if (
            event.kind in ("join", "store")
            or len(healthy) < 2
            or (event.kind == "partition" and not self.links.limited)
        ):
            return []
        if event.kind in ("kill_first", "store_first"):
            return [min(healthy, key=lambda each: (each.last_step or {})["rank"])]
        first = int(event.share * len(healthy))
        others = healthy[first + 1 :] + healthy[:first]
        return [healthy[first], *(others[:1] if event.two and len(healthy) > 2 else [])]

    def _away(self, struck: Struck, victims: list[_Worker], lasts_s: float, end: Callable[[], object]) -> None:
        for each in victims:
            each.goes(struck.at)

        def back() -> None:
            end()
            for each in victims:
                each.comes_back(time.monotonic())

        self._at(struck.at + lasts_s, partial(self._back, struck, back))

    def _back(self, struck: Struck, action: Callable[[], object]) -> None:
        action()
        struck.back_at = time.monotonic()

    def _set_links(self, victims: list[_Worker], state: str) -> None:
        assert self.links.switch is not None
        run_batches([(self.links.switch, "ip", [f"link set port{each.order.place} {state}" for each in victims])])

    def _start_rank(self) -> _Worker:
        number, taken = len(self.workers), {each.order.place for each in self.workers if each.alive}
        place = next(each for each in range(PLACES) if each not in taken)
        address = f"{self.links.address(PLACES)}:{self._port}"
        order = Order(self.trial, number, place, self.folder, address, self.timeout_s, PACE_S, self.links)
        self.workers.append(_Worker(order))
        return self.workers[-1]

    def _start_store(self) -> None:
        if self._store is not None and self._store.is_alive():
            return  # of two events, of which one has started it already
        self._store = _context().Process(target=serve, args=(self.links, PLACES, self._port, self.folder / "store"))
        self._store.start()

    def _end(self) -> None:
        """Take the stacks of ranks that hang, and end all processes."""
        late = [each for each in self.workers if each.alive]
        for each in late:
            each.signal(signal.SIGUSR1)
        time.sleep(0.5 if late else 0.0)
        for each in late:
            each.seen.hung = True
            each.seen.said = (self.folder / f"stacks{each.order.number}").read_text()[-STACKS:]
        self.stop()

    def stop(self) -> None:
        """End all processes."""
        for process in (*(each.process for each in self.workers), self._store):
            process.kill()
            process.join()
        for each in self.workers:
            each.seen.status = each.process.exitcode
            _ = each.entries


def observe(trial: Trial, timeout_s: float, links: RunNetwork, keep: Path | None = None) -> TrialSeen:
    """Run a trial, and return what became of it; no process is left. `keep`: a folder for what the ranks write."""
    with tempfile.TemporaryDirectory(prefix="sparsync-elastic-") as made:
        folder = Path(made) if keep is None else keep
        folder.mkdir(parents=True, exist_ok=True)
        running = _Trial(trial, timeout_s, links, folder)
        try:
            running.watch()
        finally:
            running.stop()
        load = partial(torch.load, weights_only=True)
        masses = {each.name: load(each) for each in folder.glob("mass*.pt")}
        left = {int(each.stem.removeprefix("left")): load(each) for each in folder.glob("left*.pt")}
        return TrialSeen(running.struck, [each.seen for each in running.workers], masses, left)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@cache
def _context() -> Any:  # Any: multiprocessing's stubs give fork servers no type of their own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # so that a rank starts in milliseconds
    return context
