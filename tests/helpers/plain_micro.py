"""MiCRO's and ExDyna's published rules, restated for all ranks at once with plain loops, for comparison with the schemes."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from helpers.exclusive_invariants import RankState


@dataclass
class Restated:
    """All ranks of a world: `step` takes every rank's gradient and returns the common result."""

    n: int
    P: int
    density: float
    bug_compatible: bool
    blocks: bool  # ExDyna's moving partitions instead of MiCRO's fixed ones
    t: int = 0
    threshold: float = 0.0
    K: int = 0
    residuals: list[Tensor] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # blocks of each partition
    chosen: list[list[int]] = field(default_factory=list)  # of each rank

    def step(self, grads: list[Tensor]) -> Tensor:
        if not self.residuals:
            self.residuals = [torch.zeros(self.n) for _ in grads]
        accs = [grad + residual for grad, residual in zip(grads, self.residuals, strict=True)]
        partitions = self._moved() if self.blocks else self._fixed()
        self._scale()
        self.chosen = [self._choose(accs[rank], *partitions[(self.t + rank) % self.P]) for rank in range(self.P)]
        union = [i for chosen in self.chosen for i in chosen]
        out = torch.zeros(self.n)
        total = accs[0][union].clone()
        for acc in accs[1:]:
            total += acc[union]
        out[union] = total / self.P
        for acc in accs:
            acc[union] = 0
        self.residuals, self.K = accs, len(union)
        self.t += 1
        return out

    def check(self, steps: list[list[Tensor]], seen: list[list[RankState]]) -> None:
        """Check that the ranks have `seen` the same bits, with the gradients `steps`."""
        for step, grads in enumerate(steps):
            expected = self.step(grads)
            for rank, states in enumerate(seen):
                shown = states[step]
                assert torch.equal(shown.grad, expected) and torch.equal(shown.residual, self.residuals[rank])
                assert shown.report.details["threshold"] == self.threshold
                assert (shown.report.union, shown.report.selected) == (self.K, len(self.chosen[rank]))

    def _fixed(self) -> list[tuple[int, int]]:
        sizes = [self.n // self.P + (p < self.n % self.P) for p in range(self.P)]
        return [(sum(sizes[:p]), sum(sizes[: p + 1])) for p in range(self.P)]

    def _moved(self) -> list[tuple[int, int]]:
        size = self.n // 1024 // 32 * 32
        if self.t == 0:
            self.held = [1024 // self.P + (p < 1024 % self.P) for p in range(self.P)]
        else:
            load = [len(self.chosen[(p - self.t + 1) % self.P]) for p in range(self.P)]
            mean, each = int(self.K / self.P), int(size * (self.K / self.n))
            for p in range(self.P - 1):
                here, there = load[p] / mean, load[p + 1] / mean
                for giver, taker, over, under in ((p, p + 1, here, there), (p + 1, p, there, here)):
                    if over > 1.05 and under < 0.95238 and self.held[giver] - 1 >= 1024 / (4 * self.P):
                        self.held[giver] -= 1
                        self.held[taker] += 1
                        load[giver] -= each
                        load[taker] += each
        ends = [sum(self.held[: p + 1]) * size for p in range(self.P)]
        ends[-1] = self.n
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def _scale(self) -> None:
        k = int(self.density * self.n)
        if self.t == 0:
            self.threshold = 1 / (2 * math.sqrt(k))
            return
        q = self.K / k
        inside = 1.00125 if self.bug_compatible or q > 1 else 0.9987
        self.threshold *= 1.005 if q > 1.1 else inside if q > 0.909 else 0.995

    def _choose(self, acc: Tensor, start: int, stop: int) -> list[int]:
        above = [start + i for i, is_above in enumerate((acc[start:stop].abs() >= self.threshold).tolist()) if is_above]
        return above or [start + self.t % (stop - start)]
