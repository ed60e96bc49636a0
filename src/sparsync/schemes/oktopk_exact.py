"""Our step of Ok-Topk: exact selections, exactly k survivors, and never more than 6k (P-1)/P words from any rank."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.collectives import sparse_allreduce
from sparsync.collectives.sparse_allreduce import Reduced
from sparsync.comm.metered import all_gather_cost
from sparsync.core import Comm, Span, Sparse
from sparsync.feedback import Terms
from sparsync.phases import phase
from sparsync.schemes.oktopk_step import (
    WORDS,
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
from sparsync.selection.topk import WARM
from sparsync.wire.elements import Elements


def exact_step(
    terms: Terms, k: int, imbalance: float, codec: Elements, control: Control, comm: Comm, written: torch.dtype
) -> Outcome | Poisoned:
    """One step; its four rounds are the counts and elements of split-and-reduce, the ladders, and the survivors."""
    acc, n, P, rank = terms.acc, terms.acc.numel(), comm.size, comm.rank
    cut = regions.between(control.boundaries, n)
    own = cut[rank]
    with phase("select"):
        mine, finite = kernels.accumulate_top_k_nonzero(
            terms.wide, terms.narrow, most_sent(k, n, P), acc, skip=own, bound=control.local_threshold
        )
    region = own.of(acc)  # all of this rank's own region counts, at no cost
    reduced = sparse_allreduce.split_and_reduce_(region, mine, cut, comm, codec, undoable=True)
    cost = sparse_allreduce.split_and_reduce_cost(reduced.outgoing, cut, acc.dtype, rank, codec)
    with phase("select"):
        top = kernels.top_k_nonzero(region, k)
        if reduced.before is not None:
            kernels.put_(region, reduced.before.index, reduced.before.value)
        finite = finite and kernels.all_finite(top.value)  # NaN and Inf are the largest
        rungs = regions.ladder(top.value, k, P, poisoned=not finite)
    ladders = torch.stack(comm.all_gather(rungs, [regions.LADDER] * P))
    cost += all_gather_cost(rungs.nbytes, P)
    if bool((ladders[:, 0] == regions.POISONED).any()):
        return Poisoned(cost)

    held = regions.shares(ladders, k)  # of the survivors, by region
    sums = largest(top, held[rank])
    sums = Sparse(sums.index + own.start, sums.value, n)
    wanted = sparse_allreduce.least_holdings(held) if _unbalanced(held, imbalance, k, n) else held
    sums, places, moved = balanced(sums, held, wanted, cut, comm, Elements())
    mean, read = sparse_allreduce.gather(replace(sums, value=sums.value / P), wanted, places, comm, codec)
    cost += moved + sparse_allreduce.gather_cost(wanted, places, acc.dtype, rank, codec)

    everything = sum(held) < k or k == n  # sums that did not survive are zero, which is what is written
    cleared, errors, within = _cleared(mine, mean, own, reduced, everything)
    if not codec.exact or written != acc.dtype:
        errors.append(unwritten(sums, read, written, P))
    boundaries = control.boundaries
    if k < n:  # at full density regions of equal width are the balanced ones
        boundaries = regions.balanced_boundaries(mean.index, n, P)
    following = replace(control, boundaries=boundaries, local_threshold=WARM * smallest(mine) or None)
    told = details(mine, mean, held, wanted, reduced.incoming, rank)
    told["global_threshold"] = P * smallest(mean)
    return Outcome(mean, cleared, errors, mine.index.numel() + within, following, cost, told)


def _cleared(
    mine: Sparse, mean: Sparse, own: Span, reduced: Reduced, everything: bool
) -> tuple[Tensor, list[Sparse], int]:
    """The positions this rank gave to survivors, what others did not learn there, and how many survivors lie in its own region."""
    edges = torch.tensor([own.start, own.stop], dtype=mean.index.dtype, device=mean.index.device)
    start, stop = torch.searchsorted(mean.index, edges).tolist()  # a host sync
    own_part, at = mean.index[start:stop], slice(None)
    if everything:
        own_part = torch.arange(own.start, own.stop, dtype=torch.int32, device=mean.index.device)
    else:
        at = kernels.isin(mine.index, mean.index).nonzero().view(-1)  # none of them lies in the own region
    gone = mine.index[at]
    errors = [] if reduced.error is None else [Sparse(gone, reduced.error[at], mean.length)]
    return torch.cat([gone, own_part]), errors, stop - start


def _unbalanced(held: Sequence[int], imbalance: float, k: int, n: int) -> bool:
    """Whether survivors should move before they are gathered; the same on all ranks."""
    P = len(held)
    if uneven(held, imbalance):
        return True
    return WORDS * max(held) * (P - 1) > _words_left(k, n, P) - WORDS * most_sent(k, n, P)


def most_sent(k: int, n: int, P: int) -> int:
    """How many elements a rank sends to other regions at most: k (P-1)/P, or what the bound leaves of it when k is small; at least 1."""
    most = k - k // P
    if k < n and P > 1:  # at full density everything is sent, so that the result is the dense mean
        most = min(most, (_words_left(k, n, P) - WORDS * (k + P - 2)) // WORDS)
    return max(1, most)


def _words_left(k: int, n: int, P: int) -> int:
    """What counts and ladders leave of the bound 6k (P-1)/P, in words."""
    return 6 * k * (P - 1) // P - (1 + regions.LADDER) * (P - 1)
