"""gTop-k's sparse all-reduce over a binary tree: every merge passes on only the k largest sums (Shi et al., arXiv 1901.04359).

In round i = 0, 1, ... each rank r with r mod 2^(i+1) = 2^i sends its k sums to rank r - 2^i, which adds its own and keeps the k largest.
Rank 0's final sums go down the tree again. Every message holds k elements, so no counts are exchanged. P may be any number.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync import Comm, kernels
from sparsync.collectives.sparse_allreduce import ElementCodec
from sparsync.core import phase
from sparsync.kernels.rounding import lacking
from sparsync.schemes import Sparse


@dataclass(frozen=True)
class Merged:
    """The final elements on all ranks, and the elements that this rank dropped on the way.

    At the positions of `mean`, the sum over ranks of the input is P * mean plus the sum over ranks of the dropped elements.
    """

    mean: Sparse
    dropped: Sequence[Sparse]  # elements cut off, and rounding errors


def rounds(P: int) -> int:
    return (P - 1).bit_length()


def cut(elements: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """Split off the `k` elements of largest magnitude, or all if there are fewer; returns them and the rest. NaN counts as infinity."""
    count = elements.index.numel()
    if count <= k:
        return elements, replace(elements, index=elements.index[:0], value=elements.value[:0])
    largest = torch.zeros(count, dtype=torch.bool, device=elements.index.device)
    largest[kernels.top_k(elements.value, k).index.long()] = True
    return _where(elements, largest), _where(elements, ~largest)


def at(elements: Sparse, index: Tensor) -> Sparse:
    """Select the `elements` at the ascending positions `index`."""
    return _where(elements, kernels.isin(elements.index, index))


def rounding(elements: Sparse, decoded: Tensor, times: int = 1) -> list[Sparse]:
    """Compute the error of receivers that count `decoded` [k] as `elements`, `times` times; [] if it is zero."""
    error = lacking(elements.value, decoded, times)
    return [replace(elements, value=error)] if bool(error.any()) else []


def tree_top_k(own: Sparse, comm: Comm, codec: ElementCodec) -> Merged:
    """Sum about the k largest elements over ranks of `own`, divided by P.

    `own` has the same number k of elements on all ranks. Among equal sums of a merge the first are kept.
    Steps: 2 ceil(log2 P)
    Bytes sent per rank: the packet of k elements, to its parent, if it is not rank 0, and to each of its up to log2 P children
    """
    n, k, dtype, P, rank = own.length, own.index.numel(), own.value.dtype, comm.size, comm.rank
    nothing = torch.empty(0, dtype=torch.uint8, device=own.index.device)
    packet = nothing.new_empty(codec.nbytes(k, n, dtype))
    dropped: list[Sparse] = []
    sums = own
    for i in range(rounds(P)):
        if _sends(rank, i):
            with phase("encode"):
                out = codec.encode(sums)
                dropped += [] if codec.exact else rounding(sums, codec.decode_values(out, k, n, dtype))
            comm.send_recv(out, rank - (1 << i), nothing, rank)
        elif _child(rank, i, P):
            comm.send_recv(nothing, rank, packet, rank + (1 << i))
            with phase("decode"):
                sums, less = cut(kernels.coalesce([sums, codec.decode(packet, k, n, dtype)]), k)
                dropped.append(less)
        else:
            comm.send_recv(nothing, rank, nothing, rank)  # this rank sits the round out
    if rank == 0:
        packet = codec.encode(replace(sums, value=sums.value / P))
    for i in reversed(range(rounds(P))):
        if _sends(rank, i):
            comm.send_recv(nothing, rank, packet, rank - (1 << i))
        elif _child(rank, i, P):
            comm.send_recv(packet, rank + (1 << i), nothing, rank)
        else:
            comm.send_recv(nothing, rank, nothing, rank)
    with phase("decode"):
        mean = codec.decode(packet, k, n, dtype)
    if rank == 0 and not codec.exact:
        dropped += rounding(sums, mean.value, P)
    return Merged(mean, dropped)


def _sends(rank: int, i: int) -> bool:
    """Tell whether `rank` sends to its parent in round i."""
    return rank % (2 << i) == 1 << i


def _child(rank: int, i: int, P: int) -> bool:
    """Tell whether `rank` receives from a child in round i."""
    return rank % (2 << i) == 0 and rank + (1 << i) < P


def _where(elements: Sparse, chosen: Tensor) -> Sparse:
    return replace(elements, index=elements.index[chosen], value=elements.value[chosen])
