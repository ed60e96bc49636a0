"""`bits="auto"`: what the first steps take, and the most bits that do not slow training by more than a tenth."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from sparsync.core import Report
from sparsync.recipes import Recipe

_LOG = logging.getLogger("sparsync")
STEPS = 20  # that are taken at the default first
_UNMEASURED = 8  # of them: memory is allocated, kernels are compiled, and the ratio is measured in each
_SHARE = 0.1  # of a step, that its exchange may take; or by which it may be longer than with the fewest bits
_TRIES = 5  # exchanges of a few numbers, of which the shortest tells the latency


@dataclass(frozen=True)
class StepTimes:
    """What a step takes, in seconds, the same numbers on all ranks, at a recipe of so many `bits`."""

    computing_s: float  # without waiting, on the slowest rank
    waiting_s: float  # for the exchange, on the rank that waits least: what the link takes
    latency_s: float  # the part of `waiting_s` that does not depend on how much is sent
    bits: float

    def waiting_at(self, bits: float) -> float:
        """Return the seconds that a step would wait for an exchange of so many bits per parameter."""
        return self.latency_s + max(0.0, self.waiting_s - self.latency_s) * bits / self.bits

    def chosen(self, recipes: Sequence[Recipe]) -> Recipe:
        """Return the recipe with the most bits for which a step waits at most a tenth of its time.

        Where none does, or latency is most of it: for which a step is at most a tenth longer than with the fewest bits.
        """
        by_bits = sorted(recipes, key=lambda each: -each.bits)
        longest_s = max(self.computing_s / (1 - _SHARE), (1 + _SHARE) * self._step_s(by_bits[-1].bits))
        return next(each for each in by_bits if self._step_s(each.bits) <= longest_s or each is by_bits[-1])

    def described(self, recipes: Sequence[Recipe]) -> str:
        """Return what was measured, and what each recipe would wait, in one line."""
        waits = ", ".join(f"{1e3 * self.waiting_at(each.bits):.3g} ms at {each.bits:g} bits" for each in recipes)
        return f"a step computes for {1e3 * self.computing_s:.3g} ms, and waits for its exchange for {waits}"

    def _step_s(self, bits: float) -> float:
        return self.computing_s + self.waiting_at(bits)


class Stopwatch:
    """Measures steps. What comes between two of them now and then, such as an evaluation, is left out by the median."""

    def __init__(self) -> None:
        self._ended_s: float | None = None
        self._computing, self._waiting, self._rounds = list[float](), list[float](), list[float]()

    def note(self, reports: Sequence[Report]) -> bool:
        """Note that a step has ended; return whether it was the last to be measured."""
        now_s, before_s = time.perf_counter(), self._ended_s
        self._ended_s = now_s
        waiting_s = sum(each.wait_s or 0.0 for each in reports)
        self._computing.append(0.0 if before_s is None else now_s - before_s - waiting_s)
        self._waiting.append(waiting_s)
        self._rounds.append(sum(each.cost.steps for each in reports))
        return len(self._computing) >= STEPS

    def times(self, bits: float, exchange: Callable[[Tensor], tuple[float, Tensor]]) -> StepTimes:
        """Return what all ranks have measured, at so many `bits`. Collective.

        `exchange` returns how long it has waited, and the numbers of all ranks, [P, n].
        """
        one_s = min(exchange(torch.zeros(3, dtype=torch.float64))[0] for _ in range(_TRIES))
        seen = slice(_UNMEASURED, None)
        own = [median(self._computing[seen]), median(self._waiting[seen]), one_s * median(self._rounds[seen])]
        rows = exchange(torch.tensor(own, dtype=torch.float64))[1]  # read below: a host sync
        waiting_s, latency_s = rows[:, 1:].min(0).values.tolist()
        return StepTimes(float(rows[:, 0].max()), waiting_s, latency_s, bits)


class Choosing:
    """Chooses among recipes by what the first steps at the default have measured.

    `gathered(key, own)` returns how long this rank has waited for the numbers of all ranks, and these, [P, n]; `take` goes on by a recipe.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        gathered: Callable[[str, Tensor], tuple[float, Tensor]],
        take: Callable[[Recipe], object],
    ) -> None:
        self.recipes, self._gathered, self._take, self._watch = recipes, gathered, take, Stopwatch()

    def note(self, reports: Sequence[Report], present: Recipe) -> bool:
        """Note that a step has ended; return whether it was the last to be measured, and the choice is made."""
        if not self._watch.note(reports):
            return False
        times = self._watch.times(present.bits, partial(self._gathered, "times"))
        chosen = times.chosen(self.recipes)
        self._take(chosen)
        _LOG.info("%s; from here on: %s", times.described(self.recipes), chosen)
        return True
