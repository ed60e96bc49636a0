"""Two levels: dense inside a node, skipping between nodes.

Ranks 0..G-1 are the first node, G..2G-1 the second, and so on. Each node reduce-scatters densely, so that each of its ranks holds
one shard of the node's sum; ranks with the same shard reduce it over the N nodes, where SkipReduce leaves out s nodes; each node
gathers its shards. Only the links between nodes carry less, and the unit left out is a whole node.
"""

from collections.abc import Callable

from torch import Tensor

from sparsync.collectives import ring
from sparsync.collectives.skip_plan import SkipPlan
from sparsync.comm.subset import SubsetComm
from sparsync.core import Comm, Cost, spans

AllReduce = Callable[[Tensor, Comm, SkipPlan, Tensor | None], None]
AllReduceCost = Callable[[int, int, int, int, SkipPlan], Cost]


def hierarchical_all_reduce_(
    x: Tensor, comm: Comm, node_size: int, plan: SkipPlan, between: AllReduce, kept: Tensor | None = None
) -> None:
    """Writes into `x` [n], on every rank, the sums over the contributing nodes; `between` reduces one shard over the nodes.

    To `kept` [n], where given, the node's sum is added on that part of this rank's shard where the node was left out.
    Steps: 2 (G-1) + those of `between` over N ranks
    Bytes sent per rank: 2 (G-1)/G * nbytes(x) inside the node, those of `between` for nbytes(x)/G between nodes
    """
    node, place = divmod(comm.rank, node_size)
    inside = SubsetComm(comm, [node * node_size + other for other in range(node_size)])
    across = SubsetComm(comm, [other * node_size + place for other in range(comm.size // node_size)])
    shard = ring.ring_reduce_scatter_(x, inside)
    between(shard.of(x), across, plan, shard.of(kept) if kept is not None else None)
    ring.ring_all_gather_(x, inside)


def cost(
    count: int, element_nbytes: int, P: int, rank: int, node_size: int, plan: SkipPlan, between: AllReduceCost
) -> Cost:
    """What `hierarchical_all_reduce_` sends from this rank, inside its node and between nodes together.

    `between` is the cost over a SubsetComm: for the direct form `direct.cost_in_messages`.
    """
    node, place = divmod(rank, node_size)
    shard = spans(count, node_size)[place]
    inside = ring.reduce_scatter_cost(count, element_nbytes, node_size, place)
    inside += ring.all_gather_cost(count, element_nbytes, node_size, place)
    return inside + between(len(shard), element_nbytes, P // node_size, node, plan)
