"""`bits="auto"`: what the first steps take, and the most bits that do not slow training by more than a tenth."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sparsync.core import Report
from sparsync.recipes import Recipe

STEPS = 20  # that are taken at the default first
_UNMEASURED = 5  # of them: memory is allocated, kernels are compiled, and the ratio is measured in each
_SHARE = 0.1  # of a step, that its exchange may take
_TRIES = 5  # exchanges of a few numbers, of which the shortest tells the latency


@dataclass(frozen=True)
class StepTimes:
    """What a step takes at the recipe that it was measured with, in seconds, the same numbers on all ranks."""

    computing_s: float  # without waiting, on the slowest rank
    waiting_s: float  # for the exchange, on the rank that waits least: what the link takes
    latency_s: float  # the part of `waiting_s` that does not depend on how much is sent
    bits: float  # of the recipe

    def waiting_at(self, bits: float) -> float:
        """Return the seconds that a step would wait for an exchange of so many bits per parameter."""
        return self.latency_s + max(0.0, self.waiting_s - self.latency_s) * bits / self.bits

    def chosen(self, recipes: Sequence[Recipe]) -> Recipe:
        """Return the recipe with the most bits for which a step waits at most a tenth of its time; otherwise the one with the fewest."""
        by_bits = sorted(recipes, key=lambda each: -each.bits)
        fast = (each for each in by_bits if self._share(each.bits) <= _SHARE)
        return next(fast, by_bits[-1])

    def described(self, recipes: Sequence[Recipe]) -> str:
        """Return what was measured, and what each recipe would wait, in one line."""
        waits = ", ".join(f"{1e3 * self.waiting_at(each.bits):.3g} ms at {each.bits:g} bits" for each in recipes)
        return f"a step computes for {1e3 * self.computing_s:.3g} ms and waits for its exchange for {waits}"

    def _share(self, bits: float) -> float:
        waiting_s = self.waiting_at(bits)
        return waiting_s / max(self.computing_s + waiting_s, 1e-9)


class Stopwatch:
    """Measures steps. Time beside training, such as an evaluation between two steps, is left out by the median."""

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

    def times(self, bits: float, gathered: Callable[[Tensor], Sequence[Tensor]]) -> StepTimes:
        """Return what all ranks have measured; `gathered` returns the numbers of each rank. Collective."""
        own = torch.zeros(3, dtype=torch.float64)
        tries = list[float]()
        for _ in range(_TRIES):
            began_s = time.perf_counter()
            gathered(own)
            tries.append(time.perf_counter() - began_s)
        seen = slice(_UNMEASURED, None)
        one_s, rounds = min(tries), median(self._rounds[seen])
        own = torch.tensor(
            [median(self._computing[seen]), median(self._waiting[seen]), one_s * rounds], dtype=torch.float64
        )
        found = torch.stack(list(gathered(own)))
        computing_s, (waiting_s, latency_s) = float(found[:, 0].max()), found[:, 1:].min(0).values.tolist()
        return StepTimes(computing_s, waiting_s, latency_s, bits)
