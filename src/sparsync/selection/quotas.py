"""Exact quotas: how many elements each partition may send so that together they send as many as asked.

Every rank tells at which magnitudes its partition holds a few agreed numbers of elements; from these ladders all ranks find the same
common level, and from it the same quotas. Integers and correctly rounded operations only, so that unlike machines agree too.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync import kernels

RUNGS = (0.25, 1.0, 4.0)  # times an equal share: how many elements lie above each magnitude of a ladder
LADDER_NBYTES = 2 * len(RUNGS)
OCTAVE = 128.0  # levels between a magnitude and its double
_TAIL = 2.0  # above the top of a ladder, twice the magnitude is taken to be reached by 2^-2 as many elements
TOP = 0x7F7F  # the largest finite level
_TRIED = 182  # levels that are looked at at once
POISONED = -1  # in place of a level: this rank's gradient holds NaN or Inf


def level_of(magnitude: Tensor) -> Tensor:
    """The level of each magnitude: the upper 16 bits of its float32, int32; about 128 times its logarithm to base 2.

    Negative for negative magnitudes; what exceeds float32 counts as its largest number.
    """
    limit = torch.finfo(torch.float32).max
    return magnitude.clamp(max=limit).to(torch.float32).view(torch.int32) >> 16


def relative_magnitudes(levels: Sequence[int]) -> list[int]:
    """The magnitudes at `levels`, in units of 2^-16 of the largest, rounded down; all 1 when that is 0."""
    magnitude = (
        (torch.tensor(list(levels), dtype=torch.int32, device="cpu") << 16).view(torch.float32).to(torch.float64)
    )
    largest = magnitude.max()
    return (magnitude / largest * 65536).to(torch.int64).tolist() if largest > 0 else [1] * len(levels)


def rung_counts(total: int, P: int, free: int) -> list[int]:
    """The numbers of elements at which a partition with `free` elements to choose from tells its magnitudes."""
    return [min(free, max(1, int(total * rung / P))) for rung in RUNGS]


def ladder(largest: Float[Tensor, " m"], counts: Sequence[int]) -> Int[Tensor, " rungs"]:
    """The level that `counts[j]` elements of a partition reach or exceed, for each of the ascending counts, int16; 0 for a count of 0.

    `largest` holds the largest elements of the partition: max(counts) of them, or all that are not zero.
    """
    told: list[Tensor] = []
    for count in reversed(counts):  # each is among those of the next larger count
        if 0 < count < largest.numel():
            largest = kernels.top_k(largest, count).value
        reached = 0 < count <= largest.numel()
        told.insert(0, level_of(largest.abs().min()) if reached else largest.new_zeros((), dtype=torch.int32))
    return torch.stack(told).to(torch.int16)


def quotas(ladders: Int[Tensor, "P rungs"], free: Sequence[int], total: int) -> list[int]:
    """How many elements each partition sends, summing to `total`: as many as it holds above the level common to all.

    `free[p]` is how many elements partition p has to choose from, at least `total` together.
    """
    levels = ladders.cpu().to(torch.float64)  # [P, rungs], descending; a host sync, what is sent next depends on it
    P = len(free)
    counts = _logarithm(torch.tensor([rung_counts(total, P, each) for each in free], dtype=torch.float64, device="cpu"))
    limit = torch.tensor(list(free), dtype=torch.float64, device="cpu")
    low, high = 0, TOP + 1  # the highest level that enough elements reach lies in [low, high)
    while high - low > 1:
        step = -(-(high - low) // _TRIED)
        tried = range(low, high, step)
        reaching = _reaching(torch.tensor(tried, dtype=torch.float64, device="cpu"), levels, counts, limit).tolist()
        enough = sum(
            math.fsum(each) >= total for each in reaching
        )  # exact, in whatever order; fewer reach a higher level
        low, high = tried[max(0, enough - 1)], min(high, tried[max(0, enough - 1)] + step)
    weights = _reaching(torch.tensor([low], dtype=torch.float64, device="cpu"), levels, counts, limit)[0]
    return apportion([int(weight * 1024) for weight in weights.tolist()], free, total)


def apportion(weights: Sequence[int], free: Sequence[int], total: int) -> list[int]:
    """`total` dealt out in proportion to `weights`, at most `free[p]` to p; what is left by rounding to the largest remainders.

    Of equal remainders the first are served. Where no weight is left, in proportion to `free`.
    Raises ValueError when `free` has less than `total` in all.
    """
    if sum(free) < total:
        raise ValueError(f"{total} elements do not fit into {sum(free)} free places")
    given = [0] * len(free)
    places = [p for p in range(len(free)) if free[p]]
    while total and places:
        share = weights if any(weights[p] for p in places) else free
        whole = sum(share[p] for p in places)
        full = [p for p in places if total * share[p] >= free[p] * whole]
        if not full:
            return _rounded(given, {p: (total * share[p], whole) for p in places}, total)
        for p in full:
            given[p] = free[p]
            total -= free[p]
        places = [p for p in places if p not in full]
    return given


def _rounded(given: list[int], wanted: Mapping[int, tuple[int, int]], total: int) -> list[int]:
    """`given` with the fractions `wanted` filled in, rounded so that they sum to `total`."""
    for p, (part, whole) in wanted.items():
        given[p] = part // whole
    left = total - sum(given[p] for p in wanted)
    for p in sorted(wanted, key=lambda p: (-(wanted[p][0] % wanted[p][1]), p))[:left]:
        given[p] += 1
    return given


def _reaching(asked: Tensor, levels: Tensor, counts: Tensor, limit: Tensor) -> Tensor:
    """About how many elements of each partition reach each level `asked`, [asked, P]: straight lines through its ladder, in logarithms."""
    reached = (levels >= asked[:, None, None]).sum(2)  # [asked, P]
    left = (reached - 1).clamp(0, levels.shape[1] - 2)
    part, level = torch.arange(levels.shape[0], device="cpu"), asked[:, None]
    upper, lower = levels[part, left], levels[part, left + 1]
    few, many = counts[part, left], counts[part, left + 1]
    inside = few + (upper - level) * (many - few) / (upper - lower).clamp(min=0.5)
    above = few - (level - upper) / OCTAVE * _TAIL
    below = torch.maximum(inside, many)
    at = torch.where(reached == 0, above, torch.where(reached == levels.shape[1], below, inside))
    return torch.minimum(_exponential(at), limit)


def _logarithm(x: Tensor) -> Tensor:
    """The logarithm to base 2, by a straight line between powers of two: exact arithmetic, unlike log. About -127 for 0."""
    return x.to(torch.float32).view(torch.int32).to(torch.float64) / 2**23 - 127.0


def _exponential(x: Tensor) -> Tensor:
    """The inverse of `_logarithm`."""
    return ((x.clamp(-127.0, 127.0) + 127.0) * 2**23).to(torch.int32).view(torch.float32).to(torch.float64)
