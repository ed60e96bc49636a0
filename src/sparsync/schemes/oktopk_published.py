"""The paper's step of Ok-Topk (arXiv 2201.07598), and the scaling of thresholds in the authors' code for VGG.

Numbers in comments are our own: `OK_SPARSE_ALLREDUCE` in six steps, reconstructed from the authors' code and descriptions of the paper,
whose text was not at hand; `oktopk` lists what differs. `acc`, residual plus gradient, comes ready; ErrorFeedbackScheme writes the mean,
clears the residual at `cleared` and calls `commit`. The programs for LSTM and BERT have other factors and bands; they are not here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsync.base.error_feedback import Update
from sparsync.collectives import sparse_allreduce
from sparsync.collectives.sparse_allreduce import Control, OwnControl, details, k_largest, uneven
from sparsync.core import FOUND_INF, Bucket, Comm, Span, Sparse, exact_divisor, raise_if_found_inf
from sparsync.feedback import Accumulator, smallest_magnitude
from sparsync.kernels import operations as kernels
from sparsync.wire import Raw


@dataclass(frozen=True)
class Settings:
    """What the published step needs of the scheme's settings; tau' is `threshold_steps` and tau is `region_steps`."""

    scales: bool  # thresholds between re-evaluations, as the authors' code does
    imbalance: float
    threshold_steps: int
    region_steps: int


def step(
    acc: Accumulator, k: int, settings: Settings, control: Control, own: OwnControl, bucket: Bucket, comm: Comm
) -> Update:
    """Return the update of one step."""
    n, P, rank, scales = bucket.grad.numel(), comm.size, comm.rank, settings.scales
    # 1: if t mod tau' == 0: th_loc = k-th largest of |acc|
    threshold = _local_threshold(acc, k, control.t, own, settings.threshold_steps, scales)
    mine = acc.above(threshold, Span(0, n))
    # 2: if t mod tau == 0: boundaries = SPACE_REPARTITION(acc, th_loc)
    boundaries = _boundaries(mine, control, settings.region_steps, comm)
    # 3: reduced, I_loc = SPLIT_AND_REDUCE(acc, th_loc, boundaries)
    regions = sparse_allreduce.regions_of(boundaries, n)
    region = mine.value.new_zeros(len(regions[rank]))
    reduced = sparse_allreduce.split_and_reduce_(region, mine, regions, comm, Raw(), counts_first=True)
    # 4: if t mod tau' == 0: all = ALLGATHERV(reduced); th_glob = k-th largest of |all|. In another order: where it is evaluated, all sums
    # are kept here, gathered in 5 and cut to k there. `region` has this rank's sums.
    global_threshold = control.threshold
    evaluate = control.t % settings.threshold_steps == 0 or global_threshold is None
    kept = kernels.select_ge(region, 0.0 if evaluate else float(global_threshold or 0.0))
    finite = acc.finite and kernels.all_finite(region)
    size = torch.tensor([kept.index.numel() if finite else FOUND_INF], dtype=torch.int32, device=region.device)
    # A host sync: buffer sizes depend on it.
    held: list[int] = torch.cat(comm.all_gather(size, [1] * P)).tolist()
    raise_if_found_inf(held)
    # 5: u, I_glob = BALANCE_AND_ALLGATHERV(reduced, th_glob)
    kept = Sparse(kept.index + regions[rank].start, kept.value, n)
    wanted = sparse_allreduce.equal_holdings(held) if not evaluate and uneven(held, settings.imbalance) else held
    kept, places = sparse_allreduce.balance(kept, held, wanted, regions, comm, Raw())
    survivors, _ = sparse_allreduce.all_gather_elements(kept, wanted, places, comm, Raw())
    if evaluate:
        survivors = k_largest(survivors, k)
        global_threshold = smallest_magnitude(survivors.value)
    # 6: return u, I_loc intersect I_glob
    cleared = survivors.index[kernels.isin(survivors.index, mine.index)]
    # All sums that are not zero were written if there were fewer than k, or k is n: nothing of what was sent is left to send.
    if evaluate and (sum(held) < k or k == n):
        cleared = mine.index
    thresholds = smallest_magnitude(mine.value), smallest_magnitude(survivors.value)
    found = details(mine, thresholds, held, wanted, reduced.incoming, rank)
    found |= {"global_count": survivors.index.numel(), "evaluated": evaluate}
    if scales:
        threshold, global_threshold = _scaled(mine, survivors, threshold, global_threshold, k, evaluate)

    def commit() -> None:
        control.become(Control(control.t + 1, boundaries, global_threshold or None))
        own.threshold = threshold or None

    mean = replace(survivors, value=survivors.value / exact_divisor(survivors.value, P))
    return Update(mean, cleared, mine.index.numel(), details=found, commit=commit)


def _local_threshold(acc: Accumulator, k: int, t: int, own: OwnControl, threshold_steps: int, scales: bool) -> float:
    if t % threshold_steps == 0 or own.threshold is None:
        return float(_magnitude(acc.top_k(k).value).min())
    return _tightened(acc.values, own.threshold, k) if scales else own.threshold


def _boundaries(mine: Sparse, control: Control, region_steps: int, comm: Comm) -> list[int]:
    """Return where the regions begin at this step: every `region_steps` steps the mean over ranks of each boundary."""
    n, P = mine.length, comm.size
    if control.t % region_steps or P == 1:
        return control.boundaries or sparse_allreduce.equal_boundaries(n, P)
    wanted = sparse_allreduce.balanced_boundaries(mine.index, n, P)
    # int64, because n * P may exceed an int32.
    total = comm.all_reduce(torch.tensor(wanted, dtype=torch.int64, device=mine.index.device))
    return (total // P).tolist()


def _tightened(acc: Tensor, threshold: float, k: int) -> float:
    """Return the threshold raised by 3 %, up to five times, while more than 4k/3 elements are selected: the authors' code for VGG."""
    size = _magnitude(acc)
    for _ in range(5):
        if 3 * int((size >= threshold).sum()) <= 4 * k:
            break
        threshold *= 1.03
    return threshold


def _scaled(
    mine: Sparse, survivors: Sparse, threshold: float, global_threshold: float | None, k: int, evaluated: bool
) -> tuple[float, float | None]:
    """Return the thresholds of the next step, by the bands of the authors' code for VGG."""
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


def _magnitude(x: Tensor) -> Tensor:
    """Return |x|, with NaN as infinity."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
