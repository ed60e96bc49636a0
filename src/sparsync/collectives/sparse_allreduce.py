"""The three exchanges of a sparse all-reduce over regions: split and reduce, balance, all-gather (arXiv 2201.07598).

Every rank owns one region of the vector. First each rank sends its elements of a region to the region's owner, which adds them up.
Then, where the survivors lie very unevenly, some move to other ranks. Then all ranks gather them. Each is one message round; the counts
of the first travel in a separate round. Messages go out in rotated order where the transport does so (gloo and NCCL do).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparsync.comm.plan import (
    Exchange,
    all_gather_exchange,
    all_to_all_exchange,
    near_equal,
    packet_tally,
    to_owners_exchange,
)
from sparsync.core import Comm, Detail, Span, Sparse, phase, spans
from sparsync.kernels import operations as kernels

COUNT_NBYTES = 4  # an int32 for each pair of ranks


@runtime_checkable
class ElementCodec(Protocol):
    """Bytes of a Sparse and back, of a length that count and span determine: `wire.Elements` or `wire.Raw`."""

    @property
    def exact(self) -> bool: ...

    def encode(self, part: Sparse) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse: ...

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int: ...


@dataclass
class Control:
    """What a rank keeps of one bucket from step to step, besides its residual; the local threshold is its own, the rest the same on all."""

    t: int = 0  # steps
    boundaries: list[int] = field(default_factory=list)  # P-1; empty: equal widths
    # Of the published rules only; None: to be evaluated. The local one is this rank's own, so it is left out where ranks are compared.
    local_threshold: float | None = field(default=None, repr=False)
    global_threshold: float | None = None

    def regions(self, n: int, P: int) -> tuple[Span, ...]:
        """Return the region of each rank."""
        return regions_of(self.boundaries or equal_boundaries(n, P), n)

    def become(self, other: "Control") -> None:
        """Take over all of `other`."""
        self.__dict__.update(other.__dict__)


def equal_boundaries(n: int, P: int) -> list[int]:
    """Return the P-1 boundaries of regions of equal width."""
    return [span.start for span in spans(n, P)[1:]]


def balanced_boundaries(index: Int[Tensor, " k"], n: int, P: int) -> list[int]:
    """Return boundaries of regions that hold equally many of the ascending positions; of equal width where k < P."""
    k = index.numel()
    if k < P:
        return equal_boundaries(n, P)
    places = torch.tensor([j * k // P for j in range(1, P)], dtype=torch.int64, device=index.device)
    # A host sync: the lengths of messages depend on it.
    return index[places].tolist()


def regions_of(boundaries: Sequence[int], n: int) -> tuple[Span, ...]:
    """Return the P regions that P-1 ascending boundaries cut [0, n) into; some may be empty."""
    return tuple(Span(start, stop) for start, stop in pairwise((0, *boundaries, n)))


@dataclass(frozen=True)
class Reduced:
    """What `split_and_reduce_` moved."""

    outgoing: list[int]  # elements sent to each rank's region
    incoming: list[int]  # elements received from each rank
    before: Sparse | None  # the region's values where elements were added, some several times; None unless asked for
    error: Tensor | None  # [k] what quantizing dropped of this rank's values; None with an exact codec


def split_and_reduce_exchanges(
    outgoing: Sequence[Sequence[int]], lengths: Sequence[int], dtype: torch.dtype, codec: ElementCodec
) -> list[Exchange]:
    """Return the exchanges of `split_and_reduce_` where rank r sends `outgoing[r][p]` elements of the region of rank p."""
    sizes = [[codec.nbytes(k, length, dtype) for k, length in zip(row, lengths, strict=True)] for row in outgoing]
    return [split_counts_exchange(len(outgoing)), all_to_all_exchange(sizes)]


def even_split_exchanges(k: int, n: int, P: int, dtype: torch.dtype, codec: ElementCodec) -> list[Exchange]:
    """Return the same where each rank sends `k` elements, near-equally many to each other region, and regions are of near-equal length."""
    counts, lengths = near_equal(k, max(1, P - 1)), near_equal(n, P)
    longest = max(codec.nbytes(count, max(lengths), dtype) for count in counts)
    sent = sum(codec.nbytes(count, max(lengths), dtype) * ranks for count, ranks in counts.items())
    if P == 1:
        return [split_counts_exchange(P), Exchange("all_to_all", 0, 0, 0, 0)]
    return [
        split_counts_exchange(P),
        Exchange("all_to_all", sent, min(P - 1, k), 1, (P - 1) * longest if k >= P else sent),
    ]


def split_counts_exchange(P: int) -> Exchange:
    """Return the all-to-all of one count to every other rank."""
    return to_owners_exchange({COUNT_NBYTES: P})


def split_and_reduce_(
    region: Tensor, mine: Sparse, regions: Sequence[Span], comm: Comm, codec: ElementCodec, undoable: bool = False
) -> Reduced:
    """Add to `region`, the span of the vector this rank owns, what all ranks selected there, in rank order.

    With `undoable`, writing `before` back to the region restores it to the bit.
    Steps: 1 for the counts, 1 for the elements
    Bytes sent per rank: 4 (P-1), and the packets of its elements outside its own region
    """
    n, dtype = region.numel(), region.dtype
    with phase("encode"):
        outgoing_elements = kernels.split(mine, regions)
        outgoing = [elements.index.numel() for elements in outgoing_elements]
        packets = [codec.encode(elements) for elements in outgoing_elements]
    counts = torch.tensor(outgoing, dtype=torch.int32, device=region.device)
    # A host sync: the sizes of the receive buffers depend on it.
    incoming: list[int] = torch.cat(comm.all_to_all(list(counts.split(1)), [1] * comm.size)).tolist()
    received = comm.all_to_all(packets, [codec.nbytes(k, n, dtype) for k in incoming])
    with phase("decode"):
        addends = [codec.decode(packet, k, n, dtype) for packet, k in zip(received, incoming, strict=True)]
        before = None
        if undoable:
            touched = torch.cat([elements.index for elements in addends])
            before = Sparse(touched, kernels.gather(region, touched), n)
        for elements in addends:
            kernels.scatter_add_(region, elements)
        if codec.exact:
            return Reduced(outgoing, incoming, before, None)
        sent = zip(packets, outgoing, regions, strict=True)
        decoded = torch.cat([codec.decode_values(packet, k, len(span), dtype) for packet, k, span in sent])
        return Reduced(outgoing, incoming, before, mine.value - decoded)


def equal_holdings(held: Sequence[int]) -> list[int]:
    """Return as many elements for every rank, give or take one: what the paper balances to."""
    each, more = divmod(sum(held), len(held))
    return [each + (rank < more) for rank in range(len(held))]


def least_holdings(held: Sequence[int]) -> list[int]:
    """Return how many elements each rank should hold so that the most any rank sends, in balancing and all-gather together, is least.

    A rank that holds g and gives away all but h sends g - h elements once and h elements P-1 times; so one with far too many does best
    to keep few or none. For P > 2 no rank sends more than G + P - 2 of all G elements, however they lie; for P = 2 moving gains nothing.
    """
    P, total = len(held), sum(held)
    if P <= 2:
        return list(held)

    def capacity(level: int) -> list[int]:
        """Return the most each rank may hold so as to send at most `level`; -1 where it cannot."""
        fits = level // (P - 1)
        return [fits if g <= fits else -1 if g > level else (level - g) // (P - 2) for g in held]

    low, high = -1, total + P - 2
    while high - low > 1:
        level = (low + high) // 2
        most = capacity(level)
        low, high = (low, level) if min(most) >= 0 and sum(most) >= total else (level, high)
    wanted = [min(g, most) for g, most in zip(held, capacity(high), strict=True)]
    left = total - sum(wanted)
    for rank, most in enumerate(capacity(high)):
        taken = min(left, most - wanted[rank])
        wanted[rank] += taken
        left -= taken
    return wanted


def moves(held: Sequence[int], wanted: Sequence[int]) -> dict[tuple[int, int], int]:
    """Return how many elements each rank gives to which, (from, to) -> count, so that all hold what is wanted; at most 2P - 1 moves."""
    missing = [[rank, want - have] for rank, (have, want) in enumerate(zip(held, wanted, strict=True)) if want > have]
    plan: dict[tuple[int, int], int] = {}
    for giver, (have, want) in enumerate(zip(held, wanted, strict=True)):
        surplus = have - want
        while surplus > 0:
            taker, lacking = missing[-1]
            count = min(surplus, lacking)
            plan[giver, taker] = count
            surplus -= count
            missing[-1][1] -= count
            if missing[-1][1] == 0:
                missing.pop()
    return plan


def balance_exchange(
    held: Sequence[int], wanted: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, codec: ElementCodec
) -> Exchange:
    """Return the exchange of `balance`: what its busiest rank sends, and receives."""
    sent, received = ([0] * len(held) for _ in range(2))
    messages = [0] * len(held)
    for (giver, taker), count in moves(held, wanted).items():
        nbytes = codec.nbytes(count, lengths[giver], dtype)
        sent[giver] += nbytes
        received[taker] += nbytes
        messages[giver] += 1
    return Exchange("all_to_all", max(sent), max(messages), 1 if len(held) > 1 else 0, max(received))


def balance(
    mine: Sparse, held: Sequence[int], wanted: Sequence[int], regions: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Sequence[Span]]:
    """Return this rank's `wanted[rank]` elements once all have moved, and the span that those of each rank lie in.

    `held` and `wanted` are the same on all ranks. `mine` lies in this rank's region; positions are those in the whole vector. The codec
    is exact: values must arrive as they are.
    Steps: 1; 0 where nothing moves
    Bytes sent per rank: the packets of held - wanted elements, where that is positive
    """
    if list(wanted) == list(held):
        return mine, regions
    plan = moves(held, wanted)
    dtype, own = mine.value.dtype, regions[comm.rank]
    position = min(held[comm.rank], wanted[comm.rank])
    kept = Sparse(mine.index[:position], mine.value[:position], mine.length)
    packets: list[Tensor] = []
    for to in range(comm.size):
        count = plan.get((comm.rank, to), 0)
        a, b = position, position + count
        packets.append(codec.encode(Sparse(mine.index[a:b] - own.start, mine.value[a:b], len(own))))
        position = b
    counts = [plan.get((source, comm.rank), 0) for source in range(comm.size)]
    sizes = [codec.nbytes(count, len(span), dtype) for count, span in zip(counts, regions, strict=True)]
    received = zip(comm.all_to_all(packets, sizes), counts, regions, strict=True)
    moved = [_in_whole(packet, k, span, mine.length, dtype, codec) for packet, k, span in received]
    return kernels.merge([kept, *moved]), [Span(0, mine.length)] * comm.size


def uneven(held: Sequence[int], imbalance: float) -> bool:
    """Return whether some rank holds more than `imbalance` times the mean, and could hold less."""
    P, most = len(held), max(held)
    return most * P > imbalance * sum(held) and most > -(-sum(held) // P)


def survivors_exchanges(
    held: Sequence[int],
    wanted: Sequence[int] | None,
    lengths: Sequence[int],
    n: int,
    dtype: torch.dtype,
    exact: ElementCodec,
    codec: ElementCodec,
) -> list[Exchange]:
    """Return the exchanges of `balance`, whose codec is `exact`, and of the `all_gather_elements` that follows it."""
    if wanted is None or list(wanted) == list(held):
        return [gather_elements_exchange(held, lengths, dtype, codec)]
    return [
        balance_exchange(held, wanted, lengths, dtype, exact),
        gather_elements_exchange(wanted, [n] * len(held), dtype, codec),
    ]


def gather_elements_exchange(
    held: Sequence[int], lengths: Sequence[int], dtype: torch.dtype, codec: ElementCodec
) -> Exchange:
    """Return the exchange of `all_gather_elements`: rank r has `held[r]` elements of a span of `lengths[r]`."""
    return all_gather_exchange(packet_tally(held, lengths, lambda count, length: codec.nbytes(count, length, dtype)))


def all_gather_elements(
    mine: Sparse, held: Sequence[int], places: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Tensor]:
    """Return the elements of all ranks, which have no position in common, and this rank's values as all ranks decode them.

    `held`, how many elements each rank has, and `places`, a span that these lie in, are known to all.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of its own elements
    """
    dtype, own = mine.value.dtype, places[comm.rank]
    with phase("encode"):
        packet = codec.encode(Sparse(mine.index - own.start, mine.value, len(own)))
    packets = comm.all_gather(packet, [codec.nbytes(k, len(span), dtype) for k, span in zip(held, places, strict=True)])
    with phase("decode"):
        decoded = codec.decode_values(packet, mine.index.numel(), len(own), dtype)
        gathered = [
            replace(mine, value=decoded) if rank == comm.rank else _in_whole(packet, k, span, mine.length, dtype, codec)
            for rank, (packet, k, span) in enumerate(zip(packets, held, places, strict=True))
        ]
        return kernels.merge(gathered), decoded


def _in_whole(packet: Tensor, k: int, span: Span, length: int, dtype: torch.dtype, codec: ElementCodec) -> Sparse:
    """Decode a packet about `span` into elements of the whole vector of `length`."""
    elements = codec.decode(packet, k, len(span), dtype)
    return Sparse(elements.index + span.start, elements.value, length)


def k_largest(elements: Sparse, k: int) -> Sparse:
    """Return the k elements of largest magnitude."""
    top = kernels.top_k(elements.value, min(k, elements.value.numel())).index
    return Sparse(elements.index[top], elements.value[top], elements.length)


def details(
    mine: Sparse, survivors: Sparse, held: Sequence[int], wanted: Sequence[int], incoming: Sequence[int], rank: int
) -> dict[str, Detail]:
    """Return what the report says besides the counts; thresholds are the smallest selected magnitudes, here and of the sums."""
    total = sum(held)
    return {
        "local_threshold": kernels.smallest_magnitude(mine.value),
        "global_threshold": kernels.smallest_magnitude(survivors.value),
        "local_count": mine.index.numel(),
        "global_count": survivors.index.numel(),
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }
