"""Ok-Topk's published rules and our exact one, restated for all ranks at once with plain loops, for comparison with the scheme."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Low and high end of the band over k, divisor and factor; of th_loc and of th_glob; and above what share of k th_loc rises at once.
CODE = {
    "vgg": ((2 / 3, 5 / 4, 1.012, 1.012), (2 / 3, 4 / 3, 1.008, 1.008), 4 / 3),
    "lstm": ((3 / 4, 5 / 4, 1.012, 1.012), (3 / 4, 5 / 4, 1.01, 1.008), 3 / 2),
    "bert": ((4 / 5, 5 / 4, 1.025, 1.025), (4 / 5, 5 / 4, 1.036, 1.025), math.inf),
}


@dataclass
class Restated:
    """All ranks of a world: `step` takes every rank's gradient and returns the common result."""

    n: int
    P: int
    k: int
    rule: str  # "exact"; "paper"; or "vgg", "lstm", "bert", with the factors and bands of the authors' programs
    dense_steps: int = 0
    threshold_steps: int = 32
    region_steps: int = 64
    imbalance: float = 4.0  # largest ratio of a region to the mean before some survivors move
    t: int = 0
    residuals: list[Tensor] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # of the regions, except the first; empty: equal widths
    chosen: list[list[int]] = field(default_factory=list)  # by each rank
    balanced: bool = False  # some survivors moved to other ranks
    # Of the published rules; None: not yet determined.
    local_thresholds: list[float | None] = field(default_factory=list)
    global_threshold: float | None = None
    # Of the exact rule: the distribution of survivors over blocks of the vector.
    observed: int = 0
    mass: list[int] = field(default_factory=list)

    def step(self, grads: list[Tensor]) -> Tensor:
        if not self.residuals:
            self.residuals = [torch.zeros(self.n) for _ in grads]
            self.local_thresholds = [None for _ in grads]
        accs = [grad + residual for grad, residual in zip(grads, self.residuals, strict=True)]
        if self.t < self.dense_steps:
            sums = accs[0].clone()
            for acc in accs[1:]:
                sums += acc
            survivors, cleared = list(range(self.n)), [list(range(self.n))] * self.P
            self.chosen = cleared
        else:
            sums, survivors, cleared = self._exact(accs) if self.rule == "exact" else self._published(accs)
        out = torch.zeros(self.n)
        out[survivors] = sums[survivors] / self.P
        for acc, gone in zip(accs, cleared, strict=True):
            acc[gone] = 0
        self.residuals = accs
        self.t += 1
        return out

    def _published(self, accs: list[Tensor]) -> tuple[Tensor, list[int], list[list[int]]]:
        fresh = self.t % self.threshold_steps == 0
        thresholds = [self._local(acc, fresh, rank) for rank, acc in enumerate(accs)]
        self.chosen = [reaching(acc, threshold) for acc, threshold in zip(accs, thresholds, strict=True)]
        if self.t % self.region_steps == 0:
            wanted = [
                [chosen[j * len(chosen) // self.P] for j in range(1, self.P)]
                if len(chosen) >= self.P
                else self._equal_begins()
                for chosen in self.chosen
            ]
            self.begins = [sum(each) // self.P for each in zip(*wanted, strict=True)]
        sums = torch.zeros(self.n)
        for acc, chosen in zip(accs, self.chosen, strict=True):
            sums[chosen] += acc[chosen]
        evaluated = fresh or self.global_threshold is None
        alive = reaching(sums, 0.0 if evaluated else self.global_threshold or 0.0)
        most = max(sum(start <= i < stop for i in alive) for start, stop in self._regions())
        self.balanced = (
            not evaluated and most * self.P > self.imbalance * len(alive) and most > -(-len(alive) // self.P)
        )
        survivors = alive
        if evaluated:
            survivors = largest(sums, alive, self.k)
            self.global_threshold = min((float(sums[i].abs()) for i in survivors), default=None)
        kept = set(range(self.n)) if evaluated and len(alive) < self.k else set(survivors)
        self.local_thresholds = [threshold or None for threshold in thresholds]
        if self.rule in CODE:
            local, overall, _ = CODE[self.rule]
            self.local_thresholds = [
                threshold and scaled(threshold, len(chosen), self.k, *local)
                for threshold, chosen in zip(self.local_thresholds, self.chosen, strict=True)
            ]
            if not evaluated and self.global_threshold is not None:
                self.global_threshold = scaled(self.global_threshold, len(survivors), self.k, *overall)
        return sums, survivors, [[i for i in chosen if i in kept] for chosen in self.chosen]

    def _local(self, acc: Tensor, fresh: bool, rank: int) -> float:
        threshold = self.local_thresholds[rank]
        if fresh or threshold is None:
            return float(acc.abs().sort(descending=True).values[self.k - 1])
        if self.rule in CODE:
            for _ in range(5):
                if len(reaching(acc, threshold)) > CODE[self.rule][2] * self.k:
                    threshold *= 1.03
        return threshold

    def _exact(self, accs: list[Tensor]) -> tuple[Tensor, list[int], list[list[int]]]:
        regions, shares = self._regions(), self._shares()
        self.chosen = [
            sorted(
                largest(
                    acc, [i for i in reaching(acc, 0.0) if not start <= i < stop], max(1, self.k - self.k // self.P)
                )
            )
            for acc, (start, stop) in zip(accs, regions, strict=True)
        ]
        sums, survivors, dropped = torch.zeros(self.n), list[list[int]](), set[int]()
        for owner, (start, stop) in enumerate(regions):
            sums[start:stop] = accs[owner][start:stop]
            for acc, chosen in zip(accs, self.chosen, strict=True):
                arrived = [i for i in chosen if start <= i < stop]
                sums[arrived] += acc[arrived]
            alive = [i for i in reaching(sums, 0.0) if start <= i < stop]
            survivors.append(largest(sums, alive, shares[owner]))
            if len(alive) > len(survivors[-1]) or (len(alive) == shares[owner] < stop - start):
                dropped |= set(range(start, stop)) - set(survivors[-1])  # otherwise the region's other sums are zero
        cleared = [
            [i for i in [*range(*region), *chosen] if i not in dropped]
            for region, chosen in zip(regions, self.chosen, strict=True)
        ]
        self._follow(sums, survivors)
        return sums, [i for each in survivors for i in each], cleared

    def _follow(self, sums: Tensor, survivors: list[list[int]]) -> None:
        """Move the regions to equal mass, where a survivor counts as the smallest one of its region."""
        if self.k == self.n or self.k < self.P:
            return
        least = [min((float(sums[i].abs()) for i in each), default=0.0) for each in survivors]
        least = (torch.tensor(least).view(torch.int32) >> 16 << 16).view(torch.float32).tolist()  # 15 bits, no sign
        most = max(least)
        blocks = max(1, min(1024, self.n // 64))
        edges = near_equal(self.n, blocks)
        mass = [0] * blocks
        for each, magnitude in zip(survivors, least, strict=True):
            for i in each:
                mass[sum(edge <= i for edge in edges) - 1] += int(magnitude / most * 65536)
        if total := sum(mass):
            mass = [each * 2**40 // total for each in mass]
            self.observed += 1
            rate = min(self.observed, max(8, -(-32 * self.P // self.k)))
            self.mass = [was + (now - was) // rate for was, now in zip(self.mass or mass, mass, strict=True)]
        if self.mass:
            self.begins = self._cut(edges)

    def _cut(self, edges: list[int]) -> list[int]:
        even = 2**40 // (8 * len(self.mass)) + 1
        mass = [each + even for each in self.mass]
        begins = []
        for part in range(1, self.P):
            wanted, block = sum(mass) * part // self.P, 0
            while sum(mass[: block + 1]) <= wanted:
                block += 1
            inside = wanted - sum(mass[:block])
            begins.append(edges[block] + inside * (edges[block + 1] - edges[block]) // mass[block])
        least = min(2 * -(-self.k // self.P), self.n // self.P)
        for i in range(len(begins)):
            begins[i] = max(begins[i], (begins[i - 1] if i else 0) + least)
        for i in reversed(range(len(begins))):
            begins[i] = min(begins[i], ([*begins, self.n])[i + 1] - least)
        return begins

    def _shares(self) -> list[int]:
        """Deal k survivors out to the regions one by one, with a rotating start; a full region gets no more."""
        shares, place, left = [0] * self.P, self.t, self.k
        lengths = [stop - start for start, stop in self._regions()]
        while left:
            if shares[place % self.P] < lengths[place % self.P]:
                shares[place % self.P] += 1
                left -= 1
            place += 1
        return shares

    def _regions(self) -> list[tuple[int, int]]:
        begins = self.begins or self._equal_begins()
        return list(zip([0, *begins], [*begins, self.n], strict=True))

    def _equal_begins(self) -> list[int]:
        return near_equal(self.n, self.P)[1:-1]


def near_equal(n: int, parts: int) -> list[int]:
    """List the starts of near-equal parts, longer ones first, and the end of the last."""
    sizes = [n // parts + (part < n % parts) for part in range(parts)]
    return [sum(sizes[:part]) for part in range(parts + 1)]


def reaching(x: Tensor, threshold: float) -> list[int]:
    return [i for i, reaches in enumerate(((x.abs() >= threshold) & (x != 0)).tolist()) if reaches]


def largest(x: Tensor, among: Iterable[int], count: int) -> list[int]:
    """List the positions of the `count` largest magnitudes; of equal ones the first win."""
    size = x.abs().tolist()
    return sorted(sorted(among, key=lambda i: (-size[i], i))[:count])


def scaled(threshold: float, found: int, k: int, low: float, high: float, lowered: float, raised: float) -> float:
    return threshold / lowered if found < low * k else threshold * raised if found > high * k else threshold
