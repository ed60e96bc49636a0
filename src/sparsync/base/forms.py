"""What the closed forms of schemes share: estimates where nothing was counted, and the work of a step beside its exchanges.

Work is told as the elements that each kind of kernel processes and the number of its calls:

    accumulate   residual + gradient
    select       looks for the largest elements
    encode       values to bytes; positions are encoded along with them
    decode       bytes to values, and what a rank decodes of its own to know what rounding drops
    apply        writes result and residual
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from sparsync.comm.busiest import Tally
from sparsync.comm.plan import Exchange, Given, Plan

Work = tuple[int, int]  # elements, calls
NOTHING: Work = (0, 0)

# Unions of gradients that are partly alike grow about so: K = k P^0.6, as drawn by `sparsync traffic`; P for unrelated ones.
UNION_EXPONENT = 0.6
# Of all that is selected, what lies in one of equal spans of a vector whose layers differ in scale, as it draws them.
PEAK = 0.6
# Bytes of a value are read or written so often: `accumulate` reads the residual and writes the sum, and so on. The gradient comes on top.
_TOUCHES = {"accumulate": 2, "select": 1, "encode": 2, "decode": 3, "apply": 2}


def union_of(given: Given, k: int) -> int:
    """Return K where each rank selects `k` elements of all n by itself: as given, or estimated."""
    if given.union is not None:
        return given.union
    return min(given.n, round(k * given.P**UNION_EXPONENT))


def selected_of(given: Given, total: int) -> Sequence[int]:
    """Return how many elements each rank selects where they select `total` together: as given, or equally many."""
    if given.selected is not None:
        return given.selected
    each, more = divmod(total, given.P)
    return [each + 1] * more + [each] * (given.P - more)


def uneven(total: int, lengths: Sequence[int]) -> list[int]:
    """Return how many of `total` elements lie in each of adjacent spans of layers that differ in scale: PEAK of them in the first."""
    P = len(lengths)
    first = min(lengths[0], max(-(-total // P), round(PEAK * total)))
    each, more = divmod(total - first, max(1, P - 1))
    return [first, *(min(length, each + (p < more)) for p, length in enumerate(lengths[1:]))]


def paired(counts: Sequence[int], lengths: Sequence[int]) -> Iterable[tuple[tuple[int, int], int]]:
    """Return each pair of a count and a length that some rank has, and how many ranks have it."""
    return Counter(zip(counts, lengths, strict=True)).items()


def mean(sizes: Tally) -> int:
    """Return the mean size, rounded up."""
    return math.ceil(sum(size * ranks for size, ranks in sizes.items()) / sum(sizes.values()))


def quantized_work(K: int, P: int) -> tuple[Work, Work]:
    """Return what `quantized_all_reduce` encodes, and decodes: at P owners, of K values."""
    own = -(-K // P)
    return (K, P), (P * own - own + K + K - own, 3 * P - 2)


def plus(*parts: Work) -> Work:
    """Return the sum of works."""
    return sum(elements for elements, _ in parts), sum(calls for _, calls in parts)


def planned(
    given: Given,
    exchanges: Iterable[Exchange],
    state_nbytes: int = 0,
    *,
    accumulate: bool = True,
    select: Work = NOTHING,
    passes_to_select: int = 0,
    encode: Work = NOTHING,
    decode: Work = NOTHING,
) -> Plan:
    """Return the plan of these exchanges and this work; exchanges without a round are those of one rank, and left out.

    `passes_to_select`: of n elements, those that selecting reads beside the pass that accumulates.
    """
    work = {"select": select, "encode": encode, "decode": decode, "apply": (given.n, 1)}
    if accumulate:
        work = {"accumulate": (given.n, 1), **work}
    work = {kind: each for kind, each in work.items() if each[1]}
    touched = {kind: elements for kind, (elements, _) in work.items()} | {"select": passes_to_select}
    passes = given.value_nbytes * sum(_TOUCHES[kind] * elements for kind, elements in touched.items())
    passes += given.itemsize * (work["apply"][0] + (given.n if accumulate else 0))
    return Plan(
        tuple(exchange for exchange in exchanges if exchange.rounds),
        passes,
        {kind: elements for kind, (elements, _) in work.items()},
        {kind: calls for kind, (_, calls) in work.items()},
        state_nbytes=state_nbytes,
    )
