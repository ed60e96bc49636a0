"""Two levels: dense inside a node, skipping between nodes.

Ranks 0..G-1 are the first node, G..2G-1 the second, and so on. Each node reduce-scatters densely, so that each of its ranks holds
one chunk of the node's sum. Ranks with the same chunk reduce it over the N nodes, where SkipReduce leaves out s nodes; then each node
gathers its chunks. Only the links between nodes carry less, and the unit left out is a whole node.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from sparsync.collectives.direct import direct_exchanges
from sparsync.collectives.ring import (
    ring_all_gather_,
    ring_all_gather_cost,
    ring_exchanges,
    ring_reduce_scatter_,
    ring_reduce_scatter_cost,
)
from sparsync.collectives.skip_plan import SkipPlan, chunks_of
from sparsync.comm.cost import costs
from sparsync.comm.plan import Exchange
from sparsync.comm.subset import SubsetComm
from sparsync.core import Comm, Cost

AllReduce = Callable[[Tensor, Comm, SkipPlan, Tensor | None, int], None]
AllReduceCost = Callable[[int, int, int, int, SkipPlan, int], Cost]


def hierarchical_all_reduce_cost(
    count: int,
    element_nbytes: int,
    P: int,
    rank: int,
    node_size: int,
    plan: SkipPlan,
    between: AllReduceCost,
    always: int = 0,
) -> Cost:
    """Return what `hierarchical_all_reduce_` sends from this rank, inside its node and between nodes together.

    `between` is the cost over a SubsetComm: for the direct form `direct_all_reduce_cost_in_messages`.
    """
    node, place = divmod(rank, node_size)
    chunk = chunks_of(count, node_size, always)[place]
    inside = ring_reduce_scatter_cost(count, element_nbytes, node_size, place, always=always)
    inside += ring_all_gather_cost(count, element_nbytes, node_size, place, always=always)
    return inside + between(len(chunk.span), element_nbytes, P // node_size, node, plan, len(chunk.always))


def hierarchical_exchanges(
    count: int, element_nbytes: int, P: int, node_size: int, form: str, offsets: Sequence[int], always: int = 0
) -> list[Exchange]:
    """Return the exchanges of `hierarchical_all_reduce_`: each what its busiest rank sends; `form` is that between nodes."""
    nodes = P // node_size
    first, last = ring_exchanges(count, element_nbytes, node_size, 0, always, "node")
    # Of the chunks that the ranks of a node hold, the first is the longest in both its parts.
    chunk = chunks_of(count, node_size, always)[0]
    held, protected = len(chunk.span), len(chunk.always)
    if form == "ring":
        between = ring_exchanges(held, element_nbytes, nodes, len(offsets), protected, "nodes")
    else:
        # Over a SubsetComm an all-to-all is P-1 messages that wait for each other.
        between = [
            replace(each, kind="send_recv", rounds=nodes - 1, peers="nodes")
            for each in direct_exchanges(held, element_nbytes, nodes, offsets, protected)
        ]
    return [first, *between, last]


@costs(
    lambda _, x, comm, node_size, plan, between, between_cost, omitted=None, always=0: hierarchical_all_reduce_cost(
        x.numel(), x.element_size(), comm.size, comm.rank, node_size, plan, between_cost, always
    )
)
def hierarchical_all_reduce_(
    x: Tensor,
    comm: Comm,
    node_size: int,
    plan: SkipPlan,
    between: AllReduce,
    between_cost: AllReduceCost,
    omitted: Tensor | None = None,
    always: int = 0,
) -> None:
    """Write into `x` [n], on every rank, the sums over the contributing nodes; `between` reduces one chunk over the nodes.

    Where this rank's node is left out, the node's sum of this rank's chunk is added to `omitted` [n], if given, and so is what the type
    of `x` drops of this rank's sums, where `omitted` is wider. No node is left out of `always` elements: they lie first in the G chunks
    (`chunks_of`) and, in each of those, first in its N chunks.
    Steps: 2 (G-1) + those of `between` over N ranks
    Bytes sent per rank: 2 (G-1)/G * nbytes(x) inside the node, those of `between` for nbytes(x)/G between nodes
    """
    node, place = divmod(comm.rank, node_size)
    inside = SubsetComm(comm, [node * node_size + other for other in range(node_size)])
    across = SubsetComm(comm, [other * node_size + place for other in range(comm.size // node_size)])
    first = len(chunks_of(x.numel(), node_size, always)[place].always)
    chunk = ring_reduce_scatter_(x, inside, always=always, dropped=omitted)
    between(chunk.of(x), across, plan, chunk.of(omitted) if omitted is not None else None, first)
    ring_all_gather_(x, inside, always=always)
