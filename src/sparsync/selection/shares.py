"""Quotas: how many elements the partitions or regions send, so that together they send about the largest elements overall.

Tail sketches: for a few agreed counts, the sample points, every rank sends the magnitude that so many elements of its partition reach.
From all sketches every rank computes the same common magnitude, and from it the same quotas. Sketches have no scale, so no threshold
must adapt. Profiles: every partition sends equally many elements, and its boundaries move until one threshold would select the same.

Magnitudes travel as levels: the upper bits of a float32, which have the order of the numbers and approximate their logarithm. Arithmetic
uses only integers and correctly rounded operations, so that different machines agree.
"""

import math
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sparsync.core import Span, spans

_FLOAT32 = struct.Struct("<f")
_WORD = struct.Struct("<i")
_FLOAT32_BITS = 31  # of a magnitude
_OCTAVE_BITS = 23  # 2^23 levels of 31 bits between a magnitude and its double
_TOP = 0x7F7FFFFF  # the largest finite float32
_LARGEST: float = _FLOAT32.unpack(_WORD.pack(_TOP))[0]
_TAIL = 2.0  # above the first sample point, 2^-2 as many elements are assumed to reach twice the magnitude
_UNIT = 1 << 20  # the resolution of estimates, per element
BLOCKS = 1024  # the most blocks of a Profile
_LEAST_BLOCK = 64  # elements of a Profile's block
_MASS = 1 << 40  # the total mass of a profile: integers, so that all ranks cut the same on any hardware
_FLOOR = 8  # a profile spreads 1/8 of its mass evenly, so that no partition is longer than 8 n/P
# Boundaries average at least this many steps, and this many elements per partition.
_MEMORY_STEPS = 8
_MEMORY_COUNT = 32


def levels_of(magnitude: Float[Tensor, " m"], bits: int = 15) -> Int[Tensor, " m"]:
    """Convert magnitudes to levels: the upper `bits` of the float32 without its sign. Larger values count as the largest float32."""
    return magnitude.clamp(max=_LARGEST).to(torch.float32).view(torch.int32) >> (_FLOAT32_BITS - bits)


def smallest_of(value: Float[Tensor, " k"]) -> Float[Tensor, " 1"]:
    """Return the smallest magnitude, on the device; 0 for no elements."""
    return value.abs().amin(0, keepdim=True) if value.numel() else value.new_zeros(1)


def relative_magnitudes(levels: Sequence[int]) -> list[int]:
    """Convert 15-bit levels to magnitudes in units of 2^-16 of the largest, rounded down; all 1 if the largest is 0."""
    # A level's smallest magnitude.
    magnitudes: list[float] = [_FLOAT32.unpack(_WORD.pack(level << (_FLOAT32_BITS - 15)))[0] for level in levels]
    largest = max(magnitudes)
    return [int(magnitude / largest * 65536) for magnitude in magnitudes] if largest > 0 else [1] * len(levels)


def sketch(largest: Float[Tensor, " m"], counts: Sequence[int], bits: int = 15) -> Int[Tensor, " points"]:
    """Compute the levels that `counts[j]` elements of a partition reach, for the ascending counts; 0 for a count of 0.

    `largest` are the largest elements of the partition, in any order: max(counts), or all that are non-zero.
    """
    magnitudes = torch.cat([largest.abs().sort(descending=True).values, largest.new_zeros(1)])
    m = largest.numel()
    reached = [magnitudes[count - 1 if 0 < count <= m else m] for count in counts]
    return levels_of(torch.stack(reached), bits)


