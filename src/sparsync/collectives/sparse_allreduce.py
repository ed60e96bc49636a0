"""The three exchanges of a sparse all-reduce over regions: split and reduce, balance, all-gather (arXiv 2201.07598).

Every rank owns one region of the vector. First all ranks send their elements to the owners of the regions, which add them up.
In the paper, some survivors then move to other ranks if they are very uneven. Then all ranks gather them.
Counts travel in the headers of packets; in the paper, in separate exchanges. The transport chooses the order of messages (gloo and NCCL
rotate it).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from sparsync.core import Comm, Detail, Span, Sparse, phase, raise_if_found_inf, spans
from sparsync.kernels import operations as kernels

COUNT_NBYTES = 4  # int32


@runtime_checkable
class ElementCodec(Protocol):
    """Encodes a Sparse as a packet whose length follows from count and span: `wire.Elements` or `wire.Raw`."""

    @property
    def exact(self) -> bool: ...

    def encode(self, part: Sparse) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse: ...

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int: ...


def equal_boundaries(n: int, P: int) -> list[int]:
    """Compute the P-1 boundaries of regions of equal width."""
    return [span.start for span in spans(n, P)[1:]]


def balanced_boundaries(index: Int[Tensor, " k"], n: int, P: int) -> list[int]:
    """Compute the boundaries of regions that contain equally many of the ascending positions; of equal width if k < P."""
    k = index.numel()
    if k < P:
        return equal_boundaries(n, P)
    places = torch.tensor([j * k // P for j in range(1, P)], dtype=torch.int64, device=index.device)
    # A host sync: the lengths of messages depend on it.
    return index[places].tolist()


def regions_of(boundaries: Sequence[int], n: int) -> tuple[Span, ...]:
    """Cut [0, n) at P-1 ascending boundaries into P regions, some perhaps empty."""
    return tuple(Span(start, stop) for start, stop in pairwise((0, *boundaries, n)))


@dataclass(frozen=True)
class Reduced:
    """The result of `split_and_reduce_`."""

    outgoing: list[int]  # elements sent, by rank
    incoming: list[int]  # elements received, by rank
    before: Sparse | None  # previous values where elements were added, perhaps repeated; None unless `undoable`
    error: Tensor | None  # [k] quantization errors of this rank's values; None with an exact codec


def split_and_reduce_(
    region: Tensor,
    mine: Sparse,
    regions: Sequence[Span],
    comm: Comm,
    codec: ElementCodec,
    undoable: bool = False,
    counts_first: bool = False,
) -> Reduced:
    """Send all selected elements to the owners of their regions, and add them to `region`, this rank's region, in rank order.

    With `undoable`, writing `before` to the region restores it bit for bit. With `counts_first`, as in the authors' program, counts
    travel in a separate exchange; otherwise in the headers of packets.
    Steps: 1; 2 with `counts_first`
    Bytes sent per rank: 12 (P-1), or 4 (P-1) with `counts_first`, and the packets of its elements outside its region
    """
    n, dtype, rank = region.numel(), region.dtype, comm.rank
    with phase("encode"):
        pieces = kernels.split(mine, regions)
        outgoing = [elements.index.numel() for elements in pieces]
        packets = [codec.encode(elements) for elements in pieces]
    if counts_first:
        counts = torch.tensor(outgoing, dtype=torch.int32, device=region.device).split(1)
        # A host sync: the sizes of the receive buffers depend on it.
        incoming: list[int] = torch.cat(comm.all_to_all(counts, [1] * comm.size)).tolist()
        received = comm.all_to_all(packets, [codec.nbytes(k, n, dtype) for k in incoming])
    else:
        heads = counts_as_bytes(outgoing, region.device)
        parts = [torch.cat([head, packet]) for head, packet in zip(heads, packets, strict=True)]
        heads, received = heads_and_packets(comm.all_to_all(parts))
        incoming = heads.tolist()  # a host sync: decoding needs the counts
    with phase("decode"):
        addends = [
            # With an exact codec this rank's piece need not be decoded.
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
    """Encode counts as headers of packets."""
    return torch.tensor(counts, dtype=torch.int32).view(torch.uint8).to(device).split(COUNT_NBYTES)


def heads_and_packets(received: Sequence[Tensor], numbers: int = 1) -> tuple[Tensor, list[Tensor]]:
    """Split received packets into headers, of `numbers` int32 numbers, and payloads.

    Raises RuntimeError if a packet is too short for a header.
    """
    head = numbers * COUNT_NBYTES
    if any(packet.numel() < head for packet in received):
        raise RuntimeError(f"a packet begins with {head} bytes, got {[packet.numel() for packet in received]}")
    return torch.cat([packet[:head] for packet in received]).view(torch.int32), [packet[head:] for packet in received]


def moves(held: Sequence[int], wanted: Sequence[int]) -> dict[tuple[int, int], int]:
    """Plan at most 2P - 1 moves that turn the counts `held` into `wanted`: (from, to) -> count."""
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
    """Move elements so that rank r holds `wanted[r]`. Return this rank's elements, and the spans that contain the elements by rank.

    `held` and `wanted` are the same on all ranks. `mine` lies in this rank's region, with positions in the whole vector. The codec
    must be exact.
    Steps: 1; 0 if nothing moves
    Bytes sent per rank: the packets of held - wanted elements, if that is positive
    """
    if list(wanted) == list(held):
        return mine, regions
    plan = moves(held, wanted)
    dtype, region = mine.value.dtype, regions[comm.rank]
    position = min(held[comm.rank], wanted[comm.rank])
    kept = Sparse(mine.index[:position], mine.value[:position], mine.length)
    packets: list[Tensor] = []
    for to in range(comm.size):
        count = plan.get((comm.rank, to), 0)
        a, b = position, position + count
        packets.append(codec.encode(Sparse(mine.index[a:b] - region.start, mine.value[a:b], len(region))))
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
    """Gather the elements of all ranks, which are disjoint. Return them, and this rank's values as all ranks decode them.

    All ranks know `held`, the numbers of elements by rank, and `places`, the spans that contain them.
    Steps: 1
    Bytes sent per rank: P-1 times the packet of its elements
    """
    dtype, place = mine.value.dtype, places[comm.rank]
    with phase("encode"):
        packet = codec.encode(Sparse(mine.index - place.start, mine.value, len(place)))
    packets = comm.all_gather(packet, [codec.nbytes(k, len(span), dtype) for k, span in zip(held, places, strict=True)])
    with phase("decode"):
        decoded = codec.decode_values(packet, mine.index.numel(), len(place), dtype)
        gathered = [
            replace(mine, value=decoded) if rank == comm.rank else _in_whole(packet, k, span, mine.length, dtype, codec)
            for rank, (packet, k, span) in enumerate(zip(packets, held, places, strict=True))
        ]
        return kernels.merge(gathered), decoded


@dataclass(frozen=True)
class Gathered:
    """The result of `gather_survivors`."""

    parts: list[Sparse]  # by region, with positions in the whole vector
    notes: list[int]  # by rank
    decoded: Tensor  # this rank's values as all ranks decode them


def gather_survivors(
    mine: Sparse, note: Tensor, regions: Sequence[Span], length: int, comm: Comm, codec: ElementCodec
) -> Gathered:
    """Gather the survivors of all regions of a vector of `length`, and all ranks' non-negative `note` [1], int32.

    `mine` are the survivors of this rank's region, by position in it; the counts travel in headers. FOUND_INF as a note says that this
    rank has NaN or Inf; then all ranks raise NonFiniteError.
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
        numbers = heads.tolist()  # a host sync: decoding needs the counts
        held, notes = numbers[::2], numbers[1::2]
        raise_if_found_inf(notes)
        decoded = mine.value if codec.exact else codec.decode_values(packet, count, mine.length, dtype)
        local = Sparse(mine.index + regions[rank].start, decoded, length)
        sent = enumerate(zip(packets, held, regions, strict=True))
        parts = [local if r == rank else _in_whole(part, k, span, length, dtype, codec) for r, (part, k, span) in sent]
    return Gathered(parts, notes, decoded)


def _in_whole(packet: Tensor, k: int, span: Span, length: int, dtype: torch.dtype, codec: ElementCodec) -> Sparse:
    """Decode a packet of elements of `span` into elements of the whole vector of `length`."""
    elements = codec.decode(packet, k, len(span), dtype)
    return Sparse(elements.index + span.start, elements.value, length)


def details(
    mine: Sparse, held: Sequence[int], wanted: Sequence[int], incoming: Sequence[int], rank: int
) -> dict[str, Detail]:
    """Collect details for the report."""
    total = sum(held)
    return {
        "local_count": mine.index.numel(),
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }
