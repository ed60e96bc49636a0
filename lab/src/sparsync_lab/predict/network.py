"""Networks, and closed forms of the seconds that an exchange takes on them, for any number of ranks.

The model is alpha-beta (Hockney, Parallel Computing 20, 1994):

    seconds = rounds * latency + the largest, over links, of bytes that cross it / its rate

Links are full duplex, and all traffic over a link shares its rate. When a rank sends n payload bytes, this many cross the link of its group
of g out of P ranks (the rank itself, or its node), in each direction:

    ring    n                        one edge of the ring leaves each group, because ranks of a group are neighbours in it
    tree    n; n/2 of two groups     an inner group of a double binary tree sends up once and down once; two groups, half of each
    all     g n (P-g)/(P-1)          each rank sends the same amount to every other rank

In the receiving direction, the busiest receiver counts. The bandwidth of a ring all_reduce of S bytes is nccl-tests' busbw, S/t 2 (P-1)/P,
since n = 2 (P-1)/P * S leaves each rank (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). Algorithms and their costs:
Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). The model omits queues and losses in switches, and the time to sum.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from sparsync_lab.predict.exchanges import Exchange, Kind

AllReduce = Literal["direct", "ring", "tree", "best"]


@runtime_checkable
class Network(Protocol):
    """Anything that predicts how long an exchange takes among P ranks."""

    def seconds(self, exchange: Exchange, P: int) -> float: ...


@dataclass(frozen=True)
class Link:
    """A full-duplex link, with the same rate in both directions."""

    bits_per_s: float
    latency_s: float = 0.0  # from one end to the other

    def times(self, factor: int | float) -> "Link":
        """Scale the rate by `factor`: an efficiency, or a number of parallel links."""
        return replace(self, bits_per_s=factor * self.bits_per_s)


@dataclass(frozen=True)
class Nodes:
    """Nodes of `ranks_per_node` adjacent ranks that reach each other by `inside`, and other nodes by their shared link `between`.

    With one rank per node this is a switch without internal contention. `all_reduce` selects the algorithm: "direct", to the owners of
    chunks and back, as `Exchange` counts it and gloo does it; a ring, with 2 (P-1) rounds; a tree, with 2 ceil(log2 P) rounds and P/(P-1)
    times the bytes, as NCCL's double binary tree; or "best", the faster of ring and tree. Two groups send each other half of a tensor up
    one tree and half down the other, so half of those bytes cross their links (https://github.com/NVIDIA/nccl/issues/812).
    `rings` lists the other kinds that the backend sends round a ring, in P-1 rounds, whatever `Exchange.peers` says: NCCL's all_gather.
    """

    between: Link
    ranks_per_node: int = 1
    inside: Link | None = None  # needed with several ranks per node
    all_reduce: AllReduce = "ring"
    rings: tuple[Kind, ...] = ()

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Predict how long this exchange takes among P ranks that begin together; 0 for P = 1."""
        if P == 1:
            return 0.0
        if exchange.kind == "all_reduce" and self.all_reduce != "direct":
            ring_s = self._seconds(replace(exchange, rounds=2 * (P - 1)), P, "ring")
            if self.all_reduce == "ring":
                return ring_s
            tree = replace(
                exchange,
                nbytes=exchange.nbytes * P / (P - 1),
                received=exchange.received * P / (P - 1),
                rounds=2 * math.ceil(math.log2(P)),
            )
            tree_s = self._seconds(tree, P, "tree")
            return tree_s if self.all_reduce == "tree" else min(tree_s, ring_s)
        if exchange.kind in self.rings and exchange.peers == "all":
            return self._seconds(replace(exchange, rounds=exchange.rounds * (P - 1)), P, "ring")
        return self._seconds(exchange, P, exchange.peers)

    def _seconds(self, exchange: Exchange, P: int, peers: str) -> float:
        """Compute the seconds with these peers. Every round crosses the slowest link, except in a ring."""
        crossed = [(g, link) for g, link in self._links() if g < P]
        busiest_s = max(8 * self._crossing(exchange, g, P, peers) / link.bits_per_s for g, link in crossed)
        latency_s = max(link.latency_s for _, link in crossed)
        if peers == "ring":
            # A chunk crosses every edge once, so latencies add up. One edge leaves each node.
            leaving = -(-P // self.ranks_per_node) if self.ranks_per_node < P else 0
            inside_s = 0.0 if self.inside is None else self.inside.latency_s
            latency_s = ((P - leaving) * inside_s + leaving * self.between.latency_s) / P
        return exchange.rounds * latency_s + busiest_s

    def _links(self) -> list[tuple[int, Link]]:
        """List the links, each with the number of ranks that share it."""
        shared = (self.ranks_per_node, self.between)
        return [shared] if self.inside is None else [(1, self.inside), shared]

    def _crossing(self, exchange: Exchange, g: int, P: int, peers: str) -> float:
        """Compute the bytes that cross the link of the busiest `g` ranks, in the busier direction."""
        if peers == "ring":
            return max(exchange.nbytes, exchange.received)
        if peers == "tree":
            return (0.5 if -(-P // g) == 2 else 1.0) * max(exchange.nbytes, exchange.received)
        outside = (P - g) / (P - 1)
        return max(g * outside * exchange.nbytes, outside * (exchange.received + (g - 1) * exchange.nbytes))