def quotas(
    levels: Sequence[Sequence[int]], counts: Sequence[Sequence[int]], limits: Sequence[int], total: int, bits: int = 15
) -> list[int]:
    """Compute how many elements the partitions send, `total` together: as many as they have above a common level.

    `levels[p]` is the sketch of partition p at its sample points `counts[p]`; `limits[p]` is the number of elements that it can
    send. Raises ValueError if the limits sum to less than `total`.
    """
    tails = [
        (tuple(row), tuple(map(_logarithm, points)), limit)
        for row, points, limit in zip(levels, counts, limits, strict=True)
    ]
    octave = float(1 << (_OCTAVE_BITS - (_FLOAT32_BITS - bits)))
    # The highest level that enough elements reach is in [low, high).
    low, high = 0, (_TOP >> (_FLOAT32_BITS - bits)) + 1
    while high - low > 1:
        level = (low + high) // 2
        # Whole numbers, whose sums are exact.
        enough = sum([int(_reaching(level, *tail, octave) * _UNIT) for tail in tails]) >= total * _UNIT
        low, high = (level, high) if enough else (low, level)
    return apportion([int(_reaching(low, *tail, octave) * 1024) for tail in tails], limits, total)


def _reaching(level: int, levels: tuple[int, ...], counts: tuple[float, ...], limit: int, octave: float) -> float:
    """Estimate how many elements of a partition reach a level; `octave` levels lie between a magnitude and its double.

    Interpolates logarithms linearly: `counts[j]` is the logarithm of the number of elements that reach `levels[j]`; levels descend.
    """
    passed = 0  # sample points at or above the level
    while passed < len(levels) and levels[passed] >= level:
        passed += 1
    if passed == 0:
        logarithm = counts[0] - (level - levels[0]) / octave * _TAIL
    else:
        last = passed == len(levels)
        left = passed - 2 if last else passed - 1
        few, many = counts[left], counts[left + 1]
        upper, lower = levels[left], levels[left + 1]
        logarithm = few + (upper - level) * (many - few) / max(upper - lower, 0.5)
        if last:
            logarithm = max(logarithm, many)
    return min(_exponential(logarithm), float(limit))


