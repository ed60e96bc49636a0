"""Networks, and the seconds that an exchange takes on them in closed form, for any number of ranks.

The model is alpha-beta (Hockney, Parallel Computing 20, 1994) with a cost for each message as in LogGP (Alexandrov et al., SPAA 1995):

    seconds = rounds * delays * latency + messages * per_message + the largest, over links, of bytes that cross it / its bandwidth

Every network is a hierarchy of groups of ranks (`Tier`), each with a link up to the rest and down from it: the rank itself, its node, its
leaf switch, its region. Links are full duplex, and what shares a link shares its bandwidth. Of n payload bytes that a rank sends, these
cross the link of its group of g ranks out of P, in each direction:

    ring    n                        one edge of the ring leaves each group, where ranks of a group stand together in it
    tree    n; n/2 of two groups     an inner group of a double binary tree sends up once and down once; two groups, half of each
    all     g n (P-g)/(P-1)          each rank sends as much to every other rank
    pair    g n                      at worst, all partners are outside

On the way down the busiest rank counts with what it receives. "pair" is the worst case: where partners are in the
same group, it takes less.

Bandwidth of a ring all_reduce of S bytes is what nccl-tests calls busbw, S/t * 2 (P-1)/P, since n = 2 (P-1)/P * S leaves each rank
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md); that of all_gather is busbw as well. Algorithms and their costs:
Thakur, Rabenseifner and Gropp, IJHPCA 19 (2005). What the model leaves out: queues and losses in switches, and the time to sum.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from sparsync_lab.predict.exchanges import Exchange, Kind

AllReduce = Literal["direct", "ring", "tree", "best"]

# One-way delays of a dependent round over gloo, in settled steps: receives are posted steps ahead, so that gloo's message that they are
# ready has arrived before.
GLOO_DELAYS_PER_ROUND = 1.0


@runtime_checkable
class Network(Protocol):
    """Anything that knows how long an exchange takes among P ranks."""

    def seconds(self, exchange: Exchange, P: int) -> float: ...


@dataclass(frozen=True)
class Link:
    """A full-duplex link. `per_message_s` is what sending and receiving one message costs a rank, LogGP's 2 o."""

    bandwidth_bits_per_s: float
    latency_s: float = 0.0  # from one end to the other, LogGP's L
    per_message_s: float = 0.0
    down_bits_per_s: float | None = None  # towards the ranks, where it differs

    def __post_init__(self) -> None:
        for name in ("bandwidth_bits_per_s", "down_bits_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} of a link must be above 0, got {value}; leave a link out that has no limit")
        for name in ("latency_s", "per_message_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} of a link must be at least 0 and finite, got {getattr(self, name)}")

    def derated(self, efficiency: int | float) -> "Link":
        """Return the link with `efficiency` times the bandwidth. Raises ValueError outside (0, 1]."""
        if not 0 < efficiency <= 1:
            raise ValueError(f"the efficiency of a link must be in (0, 1], got {efficiency}")
        down = None if self.down_bits_per_s is None else efficiency * self.down_bits_per_s
        return replace(self, bandwidth_bits_per_s=efficiency * self.bandwidth_bits_per_s, down_bits_per_s=down)

    def up_s(self, nbytes: int | float) -> float:
        """Return the seconds in which `nbytes` leave, without latency."""
        return 8 * nbytes / self.bandwidth_bits_per_s

    def down_s(self, nbytes: int | float) -> float:
        """Return the seconds in which `nbytes` arrive, without latency."""
        return 8 * nbytes / (self.down_bits_per_s or self.bandwidth_bits_per_s)


