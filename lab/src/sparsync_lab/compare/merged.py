"""One training out of what its ranks have told, some of which were there for a part of it only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Any

from sparsync_lab.faults.injector import Begun
from sparsync_lab.faults.pauses import longest_pause
from sparsync_lab.workers.process import Message

QUIET = 1 / 3  # of the usual steps: a pause is longer than three of them
_MEANS = ("loss", "sent_bytes", "interface_bytes", "messages", "union_density")  # over the ranks
# Of the first rank, which evaluates: others begin their next step meanwhile, and wait in it.
_OF_FIRST = ("step_s", "wait_s", "reduce_s", "accumulate_s", "select_s", "encode_s", "decode_s", "apply_s")


@dataclass
class Clock:
    """Seconds of training since the first step began. It stands still while a rank evaluates, for which the others wait.

    Times are those of time.monotonic, which all processes of a machine share.
    """

    began: float | None = None
    _stopped: float | None = None
    _stops: list[tuple[float, float]] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        return self.began is not None and self._stopped is None

    def begin(self, t: float) -> None:
        self.began = t if self.began is None else self.began

    def stop(self, t: float) -> None:
        self._stopped = t if self._stopped is None else self._stopped

    def go_on(self, t: float) -> None:
        if self._stopped is not None:
            self._stops.append((self._stopped, max(t, self._stopped)))
            self._stopped = None

    def seconds(self, t: float) -> float:
        """Return the seconds at a time; 0 before the first step."""
        if self.began is None:
            return 0.0
        stops = [*self._stops, *([] if self._stopped is None else [(self._stopped, max(t, self._stopped))])]
        return max(0.0, t - self.began - sum(max(0.0, min(t, end) - start) for start, end in stops))


@dataclass
class Told:
    """What the ranks of one training have told, and the faults that they were given."""

    counted: bool  # each rank has an interface alone
    clock: Clock = field(default_factory=Clock)
    heard: list[tuple[int, Message]] = field(default_factory=list)  # who, by the number of its process, and what

    def of(self, kind: str) -> list[tuple[int, Message]]:
        return [(rank, message) for rank, message in self.heard if message["kind"] == kind]

    @property
    def different(self) -> list[int]:
        """The ranks that ended with other weights than the first one that told."""
        ends = [(rank, message["digest"]) for rank, message in self.of("finished")]
        return [rank for rank, digest in ends if digest != ends[0][1]]

    def start(self) -> Message:
        """Return what the records say of the scheme, of which the ranks that began have measured a part."""
        alone = [message for _, message in self.of("alone")]
        seconds = [message["seconds"] for message in alone]
        return {"config": alone[0]["config"], "compute_s": max(seconds), "own_compute_s": fmean(seconds)}

    def steps(self) -> list[Message]:
        """Return the steps that are in the weights: of one that was taken again, what its last epoch has told."""
        found: dict[int, list[Message]] = {}
        for _, message in self.of("step"):
            found.setdefault(message["step"], []).append(message)
        return [self._step(step, _of_last_epoch(found[step])) for step in sorted(found)]

    def qualities(self, steps: Sequence[Message]) -> list[Message]:
        """Return the evaluations, a number of steps once, with the bytes of the steps until then."""
        found: dict[int, list[Message]] = {}
        for _, message in self.of("quality"):
            found.setdefault(message["step"], []).append(message)
        made = []
        for step in sorted(found):
            first = _of_last_epoch(found[step])[0]
            sent = sum(each["interface_bytes"] for each in steps if each["step"] <= step) if self.counted else None
            seconds = self.clock.seconds(first["t"])
            made.append({"step": step, "seconds": seconds, "bytes": sent, "value": first["value"]})
        return made

    def meetings(self) -> list[Message]:
        """Return when ranks have met, and how many they were then; the first time before the first step, as the clock tells."""
        found: dict[int, list[Message]] = {}
        for _, message in self.of("meeting"):
            found.setdefault(message["epoch"], []).append(message)
        firsts = [_of_last_epoch(found[epoch])[0] for epoch in sorted(found)]
        return [
            {"step": each["step"], "seconds": self.clock.seconds(each["t"]) if number else 0.0, "ranks": each["ranks"]}
            for number, each in enumerate(firsts)
        ]

    def _step(self, step: int, told: Sequence[Message]) -> Message:
        made = {name: told[0][name] for name in _OF_FIRST}
        made |= {name: fmean(each[name] for each in told) for name in _MEANS}
        if not self.counted:
            made["interface_bytes"] = None
        return {"step": step, "seconds": self.clock.seconds(told[0]["t"]), **made}


def faults(given: Sequence[Begun], steps: Sequence[Message], errors: Mapping[int, str], ranks: int) -> list[Message]:
    """Return the faults, each with the longest pause of the training that began before the next one.

    A pause that goes on when the next fault comes belongs to the first. `errors`: those that ranks have reported, by their numbers;
    `ranks`: how many began, after which those that join are numbered.
    """
    times = [0.0, *(each["seconds"] for each in steps)]
    looks = [(before, after, 1) for before, after in pairwise(times)]
    made, joined, free_s = [], ranks, 0.0
    for number, each in enumerate(given):
        rank, joined = (joined, joined + each.given) if each.fault.kind == "join" else (each.fault.rank, joined)
        error = errors.get(rank) if each.given and rank is not None else None
        told = {"seconds": each.at_s, "name": each.fault.name.replace(":", " ", 1), "given": each.given}
        told["what"] = each.what + (f"; it failed: {error}" if error else "")
        end_s = next((other.at_s for other in given[number + 1 :] if other.given), times[-1])
        pause = longest_pause(looks, max(each.at_s, free_s), end_s, False, QUIET) if each.given else None
        if pause is not None and pause.seconds:
            free_s = next((at_s for at_s in times if at_s >= pause.to_s), pause.to_s) if pause.ongoing else pause.to_s
            told |= {"paused_s": pause.from_s, "pause_s": free_s - pause.from_s}
        made.append(told)
    return made


def _of_last_epoch(told: Sequence[Message]) -> list[Message]:
    """Return what the ranks of the last of these epochs have told, by their places in it."""
    last = max(each["epoch"] for each in told)
    places: dict[int, Any] = {}  # Any: a message
    for each in told:
        if each["epoch"] == last:
            places.setdefault(each["place"], each)
    return [places[place] for place in sorted(places)]
