"""Tail sketches: how many elements each partition sends, so that together they are the asked number of the largest.

Every rank sends at which magnitudes its partition holds a few agreed numbers of elements, its sample points. From all ranks' sketches
every rank finds the same common magnitude, and from it the same quotas. A sketch is free of any scale, so no threshold is learnt.
Only integers and correctly rounded operations, so that unlike machines agree too.

Magnitudes travel as levels: the upper bits of a float32, which order as the numbers do and are about their logarithm.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync import kernels

_FLOAT32_BITS = 31  # of a magnitude
_OCTAVE_BITS = 23  # 2^23 levels of 31 bits between a magnitude and its double
_TOP = 0x7F7FFFFF  # the largest finite float32
_TAIL = 2.0  # above the first sample point, twice the magnitude is taken to be reached by 2^-2 as many elements
_UNIT = 1 << 20  # estimates are added up in parts of an element
_TRIED = 216  # levels that are looked at at once: 216^4 is just above all levels of 31 bits


def levels_of(magnitude: Float[Tensor, "*m"], bits: int = 15) -> Int[Tensor, "*m"]:
    """Return the upper `bits` of each magnitude as a float32 without its sign, int32; what exceeds float32 counts as its largest."""
    limit = torch.finfo(torch.float32).max
    return magnitude.clamp(max=limit).to(torch.float32).view(torch.int32) >> (_FLOAT32_BITS - bits)


def relative_magnitudes(levels: Sequence[int], bits: int = 15) -> list[int]:
    """Return the magnitudes at `levels` in units of 2^-16 of the largest, rounded down; all 1 when that is 0."""
    words = torch.tensor(list(levels), dtype=torch.int32, device="cpu") << (_FLOAT32_BITS - bits)
    magnitude = words.view(torch.float32).to(torch.float64)
    largest = magnitude.max()
    return (magnitude / largest * 65536).to(torch.int64).tolist() if largest > 0 else [1] * len(levels)


def sketch(largest: Float[Tensor, " m"], counts: Sequence[int], bits: int = 15) -> Int[Tensor, " points"]:
    """Return the level that `counts[j]` elements of a partition reach or exceed, for each of the ascending counts; 0 for a count of 0.

    `largest` holds the largest elements of the partition, in any order: max(counts) of them, or all that are not zero.
    """
    levels: list[Tensor] = []
    for count in reversed(counts):  # each is among those of the next larger count
        if 0 < count < largest.numel():
            largest = kernels.top_k(largest, count).value
        reached = 0 < count <= largest.numel()
        smallest = largest.abs().min() if reached else largest.new_zeros(())
        levels.insert(0, smallest)
    return levels_of(torch.stack(levels), bits)


def quotas(
    levels: Int[Tensor, "P points"], counts: Sequence[Sequence[int]], limits: Sequence[int], total: int, bits: int = 15
) -> list[int]:
    """Return how many elements each partition sends, `total` together: as many as it holds above the level common to all.

    Row p of `levels` is the sketch of partition p at its sample points `counts[p]`; `limits[p]` is how many elements it has to choose
    from. Raises ValueError when these are less than `total` together.
    """
    # A host sync: the lengths of the next messages depend on it.
    reached = levels.cpu().to(torch.float64)  # [P, points], descending
    points = _logarithm(torch.tensor([list(each) for each in counts], dtype=torch.float64, device="cpu"))
    limit = torch.tensor(list(limits), dtype=torch.float64, device="cpu")
    octave = float(1 << (_OCTAVE_BITS - (_FLOAT32_BITS - bits)))
    # The highest level that enough elements reach lies in [low, high).
    low, high = 0, (_TOP >> (_FLOAT32_BITS - bits)) + 1
    while high - low > 1:
        step = -(-(high - low) // _TRIED)
        tried = range(low, high, step)
        # Whole numbers, whose sums are exact in whatever order. Fewer elements reach a higher level.
        above = (_reaching(tried, reached, points, limit, octave) * _UNIT).to(torch.int64).sum(1)
        enough = int((above >= total * _UNIT).sum())
        low, high = tried[max(0, enough - 1)], min(high, tried[max(0, enough - 1)] + step)
    weights = _reaching([low], reached, points, limit, octave)[0].tolist()
    return apportion([int(weight * 1024) for weight in weights], limits, total)


def apportion(weights: Sequence[int], limits: Sequence[int], total: int) -> list[int]:
    """Return `total` in shares proportional to `weights`, at most `limits[p]` for p; what rounding leaves goes to the largest remainders.

    Of equal remainders the first are served. Where no weight is left, in proportion to the limits.
    Raises ValueError when the limits are less than `total` together.
    """
    if sum(limits) < total:
        raise ValueError(f"{total} elements do not fit into {sum(limits)} free places")
    given = [0] * len(limits)
    open_places = [p for p in range(len(limits)) if limits[p]]
    while total and open_places:
        share = weights if any(weights[p] for p in open_places) else limits
        whole = sum(share[p] for p in open_places)
        full = [p for p in open_places if total * share[p] >= limits[p] * whole]
        if not full:
            return _rounded(given, {p: (total * share[p], whole) for p in open_places}, total)
        for p in full:
            given[p] = limits[p]
            total -= limits[p]
        open_places = [p for p in open_places if p not in full]
    return given


def _rounded(given: list[int], wanted: Mapping[int, tuple[int, int]], total: int) -> list[int]:
    """Return `given` with the fractions `wanted` filled in, rounded so that they sum to `total`."""
    for p, (numerator, whole) in wanted.items():
        given[p] = numerator // whole
    left = total - sum(given[p] for p in wanted)
    for p in sorted(wanted, key=lambda p: (-(wanted[p][0] % wanted[p][1]), p))[:left]:
        given[p] += 1
    return given


def _reaching(asked: Sequence[int], levels: Tensor, points: Tensor, limit: Tensor, octave: float) -> Tensor:
    """Return about how many elements of each partition reach each level asked for, [asked, P].

    Straight lines through the sample points, in logarithms.
    """
    level = torch.tensor(asked, dtype=torch.float64, device="cpu")[:, None]
    passed = (levels >= level[:, :, None]).sum(2)  # [asked, P]: sample points at or above the level
    left = (passed - 1).clamp(0, levels.shape[1] - 2)
    p = torch.arange(levels.shape[0], device="cpu")
    upper, lower = levels[p, left], levels[p, left + 1]
    few, many = points[p, left], points[p, left + 1]
    inside = few + (upper - level) * (many - few) / (upper - lower).clamp(min=0.5)
    above = few - (level - upper) / octave * _TAIL
    below = torch.maximum(inside, many)
    at = torch.where(passed == 0, above, torch.where(passed == levels.shape[1], below, inside))
    return torch.minimum(_exponential(at), limit)


def _logarithm(x: Tensor) -> Tensor:
    """Return the logarithm to base 2, by a straight line between powers of two: exact arithmetic, unlike log. About -127 for 0."""
    return x.to(torch.float32).view(torch.int32).to(torch.float64) / 2**23 - 127.0


def _exponential(x: Tensor) -> Tensor:
    """Return the inverse of `_logarithm`."""
    return ((x.clamp(-127.0, 127.0) + 127.0) * 2**23).to(torch.int32).view(torch.float32).to(torch.float64)
