"""Exchanges in closed form, without tensors and in a time that does not grow with P: what the busiest rank sends and receives.

Parts of packets are told as a tally, size in bytes -> how many ranks have a part of this size, because near-equal parts have two sizes
at any P. What a ring's rank sends is told by `core.adjacent`. The forms of single ranks stand in `metered` and beside the collectives.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from sparsync.comm.metered import COUNT_NBYTES, all_reduce_cost
from sparsync.comm.plan import Exchange
from sparsync.core import Cost

Tally = Mapping[int, int]  # a size, and of how many ranks it is


def near_equal(count: int, P: int) -> Tally:
    """Return the tally of the lengths of `spans(count, P)`."""
    short, longer = divmod(count, P)
    return {length: ranks for length, ranks in ((short + 1, longer), (short, P - longer)) if ranks}


def tally(sizes: Mapping[int, int] | Iterable[int], nbytes: Callable[[int], int] = int) -> Tally:
    """Return how many ranks have parts of each size; `nbytes` gives the size of what is tallied or listed."""
    found: Counter[int] = Counter()
    for size, ranks in sizes.items() if isinstance(sizes, Mapping) else Counter(sizes).items():
        found[nbytes(size)] += ranks
    return found


def all_gather_exchange(sizes: Tally) -> Exchange:
    """Return the all-gather of one part from each rank to all others."""
    P, total = sum(sizes.values()), _total(sizes)
    longest, shortest = max(sizes), min(sizes)
    if P == 1:
        return Exchange("all_gather", 0, 0, 0, 0)
    return Exchange("all_gather", (P - 1) * longest, P - 1 if longest else 0, 1, total - shortest)


def counts_exchange(P: int, nbytes: int = COUNT_NBYTES) -> Exchange:
    """Return the all-gather of `nbytes` from each rank."""
    return all_gather_exchange({nbytes: P})


def to_owners_exchange(sizes: Tally) -> Exchange:
    """Return the all-to-all in which each rank sends to every other the part of this size that is the other's."""
    P, total = sum(sizes.values()), _total(sizes)
    full = P - sizes.get(0, 0)
    if P == 1:
        return Exchange("all_to_all", 0, 0, 0, 0)
    return Exchange("all_to_all", total - min(sizes), min(full, P - 1), 1, (P - 1) * max(sizes))


def all_to_all_exchange(nbytes: Sequence[Sequence[int]]) -> Exchange:
    """Return the all-to-all in which rank r sends `nbytes[r][p]` to rank p; what is its own does not travel."""
    P = len(nbytes)
    if P == 1:
        return Exchange("all_to_all", 0, 0, 0, 0)
    sent = [[part for p, part in enumerate(row) if p != rank] for rank, row in enumerate(nbytes)]
    received = [sum(row[p] for rank, row in enumerate(nbytes) if rank != p) for p in range(P)]
    return Exchange(
        "all_to_all", max(map(sum, sent)), max(sum(1 for part in row if part) for row in sent), 1, max(received)
    )


def from_one_exchange(nbytes: int, P: int) -> Exchange:
    """Return the exchange in which one rank sends the same to all others, which send nothing."""
    return Exchange("all_gather", (P - 1) * nbytes, P - 1 if nbytes else 0, 1 if P > 1 else 0, nbytes if P > 1 else 0)


def all_reduce_exchange(count: int, element_nbytes: int, P: int) -> Exchange:
    """Return the backend's all-reduce of `count` elements, counted as a ring."""
    # Everybody leaves out two adjacent chunks; the last ones are the shortest.
    cost = all_reduce_cost(count, element_nbytes, P, max(0, P - 2))
    # What a rank receives is what its neighbour sends.
    return Exchange("all_reduce", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


def busiest_of(costs: Iterable[Cost]) -> Cost:
    """Return the most bytes and the most messages of several ranks, which take equally many steps."""
    found = list(costs)
    return Cost(found[0].steps, max(cost.messages for cost in found), max(cost.nbytes for cost in found))


def _total(sizes: Tally) -> int:
    return sum(size * ranks for size, ranks in sizes.items())
