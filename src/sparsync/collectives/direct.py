"""The direct form: every rank sends its chunk to each owner at once, and the owners pass their sums round.

One step where a ring takes P-1-s, and any set of offsets S may be left out (empty messages of the all-to-all), not only
{1, ..., s}; with that set it sums the same contributors as the ring. Generalises doi 10.1145/3725843.3756092.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sparsync.collectives.ring import ring_all_gather_, ring_all_gather_cost, ring_exchanges
from sparsync.collectives.skip_plan import SkipPlan, chunks_of, first_offsets
from sparsync.comm.busiest import busiest_of
from sparsync.comm.cost import costs
from sparsync.comm.metered import all_to_all_cost
from sparsync.comm.plan import Exchange
from sparsync.core import Comm, Cost, Span
from sparsync.kernels.rounding import add_rounded_

_DENSE = SkipPlan()


def direct_all_reduce_cost(
    count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = _DENSE, always: int = 0
) -> Cost:
    """Return what `direct_all_reduce_` sends from this rank."""
    exchanged = _scattered_cost(count, element_nbytes, P, rank, plan, always)
    return exchanged + ring_all_gather_cost(count, element_nbytes, P, rank, plan.shift, always)


def direct_exchanges(
    count: int, element_nbytes: int, P: int, offsets: Sequence[int], always: int = 0
) -> list[Exchange]:
    """Return the all-to-all and the ring's all-gather of `direct_all_reduce_`: each what its busiest rank sends, and receives."""
    if P == 1:
        return []
    ring, gathered = ring_exchanges(count, element_nbytes, P, len(offsets), always)
    scattered = replace(ring, kind="all_to_all", rounds=1, peers="all")
    if tuple(offsets) != first_offsets(len(offsets)):
        # Which of the longer chunks a rank leaves out depends on the set; no form in a few numbers.
        plan = SkipPlan(tuple(offsets))
        cost = busiest_of(_scattered_cost(count, element_nbytes, P, rank, plan, always) for rank in range(P))
        scattered = replace(scattered, nbytes=cost.nbytes, messages=cost.messages)
    first = chunks_of(count, P, always)[0]
    received = (P - 1 - len(offsets)) * len(first.span) + len(offsets) * len(first.always)
    return [replace(scattered, received=element_nbytes * received), gathered]


def direct_all_reduce_cost_in_messages(
    count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = _DENSE, always: int = 0
) -> Cost:
    """Return the same over a SubsetComm, whose all-to-all is P-1 messages that wait for each other."""
    return replace(direct_all_reduce_cost(count, element_nbytes, P, rank, plan, always), steps=2 * (P - 1))


@costs(
    lambda _, x, comm, plan=_DENSE, omitted=None, always=0: direct_all_reduce_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, plan, always
    )
)
def direct_all_reduce_(
    x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, omitted: Tensor | None = None, always: int = 0
) -> None:
    """Write into `x` [n], on every rank, the sum over the contributors of each chunk, added in rank order.

    As in `ring_all_reduce_`, all ranks contribute to the `always` elements that lie first in the chunks, and where this rank is left
    out, its elements of `x` are added to `omitted` [n], if given, and so is what the type of `x` drops of the sum that it forms.
    Steps: 1, and P-1 of the ring's all-gather
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x) + s/P * nbytes of what is never left out
    """
    P = comm.size
    if P == 1:
        return
    if omitted is not None:
        for span in plan.skipped(comm.rank, x.numel(), P, always):
            span.of(omitted).add_(span.of(x))
    direct_reduce_scatter_(x, comm, plan, always, omitted)
    ring_all_gather_(x, comm, plan.shift, always)


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
        x[:0] if owner == rank else chunks[(owner + plan.shift) % P].sent(_skips(rank, owner, P, plan)).of(x)
        for owner in range(P)
    ]
    skipping = [_skips(source, rank, P, plan) for source in range(P)]
    received = comm.all_to_all(outgoing, [len(mine.sent(skipping[r])) * (r != rank) for r in range(P)])
    whole = [mine.span.of(x) if r == rank else chunk for r, chunk in enumerate(received)]
    first = len(mine.always)
    for part, addends in (
        (mine.always, [chunk[:first] for chunk in whole]),
        (mine.others, [chunk[first:] for chunk, skips in zip(whole, skipping, strict=True) if not skips]),
    ):
        if len(part):
            total = addends[0].clone()
            for addend in addends[1:]:
                add_rounded_(total, addend, part.of(dropped) if dropped is not None else None)
            part.of(x).copy_(total)
    return mine.span


def _scattered_cost(count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan, always: int) -> Cost:
    chunks = chunks_of(count, P, always)
    sent = [chunks[(owner + plan.shift) % P].sent(_skips(rank, owner, P, plan)) for owner in range(P)]
    lengths = [len(span) * (owner != rank) for owner, span in enumerate(sent)]
    return all_to_all_cost([element_nbytes * length for length in lengths], rank)


def _skips(source: int, owner: int, P: int, plan: SkipPlan) -> bool:
    """Return whether the contribution of `source` is left out of the chunk that `owner` sums."""
    return (source - owner) % P in plan.offsets
