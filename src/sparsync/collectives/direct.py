"""The direct form: every rank sends its chunk to each owner at once, and the owners pass their sums round.

One step where a ring takes P-1-s, and any set of offsets S may be left out (empty messages of the all-to-all), not only
{1, ..., s}; with that set it sums the same contributors as the ring. Generalises doi 10.1145/3725843.3756092.
"""

from dataclasses import replace

from torch import Tensor

from sparsync.collectives.ring import ring_all_gather_, ring_all_gather_cost
from sparsync.collectives.skip_plan import SkipPlan
from sparsync.comm.cost import costs
from sparsync.comm.metered import all_to_all_cost
from sparsync.core import Comm, Cost, Span, spans, sum_in_rank_order

_DENSE = SkipPlan()


def direct_all_reduce_cost(count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = _DENSE) -> Cost:
    """Return what `direct_all_reduce_` sends from this rank."""
    chunks = spans(count, P)
    lengths = [len(chunks[(owner + plan.shift) % P]) * _sends(rank, owner, P, plan) for owner in range(P)]
    exchanged = all_to_all_cost([element_nbytes * length for length in lengths], rank)
    return exchanged + ring_all_gather_cost(count, element_nbytes, P, rank, plan.shift)


def direct_all_reduce_cost_in_messages(
    count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = _DENSE
) -> Cost:
    """Return the same over a SubsetComm, whose all-to-all is P-1 messages that wait for each other."""
    return replace(direct_all_reduce_cost(count, element_nbytes, P, rank, plan), steps=2 * (P - 1))


@costs(
    lambda _, x, comm, plan=_DENSE, omitted=None: direct_all_reduce_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, plan
    )
)
def direct_all_reduce_(x: Tensor, comm: Comm, plan: SkipPlan = _DENSE, omitted: Tensor | None = None) -> None:
    """Write into `x` [n], on every rank, the sum over the contributors of each chunk, added in rank order.

    Where this rank is left out, its elements of `x` are added to `omitted` [n], if given.
    Steps: 1, and P-1 of the ring's all-gather
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x)
    """
    P = comm.size
    if P == 1:
        return
    if omitted is not None:
        for span in plan.skipped(comm.rank, x.numel(), P):
            span.of(omitted).add_(span.of(x))
    direct_reduce_scatter_(x, comm, plan)
    ring_all_gather_(x, comm, plan.shift)


def direct_reduce_scatter_(x: Tensor, comm: Comm, plan: SkipPlan = _DENSE) -> Span:
    """Sum one chunk of `x` over its contributors, and return its span; the rest of `x` is as it was.

    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x)
    """
    P = comm.size
    chunks = spans(x.numel(), P)
    mine = chunks[(comm.rank + plan.shift) % P]
    outgoing = [
        chunks[(owner + plan.shift) % P].of(x) if _sends(comm.rank, owner, P, plan) else x[:0] for owner in range(P)
    ]
    received = comm.all_to_all(outgoing, [len(mine) * _sends(source, comm.rank, P, plan) for source in range(P)])
    addends = [mine.of(x) if r == comm.rank else chunk for r, chunk in enumerate(received)]
    addends = [chunk for chunk in addends if chunk.numel()]
    if addends:
        mine.of(x).copy_(sum_in_rank_order(addends))
    return mine


def _sends(source: int, owner: int, P: int, plan: SkipPlan) -> bool:
    """Return whether `source` sends `owner` its elements of the chunk that `owner` sums."""
    return source != owner and (source - owner) % P not in plan.offsets
