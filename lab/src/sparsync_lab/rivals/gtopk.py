"""gTop-k: about the k largest sums over ranks, found by merging selections pairwise in a tree (Shi et al., ICDCS 2019, arXiv 1901.04359).

Every rank selects its k largest elements. In round i = 0, 1, ... each rank r with r mod 2^(i+1) = 2^i sends its k sums to rank r - 2^i,
which adds its own and keeps the k largest. Rank 0's final sums go down the tree again. Traffic grows with log2 P. Every message and the
result have k elements at any P, so no counts are exchanged.

Differs from the paper: there, an element that one merge dropped while it survived on another branch was cleared everywhere and so lost;
here the rank that dropped it adds it to its residual, so mass is conserved. P need not be a power of two. The learning rate is outside.
NaN and Inf count among the largest, reach all ranks, and leave residuals untouched.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync import Bucket, Comm, ErrorFeedbackScheme, kernels
from sparsync.collectives.sparse_allreduce import ElementCodec
from sparsync.core import check_density, count_for, phase
from sparsync.feedback import Residuals
from sparsync.kernels.rounding import lacking
from sparsync.schemes import Accumulator, Sparse, State, Update
from sparsync.wire import Elements, Values, check_values


@dataclass(frozen=True)
class GTopK(ErrorFeedbackScheme):
    """Merge selections pairwise in a tree, k elements in the end: gTop-k (arXiv 1901.04359).

    The result is about the k = density * n largest sums over the ranks' selections, divided by P; the rest stays in the residuals.
    NaN or Inf on any rank shows in the gradient of every rank, and leaves residuals unchanged.
    """

    density: float = 0.01  # share of elements that each rank selects, and that the result has; 0.001 in the paper
    values: Values = "float32"  # format of sent values, rounded at every hop; rounding errors stay in a residual
    residuals: Residuals = "float32"  # "bfloat16" halves the memory of residuals and loses its rounding errors

    name = "gtopk"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_density(self.density)
        check_values(self.values)

    def step(self, state: State, acc: Accumulator, bucket: Bucket, comm: Comm) -> Update:
        own = acc.top_k(count_for(self.density, bucket.grad.numel()))  # [k]
        merged = tree_top_k(own, comm, Elements(self.values))
        return of_survivors(own, merged.mean, merged.dropped)


def of_survivors(own: Sparse, mean: Sparse, dropped: Sequence[Sparse]) -> Update:
    """Make the update that clears a rank's surviving selection, and returns the parts of survivors that the rank dropped.

    Every rank keeps its acc of elements that did not survive, so parts dropped there need no return.
    """
    cleared = own.index[kernels.isin(own.index, mean.index)]
    errors = [error for error in (at(part, mean.index) for part in dropped) if error.index.numel()]
    return Update(mean, cleared, own.index.numel(), errors, {"survived": cleared.numel()})


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
