"""SparDL's two exchanges: a reduce-scatter of sparse blocks, and an all-gather, in ceil(log2 P) rounds each (arXiv 2304.00737).

Block b is summed on rank b. In round i, from the highest to 0, each rank sends to the rank 2^i further the blocks that are still to
travel 2^i ranks or more. Before a block is sent it is cut to its k_b largest sums, so the length of every message is known beforehand.
Each rank sends P-1 blocks in all, as few bytes as in one round to all others. The all-gather is Bruck's. Any number of ranks.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import sub

import torch
from torch import Tensor

from sparsync import Comm, Span, Sparse, kernels
from sparsync.collectives.sparse_allreduce import ElementCodec
from sparsync.comm.plan import Exchange
from sparsync.core import phase
from sparsync_lab.rivals.tree_top_k import cut, rounding, rounds


def spar_reduce_scatter_exchanges(sizes: Sequence[int]) -> list[Exchange]:
    """Return the exchanges of `spar_reduce_scatter`, one for each round; `sizes[b]` are the bytes of a packet of block b."""
    P = len(sizes)
    return [_window_exchange(sizes, min(2 << i, P) - (1 << i)) for i in reversed(range(rounds(P)))]


def bruck_all_gather_exchanges(sizes: Sequence[int]) -> list[Exchange]:
    """Return the exchanges of `bruck_all_gather`, one for each round; `sizes[r]` are the bytes of rank r's packet."""
    P = len(sizes)
    return [_window_exchange(sizes, _passed_on(i, P)) for i in range(rounds(P))]


def spar_reduce_scatter(
    blocks: Sequence[Sparse], counts: Sequence[int], places: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, list[Sparse]]:
    """Return about the `counts[rank]` largest sums over ranks of this rank's block, and what this rank dropped of all blocks.

    `blocks[b]` holds `counts[b]` elements of the span `places[b]`, by positions in it; `counts` and `places` are the same on all ranks.
    What was dropped, cut off or by rounding, is a Sparse for each time, by positions in the whole vector.
    Steps: ceil(log2 P)
    Bytes sent per rank: the packets of all blocks but its own
    """
    P, rank, dtype, n = comm.size, comm.rank, blocks[0].value.dtype, places[-1].stop
    sizes, sums, dropped = _sizes(counts, places, dtype, codec), list(blocks), []

    def drop(block: int, part: Sparse) -> None:
        if part.index.numel():
            dropped.append(Sparse(part.index + places[block].start, part.value, n))

    def shorten(block: int) -> Sparse:
        sums[block], less = cut(sums[block], counts[block])
        drop(block, less)
        return sums[block]

    for i in reversed(range(rounds(P))):
        to, source = (rank + (1 << i)) % P, (rank - (1 << i)) % P
        outgoing, incoming = _travelling(rank, i, P), _travelling(source, i, P)
        with phase("encode"):
            packets = [codec.encode(shorten(block)) for block in outgoing]
            for block, packet in zip(outgoing, packets, strict=True) if not codec.exact else ():
                decoded = codec.decode_values(packet, counts[block], len(places[block]), dtype)
                for error in rounding(sums[block], decoded):
                    drop(block, error)
        into = packets[0].new_empty(sum(sizes[block] for block in incoming))
        comm.send_recv(torch.cat(packets), to, into, source)
        with phase("decode"):
            for block, packet in zip(incoming, into.split([sizes[block] for block in incoming]), strict=True):
                received = codec.decode(packet, counts[block], len(places[block]), dtype)
                sums[block] = kernels.coalesce([sums[block], received])
    return shorten(rank), dropped


def bruck_all_gather(packet: Tensor, sizes: Sequence[int], comm: Comm) -> list[Tensor]:
    """Return every rank's `packet`, uint8, in rank order; `sizes[r]`, the bytes of rank r's, are known to all.

    Steps: ceil(log2 P)
    Bytes sent per rank: in round i the packets of itself and the 2^i - 1 ranks after it, fewer in the last one: of P-1 ranks in all
    """
    P, rank = comm.size, comm.rank
    held = [packet]  # those of rank, rank + 1, ...
    for i in range(rounds(P)):
        count, source = _passed_on(i, P), rank + (1 << i)
        lengths = [sizes[(source + j) % P] for j in range(count)]
        into = packet.new_empty(sum(lengths))
        comm.send_recv(torch.cat(held[:count]), (rank - (1 << i)) % P, into, source % P)
        held += [into[start:stop] for start, stop in pairwise(accumulate(lengths, initial=0))]
    return [held[(owner - rank) % P] for owner in range(P)]


def all_gather_blocks(
    mine: Sparse, counts: Sequence[int], places: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Tensor]:
    """Return the elements of all blocks as one vector of all places, and this rank's values as all ranks decode them.

    `mine` holds `counts[rank]` elements of the span `places[rank]`, by positions in it.
    Steps, bytes sent per rank: those of `bruck_all_gather`
    """
    dtype = mine.value.dtype
    with phase("encode"):
        packet = codec.encode(mine)
    packets = bruck_all_gather(packet, _sizes(counts, places, dtype, codec), comm)
    with phase("decode"):
        parts = [
            codec.decode(each, count, len(place), dtype)
            for each, count, place in zip(packets, counts, places, strict=True)
        ]
        index = torch.cat([part.index + place.start for part, place in zip(parts, places, strict=True)])
        gathered = Sparse(index, torch.cat([part.value for part in parts]), places[-1].stop)
    return gathered, parts[comm.rank].value


def _window_exchange(sizes: Sequence[int], width: int) -> Exchange:
    """Return the exchange in which each rank sends one other the packets of `width` adjacent ranks."""
    until = list(accumulate([*sizes, *sizes[: width - 1]], initial=0))
    most = max(map(sub, until[width:], until))
    return Exchange("send_recv", most, 1 if most else 0, 1, most, "pair")


def _travelling(rank: int, i: int, P: int) -> list[int]:
    """Return the blocks that `rank` sends 2^i ranks further in round i."""
    return [(rank + j) % P for j in range(1 << i, min(2 << i, P))]


def _passed_on(i: int, P: int) -> int:
    """Return how many packets each rank sends in round i of the all-gather."""
    return min(1 << i, P - (1 << i))


def _sizes(counts: Sequence[int], places: Sequence[Span], dtype: torch.dtype, codec: ElementCodec) -> list[int]:
    return [codec.nbytes(count, len(place), dtype) for count, place in zip(counts, places, strict=True)]
