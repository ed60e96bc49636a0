"""The exchanges of schemes whose ranks select in exclusive partitions: no position is sent twice, so the union needs no merging.

First the positions are gathered, then every rank gives its value at every position of the union, as it is or quantized. The published
schemes (MiCRO, arXiv 2310.00967; ExDyna, arXiv 2402.13781) exchange counts first, and pad all selections to the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.exchange import all_gather, all_reduce
from sparsync.collectives.quantized_all_reduce import (
    Quantizer,
    quantized_all_reduce,
    quantized_all_reduce_exchanges,
)
from sparsync.comm.busiest import all_reduce_exchange
from sparsync.comm.plan import Exchange
from sparsync.core import FOUND_INF, Comm, raise_if_found_inf

COUNT_NBYTES = 8


def exchange_counts(count: int, finite: bool, comm: Comm, device: torch.device) -> list[int]:
    """Return how many elements each rank selected. Raises NonFiniteError on all ranks where one is not `finite`.

    Steps: 1
    Bytes sent per rank: 8 (P-1)
    """
    own = torch.tensor([count if finite else FOUND_INF], dtype=torch.int64, device=device)
    # A host sync: the sizes of the next buffers depend on it.
    counts = [int(each) for each in all_gather(own, [1] * comm.size, comm)]
    raise_if_found_inf(counts)
    return counts


def all_gather_padded(index: Tensor, counts: Sequence[int], comm: Comm) -> Tensor:
    """Return the selections of all ranks after each other, [K]; `counts[r]` is the length of rank r's.

    Steps: 1
    Bytes sent per rank: (P-1) * max(counts) * bytes of an index
    """
    longest = max(counts)
    padded = torch.nn.functional.pad(index, (0, longest - index.numel()))
    gathered = all_gather(padded, [longest] * comm.size, comm)
    return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])


def padding(counts: Sequence[int]) -> float:
    """Return f = P * max(k_r) / K, how much longer padded selections are than the selections; 1 when nothing is selected."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


@dataclass(frozen=True)
class SparseMean:
    """The means over ranks at the positions `index` [K], the same on every rank."""

    index: Tensor
    value: Tensor
    error: Tensor | None  # [K] what the means lack of this rank's values; None where they travelled as they are


def mean_at_exchanges(K: int, dtype: torch.dtype, P: int, quantizer: Quantizer | None = None) -> list[Exchange]:
    """Return the exchanges of `mean_at`: each what its busiest rank sends."""
    if quantizer is None:
        return [all_reduce_exchange(K, dtype.itemsize, P)]
    return quantized_all_reduce_exchanges(K, dtype, P, quantizer)


def mean_at(acc: Tensor, index: Tensor, comm: Comm, quantizer: Quantizer | None = None) -> SparseMean:
    """Return the means over ranks of `acc` [n] at the positions `index` [K], which are the same on every rank.

    Steps: 2 (P-1); with a quantizer 2
    Bytes sent per rank: 2 (P-1)/P * K * bytes of a value, and its share of the scales that the quantizer may add
    """
    index = index.long()
    value = kernels.gather(acc, index)  # [K]
    if quantizer is None:
        return SparseMean(index, all_reduce(value, comm) / comm.size, None)
    return SparseMean(index, *quantized_all_reduce(value, comm, quantizer))
