"""The three exchanges of a sparse all-reduce over regions: split and reduce, balance, all-gather (arXiv 2201.07598).

Every rank owns one region of the vector. First each rank sends its elements of a region to the region's owner, which adds them up.
In the paper, some survivors then move to other ranks if they lie very unevenly. Then all ranks gather them. Each is one exchange.
Counts travel at the heads of packets; in the paper, in separate exchanges. Messages go out in rotated order where the transport does
so (gloo and NCCL do).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparsync.core import Comm, Detail, Span, Sparse, numbers_of, phase, raise_if_found_inf, spans
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


def split_and_reduce_(
    region: Tensor,
    mine: Sparse,
    regions: Sequence[Span],
    comm: Comm,
    codec: ElementCodec,
    undoable: bool = False,
    counts_first: bool = False,
) -> Reduced:
    """Add to `region`, the span of the vector this rank owns, what all ranks selected there, in rank order.

    With `undoable`, writing `before` back to the region restores it to the bit. With `counts_first`, as in the authors' program, counts
    travel in an exchange before; otherwise at the head of each packet.
    Steps: 1; 2 with `counts_first`
    Bytes sent per rank: 12 (P-1), or 4 (P-1) with `counts_first`, and the packets of its elements outside its own region
    """
    n, dtype, rank = region.numel(), region.dtype, comm.rank
    with phase("encode"):
        pieces = kernels.split(mine, regions)
        outgoing = [elements.index.numel() for elements in pieces]
        packets = [codec.encode(elements) for elements in pieces]
    if counts_first:
        incoming = _counts_exchanged(outgoing, comm, region.device)
        received = comm.all_to_all(packets, [codec.nbytes(k, n, dtype) for k in incoming])
    else:
        heads = counts_as_bytes(outgoing, region.device)
        parts = [torch.cat([head, packet]) for head, packet in zip(heads, packets, strict=True)]
        heads, received = heads_and_packets(comm.all_to_all(parts))
        incoming: list[int] = heads.tolist()  # a host sync: what follows is decoded by it
    with phase("decode"):
        addends = [
            # What an exact codec gives back is not decoded again.
            pieces[rank] if source == rank and codec.exact else codec.decode(packet, k, n, dtype)
            for source, (packet, k) in enumerate(zip(received, incoming, strict=True))
        ]
        before = None
        if undoable:
            touched = torch.cat([elements.index for elements in addends])
            before = Sparse(touched, kernels.gather(region, touched), n)
        for elements in addends:
            if elements.index.numel():
                kernels.scatter_add_(region, elements)
        if codec.exact:
            return Reduced(outgoing, incoming, before, None)
        sent = zip(packets, outgoing, regions, strict=True)
        decoded = torch.cat([codec.decode_values(packet, k, len(span), dtype) for packet, k, span in sent])
        return Reduced(outgoing, incoming, before, mine.value - decoded)


def counts_as_bytes(counts: Sequence[int], device: torch.device) -> Sequence[Tensor]:
    """Return each count as the head of a packet."""
    return torch.tensor(counts, dtype=torch.int32).view(torch.uint8).to(device).split(COUNT_NBYTES)


def heads_and_packets(received: Sequence[Tensor], numbers: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Return the numbers at the heads of what was received, int32, so many of each rank, and what follows them.

    Raises RuntimeError where a packet is too short for a head.
    """
    head = numbers * COUNT_NBYTES
    if any(packet.numel() < head for packet in received):
        raise RuntimeError(f"a packet begins with {head} bytes, got {[packet.numel() for packet in received]}")
    return torch.cat([packet[:head] for packet in received]).view(torch.int32), [packet[head:] for packet in received]


def _counts_exchanged(outgoing: Sequence[int], comm: Comm, device: torch.device) -> list[int]:
    """Return how many elements each rank sends here, when this rank sends them `outgoing`."""
    counts = torch.tensor(outgoing, dtype=torch.int32, device=device)
    # A host sync: the sizes of the receive buffers depend on it.
    return torch.cat(comm.all_to_all(list(counts.split(1)), [1] * comm.size)).tolist()


