"""The three exchanges of a sparse all-reduce over regions: split and reduce, balance, all-gather (arXiv 2201.07598).

Every rank owns one region of the vector. First each sends its elements of a region to the rank that owns it, which adds them up; then,
where the survivors lie very unevenly, some move to other ranks; then all gather them. One message round each, the counts of the first
in a round of their own. Messages go out in rotated order where the transport does so (gloo and NCCL do).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsync.comm.metered import all_gather_cost, all_to_all_cost
from sparsync.core import Comm, Cost, Span, Sparse
from sparsync.kernels import gather as gather_values
from sparsync.kernels import merge, scatter_add_, split
from sparsync.phases import phase

COUNT_NBYTES = 4  # an int32 for each pair of ranks


@runtime_checkable
class Codec(Protocol):
    """Bytes out of a Sparse and back, of a length that count and span tell; `wire.elements.Elements` is one, the module `wire.raw` too."""

    @property
    def exact(self) -> bool: ...

    def encode(self, part: Sparse) -> Tensor: ...

    def decode(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Sparse: ...

    def decode_values(self, packet: Tensor, k: int, length: int, dtype: torch.dtype) -> Tensor: ...

    def nbytes(self, k: int, length: int, dtype: torch.dtype) -> int: ...


@dataclass(frozen=True)
class Reduced:
    """How many elements went to each rank's region and came from each rank, what others did not learn of ours, and what was changed."""

    outgoing: list[int]
    incoming: list[int]
    before: Sparse | None  # what the region held where elements came to, some several times; None unless asked for
    error: Tensor | None  # [k], of what this rank sent; None: others got it all


def split_and_reduce_(
    region: Tensor, mine: Sparse, regions: Sequence[Span], comm: Comm, codec: Codec, undoable: bool = False
) -> Reduced:
    """Adds to `region`, the part of the vector this rank owns, what all ranks selected there, in rank order.

    Writing back what `before` tells, where it is to be `undoable`, undoes it.
    Steps: 1 for the counts, 1 for the elements
    Bytes sent per rank: 4 (P-1), and the packets of its elements outside its own region
    """
    n, dtype = region.numel(), region.dtype
    with phase("encode"):
        parts = split(mine, regions)
        outgoing = [part.index.numel() for part in parts]
        packets = [codec.encode(part) for part in parts]
    told = torch.tensor(outgoing, dtype=torch.int32, device=region.device)
    heard = comm.all_to_all(list(told.split(1)), [1] * comm.size)
    incoming: list[int] = torch.cat(heard).tolist()  # a host sync: the sizes of the receive buffers depend on it
    arrived = comm.all_to_all(packets, [codec.nbytes(k, n, dtype) for k in incoming])
    with phase("decode"):
        parts = [codec.decode(packet, k, n, dtype) for packet, k in zip(arrived, incoming, strict=True)]
        before = _held_at(region, parts) if undoable else None
        for part in parts:
            scatter_add_(region, part)
        if codec.exact:
            return Reduced(outgoing, incoming, before, None)
        told = zip(packets, outgoing, regions, strict=True)
        read = torch.cat([codec.decode_values(packet, k, len(span), dtype) for packet, k, span in told])
        return Reduced(outgoing, incoming, before, mine.value - read)


def _held_at(region: Tensor, parts: Sequence[Sparse]) -> Sparse:
    touched = torch.cat([part.index for part in parts])
    return Sparse(touched, gather_values(region, touched), region.numel())


def split_and_reduce_cost(
    outgoing: Sequence[int], regions: Sequence[Span], dtype: torch.dtype, rank: int, codec: Codec
) -> Cost:
    """What `split_and_reduce_` sends from this rank."""
    counts = all_to_all_cost([COUNT_NBYTES] * len(outgoing), rank)
    sizes = [codec.nbytes(k, len(span), dtype) for k, span in zip(outgoing, regions, strict=True)]
    return counts + all_to_all_cost(sizes, rank)


def equal_holdings(held: Sequence[int]) -> list[int]:
    """As many elements on every rank, give or take one: what the paper balances to."""
    each, more = divmod(sum(held), len(held))
    return [each + (rank < more) for rank in range(len(held))]


