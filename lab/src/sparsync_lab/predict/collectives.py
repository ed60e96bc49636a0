"""Closed forms of the library's collectives: the traffic of their busiest rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from sparsync.collectives.skipping import chunks_of
from sparsync.collectives.sparse_allreduce import COUNT_NBYTES, ElementCodec
from sparsync.collectives.values import Quantizer, takes_little_more
from sparsync.comm.channels import LENGTH_NBYTES
from sparsync.core import Cost
from sparsync_lab.predict.exchanges import (
    NOTHING,
    Exchange,
    Peers,
    Work,
    all_gather_exchange,
    all_reduce_exchange,
    near_equal,
    packet_tally,
    tally,
    to_owners_exchange,
)


@dataclass(frozen=True)
class ValuesPlan:
    """The exchanges and work of `mean_at` or `quantized_all_reduce_`."""

    exchanges: list[Exchange]
    encode: Work = NOTHING
    decode: Work = NOTHING


def mean_at_plan(K: int, dtype: torch.dtype, P: int, quantizer: Quantizer, at_once: bool = False) -> ValuesPlan:
    """Plan `mean_at`."""
    if at_once and takes_little_more(K, dtype, P, quantizer):
        rounding = (NOTHING, NOTHING) if quantizer.exact else ((K, 1), (P * K, P))
        return ValuesPlan([all_gather_exchange({quantizer.nbytes(K, dtype): P})], *rounding)
    if quantizer.exact:
        return ValuesPlan([all_reduce_exchange(K, dtype.itemsize, P)])
    return quantized_all_reduce_plan(K, dtype, P, quantizer)


def quantized_all_reduce_plan(
    K: int, dtype: torch.dtype, P: int, quantizer: Quantizer, down: Quantizer | None = None
) -> ValuesPlan:
    """Plan `quantized_all_reduce_`."""
    to_owners, to_all = (
        tally(near_equal(K, P), lambda length, each=each: each.nbytes(length, dtype))
        for each in (quantizer, down or quantizer)
    )
    own = -(-K // P)
    decode = (P * own - own + K + K - own, 3 * P - 2)
    return ValuesPlan([to_owners_exchange(to_owners), all_gather_exchange(to_all)], (K, P), decode)


def even_split_exchanges(
    k: int, n: int, P: int, dtype: torch.dtype, codec: ElementCodec, counts_first: bool = False
) -> list[Exchange]:
    """List the exchanges of `split_and_reduce_` if each rank sends `k` elements, spread near-equally over regions of near-equal lengths."""
    if P == 1:
        nothing = Exchange("all_to_all", 0, 0, 0, 0)
        return [split_counts_exchange(P), nothing] if counts_first else [nothing]
    counts, lengths = near_equal(k, P - 1), near_equal(n, P)
    head = 0 if counts_first else COUNT_NBYTES
    longest = head + max(codec.nbytes(count, max(lengths), dtype) for count in counts)
    sent = sum((head + codec.nbytes(count, max(lengths), dtype)) * ranks for count, ranks in counts.items())
    received = (P - 1) * longest if k >= P or head else sent
    split = Exchange("all_to_all", sent, min(P - 1, k), 1, received)
    return [split_counts_exchange(P), split] if counts_first else [with_lengths(split, P)]


def split_counts_exchange(P: int) -> Exchange:
    """Make the all-to-all of one count to every other rank."""
    return to_owners_exchange({COUNT_NBYTES: P})


def with_lengths(exchange: Exchange, P: int) -> Exchange:
    """Add the lengths that messages carry if no rank knows them beforehand."""
    if P == 1:
        return exchange
    return replace(exchange, nbytes=exchange.nbytes + LENGTH_NBYTES * (P - 1), messages=P - 1)


def gather_elements_exchange(
    held: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, codec: ElementCodec
) -> Exchange:
    """Make the exchange of `all_gather_elements`: rank r holds `held[r]` elements of a span of `lengths[r]`."""
    return all_gather_exchange(packet_tally(held, lengths, lambda count, length: codec.nbytes(count, length, dtype)))


def gather_survivors_exchange(
    held: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, codec: ElementCodec
) -> Exchange:
    """Make the exchange of `gather_survivors`: rank r holds `held[r]` elements of a region of `lengths[r]`."""
    sizes = packet_tally(held, lengths, lambda count, length: 2 * COUNT_NBYTES + codec.nbytes(count, length, dtype))
    return with_lengths(all_gather_exchange(sizes), len(held))


def ring_exchanges(
    count: int, element_nbytes: int, P: int, skip: int = 0, always: int = 0, peers: Peers = "ring"
) -> list[Exchange]:
    """List the reduce-scatter and the all-gather of `all_reduce_` in the ring form."""
    # The bytes sent are piecewise linear in the rank. A piece ends where its first or last chunk becomes a longer one.
    long = [0, always % P, (count - always) % P, min(P, always), _chunks_with_any(count, P, always)]
    ranks = {(end + off) % P for end in long for off in (-2, -1, 0, skip, skip + 1)}
    reduced = _busiest_of(_ring_cost(count, element_nbytes, P, rank + 1, skip, always) for rank in ranks)
    gathered = _busiest_of(_ring_cost(count, element_nbytes, P, rank + 2, 0, always) for rank in ranks)
    # A rank receives as much as its neighbour sends.
    return [
        Exchange("send_recv", cost.nbytes, cost.messages, cost.steps, cost.nbytes, peers)
        for cost in (reduced, gathered)
    ]


def _ring_cost(count: int, element_nbytes: int, P: int, first: int, skip: int, always: int) -> Cost:
    """Count one rank's traffic: P-1-s whole chunks from number `first` on, and of the s chunks before, the part that is never skipped."""
    width = P - 1 - skip
    sent = _adjacent(always, P, first, P - 1) + _adjacent(count - always, P, first, width)
    whole = _adjacent(_chunks_with_any(count, P, always), P, first, width)
    part = _adjacent(min(P, always), P, first - 1 - skip, skip)
    steps = P - 1 if always else width  # reduce-scatter steps that carry data
    return Cost(steps, whole + part, element_nbytes * sent)


