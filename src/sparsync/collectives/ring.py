"""The ring: reduce-scatter and all-gather between neighbours, complete or with its first reduce-scatter steps left out.

The ranks stand in a circle. In each step a rank sends one chunk to the next rank and receives one from the rank before. With
y = rank + shift, a rank starts the reduce-scatter with chunk y-1 and ends it with chunk y, which it then owns; the all-gather passes
the owned chunks round. SkipReduce (doi 10.1145/3725843.3756092) starts the reduce-scatter s steps late, with chunk y-1-s: P-1-s steps
remain, and chunk c lacks the s ranks just after its owner. The all-gather is always complete, so all ranks end with the same bits.

Elements that are never left out (`always` of them, first in their chunks) ride along: the s steps carry nothing but them, and the
others carry whole chunks. So there are never more message rounds than in a complete ring. That is ours.
"""

from torch import Tensor

from sparsync.collectives.skip_plan import SkipPlan, chunks_of, chunks_with_any
from sparsync.comm.busiest import busiest_of
from sparsync.comm.cost import costs
from sparsync.comm.plan import Exchange, Peers
from sparsync.core import Comm, Cost, Span, adjacent
from sparsync.kernels.rounding import add_rounded_

_DENSE = SkipPlan()


def ring_reduce_scatter_cost(
    count: int, element_nbytes: int, P: int, rank: int, skip: int = 0, shift: int = 0, always: int = 0
) -> Cost:
    """Return what `ring_reduce_scatter_` sends from this rank."""
    y, steps = rank + shift, len(_steps(P, skip, always))
    # Whole chunks y+1, ..., y-1-s, and of the s after these what is never left out.
    width = P - 1 - skip
    sent = adjacent(always, P, y + 1, P - 1) + adjacent(count - always, P, y + 1, width)
    full = adjacent(chunks_with_any(count, P, always), P, y + 1, width) + adjacent(min(P, always), P, y - skip, skip)
    return Cost(steps, full, element_nbytes * sent)


def ring_all_gather_cost(count: int, element_nbytes: int, P: int, rank: int, shift: int = 0, always: int = 0) -> Cost:
    """Return what `ring_all_gather_` sends from this rank."""
    first = rank + shift + 2  # all chunks but y+1
    sent = adjacent(always, P, first, P - 1) + adjacent(count - always, P, first, P - 1)
    return Cost(P - 1, adjacent(chunks_with_any(count, P, always), P, first, P - 1), element_nbytes * sent)


def ring_exchanges(
    count: int, element_nbytes: int, P: int, skip: int = 0, always: int = 0, peers: Peers = "ring"
) -> list[Exchange]:
    """Return the reduce-scatter and the all-gather of `ring_all_reduce_`: each what its busiest rank sends."""
    # As a function of the rank, what is sent has straight pieces that end where an end of its chunks meets one of the longer ones.
    long = [0, always % P, (count - always) % P, min(P, always), chunks_with_any(count, P, always)]
    ranks = {(end + off) % P for end in long for off in (-2, -1, 0, skip, skip + 1)}
    reduced = busiest_of(ring_reduce_scatter_cost(count, element_nbytes, P, rank, skip, 0, always) for rank in ranks)
    gathered = busiest_of(ring_all_gather_cost(count, element_nbytes, P, rank, 0, always) for rank in ranks)
    # A rank receives what its neighbour sends.
    return [
        Exchange("send_recv", cost.nbytes, cost.messages, cost.steps, cost.nbytes, peers)
        for cost in (reduced, gathered)
    ]


def ring_all_reduce_cost(
    count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = _DENSE, always: int = 0
) -> Cost:
    """Return what `ring_all_reduce_` sends from this rank."""
    reduced = ring_reduce_scatter_cost(count, element_nbytes, P, rank, plan.skip, plan.shift, always)
    return reduced + ring_all_gather_cost(count, element_nbytes, P, rank, plan.shift, always)


@costs(
    lambda _, x, comm, plan=_DENSE, omitted=None, always=0: ring_all_reduce_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, plan, always
    )
)
def ring_all_reduce_(
    x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, omitted: Tensor | None = None, always: int = 0
) -> None:
    """Write into `x` [n], on every rank, the sum over the contributors of each chunk, and over all ranks of its first elements.

    The chunks are `chunks_of(n, P, always)`: each begins with its share of the `always` elements that all ranks contribute to.
    `plan.offsets` must be {1, ..., s}: a ring can leave out nothing else. Where this rank is left out, its elements of `x` are added to
    `omitted` [n], if given, and so is what the type of `x` drops of the sums that it forms, where `omitted` is wider. Raises ValueError
    for other offsets.
    Steps: 2 (P-1) - s; 2 (P-1) with P or more elements that are never left out
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x) + s/P * nbytes of what is never left out
    """
    if comm.size == 1:
        return
    if plan.offsets != tuple(range(1, plan.skip + 1)):
        raise ValueError(f"a ring leaves out the offsets 1..s, got {plan.offsets}; use the direct form for other sets")
    if omitted is not None:
        for span in plan.skipped(comm.rank, x.numel(), comm.size, always):
            span.of(omitted).add_(span.of(x))
    ring_reduce_scatter_(x, comm, plan.skip, plan.shift, always, omitted)
    ring_all_gather_(x, comm, plan.shift, always)


@costs(
    lambda _, x, comm, skip=0, shift=0, always=0, dropped=None: ring_reduce_scatter_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, skip, shift, always
    )
)
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


@costs(
    lambda _, x, comm, shift=0, always=0: ring_all_gather_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, shift, always
    )
)
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
