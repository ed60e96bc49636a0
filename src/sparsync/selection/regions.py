"""Regions: which rank sums which part of the vector, and how many of the k survivors each region may keep.

Everything here is a function of numbers that all ranks hold alike, in integers, so that all ranks come to the same answer. What
travels is a ladder: the magnitudes of a few of a region's largest sums. It is free of any scale, so no threshold has to be learnt.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from sparsync import kernels
from sparsync.core import Span, spans

RUNGS = 5
LADDER = 1 + RUNGS  # words: how many sums there are, and the magnitudes of the largest, of number k/2P, k/P, 2k/P and k
POISONED = -1  # in place of the count: this rank has met NaN or Inf
_TRIED = 256  # levels that are looked at at once
_TOP = 2**31  # above the bits of every float32


def equal_boundaries(n: int, P: int) -> list[int]:
    """The P-1 boundaries of regions of equal width."""
    return [span.start for span in spans(n, P)[1:]]


def between(boundaries: Sequence[int], n: int) -> tuple[Span, ...]:
    """The P regions that P-1 ascending boundaries cut [0, n) into; some may be empty."""
    return tuple(Span(start, stop) for start, stop in pairwise((0, *boundaries, n)))


def balanced_boundaries(index: Int[Tensor, " k"], n: int, P: int) -> list[int]:
    """Boundaries of regions that hold equally many of the ascending positions `index`; of equal width where those are fewer than P."""
    k = index.numel()
    if k < P:
        return equal_boundaries(n, P)
    places = torch.tensor([j * k // P for j in range(1, P)], dtype=torch.int64, device=index.device)
    return index[places].tolist()  # a host sync: they say how long the messages are


def ladder(sums: Tensor, k: int, P: int, poisoned: bool = False) -> Int[Tensor, " 6"]:
    """How a region's `sums` fall off, none zero, at most k of them, in any order: int32 words.

    Magnitudes travel as the bits of a float32, which order as the numbers do and are about their logarithm.
    """
    count = sums.numel()
    words = torch.zeros(LADDER, dtype=torch.int32, device=sums.device)
    words[0] = POISONED if poisoned else count
    if count and not poisoned:
        magnitudes: list[Tensor] = []
        for number in reversed(_rungs(k, P)):  # each is among those of the next larger number
            if 1 < number < sums.numel():
                sums = kernels.top_k(sums, number).value
            size = sums.abs()
            magnitudes.insert(0, size.max() if number == 1 else size.min())
        largest = torch.finfo(torch.float32).max
        words[1:] = torch.stack(magnitudes).to(torch.float32).clamp(max=largest).view(torch.int32).clamp(min=1)
    return words


def shares(ladders: Int[Tensor, "P 6"], k: int) -> list[int]:
    """How many of the k largest sums lie in each region, as their ladders let one tell; together exactly k, or all there are.

    One threshold for all regions, found by search; between two rungs a region's count is interpolated along the logarithm of the
    magnitude. What is level with the threshold is shared in proportion, so equal magnitudes do not crowd into the first regions.
    """
    P = ladders.shape[0]
    ladders = ladders.cpu().long()  # a host sync: all that follows decides lengths of messages
    count, bits = ladders[:, 0], ladders[:, 1:]
    number = torch.minimum(torch.tensor(_rungs(k, P), device="cpu"), count[:, None])  # [P, rungs]
    wanted = min(k, int(count.sum()))
    if wanted == 0:
        return [0] * P
    low, high = 1, _TOP  # the estimate at `low` is at least as many as wanted, at `high` it is less
    while high - low > 1:
        step = max(1, (high - low) // _TRIED)
        levels = torch.arange(low, high, step, device="cpu")
        enough = _estimate(levels, bits, number).sum(dim=1) >= wanted
        last = int(enough.sum()) - 1  # estimates fall as levels rise, and the first is enough
        low, high = int(levels[last]), min(high, int(levels[last]) + step)
    level, above = _estimate(torch.tensor([low, low + 1], device="cpu"), bits, number)
    room = level - above
    rest = wanted - int(above.sum())
    given = above + rest * room // max(1, int(room.sum()))
    for region in range(P):  # fewer than P are left to give
        if int(given.sum()) < wanted and given[region] < level[region]:
            given[region] += 1
    return given.tolist()


def _rungs(k: int, P: int) -> list[int]:
    return [1, max(1, k // (2 * P)), max(1, k // P), max(1, min(k, 2 * k // P)), max(1, k)]


def _estimate(levels: Tensor, bits: Tensor, number: Tensor) -> Tensor:
    """About how many of each region's sums have at least `levels` as their bits, [levels, P]; falls as the level rises."""
    passed = (bits[None] >= levels[:, None, None]).sum(dim=2)  # [levels, P]: rungs at or above the level
    upper, lower = (passed - 1).clamp(min=0), passed.clamp(max=RUNGS - 1)
    region = torch.arange(bits.shape[0], device="cpu")
    drop = (bits[region, upper] - bits[region, lower]).clamp(min=1)
    more = (number[region, lower] - number[region, upper]) * (bits[region, upper] - levels[:, None]) // drop
    return torch.where(passed > 0, number[region, upper] + more, 0)