def equal_holdings(held: Sequence[int]) -> list[int]:
    """Return as many elements for every rank, give or take one: what the paper balances to."""
    each, more = divmod(sum(held), len(held))
    return [each + (rank < more) for rank in range(len(held))]


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


def balance(
    mine: Sparse, held: Sequence[int], wanted: Sequence[int], regions: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Sequence[Span]]:
    """Return this rank's `wanted[rank]` elements once all have moved, and the span that those of each rank lie in.

    `held` and `wanted` are the same on all ranks. `mine` lies in this rank's region; positions are those in the whole vector. The codec
    is exact: values must arrive as they are.
    Steps: 1; 0 where nothing moves
    Bytes sent per rank: the packets of held - wanted elements, if that is positive
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


def all_gather_elements(
    mine: Sparse, held: Sequence[int], places: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Tensor]:
    """Return the elements of all ranks, which have no position in common, and this rank's values as all ranks decode them.

    `held`, how many elements each rank has, and `places`, a span that these lie in, are known to all.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of its elements
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


@dataclass(frozen=True)
class Gathered:
    """What `gather_survivors` brings together."""

    parts: list[Sparse]  # of each region, by positions in the whole vector
    notes: list[int]  # of each rank
    decoded: Tensor  # this rank's values as all ranks decode them
    beside: float


def gather_survivors(
    mine: Sparse,
    note: Tensor,
    regions: Sequence[Span],
    length: int,
    comm: Comm,
    codec: ElementCodec,
    beside: Tensor,
) -> Gathered:
    """Gather what survives in each region of a vector of `length`, and a number from each rank, `note` [1], int32, from 0 on.

    `mine` are the survivors of this rank's region, by their positions in it; how many others have is at the head of their packets. A note
    of FOUND_INF says that this rank met NaN or Inf. Raises NonFiniteError on all ranks where one did. The host reads `beside` [1] along.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of its elements, and 16 (P-1)
    """
    dtype, rank, count = mine.value.dtype, comm.rank, mine.index.numel()
    with phase("encode"):
        packet = codec.encode(mine)
        head = counts_as_bytes([count], packet.device)
    received = comm.all_gather(torch.cat([*head, note.view(torch.uint8), packet]))
    with phase("decode"):
        heads, packets = heads_and_packets(received, 2)
        numbers, (told,) = numbers_of(heads, beside)  # a host sync: what follows is decoded by it
        held, notes = numbers[::2], numbers[1::2]
        raise_if_found_inf(notes)
        decoded = mine.value if codec.exact else codec.decode_values(packet, count, mine.length, dtype)
        own = Sparse(mine.index + regions[rank].start, decoded, length)
        sources = enumerate(zip(packets, held, regions, strict=True))
        parts = [own if r == rank else _in_whole(each, k, span, length, dtype, codec) for r, (each, k, span) in sources]
    return Gathered(parts, notes, decoded, told)


def _in_whole(packet: Tensor, k: int, span: Span, length: int, dtype: torch.dtype, codec: ElementCodec) -> Sparse:
    """Decode a packet about `span` into elements of the whole vector of `length`."""
    elements = codec.decode(packet, k, len(span), dtype)
    return Sparse(elements.index + span.start, elements.value, length)


def k_largest(elements: Sparse, k: int) -> Sparse:
    """Return the k elements of largest magnitude."""
    top = kernels.top_k(elements.value, min(k, elements.value.numel())).index
    return Sparse(elements.index[top], elements.value[top], elements.length)


def details(
    mine: Sparse,
    thresholds: tuple[float, float],
    held: Sequence[int],
    wanted: Sequence[int],
    incoming: Sequence[int],
    rank: int,
) -> dict[str, Detail]:
    """Return further details for the report; `thresholds` are the smallest magnitudes in `mine` and of the sums that survive."""
    total = sum(held)
    return {
        "local_threshold": thresholds[0],
        "global_threshold": thresholds[1],
        "local_count": mine.index.numel(),
        "global_count": total,
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }
