"""A reduce-scatter with fixed owners, as sharded training has them: rank r ends with the sum of chunk r, minus who is left out.

`x` [P m] is P chunks of m elements in the order of their owners. With `plan.offsets` S, owner o gets nothing from rank o + i for each i
in S, except inside the spans `always` of a chunk, which nobody leaves out. Sums run in a ring's order, from the rank after the owner
round to the owner, which is also gloo's.
"""

from collections.abc import Sequence

from torch import Tensor

from sparsync.collectives.skip_plan import SkipPlan
from sparsync.comm.cost import costs
from sparsync.comm.metered import all_to_all_cost
from sparsync.core import Comm, Cost, Span


def reduce_scatter_cost(
    m: int, element_nbytes: int, P: int, rank: int, plan: SkipPlan, always: Sequence[Span] = ()
) -> Cost:
    """Return what `reduce_scatter` sends from this rank."""
    counts = [0 if o == rank else _count(m, skips(rank, o, P, plan), always) for o in range(P)]
    return all_to_all_cost([element_nbytes * count for count in counts], rank)


@costs(
    lambda _, x, out, comm, plan, always=(): reduce_scatter_cost(
        out.numel(), x.element_size(), comm.size, comm.rank, plan, always
    )
)
def reduce_scatter(x: Tensor, out: Tensor, comm: Comm, plan: SkipPlan, always: Sequence[Span] = ()) -> None:
    """Write to `out` [m], in its type, the sum of this rank's chunk over its contributors; `x` is not changed.

    Steps: 1
    Bytes sent per rank: (P-1-s)/P * nbytes(x), and s times the bytes of `always`
    """
    P, rank, m = comm.size, comm.rank, out.numel()
    chunks = x.split(m) if m else [x] * P
    outgoing = [x[:0] if o == rank else _packet(chunks[o], skips(rank, o, P, plan), always) for o in range(P)]
    counts = [0 if r == rank else _count(m, skips(r, rank, P, plan), always) for r in range(P)]
    received = comm.all_to_all(outgoing, counts)
    order = [(rank + i) % P for i in range(1, P)]
    first = received[order[0]] if P > 1 and not skips(order[0], rank, P, plan) else None
    out.zero_() if first is None else out.copy_(first)
    for source in order if first is None else order[1:]:
        if not skips(source, rank, P, plan):
            out.add_(received[source])
        elif always:
            _add_always(out, received[source], always)
    out.add_(chunks[rank])


def skips(source: int, owner: int, P: int, plan: SkipPlan) -> bool:
    """Return whether what `source` has for the chunk of `owner` is left out."""
    return (source - owner) % P in plan.offsets


def _count(m: int, skipped: bool, always: Sequence[Span]) -> int:
    return sum(map(len, always)) if skipped else m


def _packet(chunk: Tensor, skipped: bool, always: Sequence[Span]) -> Tensor:
    if not skipped:
        return chunk
    packet = chunk.new_empty(sum(map(len, always)))
    position = 0
    for span in always:
        packet[position : position + len(span)] = span.of(chunk)
        position += len(span)
    return packet


def _add_always(out: Tensor, packet: Tensor, always: Sequence[Span]) -> None:
    position = 0
    for span in always:
        span.of(out).add_(packet[position : position + len(span)])
        position += len(span)