def direct_exchanges(count: int, element_nbytes: int, P: int, skip: int, always: int = 0) -> list[Exchange]:
    """List the all-to-all and the ring all-gather of `all_reduce_` in the direct form, with a ring's offsets."""
    if P == 1:
        return []
    ring, gathered = ring_exchanges(count, element_nbytes, P, skip, always)
    scattered = replace(ring, kind="all_to_all", rounds=1, peers="all")
    first = chunks_of(count, P, always)[0]
    received = (P - 1 - skip) * len(first.span) + skip * len(first.always)
    return [replace(scattered, received=element_nbytes * received), gathered]


def hierarchical_exchanges(
    count: int, element_nbytes: int, P: int, node_size: int, form: str, skip: int, always: int = 0
) -> list[Exchange]:
    """List the exchanges of `hierarchical_all_reduce_`; `form` is the one used between nodes."""
    nodes = P // node_size
    first, last = ring_exchanges(count, element_nbytes, node_size, 0, always, "node")
    # The first chunk in a node is the longest in both its parts.
    chunk = chunks_of(count, node_size, always)[0]
    held, protected = len(chunk.span), len(chunk.always)
    if form == "ring":
        between = ring_exchanges(held, element_nbytes, nodes, skip, protected, "nodes")
    else:
        # Over a SubsetComm, an all-to-all is P-1 sequential messages.
        between = [
            replace(each, kind="send_recv", rounds=nodes - 1, peers="nodes")
            for each in direct_exchanges(held, element_nbytes, nodes, skip, protected)
        ]
    return [first, *between, last]


def _chunks_with_any(count: int, P: int, always: int) -> int:
    """Count the non-empty chunks, which come first."""
    return min(P, max(always, count - always))


def _adjacent(count: int, parts: int, first: int, width: int) -> int:
    """Sum the lengths of `width` adjacent spans of `spans(count, parts)` from number `first` on, with wrap-around."""
    short, longer = divmod(count, parts)

    def below(number: int) -> int:
        rounds, place = divmod(number, parts)
        return rounds * count + place * short + min(place, longer)

    return below(first + width) - below(first)


def _busiest_of(costs: Iterable[Cost]) -> Cost:
    """Take the most bytes and the most messages over ranks with the same number of steps."""
    found = list(costs)
    return Cost(found[0].steps, max(cost.messages for cost in found), max(cost.nbytes for cost in found))
