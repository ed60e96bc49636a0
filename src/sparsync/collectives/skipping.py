"""All-reduces that may leave ranks out of chunks: SkipReduce (doi 10.1145/3725843.3756092) as a ring, directly, and in two levels.

A vector of n elements is cut into P chunks. Position o(c) = (c - shift) mod P owns chunk c and computes its sum. S is a set of offsets:
the sum omits position o + i for every i in S. The `always` elements that all ranks contribute to lie first in the chunks and travel in the
messages of the others, so that skipping never adds rounds. This differs from the paper.

    ring            S = {1, ..., s}: the reduce-scatter starts s steps late
    direct          any S, in one all-to-all instead of P-1-s steps of a ring
    hierarchical    dense inside a node; one of the two between nodes, which are omitted as a whole
    reduce_scatter  fixed owners, as in sharded training, without an all-gather

If S is empty, the first three are dense all-reduces.
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
    """The contributions that one SkipReduce omits; the same on every rank. `offsets` ascend in [1, P-1]; `shift` is in [0, P-1]."""

    offsets: tuple[int, ...] = ()
    shift: int = 0

    @property
    def skip(self) -> int:
        """s, the number of ranks that every chunk omits."""
        return len(self.offsets)

    def skipped(self, position: int, count: int, P: int, always: int = 0) -> list[Span]:
        """Return the spans of a vector of `count` elements that omit this position: parts of s chunks.

        The `always` elements, first in the chunks (`chunks_of`), are never omitted.
        """
        chunks = chunks_of(count, P, always)
        return [chunks[(position - i + self.shift) % P].others for i in self.offsets]


@dataclass(frozen=True)
class Chunk:
    """One of the P chunks of a vector: first the elements that are never omitted, then the others."""

    always: Span
    others: Span

    @property
    def span(self) -> Span:
        return Span(self.always.start, self.others.stop)

    def sent(self, skipping: bool) -> Span:
        """Return the part of the chunk that travels in a step; `skipping` says whether the step is skipped."""
        return self.always if skipping else self.span


@lru_cache(maxsize=256)
def chunks_of(count: int, P: int, always: int = 0) -> tuple[Chunk, ...]:
    """Cut [0, count) into P adjacent chunks that share the `always` elements, which are never omitted."""
    lengths = [len(part) for pair in zip(spans(always, P), spans(count - always, P), strict=True) for part in pair]
    parts = [Span(start, stop) for start, stop in pairwise(accumulate(lengths, initial=0))]
    return tuple(Chunk(first, rest) for first, rest in zip(parts[::2], parts[1::2], strict=True))


@lru_cache(maxsize=256)
def by_chunk(dense: SpanSet, skipping: SpanSet, node_size: int, nodes: int) -> SpanSet:
    """Order all elements by chunk, first those in `dense`, then those in `skipping`, so that a message is one span.

    Both are cut separately: first for the ranks of a node, then for the nodes.
    """
    ordered: list[Span] = []
    for place in range(node_size):
        for node in range(nodes):
            for part in (dense, skipping):
                outer = spans(len(part), node_size)[place]
                inner = spans(len(outer), nodes)[node]
                ordered += part.part(Span(outer.start + inner.start, outer.start + inner.stop))
    return SpanSet.joined(ordered)


def skip_count(skip: int | float, P: int, unit: str = "ranks") -> int:
    """Return s, the number of P ranks that every chunk omits: `skip` if it is an int, else the share `skip` of P, rounded down.

    With one rank nothing is sent, so nothing is skipped. Raises ValueError for a count outside [0, P-1].
    """
    if P == 1:
        return 0
    if isinstance(skip, float):
        return min(int(skip * P + 1e-9), P - 1)
    if not 0 <= skip <= P - 1:
        raise ValueError(f"skip must be in [0, {P - 1}] for {P} {unit}, got {skip}")
    return skip


def first_offsets(skip: int) -> tuple[int, ...]:
    """Return {1, ..., s}, the offsets that a ring omits when it starts its reduce-scatter s steps late."""
    return tuple(range(1, skip + 1))


def random_offsets(skip: int, P: int, seed: int, key: str, step: int) -> tuple[int, ...]:
    """Draw `skip` of the offsets 1..P-1, every set equally likely, the same on all ranks."""
    draw = torch.randperm(P - 1, generator=generator(seed, f"offsets/{key}", step))
    return tuple(sorted(int(i) + 1 for i in draw[:skip]))


def rotating_offsets(skip: int, P: int, seed: int, key: str, step: int) -> tuple[int, ...]:
    """Draw `skip` of the offsets 1..P-1, the same on all ranks, for chunks with fixed owners.

    A run of P-1 steps that starts at a multiple of P-1 omits every offset `skip` times, in random order. So owners omit all
    other ranks equally often, not only in expectation.
    """
    if skip == 0:
        return ()
    # Keep "turn" in the generator's key: another word would draw other offsets.
    round_number, place = divmod(step, P - 1)
    order = torch.randperm(P - 1, generator=generator(seed, f"turn/{key}", round_number)).tolist()
    return tuple(sorted(order[(place + j) % (P - 1)] + 1 for j in range(skip)))


def random_shift(P: int, seed: int, key: str, step: int) -> int:
    """Draw a shift in [0, P-1], the same on all ranks, all equally likely, and never the shift of the last step (for P > 1).

    With two ranks only the first shift is random; then they alternate.

    A run of P steps that starts at a multiple of P takes every shift once, in random order, so that every chunk omits every rank
    equally often, not only in expectation.
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
    x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, omitted: Tensor | None = None, always: int = 0, form: Form = "ring"
) -> None:
    """Replace `x` [n] on every rank by the sum over the contributors, and its `always` elements by the sum over all ranks.

    The chunks are `chunks_of(n, P, always)`, which begin with the `always` elements. `omitted` [n], if given, receives this rank's elements
    of the chunks that omit it, and if its type is wider, the rounding errors of the sums that this rank computes. A ring can omit
    only the offsets {1, ..., s}; raises ValueError for others. The direct form adds in rank order.
    Steps: ring 2 (P-1) - s, or 2 (P-1) with P or more `always` elements; direct 1, and P-1 of the ring's all-gather
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x) + s/P * nbytes of the `always` elements
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

    Adds the rounding errors of this rank's sums to `dropped` [n], if given and of a wider type.
    Steps: P-1-s; P-1 with P or more `always` elements
    Bytes sent per rank: (P-1-s)/P * nbytes(x) + s/P * nbytes of the `always` elements
    """
    P = comm.size
    y = (comm.rank + shift) % P
    chunks = chunks_of(x.numel(), P, always)
    arrived = x.new_empty(len(chunks[0].span))  # no chunk is longer than the first
    for j in range(1 if always else 1 + skip, P):  # the steps that send anything
        out, mine = chunks[(y - j) % P].sent(j <= skip), chunks[(y - j - 1) % P].sent(j <= skip)
        partial = arrived[: len(mine)]
        comm.send_recv(out.of(x), (comm.rank + 1) % P, partial, (comm.rank - 1) % P)
        add_rounded_(mine.of(x), partial, mine.of(dropped) if dropped is not None else None)
    return chunks[y].span


