"""One training of a comparison with faults: starts its ranks and its store, gives the faults, and hears what the ranks tell."""

import math
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field

from sparsync_lab.compare import merged
from sparsync_lab.compare.settings import CompareSettings
from sparsync_lab.faults.injector import Begun, Injector
from sparsync_lab.netlab import RunNetwork
from sparsync_lab.scheme_choice import SchemeChoice
from sparsync_lab.temporary import temporary_folder
from sparsync_lab.workers.descendants import die_with_parent
from sparsync_lab.workers.group import GRACE_S, RankFailedError, Worker, diagnosis, start
from sparsync_lab.workers.process import Message, Order
from sparsync_lab.workers.ranks import Ranks

TASK = "sparsync_lab.compare.rank_under_faults:train"
WAIT_S = 120.0  # for the store, for the first meeting and to be let in


@dataclass
class DisturbedTraining:
    """The training of one scheme with one seed."""

    settings: CompareSettings
    choice: SchemeChoice
    seed: int
    links: RunNetwork
    told: merged.Told = field(init=False)
    workers: list[Worker] = field(default_factory=list)
    given: list[Begun] = field(default_factory=list)
    done: bool = False
    _heard_at: float = 0.0
    _evaluating: int | None = None  # which rank, as it has told
    _step: int = 0

    def __post_init__(self) -> None:
        self.told = merged.Told(counted=self.links.limited)

    def messages(self) -> Generator[Message, None, None]:
        """Train, and yield what a display shows.

        Raises RankFailedError where a rank fails that no fault has hit, where faults have ended all ranks, and where replicas differ.
        """
        settings, links, plan = self.settings, self.links, self.settings.faults
        place, port = plan.places(settings.ranks) - 1, links.free_port()
        spec = {"settings": asdict(settings), "scheme": self.choice.label, "seed": self.seed, "wait_s": WAIT_S}
        with temporary_folder() as folder, Ranks(GRACE_S) as ranks:
            order = Order(
                TASK,
                spec,
                links.interface,
                links.limited,
                str(folder / "rendezvous"),
                settings.timeout_s,
                store=f"{links.address(place)}:{port}",
            ).encoded()

            def begin(number: int, place: int) -> None:
                # For a rank that is stopped, and does not see that its standard input ends.
                made = start(ranks, order, links, folder, place, settings.ranks, preexec_fn=die_with_parent)
                self.workers.append(made)

            with Injector(plan, settings.ranks, links, port, ranks, begin) as injector:
                self._heard_at = time.monotonic()
                injector.begin()
                try:
                    yield from self._watch(ranks, injector)
                finally:
                    self.given = [*injector.begun, *injector.not_given()]
        self._check_end()

    def records(self) -> Iterator[Message]:
        """Yield what is to be recorded of the training so far: nothing before its first step; its end where it has one."""
        about = {"scheme": self.choice.label, "seed": self.seed}
        steps = self.told.steps()
        if not steps:
            return
        errors = {number: worker.error for number, worker in enumerate(self.workers) if worker.error is not None}
        yield {"kind": "scheme", **about, **self.told.start()}
        for kind, found in (
            ("step", steps),
            ("quality", self.told.qualities(steps)),
            ("meeting", self.told.meetings()),
            ("fault", merged.faults(self.given, steps, errors, self.settings.ranks)),
        ):
            for each in found:
                yield {"kind": kind, **about, **each}
        if self.done:
            yield {"kind": "end", **about, **self._end()}

    def _watch(self, ranks: Ranks, injector: Injector) -> Iterator[Message]:
        clock, first = self.told.clock, None
        while ranks.busy and not ranks.stopped:
            now = time.monotonic()
            due = now + injector.due_s - clock.seconds(now) if clock.runs else math.inf
            ranks.turn(min(due, self._silence_ends()) if first is None else math.inf)
            for number, worker in enumerate(self.workers):
                while worker.messages:
                    yield from self._hear(number, worker.messages.popleft(), injector)
            if first is not None:
                continue
            now = time.monotonic()
            if self._evaluating is not None and self._is_away(self._evaluating, injector):
                self._evaluating = None
                clock.go_on(now)
            first = next(
                (worker for number, worker in enumerate(self.workers) if worker.failed and number not in injector.hit),
                None,
            )
            if first is not None:
                ranks.stop_later()
            elif injector.store_ended:
                raise RankFailedError(
                    "the store of the run has ended by itself, and without it no rank can join or be lost"
                )
            elif ranks.busy and now >= self._silence_ends():
                raise RankFailedError(
                    f"no rank has told anything for {now - self._heard_at:.0f} s; they hang, or steps are longer: raise --timeout"
                )
            elif clock.runs:
                for each in injector.turn(clock.seconds(now), stopped=False):
                    yield {"kind": "fault", "seconds": each.at_s, "name": each.fault.name, "what": each.what}
        if first is not None:
            own = [worker for number, worker in enumerate(self.workers) if number not in injector.hit]
            raise RankFailedError(diagnosis(own, first))

    def _hear(self, number: int, message: Message, injector: Injector) -> Iterator[Message]:
        clock, about = self.told.clock, {"scheme": self.choice.label, "seed": self.seed}
        self.told.heard.append((number, message))
        self._heard_at = time.monotonic()
        kind = message["kind"]
        if kind == "alive":
            yield message
        elif kind == "step" and message["step"] > self._step:
            if clock.began is None:
                clock.begin(message["t"] - message["step_s"])
                yield {"kind": "scheme", **about}
            self._step = message["step"]
            yield {"kind": "progress", **about, "step": self._step, "loss": message["loss"]}
        elif kind == "evaluates" and not self._is_away(number, injector):
            clock.stop(message["t"])
            self._evaluating = number
        elif kind == "quality":
            seconds = clock.seconds(message["t"])
            if self._evaluating == number:
                self._evaluating = None
                clock.go_on(message["until"])
            yield {**message, **about, "seconds": seconds}

    def _is_away(self, number: int, injector: Injector) -> bool:
        """Return whether a rank does not train with the others now."""
        return not self.workers[number].rank.running or injector.disturbed(number)

    def _silence_ends(self) -> float:
        return self._heard_at + WAIT_S + 2 * self.settings.timeout_s

    def _check_end(self) -> None:
        if not self.told.of("finished"):
            ends = "; ".join(f"rank {each.rank.number}: {each.error or each.rank.ending}" for each in self.workers)
            raise RankFailedError(f"no rank has reached the last step, faults have hit all of them: {ends}")
        self.done = True
        if self.told.different:
            raise RankFailedError(
                f"after {self.choice.label!r} the replicas of ranks {self.told.different} differ from those of the others"
            )

    def _end(self) -> Message:
        different, ends = self.told.different, [message for _, message in self.told.of("finished")]
        counts = {
            name: max(each[name] for each in ends if name in each)
            for name in ("exchanges", "missed")
            if name in ends[0]
        }
        if self.choice.never_due(self.settings.steps):
            counts["exchanges"] = 0
        status = f"failed: replicas of ranks {different} differ" if different else "finished"
        return {"replicas_identical": not different, "status": status, **counts}
