"""Which rank is left out of which chunk: the arithmetic of SkipReduce, without communication.

A vector of n elements is cut into P chunks. Chunk c belongs to position o(c) = (c - shift) mod P, which ends up with its sum. With
the set of offsets S, position o + i is left out of that sum for each i in S; a ring that starts its reduce-scatter s steps late
leaves out S = {1, ..., s} (doi 10.1145/3725843.3756092). Some elements of a chunk may be such that nobody is left out of them.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from sparsync.core import Span, generator, spans


@dataclass(frozen=True)
class SkipPlan:
    """What one SkipReduce leaves out; the same on every rank. `offsets` ascend and lie in [1, P-1]; `shift` lies in [0, P-1]."""

    offsets: tuple[int, ...] = ()
    shift: int = 0

    @property
    def skip(self) -> int:
        """s, how many ranks are missing in every chunk."""
        return len(self.offsets)

    def owner(self, chunk: int, P: int) -> int:
        """Return the position that ends up with the sum of this chunk."""
        return (chunk - self.shift) % P

    def contributors(self, chunk: int, P: int) -> frozenset[int]:
        """Return the P - s positions whose gradient is in the sum of this chunk."""
        owner = self.owner(chunk, P)
        return frozenset((owner + i) % P for i in range(P) if i not in self.offsets)

    def skipped(self, position: int, count: int, P: int, always: int = 0) -> list[Span]:
        """Return where in a vector of `count` elements the contribution of this position is left out: s of the P chunks.

        The `always` elements that lie first in the chunks (`chunks_of`) are never left out.
        """
        chunks = chunks_of(count, P, always)
        return [chunks[(position - i + self.shift) % P].others for i in self.offsets]


@dataclass(frozen=True)
class Chunk:
    """One of the P chunks of a vector: first its elements that are never left out, then the others."""

    always: Span
    others: Span

    @property
    def span(self) -> Span:
        return Span(self.always.start, self.others.stop)

    def sent(self, skipping: bool) -> Span:
        """Return what of the chunk travels in a step, which may be one that is skipped."""
        return self.always if skipping else self.span


@lru_cache(maxsize=256)
def chunks_of(count: int, P: int, always: int = 0) -> tuple[Chunk, ...]:
    """Return P adjacent chunks that cover [0, count), each with its share of the `always` elements that are never left out."""
    chunks: list[Chunk] = []
    start = 0
    for first, rest in zip(spans(always, P), spans(count - always, P), strict=True):
        middle = start + len(first)
        chunks.append(Chunk(Span(start, middle), Span(middle, middle + len(rest))))
        start = middle + len(rest)
    return tuple(chunks)


def chunks_with_any(count: int, P: int, always: int = 0) -> int:
    """Return how many of the chunks have any element: the first ones."""
    return min(P, max(always, count - always))


def skip_count(skip: int | float, P: int, unit: str = "ranks") -> int:
    """Return how many of P ranks each chunk loses: `skip` itself, or, given as a fraction, that share of P rounded down.

    Rounded down, so that never more is lost than asked for. With one rank nothing is sent, so nothing is skipped.
    Raises ValueError when a count is not in [0, P-1].
    """
    if P == 1:
        return 0
    if isinstance(skip, float):
        return min(int(skip * P + 1e-9), P - 1)
    if not 0 <= skip <= P - 1:
        raise ValueError(f"skip must be in [0, {P - 1}] for {P} {unit}, got {skip}")
    return skip


def first_offsets(skip: int) -> tuple[int, ...]:
    """Return {1, ..., s}: what a ring leaves out when it starts its reduce-scatter s steps late."""
    return tuple(range(1, skip + 1))


def random_offsets(skip: int, P: int, seed: int, key: str, step: int) -> tuple[int, ...]:
    """Return `skip` of the offsets 1..P-1, every set equally likely, the same on all ranks."""
    draw = torch.randperm(P - 1, generator=generator(seed, f"offsets/{key}", step))
    return tuple(sorted(int(i) + 1 for i in draw[:skip]))


def rotating_offsets(skip: int, P: int, seed: int, key: str, step: int) -> tuple[int, ...]:
    """Return `skip` of the offsets 1..P-1, the same on all ranks, for chunks whose owners are fixed.

    Every run of P-1 steps that starts at a multiple of P-1 leaves out each offset `skip` times, in random order: so each owner misses
    all others equally often, not only in expectation.
    """
    if skip == 0:
        return ()
    # The key of the generator says "turn": other words would draw other offsets.
    round_number, place = divmod(step, P - 1)
    order = torch.randperm(P - 1, generator=generator(seed, f"turn/{key}", round_number)).tolist()
    return tuple(sorted(order[(place + j) % (P - 1)] + 1 for j in range(skip)))


def random_shift(P: int, seed: int, key: str, step: int) -> int:
    """Return a shift in [0, P-1], the same on all ranks, each equally likely, and never that of the step before (for P > 1).

    With two ranks that leaves nothing to draw but the first: the shifts alternate.

    Every run of P steps that starts at a multiple of P takes each shift once, in random order, so that every rank is left out of every
    chunk equally often, not only in expectation.
    """
    if P == 1:
        return 0
    if P == 2:
        return (_shifts(P, seed, key, 0)[0] + step) % 2
    round_number, place = divmod(step, P)
    order = _shifts(P, seed, key, round_number)
    if round_number > 0 and order[0] == _shifts(P, seed, key, round_number - 1)[-1]:
        order[0], order[1] = order[1], order[0]  # the last of a round never moves, so looking one round back is enough
    return order[place]


def _shifts(P: int, seed: int, key: str, round_number: int) -> list[int]:
    return torch.randperm(P, generator=generator(seed, f"shift/{key}", round_number)).tolist()