def ring_all_gather_(x: Tensor, comm: Comm, shift: int = 0, always: int = 0) -> None:
    """Copy every chunk from its owner to all ranks, in place; rank r owns chunk r + shift.

    Steps: P-1
    Bytes sent per rank: (P-1)/P * nbytes(x)
    """
    P = comm.size
    y = (comm.rank + shift) % P
    chunks = chunks_of(x.numel(), P, always)
    for j in range(P - 1):
        out, into = chunks[(y - j) % P].span, chunks[(y - j - 1) % P].span
        comm.send_recv(out.of(x), (comm.rank + 1) % P, into.of(x), (comm.rank - 1) % P)


def direct_reduce_scatter_(
    x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, always: int = 0, dropped: Tensor | None = None
) -> Span:
    """Sum one chunk of `x` over its contributors, and return its span; the rest of `x` does not change.

    Adds the rounding errors of the sum to `dropped` [n], if given and of a wider type.
    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x) + s/P * nbytes of the `always` elements
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
    """Replace `x` [n] on every rank by the sums over the contributing nodes. `form` applies between nodes.

    `omitted` [n], if given, receives the node's sum of this rank's chunk where this rank's node is omitted, and if its type is wider, the
    rounding errors of this rank's sums. The `always` elements are summed over all nodes: they lie first in the G chunks
    (`chunks_of`), and inside a chunk first in its N chunks.
    Steps: 2 (G-1), and `all_reduce_` over N ranks
    Bytes sent per rank: 2 (G-1)/G * nbytes(x) inside the node, and between nodes `all_reduce_` of nbytes(x)/G
    """
    node, place = divmod(comm.rank, node_size)
    inside = SubsetComm(comm, [node * node_size + other for other in range(node_size)])
    across = SubsetComm(comm, [other * node_size + place for other in range(comm.size // node_size)])
    first = len(chunks_of(x.numel(), node_size, always)[place].always)
    chunk = ring_reduce_scatter_(x, inside, always=always, dropped=omitted)
    all_reduce_(chunk.of(x), across, plan, chunk.of(omitted) if omitted is not None else None, first, form)
    ring_all_gather_(x, inside, always=always)


def reduce_scatter(x: Tensor, out: Tensor, comm: Comm, plan: SkipPlan, always: Sequence[Span] = ()) -> None:
    """Sum this rank's chunk of `x` over its contributors into `out` [m], in the type of `out`, without changing `x`.

    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x), and s times the bytes of `always`
    """
    P, rank, m, protected = comm.size, comm.rank, out.numel(), SpanSet(tuple(always))
    chunks = x.split(m) if m else [x] * P
    # To an owner that omits this rank, send only the elements that are never omitted.
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
    """Return whether the chunk of `owner` omits `source`."""
    return (source - owner) % P in plan.offsets