def least_holdings(held: Sequence[int]) -> list[int]:
    """How many elements each rank should hold so that the most any rank sends, in balancing and all-gather together, is least.

    A rank that holds g and gives away all but h sends g - h elements once and h elements P-1 times; so one with far too many does best
    to keep few or none. For P > 2 no rank sends more than G + P - 2 of all G elements, however they lie; for P = 2 moving gains nothing.
    """
    P, total = len(held), sum(held)
    if P <= 2:
        return list(held)

    def capacity(level: int) -> list[int]:
        """The most each rank may hold so as to send at most `level`; -1 where it cannot."""
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
    """How many elements each rank gives to which, (from, to) -> count, so that all hold what is wanted; at most 2P - 1 of them."""
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
    mine: Sparse, held: Sequence[int], wanted: Sequence[int], regions: Sequence[Span], comm: Comm, codec: Codec
) -> Sparse:
    """This rank's `wanted[rank]` elements once all have moved; `held` and `wanted` are the same on all ranks.

    `mine` lies in this rank's region; positions are those in the whole vector. What moves must arrive as it is: the codec is exact.
    Steps: 1
    Bytes sent per rank: the packets of held - wanted elements, where that is positive
    """
    plan = moves(held, wanted)
    dtype, own = mine.value.dtype, regions[comm.rank]
    position = min(held[comm.rank], wanted[comm.rank])
    kept = Sparse(mine.index[:position], mine.value[:position], mine.length)
    parts: list[Tensor] = []
    for to in range(comm.size):
        count = plan.get((comm.rank, to), 0)
        a, b = position, position + count
        parts.append(codec.encode(Sparse(mine.index[a:b] - own.start, mine.value[a:b], len(own))))
        position = b
    counts = [plan.get((source, comm.rank), 0) for source in range(comm.size)]
    sizes = [codec.nbytes(count, len(span), dtype) for count, span in zip(counts, regions, strict=True)]
    arrived = zip(comm.all_to_all(parts, sizes), counts, regions, strict=True)
    return merge([kept, *(_in_whole(packet, k, at, mine.length, dtype, codec) for packet, k, at in arrived)])


def balance_cost(
    held: Sequence[int],
    wanted: Sequence[int],
    regions: Sequence[Span],
    dtype: torch.dtype,
    rank: int,
    codec: Codec,
) -> Cost:
    """What `balance` sends from this rank."""
    plan, length = moves(held, wanted), len(regions[rank])
    return all_to_all_cost([codec.nbytes(plan.get((rank, to), 0), length, dtype) for to in range(len(held))], rank)


def gather(
    mine: Sparse, held: Sequence[int], places: Sequence[Span], comm: Comm, codec: Codec
) -> tuple[Sparse, Tensor]:
    """The elements of all ranks, which have no position in common, and what all read of this rank's values.

    `held`, how many each rank has, and `places`, a span that these lie in, are known to all.
    Steps: P-1
    Bytes sent per rank: P-1 times the packet of its own elements
    """
    dtype, own = mine.value.dtype, places[comm.rank]
    with phase("encode"):
        packet = codec.encode(Sparse(mine.index - own.start, mine.value, len(own)))
    packets = comm.all_gather(packet, [codec.nbytes(k, len(at), dtype) for k, at in zip(held, places, strict=True)])
    with phase("decode"):
        each = zip(packets, held, places, strict=True)
        read = codec.decode_values(packet, mine.index.numel(), len(own), dtype)
        parts = [
            replace(mine, value=read) if rank == comm.rank else _in_whole(packet, k, at, mine.length, dtype, codec)
            for rank, (packet, k, at) in enumerate(each)
        ]
        return merge(parts), read


def gather_cost(held: Sequence[int], places: Sequence[Span], dtype: torch.dtype, rank: int, codec: Codec) -> Cost:
    """What `gather` sends from this rank."""
    return all_gather_cost(codec.nbytes(held[rank], len(places[rank]), dtype), len(held))


def _in_whole(packet: Tensor, k: int, at: Span, length: int, dtype: torch.dtype, codec: Codec) -> Sparse:
    """What a packet tells about the span `at`, as a part of the whole vector of `length` elements."""
    part = codec.decode(packet, k, len(at), dtype)
    return Sparse(part.index + at.start, part.value, length)