@dataclass(frozen=True)
class Tier:
    """Groups of `ranks` adjacent ranks. Group i reaches what is outside through `links[i % len(links)]`."""

    ranks: int
    links: tuple[Link, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a group has at least 1 rank, got {self.ranks}")
        if not self.links:
            raise ValueError(f"groups of {self.ranks} ranks need a link, got none")

    def groups(self, P: int) -> int:
        """Return how many groups P ranks make; the last one may be smaller."""
        return -(-P // self.ranks)

    def links_of(self, P: int) -> tuple[Link, ...]:
        """Return the links of the groups that P ranks make, each at most once."""
        return self.links[: self.groups(P)]


@dataclass(frozen=True)
class Tiers:
    """A hierarchy of groups, the smallest first. `flat_switch` and `nodes` make one.

    `all_reduce` is the algorithm of an all_reduce: "direct", to the owners of chunks and back, as `Exchange` counts it and as over gloo; a
    ring, of 2 (P-1) rounds; a tree, of 2 ceil(log2 P) rounds and P/(P-1) times the bytes, as NCCL's double binary tree; or "best", the
    quicker one of ring and tree. Of two groups each sends the other half of a tensor up one
    tree and half of it down the other, so half of those bytes cross their links (https://github.com/NVIDIA/nccl/issues/812). `rings` are
    the other kinds that the backend sends round a ring, in P-1 rounds, whatever `Exchange.peers` says: NCCL's all_gather.
    `delays_per_round` are the one-way delays that a dependent round takes: 1 where messages need not wait for their receivers, and
    GLOO_DELAYS_PER_ROUND over gloo.
    """

    tiers: tuple[Tier, ...]
    all_reduce: AllReduce = "ring"
    rings: tuple[Kind, ...] = ()
    delays_per_round: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.delays_per_round < math.inf:
            raise ValueError(
                f"delays_per_round must be at least 1 and finite, got {self.delays_per_round}: a message takes one one-way delay"
            )
        sizes = [tier.ranks for tier in self.tiers]
        if sizes[:1] != [1] or sizes != sorted(set(sizes)):
            raise ValueError(f"groups must grow from tier to tier, from single ranks on, got {sizes} ranks")

    def seconds(self, exchange: Exchange, P: int) -> float:
        """Return how long this exchange takes among P ranks that begin at the same time; 0 for P = 1."""
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
                messages=min(exchange.messages, 4 * math.ceil(math.log2(P))),
            )
            tree_s = self._seconds(tree, P, "tree")
            return tree_s if self.all_reduce == "tree" else min(tree_s, ring_s)
        if exchange.kind in self.rings and exchange.peers == "all":
            return self._seconds(replace(exchange, rounds=exchange.rounds * (P - 1)), P, "ring")
        return self._seconds(exchange, P, exchange.peers)

    def _seconds(self, exchange: Exchange, P: int, peers: str) -> float:
        """Return the seconds with these peers; every round crosses the slowest tier, save round a ring."""
        busiest = max(self._crossing_s(tier, exchange, P, peers) for tier in self.tiers if tier.ranks < P)
        if peers == "ring":
            latency_s, per_message_s = self._mean_hop(P)
        else:
            crossed = [link for tier in self.tiers if tier.ranks < P for link in tier.links_of(P)]
            latency_s = max(link.latency_s for link in crossed)
            per_message_s = max(link.per_message_s for link in self.tiers[0].links_of(P))
        return exchange.rounds * self.delays_per_round * latency_s + exchange.messages * per_message_s + busiest

    def _crossing_s(self, tier: Tier, exchange: Exchange, P: int, peers: str) -> float:
        """Return the seconds in which the busiest group of a tier sends and receives, which it does at the same time."""
        g = min(tier.ranks, P)
        if peers == "ring":
            up, down = exchange.nbytes, exchange.received
        elif peers == "tree":
            share = 0.5 if tier.groups(P) == 2 else 1.0
            up, down = share * exchange.nbytes, share * exchange.received
        elif peers == "pair":
            up, down = g * exchange.nbytes, exchange.received + (g - 1) * exchange.nbytes
        else:
            outside = (P - g) / (P - 1)
            up, down = g * outside * exchange.nbytes, outside * (exchange.received + (g - 1) * exchange.nbytes)
        return max(max(link.up_s(up), link.down_s(down)) for link in tier.links_of(P))

    def _mean_hop(self, P: int) -> tuple[float, float]:
        """Return the mean latency of the ring's edges, and the cost of a message.

        A chunk that goes round passes every edge once, so latencies add up. An edge has the latency of the largest group that it leaves.
        """
        total, inner_edges = 0.0, P
        for number, tier in enumerate(self.tiers):
            above = self.tiers[number + 1] if number + 1 < len(self.tiers) else None
            outer_edges = above.groups(P) if above is not None and above.ranks < P else 0
            latencies = [link.latency_s for link in tier.links_of(P)]
            total += (inner_edges - outer_edges) * (sum(latencies) / len(latencies))
            inner_edges = outer_edges
            if not outer_edges:
                break
        return total / P, max(link.per_message_s for link in self.tiers[0].links_of(P))


def flat_switch(
    *links: Link, all_reduce: AllReduce = "ring", rings: tuple[Kind, ...] = (), delays_per_round: float = 1.0
) -> Tiers:
    """Return ranks on a switch without contention inside: one link for all ranks, or one for each of them."""
    return Tiers((Tier(1, links),), all_reduce, rings, delays_per_round)


def nodes(
    inside: Link,
    between: Link,
    ranks_per_node: int,
    links_per_node: int = 1,
    all_reduce: AllReduce = "ring",
    rings: tuple[Kind, ...] = (),
) -> Tiers:
    """Return nodes whose ranks reach each other by `inside`, and other nodes by `links_per_node` shared links `between`."""
    if ranks_per_node == 1:
        return flat_switch(bundled(between, links_per_node), all_reduce=all_reduce, rings=rings)
    return Tiers((Tier(1, (inside,)), Tier(ranks_per_node, (bundled(between, links_per_node),))), all_reduce, rings)


def bundled(link: Link, count: int) -> Link:
    """Return `count` parallel links as one, with their bandwidths together."""
    if count < 1:
        raise ValueError(f"a node has at least 1 link, got {count}")
    down = None if link.down_bits_per_s is None else count * link.down_bits_per_s
    return replace(link, bandwidth_bits_per_s=count * link.bandwidth_bits_per_s, down_bits_per_s=down)
