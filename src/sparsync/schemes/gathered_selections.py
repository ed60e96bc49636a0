"""What schemes share in which every rank sends a selection of its own to all others: TopkA and the schemes with a threshold.

Where selections have as many elements as the gradient makes them, one message of counts goes first and says which rank holds NaN or Inf.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sparsync import kernels
from sparsync.base.error_feedback import Update
from sparsync.base.forms import NOTHING, planned, plus
from sparsync.collectives.exchange import all_gather
from sparsync.collectives.union_all_reduce import exchange_counts
from sparsync.comm.busiest import Tally, all_gather_exchange, counts_exchange, tally
from sparsync.comm.plan import Exchange, Given, Plan
from sparsync.core import Bucket, Comm, Detail, Sparse
from sparsync.feedback import Accumulator
from sparsync.kernels.rounding import lacking
from sparsync.phases import phase
from sparsync.selection.density import count_for
from sparsync.wire.elements import Elements
from sparsync.wire.values import Values


def gather_selections(
    own: Sparse,
    counts: Sequence[int],
    values: Values,
    bucket: Bucket,
    comm: Comm,
    details: Mapping[str, Detail] | None = None,
    commit: Callable[[], None] = lambda: None,
) -> Update:
    """Return the update in which the mean is the sum of all ranks' selections divided by P, and each rank clears its own.

    `counts[r]`, how many elements rank r selected, are known to all; `values` says how values travel.
    Exchanges: one all-gather. Bytes sent per rank: P-1 times the packet of its own selection.
    """
    n, P, dtype, k = bucket.grad.numel(), comm.size, own.value.dtype, own.index.numel()
    codec = Elements(values)
    with phase("encode"):
        # Quantized values are sent as their share of the mean, value / P: times P it is exact, which a mean of decoded values is not.
        packet = codec.encode(own if codec.exact else Sparse(own.index, own.value / P, n))
    packets = all_gather(packet, [codec.nbytes(count, n, dtype) for count in counts], comm)
    with phase("decode"):
        gathered = [codec.decode(each, count, n, dtype) for each, count in zip(packets, counts, strict=True)]
        # In rank order, so the same bits on every rank.
        union = kernels.coalesce(gathered)
    found, note = dict(details or {}), commit
    if codec.exact:
        return Update(Sparse(union.index, union.value.div_(P), n), own.index, k, details=found, commit=note)
    error = lacking(own.value, codec.decode_values(packet, k, n, dtype), P)
    return Update(union, own.index, k, [Sparse(own.index, error, n)], found, note)


def gather_selections_planned(
    given: Given, counts: Tally, values: Values, state_nbytes: int, first: Sequence[Exchange] = (), passes: int = 0
) -> Plan:
    """Return the plan of `gather_selections` by ranks of which so many select so many elements, after the exchanges `first`.

    `passes`: as often all n elements are read to find them.
    """
    codec, n, total = Elements(values), given.n, sum(count * ranks for count, ranks in counts.items())
    sizes = tally(counts, lambda count: codec.nbytes(count, n, given.dtype))
    encode = (max(counts), 1)
    return planned(
        given,
        [*first, all_gather_exchange(sizes)],
        state_nbytes,
        select=(n, 1),
        passes_to_select=passes * n,
        encode=encode,
        decode=plus((total, given.P), NOTHING if codec.exact else encode),
    )


def gather_above_planned(given: Given, density: float, values: Values, state_nbytes: int, passes: int) -> Plan:
    """Return the plan of `gather_above`; each rank selects what the density stands for, unless `given.selected` says otherwise."""
    counts = {count_for(density, given.n): given.P} if given.selected is None else tally(given.selected)
    return gather_selections_planned(given, counts, values, state_nbytes, [counts_exchange(given.P)], passes)


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


def values_or_nan(acc: Accumulator) -> Tensor:
    """Return the values of `acc`, [n], or only NaN where one is not finite: in any sum over ranks all of them see it."""
    return acc.values if acc.finite else torch.full_like(acc.values, torch.nan)


def _nothing(x: Tensor) -> Sparse:
    return Sparse(torch.empty(0, dtype=torch.int32, device=x.device), x[:0], x.numel())
