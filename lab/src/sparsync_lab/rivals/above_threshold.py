"""What schemes share in which each rank sends all others what reaches a threshold it estimates.

Where selections have as many elements as the gradient makes them, one message of counts goes first and says which rank holds NaN or Inf.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsync import Accumulator, Bucket, Comm, Sparse, Update, kernels
from sparsync.collectives.values import exchange_counts
from sparsync.comm.plan import Given, Plan, counts_exchange, tally
from sparsync.core import Detail, count_for, phase
from sparsync.schemes.topk_allgather import gather_selections, gather_selections_planned
from sparsync.wire import Values


def gather_above(
    acc: Accumulator,
    find: Callable[[Tensor], float],
    values: Values,
    bucket: Bucket,
    comm: Comm,
    details: Mapping[str, Detail] | None = None,
    accept: Callable[[int], None] = lambda count: None,
) -> Update:
    """Return the update of `gather_selections` in which each rank selects what reaches the threshold `find(acc)`, its own.

    Zeros are never selected; `find` sees finite numbers only. `accept(k_r)` changes the scheme's state once the mean is known to be finite.
    Raises NonFiniteError on all ranks where one holds NaN or Inf.
    Exchanges: two all-gathers. Bytes sent per rank: P-1 times 8 and the packet of its own selection.
    """
    x = acc.values
    with phase("select"):
        threshold = find(x) if acc.finite else torch.inf
        own = kernels.select_ge(x, max(0.0, threshold)) if acc.finite else _nothing(x)
    count = own.index.numel()
    counts = exchange_counts(count, acc.finite, comm, x.device)
    found = {"threshold": threshold, **(details or {})}
    return gather_selections(own, counts, values, bucket, comm, found, lambda: accept(count))


def gather_above_planned(given: Given, density: float, values: Values, state_nbytes: int, passes: int) -> Plan:
    """Return the plan of `gather_above`; each rank selects what the density stands for, or the figures "selected"."""
    selected = given.by_rank("selected")
    counts = {count_for(density, given.n): given.P} if selected is None else tally(selected)
    return gather_selections_planned(given, counts, values, state_nbytes, [counts_exchange(given.P)], passes)


def _nothing(x: Tensor) -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], x.numel())