def apportion(weights: Sequence[int], limits: Sequence[int], total: int) -> list[int]:
    """Divide `total` in proportion to `weights`, at most `limits[p]` for p. The largest remainders are rounded up.

    Of equal remainders the first take precedence. If no weight is left, divides in proportion to the limits.
    Raises ValueError if the limits sum to less than `total`.
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
            return _filled(given, {p: (total * share[p], whole) for p in open_places}, total)
        for p in full:
            given[p] = limits[p]
            total -= limits[p]
        open_places = [p for p in open_places if p not in full]
    return given


def equal_shares(limits: Sequence[int], total: int, turn: int) -> list[int]:
    """Divide `total` equally, at most `limits[p]` for p; who gets the remainder rotates with `turn`, 0, 1, ..."""
    P = len(limits)
    first = turn % P
    shares = apportion([1] * P, [*limits[first:], *limits[:first]], total)
    return [*shares[P - first :], *shares[: P - first]]


@dataclass
class Profile:
    """The distribution of large elements over blocks of the vector, smoothed over steps; the same on every rank.

    Equal counts do not tell how partitions compare. So a selected element weighs as much as the smallest magnitude selected in its
    partition: if that is twice as large, the partition has about twice as many large elements.
    """

    steps: int = 0
    mass: list[int] = field(default_factory=list)  # by block; empty: nothing observed yet

    def cut(self, n: int, P: int, least: int) -> list[Span]:
        """Cut P partitions of equal mass and at least `least` elements (fewer if n < P * least). Without mass: equal lengths."""
        if not self.mass or n < P:
            return list(spans(n, P))
        blocks = len(self.mass)
        edges = block_starts(n, blocks)
        ends = [0, *accumulate(self.mass)]
        even = _MASS // (_FLOOR * blocks) + 1  # per block
        cuts, block = [0], 0
        for part in range(1, P):
            wanted = (ends[-1] + blocks * even) * part // P
            # The last block whose preceding mass is at most `wanted`.
            block = bisect_right(range(blocks), wanted, lo=block, key=lambda i: ends[i] + i * even) - 1
            mass = self.mass[block] + even
            cuts.append(
                edges[block] + (wanted - ends[block] - block * even) * (edges[block + 1] - edges[block]) // mass
            )
        return [Span(start, stop) for start, stop in pairwise(_spread([*cuts, n], min(least, n // P)))]

    def observe(self, before: Sequence[int], counts: Sequence[int], weights: Sequence[int], memory: int) -> None:
        """Add a step with `counts[p]` elements of mass `weights[p]` in partition p; `before` is a result of `before_blocks`.

        A step `memory` steps ago counts 1/e.
        """
        blocks = len(before) - 1
        total = sum(map(int.__mul__, counts, weights))
        if total == 0:
            return
        share = [mass * _MASS // total for mass in _masses(before, counts, weights)]
        self.steps += 1
        rate = min(self.steps, memory)
        old = self.mass if len(self.mass) == blocks else share
        self.mass = [was + (now - was) // rate for was, now in zip(old, share, strict=True)]


def before_blocks(index: Int[Tensor, " K"], n: int) -> Int[Tensor, " edges"]:
    """Count the ascending positions before every block of a profile of n elements, and before its end."""
    blocks = max(1, min(BLOCKS, n // _LEAST_BLOCK))
    return torch.searchsorted(index, _edges_on(n, blocks, index.device), out_int32=True)


def profile_memory(count: int, P: int) -> int:
    """Return the number of steps that smooth a profile, if it observes `count` elements per step."""
    return max(_MEMORY_STEPS, -(-_MEMORY_COUNT * P // count))


@lru_cache(maxsize=1024)
def block_starts(n: int, blocks: int) -> tuple[int, ...]:
    """Return the edges of near-equal blocks of a vector."""
    return (0, *(span.stop for span in spans(n, blocks)))


@lru_cache(maxsize=1024)
def _edges_on(n: int, blocks: int, device: torch.device) -> Tensor:
    return torch.tensor(block_starts(n, blocks), dtype=torch.int32, device=device)


def _masses(before: Sequence[int], counts: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Compute the masses by block; `before[b]` elements lie before block b."""
    masses = [0] * (len(before) - 1)
    block = start = 0
    for count, weight in zip(counts, weights, strict=True):
        stop = start + count
        while start < stop:
            while before[block + 1] <= start:
                block += 1
            upto = min(before[block + 1], stop)
            masses[block] += (upto - start) * weight
            start = upto
    return masses


def _spread(cuts: list[int], least: int) -> list[int]:
    """Move the ascending `cuts`, except the first and last, so that neighbours are at least `least` apart."""
    cuts = list(cuts)
    for i in range(1, len(cuts) - 1):
        cuts[i] = max(cuts[i], cuts[i - 1] + least)
    for i in range(len(cuts) - 2, 0, -1):
        cuts[i] = min(cuts[i], cuts[i + 1] - least)
    return cuts


def _filled(given: list[int], wanted: Mapping[int, tuple[int, int]], total: int) -> list[int]:
    """Fill the fractions `wanted` into `given`, rounded so that they sum to `total`."""
    for p, (numerator, whole) in wanted.items():
        given[p] = numerator // whole
    left = total - sum(given[p] for p in wanted)
    for p in sorted(wanted, key=lambda p: (-(wanted[p][0] % wanted[p][1]), p))[:left]:
        given[p] += 1
    return given


def _logarithm(count: int) -> float:
    """Compute log2 by linear interpolation between powers of two, in exact arithmetic, unlike log; -127 for 0."""
    if not count:
        return -127.0
    mantissa, exponent = math.frexp(count)
    return exponent + 2.0 * mantissa - 2.0


def _exponential(logarithm: float) -> float:
    """Invert `_logarithm`."""
    logarithm = max(-127.0, min(127.0, logarithm))
    exponent = math.floor(logarithm)
    return math.ldexp(1.0 + (logarithm - exponent), exponent)
