"""What Ok-Topk's two rules have in common: what a rank knows of a bucket, what a step comes to, and who holds the survivors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives import sparse_allreduce
from sparsync.core import Comm, Cost, Detail, Span, Sparse

WORDS = 2  # of an element on the wire, at most: its position and its value


@dataclass
class Control:
    """What one rank knows about one bucket besides its residual; the local threshold is its own, the rest the same on all ranks."""

    elements: int
    ranks: int
    boundaries: list[int]
    names: list[str]
    t: int = 0
    local_threshold: float | None = None  # None: to be evaluated
    global_threshold: float | None = None


@dataclass(frozen=True)
class Outcome:
    """One step: the means that are written, the same on all ranks, and what this rank no longer keeps, and still keeps, of them."""

    mean: Sparse  # [G]
    cleared: Tensor  # positions
    errors: Sequence[Sparse]  # what others did not learn of the cleared, and readers not of this rank's sums
    selected: int
    control: Control
    cost: Cost
    details: dict[str, Detail]


@dataclass(frozen=True)
class Poisoned:
    """NaN or Inf on some rank; all ranks know, and nothing is written."""

    cost: Cost


def uneven(held: Sequence[int], imbalance: float) -> bool:
    """Whether some rank holds more than `imbalance` times the mean, and could hold less."""
    P, most = len(held), max(held)
    return most * P > imbalance * sum(held) and most > -(-sum(held) // P)


def balanced(
    sums: Sparse,
    held: Sequence[int],
    wanted: Sequence[int],
    cut: Sequence[Span],
    comm: Comm,
    codec: sparse_allreduce.Codec,
) -> tuple[Sparse, Sequence[Span], Cost]:
    """This rank's `wanted` survivors, the spans that those of each rank lie in, and what it took."""
    if list(wanted) == list(held):
        return sums, cut, Cost()
    moved = sparse_allreduce.balance(sums, held, wanted, cut, comm, codec)
    cost = sparse_allreduce.balance_cost(held, wanted, cut, sums.value.dtype, comm.rank, codec)
    return moved, [Span(0, sums.length)] * comm.size, cost


def unwritten(sums: Sparse, read: Tensor, written: torch.dtype, P: int) -> Sparse:
    """What P times the mean lacks of these sums, where the mean is `read` in the type `written`."""
    return replace(sums, value=sums.value - P * read.to(written).to(sums.value.dtype))


def largest(part: Sparse, k: int) -> Sparse:
    """The k largest elements of `part`."""
    top = kernels.top_k(part.value, min(k, part.value.numel())).index
    return Sparse(part.index[top], part.value[top], part.length)


def smallest(part: Sparse) -> float:
    """The smallest magnitude in `part`, 0 when it is empty."""
    return float(part.value.abs().min()) if part.value.numel() else 0.0


def details(
    mine: Sparse, survivors: Sparse, held: Sequence[int], wanted: Sequence[int], incoming: Sequence[int], rank: int
) -> dict[str, Detail]:
    """What the report tells besides the counts; thresholds are the smallest magnitudes that were selected, here and of the sums."""
    total = sum(held)
    return {
        "local_threshold": smallest(mine),
        "global_threshold": smallest(survivors),
        "local_count": mine.index.numel(),
        "global_count": survivors.index.numel(),
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }
