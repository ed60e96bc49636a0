"""All-reduces that may leave ranks out of chunks: SkipReduce (doi 10.1145/3725843.3756092) as a ring, directly, and in two levels.

A vector of n elements is cut into P chunks. Chunk c belongs to position o(c) = (c - shift) mod P, which ends up with its sum. With the
set of offsets S, position o + i is left out of that sum for each i in S. Elements that all ranks contribute to (`always` of them) lie first
in their chunks and ride along in the messages of the others, so there are never more rounds than without skipping; that is ours.

    ring            S = {1, ..., s}: the reduce-scatter starts s steps late
    direct          any S, in one all-to-all where a ring takes P-1-s steps
    hierarchical    dense inside a node; between nodes one of the two, whose unit is a whole node
    reduce_scatter  owners are fixed, as in sharded training; no all-gather follows

With S empty the first three are dense all-reduces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from sparsync.comm.subset import SubsetComm
from sparsync.core import Comm, Span, SpanSet, generator, spans
from sparsync.kernels.rounding import add_rounded_


@dataclass(frozen=True)
class SkipPlan:
    """What one SkipReduce leaves out; the same on every rank. `offsets` ascend and lie in [1, P-1]; `shift` lies in [0, P-1]."""

    offsets: tuple[int, ...] = ()
    shift: int = 0

    @property
    def skip(self) -> int:
        """s, how many ranks are missing in every chunk."""
        return len(self.offsets)

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
        """Return the part of the chunk that travels in a step, which may be a skipped one."""
        return self.always if skipping else self.span


@lru_cache(maxsize=256)
def chunks_of(count: int, P: int, always: int = 0) -> tuple[Chunk, ...]:
    """Return P adjacent chunks that cover [0, count), each with its share of the `always` elements that are never left out."""
    lengths = [len(part) for pair in zip(spans(always, P), spans(count - always, P), strict=True) for part in pair]
    parts = [Span(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
    return tuple(Chunk(first, rest) for first, rest in zip(parts[::2], parts[1::2], strict=True))


@lru_cache(maxsize=256)
def by_chunk(dense: SpanSet, skipping: SpanSet, node_size: int, nodes: int) -> SpanSet:
    """Return all elements in the order of the chunks: the share of each in `dense`, then that in `skipping`, so that a message is one span.

    Each of both is cut as a separate vector: first for the ranks of a node, then for the nodes.
    """
    found: list[Span] = []
    for place in range(node_size):
        for node in range(nodes):
            for each in (dense, skipping):
                outer = spans(len(each), node_size)[place]
                inner = spans(len(outer), nodes)[node]
                found += each.part(Span(outer.start + inner.start, outer.start + inner.stop))
    return SpanSet.joined(found)


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


_DENSE = SkipPlan()
Form = Literal["ring", "direct"]


def all_reduce_(
    x: Tensor,
    comm: Comm,
    plan: SkipPlan = _DENSE,
    omitted: Tensor | None = None,
    always: int = 0,
    form: Form = "ring",
) -> None:
    """Write into `x` [n], on every rank, the sum over the contributors of each chunk, and over all ranks of its first elements.

    The chunks are `chunks_of(n, P, always)`: each begins with its share of the `always` elements that all ranks contribute to. Where this
    rank is left out, its elements of `x` are added to `omitted` [n], if given, and so is what the type of `x` drops of the sums that it
    forms, where `omitted` is wider. A ring can leave out the offsets {1, ..., s} only; raises ValueError for others. The direct form adds
    in rank order.
    Steps: ring 2 (P-1) - s, or 2 (P-1) with P or more elements that are never left out; direct 1, and P-1 of the ring's all-gather
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x) + s/P * nbytes of what is never left out
    """
    if comm.size == 1:
        return
    if form == "ring" and plan.offsets != first_offsets(plan.skip):
        raise ValueError(f"a ring leaves out the offsets 1..s, got {plan.offsets}; use the direct form for other sets")
    if omitted is not None:
        for span in plan.skipped(comm.rank, x.numel(), comm.size, always):
            span.of(omitted).add_(span.of(x))
    if form == "ring":
        ring_reduce_scatter_(x, comm, plan.skip, plan.shift, always, omitted)
    else:
        direct_reduce_scatter_(x, comm, plan, always, omitted)
    ring_all_gather_(x, comm, plan.shift, always)


def ring_reduce_scatter_(
    x: Tensor, comm: Comm, skip: int = 0, shift: int = 0, always: int = 0, dropped: Tensor | None = None
) -> Span:
    """Sum one chunk of `x` over its contributors, and return its span; the other chunks of `x` hold partial sums.

    What the type of `x` drops of this rank's sums is added to `dropped` [n], if that is given and wider.
    Steps: P-1-s; P-1 with P or more elements that are never left out
    Bytes sent per rank: (P-1-s)/P * nbytes(x) + s/P * nbytes of what is never left out
    """
    P = comm.size
    y = (comm.rank + shift) % P
    chunks = chunks_of(x.numel(), P, always)
    arrived = x.new_empty(len(chunks[0].span))  # no chunk is longer than the first
    for j in _steps(P, skip, always):
        out, mine = chunks[(y - j) % P].sent(j <= skip), chunks[(y - j - 1) % P].sent(j <= skip)
        partial = arrived[: len(mine)]
        comm.send_recv(out.of(x), (comm.rank + 1) % P, partial, (comm.rank - 1) % P)
        add_rounded_(mine.of(x), partial, mine.of(dropped) if dropped is not None else None)
    return chunks[y].span


def ring_all_gather_(x: Tensor, comm: Comm, shift: int = 0, always: int = 0) -> None:
    """Copy the chunk that each rank owns, rank + shift, into `x` on all ranks.

    Steps: P-1
    Bytes sent per rank: (P-1)/P * nbytes(x)
    """
    P = comm.size
    y = (comm.rank + shift) % P
    chunks = chunks_of(x.numel(), P, always)
    for j in range(P - 1):
        out, into = chunks[(y - j) % P].span, chunks[(y - j - 1) % P].span
        comm.send_recv(out.of(x), (comm.rank + 1) % P, into.of(x), (comm.rank - 1) % P)


def _steps(P: int, skip: int, always: int) -> range:
    """Return the numbers of the reduce-scatter steps that carry anything."""
    return range(1 if always else 1 + skip, P)


def direct_reduce_scatter_(
    x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, always: int = 0, dropped: Tensor | None = None
) -> Span:
    """Sum one chunk of `x` over its contributors, and return its span; the rest of `x` is as it was.

    What the type of `x` drops of the sum is added to `dropped` [n], if that is given and wider.
    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x) + s/P * nbytes of what is never left out
    """
    P, rank = comm.size, comm.rank
    chunks = chunks_of(x.numel(), P, always)
    mine = chunks[(rank + plan.shift) % P]
    outgoing = [
        x[:0] if owner == rank else chunks[(owner + plan.shift) % P].sent(skips(rank, owner, P, plan)).of(x)
        for owner in range(P)
    ]
    skipping = [skips(source, rank, P, plan) for source in range(P)]
    received = comm.all_to_all(outgoing, [len(mine.sent(skipping[r])) * (r != rank) for r in range(P)])
    whole = [mine.span.of(x) if r == rank else chunk for r, chunk in enumerate(received)]
    first = len(mine.always)
    for part, addends in (
        (mine.always, [chunk[:first] for chunk in whole]),
        (mine.others, [chunk[first:] for chunk, left_out in zip(whole, skipping, strict=True) if not left_out]),
    ):
        if len(part):
            total = addends[0].clone()
            for addend in addends[1:]:
                add_rounded_(total, addend, part.of(dropped) if dropped is not None else None)
            part.of(x).copy_(total)
    return mine.span


def hierarchical_all_reduce_(
    x: Tensor,
    comm: Comm,
    node_size: int,
    plan: SkipPlan,
    omitted: Tensor | None = None,
    always: int = 0,
    form: Form = "ring",
) -> None:
    """Write into `x` [n], on every rank, the sums over the contributing nodes; `form` is that of the all-reduce between nodes.

    Where this rank's node is left out, the node's sum of this rank's chunk is added to `omitted` [n], if given, and so is what the type
    of `x` drops of this rank's sums, where `omitted` is wider. No node is left out of `always` elements: they lie first in the G chunks
    (`chunks_of`) and, in each of those, first in its N chunks.
    Steps: 2 (G-1) + those of `all_reduce_` over N ranks
    Bytes sent per rank: 2 (G-1)/G * nbytes(x) inside the node, those of `all_reduce_` for nbytes(x)/G between nodes
    """
    node, place = divmod(comm.rank, node_size)
    inside = SubsetComm(comm, [node * node_size + other for other in range(node_size)])
    across = SubsetComm(comm, [other * node_size + place for other in range(comm.size // node_size)])
    first = len(chunks_of(x.numel(), node_size, always)[place].always)
    chunk = ring_reduce_scatter_(x, inside, always=always, dropped=omitted)
    all_reduce_(chunk.of(x), across, plan, chunk.of(omitted) if omitted is not None else None, first, form)
    ring_all_gather_(x, inside, always=always)


def reduce_scatter(x: Tensor, out: Tensor, comm: Comm, plan: SkipPlan, always: Sequence[Span] = ()) -> None:
    """Write to `out` [m], in its type, the sum of this rank's chunk over its contributors; `x` is not changed.

    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x), and s times the bytes of `always`
    """
    P, rank, m, protected = comm.size, comm.rank, out.numel(), SpanSet(tuple(always))
    chunks = x.split(m) if m else [x] * P
    # A chunk whose owner leaves this rank out: only what is never left out.
    outgoing = [protected.take(chunk) if skips(rank, o, P, plan) else chunk for o, chunk in enumerate(chunks)]
    outgoing[rank] = x[:0]
    counts = [len(protected) if skips(source, rank, P, plan) else m for source in range(P)]
    counts[rank] = 0
    received = comm.all_to_all(outgoing, counts)
    order = [(rank + i) % P for i in range(1, P)]
    first = received[order[0]] if P > 1 and not skips(order[0], rank, P, plan) else None
    out.zero_() if first is None else out.copy_(first)
    for source in order if first is None else order[1:]:
        if not skips(source, rank, P, plan):
            out.add_(received[source])
            continue
        for span, part in zip(always, received[source].split([len(span) for span in always]), strict=True):
            span.of(out).add_(part)
    out.add_(chunks[rank])


def skips(source: int, owner: int, P: int, plan: SkipPlan) -> bool:
    """Return whether what `source` has for the chunk of `owner` is left out."""
    return (source - owner) % P in plan.offsets
