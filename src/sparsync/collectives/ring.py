"""The ring: reduce-scatter and all-gather between neighbours, complete or with its first reduce-scatter steps left out.

The ranks stand in a circle; in each step a rank sends one slice to the next and receives one from the one before. With y = rank +
shift, a rank starts the reduce-scatter with slice y-1 and ends it with slice y, which it then owns; the all-gather passes the owned
slices round. SkipReduce (doi 10.1145/3725843.3756092) starts the reduce-scatter s steps late, with slice y-1-s: P-1-s steps remain,
and slice c lacks the s ranks just after its owner. The all-gather is always complete, so all ranks end with the same bits.
"""

from torch import Tensor

from sparsync.collectives.skip_plan import SkipPlan
from sparsync.comm.metered import send_cost
from sparsync.core import Comm, Cost, Span, spans


def ring_all_reduce_(x: Tensor, comm: Comm, plan: SkipPlan = SkipPlan(), kept: Tensor | None = None) -> None:  # noqa: B008  # frozen
    """Writes into `x` [n], on every rank, the sums over the contributors of each slice.

    `plan.offsets` must be {1, ..., s}: a ring can leave out nothing else. To `kept` [n], where given, this rank's part of `x` is added
    where it was left out; the rest of it is not touched.
    Steps: 2 (P-1) - s
    Bytes sent per rank: (2 (P-1) - s)/P * nbytes(x)
    """
    if comm.size == 1:
        return
    if plan.offsets != tuple(range(1, plan.skip + 1)):
        raise ValueError(f"a ring leaves out the offsets 1..s, got {plan.offsets}; use the direct form for other sets")
    if kept is not None:
        for span in plan.skipped(comm.rank, x.numel(), comm.size):
            span.of(kept).add_(span.of(x))
    ring_reduce_scatter_(x, comm, plan.skip, plan.shift)
    ring_all_gather_(x, comm, plan.shift)


def ring_reduce_scatter_(x: Tensor, comm: Comm, skip: int = 0, shift: int = 0) -> Span:
    """The slice of `x` that now holds the sum over its contributors; the other slices of `x` hold partial sums.

    Steps: P-1-s
    Bytes sent per rank: (P-1-s)/P * nbytes(x)
    """
    P = comm.size
    y = (comm.rank + shift) % P
    slices = spans(x.numel(), P)
    arrived = x.new_empty(len(slices[0]))
    for j in range(1 + skip, P):
        mine = slices[(y - j - 1) % P]
        partial = arrived[: len(mine)]
        comm.send_recv(slices[(y - j) % P].of(x), (comm.rank + 1) % P, partial, (comm.rank - 1) % P)
        mine.of(x).add_(partial)
    return slices[y]


def ring_all_gather_(x: Tensor, comm: Comm, shift: int = 0) -> None:
    """Copies the slice that each rank owns, rank + shift, into `x` on all ranks.

    Steps: P-1
    Bytes sent per rank: (P-1)/P * nbytes(x)
    """
    P = comm.size
    y = (comm.rank + shift) % P
    slices = spans(x.numel(), P)
    for j in range(P - 1):
        comm.send_recv(
            slices[(y - j) % P].of(x), (comm.rank + 1) % P, slices[(y - j - 1) % P].of(x), (comm.rank - 1) % P
        )


def reduce_scatter_cost(count: int, element_nbytes: int, P: int, rank: int, skip: int = 0, shift: int = 0) -> Cost:
    """What `ring_reduce_scatter_` sends from this rank."""
    return _sends(count, element_nbytes, P, [rank + shift - j for j in range(1 + skip, P)])


def all_gather_cost(count: int, element_nbytes: int, P: int, rank: int, shift: int = 0) -> Cost:
    """What `ring_all_gather_` sends from this rank."""
    return _sends(count, element_nbytes, P, [rank + shift - j for j in range(P - 1)])


def cost(count: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan = SkipPlan()) -> Cost:  # noqa: B008  # frozen
    """What `ring_all_reduce_` sends from this rank."""
    reduced = reduce_scatter_cost(count, element_nbytes, P, rank, plan.skip, plan.shift)
    return reduced + all_gather_cost(count, element_nbytes, P, rank, plan.shift)


def _sends(count: int, element_nbytes: int, P: int, numbers: list[int]) -> Cost:
    slices = spans(count, P)
    return sum((send_cost(element_nbytes * len(slices[number % P])) for number in numbers), Cost())
