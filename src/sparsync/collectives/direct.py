"""The direct form: every rank sends its slice to each owner at once, the owners add up and pass their sums round.

One message round where a ring takes P-1-s, and any set of offsets S may be left out (zero-length parts of the all-to-all), not only
{1, ..., s}; with that set it sums the same contributors as the ring. Generalises doi 10.1145/3725843.3756092.
"""

from dataclasses import replace

from torch import Tensor

from sparsync.collectives import ring
from sparsync.collectives.skip_plan import SkipPlan
from sparsync.comm.metered import all_to_all_cost
from sparsync.core import Comm, Cost, Span, spans


def direct_all_reduce_(x: Tensor, comm: Comm, plan: SkipPlan = SkipPlan(), kept: Tensor | None = None) -> None:  # noqa: B008  # frozen
    """Writes into `x` [n], on every rank, the sums over the contributors of each slice, added in rank order.

    To `kept` [n], where given, this rank's part of `x` is added where it was left out; the rest of it is not touched.
    Steps: 1 + (P-1)
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x)
    """
    P = comm.size
    if P == 1:
        return
    if kept is not None:
        for span in plan.skipped(comm.rank, x.numel(), P):
            span.of(kept).add_(span.of(x))
    direct_reduce_scatter_(x, comm, plan)
    ring.ring_all_gather_(x, comm, plan.shift)


def direct_reduce_scatter_(x: Tensor, comm: Comm, plan: SkipPlan = SkipPlan()) -> Span:  # noqa: B008  # frozen
    """The slice of `x` that now holds the sum over its contributors; the rest of `x` is as it was.

    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x)
    """
    P = comm.size
    slices = spans(x.numel(), P)
    mine = slices[(comm.rank + plan.shift) % P]
    outgoing = [
        slices[(owner + plan.shift) % P].of(x) if _sends(comm.rank, owner, P, plan) else x[:0] for owner in range(P)
    ]
    received = comm.all_to_all(outgoing, [len(mine) * _sends(source, comm.rank, P, plan) for source in range(P)])
    total = _sum_in_rank_order([mine.of(x) if r == comm.rank else part for r, part in enumerate(received)])
    mine.of(x).copy_(total)
    return mine


def cost(count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = SkipPlan()) -> Cost:  # noqa: B008  # frozen
    """What `direct_all_reduce_` sends from this rank."""
    slices = spans(count, P)
    lengths = [len(slices[(owner + plan.shift) % P]) * _sends(rank, owner, P, plan) for owner in range(P)]
    exchanged = all_to_all_cost([element_nbytes * length for length in lengths], rank)
    return exchanged + ring.all_gather_cost(count, element_nbytes, P, rank, plan.shift)


def cost_in_messages(count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = SkipPlan()) -> Cost:  # noqa: B008  # frozen
    """The same over a SubsetComm, whose all-to-all is P-1 messages one after the other."""
    return replace(cost(count, element_nbytes, P, rank, plan), steps=2 * (P - 1))


def _sends(source: int, owner: int, P: int, plan: SkipPlan) -> bool:
    """Whether `source` sends `owner` its part of the slice that `owner` sums."""
    return source != owner and (source - owner) % P not in plan.offsets


def _sum_in_rank_order(parts: list[Tensor]) -> Tensor:
    there = [part for part in parts if part.numel()]
    if not there:
        return parts[0]
    total = there[0].clone()
    for part in there[1:]:
        total += part
    return total
