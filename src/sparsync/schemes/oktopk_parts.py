"""What both rules of Ok-Topk use: the state of a bucket, balancing, and what a report says."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sparsync import kernels
from sparsync.collectives import sparse_allreduce
from sparsync.collectives.sparse_allreduce import ElementCodec
from sparsync.comm.plan import Exchange, Given
from sparsync.core import Comm, Detail, Span, Sparse, spans
from sparsync.feedback import smallest_magnitude


@dataclass
class Control:
    """What one rank knows of one bucket besides its residual; the local threshold is its own, the rest the same on all ranks."""

    t: int = 0  # steps
    boundaries: list[int] = field(default_factory=list)  # P-1; empty: equal widths
    # Of the published rules only; None: to be evaluated. The local one is this rank's own, so it is left out where ranks are compared.
    local_threshold: float | None = field(default=None, repr=False)
    global_threshold: float | None = None

    def regions(self, n: int, P: int) -> tuple[Span, ...]:
        """Return the region of each rank."""
        return sparse_allreduce.regions_of(self.boundaries or sparse_allreduce.equal_boundaries(n, P), n)

    def become(self, other: "Control") -> None:
        """Take over all of `other`."""
        self.__dict__.update(other.__dict__)


def uneven(held: Sequence[int], imbalance: float) -> bool:
    """Return whether some rank holds more than `imbalance` times the mean, and could hold less."""
    P, most = len(held), max(held)
    return most * P > imbalance * sum(held) and most > -(-sum(held) // P)


def balanced(
    sums: Sparse, held: Sequence[int], wanted: Sequence[int], regions: Sequence[Span], comm: Comm, codec: ElementCodec
) -> tuple[Sparse, Sequence[Span]]:
    """Return this rank's `wanted` survivors, and the span that those of each rank lie in."""
    if list(wanted) == list(held):
        return sums, regions
    moved = sparse_allreduce.balance(sums, held, wanted, regions, comm, codec)
    return moved, [Span(0, sums.length)] * comm.size


def balanced_exchanges(
    held: Sequence[int], wanted: Sequence[int] | None, given: Given, exact: ElementCodec, codec: ElementCodec
) -> list[Exchange]:
    """Return the exchanges of `balanced`, whose codec is `exact`, and of the all-gather that follows it."""
    lengths = given.lengths or [len(span) for span in spans(given.n, given.P)]
    if wanted is None or list(wanted) == list(held):
        return [sparse_allreduce.gather_elements_exchange(held, lengths, given.dtype, codec)]
    everywhere = [given.n] * given.P
    return [
        sparse_allreduce.balance_exchange(held, wanted, lengths, given.dtype, exact),
        sparse_allreduce.gather_elements_exchange(wanted, everywhere, given.dtype, codec),
    ]


def k_largest(elements: Sparse, k: int) -> Sparse:
    """Return the k elements of largest magnitude."""
    top = kernels.top_k(elements.value, min(k, elements.value.numel())).index
    return Sparse(elements.index[top], elements.value[top], elements.length)


def details(
    mine: Sparse, survivors: Sparse, held: Sequence[int], wanted: Sequence[int], incoming: Sequence[int], rank: int
) -> dict[str, Detail]:
    """Return what the report says besides the counts; thresholds are the smallest selected magnitudes, here and of the sums."""
    total = sum(held)
    return {
        "local_threshold": smallest_magnitude(mine.value),
        "global_threshold": smallest_magnitude(survivors.value),
        "local_count": mine.index.numel(),
        "global_count": survivors.index.numel(),
        "received_count": sum(incoming) - incoming[rank],
        "imbalance": max(held) * len(held) / total if total else 1.0,
        "balanced": list(wanted) != list(held),
    }
