"""`bits="auto"`: times the first steps, then takes the most bits that slow training by at most a tenth."""

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
STEPS = 20  # taken at the default recipe before the choice
_UNMEASURED = 8  # first steps, left out: they allocate memory, compile kernels and measure the ratio
_SHARE = 0.1  # the longest wait over the step time; or the largest slowdown over the fewest bits
_TRIES = 5  # exchanges of a few numbers; the shortest one is the latency


@dataclass(frozen=True)
class StepTimes:
    """The time of a step in seconds, the same numbers on all ranks, measured at a recipe of `bits` bits."""

    computing_s: float  # without waiting, on the slowest rank
    waiting_s: float  # for the exchange, on the rank that waits least: the time of the link
    latency_s: float  # the part of `waiting_s` that does not depend on how much is sent
    bits: float

    def waiting_at(self, bits: float) -> float:
        """Estimate the seconds that a step waits for an exchange of `bits` bits per parameter."""
        return self.latency_s + max(0.0, self.waiting_s - self.latency_s) * bits / self.bits

    def chosen(self, recipes: Sequence[Recipe]) -> Recipe:
        """Choose the recipe with the most bits whose step waits at most a tenth of its time.

        A recipe also qualifies if its step is at most a tenth longer than with the fewest bits: latency may be most of the wait.
        """
        by_bits = sorted(recipes, key=lambda each: -each.bits)
        longest_s = max(self.computing_s / (1 - _SHARE), (1 + _SHARE) * self._step_s(by_bits[-1].bits))
        return next(each for each in by_bits if self._step_s(each.bits) <= longest_s or each is by_bits[-1])

    def described(self, recipes: Sequence[Recipe]) -> str:
        """Describe the measured times, and the wait of each recipe, in one line."""
        waits = ", ".join(f"{1e3 * self.waiting_at(each.bits):.3g} ms at {each.bits:g} bits" for each in recipes)
        return f"a step computes for {1e3 * self.computing_s:.3g} ms, and waits for its exchange for {waits}"

    def _step_s(self, bits: float) -> float:
        return self.computing_s + self.waiting_at(bits)


class Choosing:
    """Chooses among recipes by the times of the first steps, which use the default one.

    Its medians ignore what happens between some steps only, such as an evaluation. `gathered(key, own)` returns how long this rank has
    waited, and the numbers of all ranks, [P, n]. `take` switches to a recipe.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        gathered: Callable[[str, Tensor], tuple[float, Tensor]],
        take: Callable[[Recipe], object],
    ) -> None:
        self.recipes, self._gathered, self._take = recipes, partial(gathered, "times"), take
        self._ended_s: float | None = None
        self._computing, self._waiting, self._rounds = list[float](), list[float](), list[float]()

    def note(self, reports: Sequence[Report], present: Recipe) -> bool:
        """Note that a step has ended, and choose after the last one to be measured; return whether that was this one."""
        now_s, before_s = time.perf_counter(), self._ended_s
        self._ended_s = now_s
        waiting_s = sum(each.wait_s or 0.0 for each in reports)
        self._computing.append(0.0 if before_s is None else now_s - before_s - waiting_s)
        self._waiting.append(waiting_s)
        self._rounds.append(sum(each.cost.steps for each in reports))
        if len(self._computing) < STEPS:
            return False
        times = self.times(present.bits)
        chosen = times.chosen(self.recipes)
        self._take(chosen)
        _LOG.info("%s; from here on: %s", times.described(self.recipes), chosen)
        return True

    def times(self, bits: float) -> StepTimes:
        """Combine the measurements of all ranks, made at `bits` bits. Collective."""
        one_s = min(self._gathered(torch.zeros(3, dtype=torch.float64))[0] for _ in range(_TRIES))
        seen = slice(_UNMEASURED, None)
        mine = [median(self._computing[seen]), median(self._waiting[seen]), one_s * median(self._rounds[seen])]
        rows = self._gathered(torch.tensor(mine, dtype=torch.float64))[1]  # read below: a host sync
        waiting_s, latency_s = rows[:, 1:].min(0).values.tolist()
        return StepTimes(float(rows[:, 0].max()), waiting_s, latency_s, bits)
