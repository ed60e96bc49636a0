"""The paper's step of Ok-Topk, line by line (arXiv 2201.07598), and the scaling of thresholds in the authors' code for VGG."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives import sparse_allreduce
from sparsync.comm.metered import all_gather_cost, all_reduce_cost
from sparsync.core import Comm, Cost, Sparse
from sparsync.kernels import sparse_reference
from sparsync.schemes.oktopk_step import (
    Control,
    Outcome,
    Poisoned,
    balanced,
    details,
    largest,
    smallest,
    uneven,
    unwritten,
)
from sparsync.selection import regions
from sparsync.wire import raw

SIZE_NBYTES = 4  # an int32: how many survivors a rank has, or POISONED


@dataclass(frozen=True)
class Settings:
    """What the paper's step is told; tau' is `threshold_steps` and tau is `region_steps`."""

    scales: bool  # thresholds between re-evaluations, as the authors' code does
    imbalance: float
    threshold_steps: int
    region_steps: int


def published_step(
    acc: Tensor, k: int, settings: Settings, control: Control, comm: Comm, written: torch.dtype
) -> Outcome | Poisoned:
    """One step on `acc` [n]; numbers are lines of the paper's text."""
    n, P, rank = acc.numel(), comm.size, comm.rank
    # 1: if t mod tau' == 0: th_loc = k-th largest of |acc|
    threshold = _local_threshold(acc, k, settings, control)
    mine = kernels.select_ge(acc, threshold)
    # 2: if t mod tau == 0: boundaries = SPACE_REPARTITION(acc, th_loc)
    boundaries, cost = _boundaries(mine, settings, control, comm)
    # 3: reduced, I_loc = SPLIT_AND_REDUCE(acc, th_loc, boundaries)
    cut = regions.between(boundaries, n)
    region = acc.new_zeros(len(cut[rank]))
    reduced = sparse_allreduce.split_and_reduce_(region, mine, cut, comm, raw)
    cost += sparse_allreduce.split_and_reduce_cost(reduced.outgoing, cut, acc.dtype, rank, raw)
    # 4: if t mod tau' == 0: all = ALLGATHERV(reduced); th_glob = k-th largest of |all|
    global_threshold = control.global_threshold
    evaluate = control.t % settings.threshold_steps == 0 or global_threshold is None
    kept = kernels.select_ge(region, 0.0 if evaluate else float(global_threshold or 0.0))
    finite = kernels.all_finite(mine.value) and kernels.all_finite(region)
    size = torch.tensor([kept.index.numel() if finite else regions.POISONED], dtype=torch.int32, device=acc.device)
    held: list[int] = torch.cat(comm.all_gather(size, [1] * P)).tolist()  # a host sync: buffer sizes depend on it
    cost += all_gather_cost(SIZE_NBYTES, P)
    if regions.POISONED in held:
        return Poisoned(cost)
    # 5: u, I_glob = BALANCE_AND_ALLGATHERV(reduced, th_glob)
    kept = Sparse(kept.index + cut[rank].start, kept.value, n)
    wanted = sparse_allreduce.equal_holdings(held) if not evaluate and uneven(held, settings.imbalance) else held
    kept, places, moved = balanced(kept, held, wanted, cut, comm, raw)
    survivors, _ = sparse_allreduce.gather(kept, wanted, places, comm, raw)
    cost += moved + sparse_allreduce.gather_cost(wanted, places, acc.dtype, rank, raw)
    if evaluate:
        survivors = largest(survivors, k)
        global_threshold = smallest(survivors)
    # 6: return u, I_loc intersect I_glob
    cleared = survivors.index[kernels.isin(survivors.index, mine.index)]
    if evaluate and (sum(held) < k or k == n):  # sums that did not survive are zero, which is what is written
        cleared = mine.index
    told = details(mine, survivors, held, wanted, reduced.incoming, rank) | {"evaluated": evaluate}
    if settings.scales:
        threshold, global_threshold = _scaled(mine, survivors, threshold, global_threshold, k, evaluate)
    following = replace(
        control, boundaries=boundaries, local_threshold=threshold or None, global_threshold=global_threshold or None
    )
    mean = replace(survivors, value=survivors.value / P)
    errors = _unwritten_here(kept, survivors, written, P)
    return Outcome(mean, cleared, errors, mine.index.numel(), following, cost, told)


def _local_threshold(acc: Tensor, k: int, settings: Settings, control: Control) -> float:
    if control.t % settings.threshold_steps == 0 or control.local_threshold is None:
        return float(sparse_reference.magnitude(kernels.top_k(acc, k).value).min())
    return _tightened(acc, control.local_threshold, k) if settings.scales else control.local_threshold


def _boundaries(mine: Sparse, settings: Settings, control: Control, comm: Comm) -> tuple[list[int], Cost]:
    """Where the regions begin at this step, and what it took to agree: the mean over ranks of each boundary."""
    n, P = mine.length, comm.size
    if control.t % settings.region_steps or P == 1:
        return control.boundaries, Cost()
    wanted = regions.balanced_boundaries(mine.index, n, P)
    # int64, because n * P may exceed an int32
    total = comm.all_reduce(torch.tensor(wanted, dtype=torch.int64, device=mine.index.device))
    return (total // P).tolist(), all_reduce_cost(P - 1, 8, P, comm.rank)


def _unwritten_here(kept: Sparse, survivors: Sparse, written: torch.dtype, P: int) -> Sequence[Sparse]:
    """What the mean, in the type `written`, lacks of those of this rank's sums that survived."""
    if written == kept.value.dtype:
        return []
    at = kernels.isin(kept.index, survivors.index)
    here = Sparse(kept.index[at], kept.value[at], kept.length)
    return [unwritten(here, here.value / P, written, P)]


def _tightened(acc: Tensor, threshold: float, k: int) -> float:
    """The authors' code for VGG: up to five times 3 % more while more than 4k/3 elements are selected."""
    size = sparse_reference.magnitude(acc)
    for _ in range(5):
        if 3 * int((size >= threshold).sum()) <= 4 * k:
            break
        threshold *= 1.03
    return threshold


def _scaled(
    mine: Sparse, survivors: Sparse, threshold: float, global_threshold: float | None, k: int, evaluated: bool
) -> tuple[float, float | None]:
    """The thresholds of the next step, by the bands of the authors' code for VGG."""
    total, gathered = mine.index.numel(), survivors.index.numel()
    if 3 * total < 2 * k:
        threshold /= 1.012
    elif 4 * total > 5 * k:
        threshold *= 1.012
    if global_threshold is not None and not evaluated:
        if 3 * gathered < 2 * k:
            global_threshold /= 1.008
        elif 3 * gathered > 4 * k:
            global_threshold *= 1.008
    return threshold, global_threshold
