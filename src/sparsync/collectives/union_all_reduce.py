"""Exchanges of schemes whose ranks select in exclusive partitions: no position is sent twice, so selections need no merging.

First the positions go round, then every rank gives its value at every position of the union, as it is or rounded. The published schemes
(MiCRO, arXiv 2310.00967; ExDyna, arXiv 2402.13781) exchange counts first and fill all selections up to the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives.quantized_all_reduce import Rounding, mean_rounded, mean_rounded_cost
from sparsync.comm.metered import all_gather_cost, all_reduce_cost
from sparsync.core import Comm, Cost

COUNT_NBYTES = 8


def exchange_counts(count: int, poisoned: bool, comm: Comm, device: torch.device) -> list[int] | None:
    """How many elements each rank selected, or None on every rank when any rank holds NaN or Inf: it tells a negative number.

    Steps: P-1
    Bytes sent per rank: 8 (P-1)
    """
    told = torch.tensor([-1 if poisoned else count], dtype=torch.int64, device=device)
    counts = [int(each) for each in comm.all_gather(told, [1] * comm.size)]  # a host sync: buffer sizes depend on it
    return None if min(counts) < 0 else counts


def counts_cost(P: int) -> Cost:
    """What `exchange_counts` sends from this rank."""
    return all_gather_cost(COUNT_NBYTES, P)


def all_gather_padded(index: Tensor, counts: Sequence[int], comm: Comm) -> Tensor:
    """The selections of all ranks after each other, [K]; `counts[r]` is the length of rank r's.

    Steps: P-1
    Bytes sent per rank: (P-1) * max(counts) * bytes of an index
    """
    longest = max(counts)
    padded = torch.nn.functional.pad(index, (0, longest - index.numel()))
    gathered = comm.all_gather(padded, [longest] * comm.size)
    return torch.cat([each[:count] for each, count in zip(gathered, counts, strict=True)])


def padded_cost(counts: Sequence[int], index_nbytes: int) -> Cost:
    """What `all_gather_padded` sends from this rank."""
    return all_gather_cost(max(counts) * index_nbytes, len(counts))


def padding(counts: Sequence[int]) -> float:
    """f = P * max(k_r) / K, how much longer an exchange of equal lengths is than the selections in it; 1 when nothing is selected."""
    total = sum(counts)
    return len(counts) * max(counts) / total if total else 1.0


@dataclass(frozen=True)
class Union:
    """The means over ranks at the positions `index` [K], the same on every rank, and what it cost to get them there."""

    index: Tensor
    mean: Tensor
    error: Tensor  # what this rank must keep for the means to lack nothing: zero where values are sent as they are
    cost: Cost


def mean_at(acc: Tensor, index: Tensor, written: torch.dtype, comm: Comm, rounding: Rounding | None = None) -> Union:
    """The means over ranks of `acc` [n] at the positions `index` [K], which are the same on every rank.

    With `rounding`, as the type `written` holds them.
    Steps: 2 (P-1); with rounding P
    Bytes sent per rank: 2 (P-1)/P * K * bytes of a value, and its share of the scales that the rounding may add
    """
    index = index.long()
    value = kernels.gather(acc, index)  # [K]
    if rounding is None:
        cost = all_reduce_cost(value.numel(), value.element_size(), comm.size, comm.rank)
        return Union(index, comm.all_reduce(value) / comm.size, torch.zeros_like(value), cost)
    mean, error = mean_rounded(value, written, comm, rounding)
    return Union(index, mean, error, mean_rounded_cost(value.numel(), value.dtype, comm.size, comm.rank, rounding))
