"""The types of plans: exchanges in closed form, the work beside them, and the bucket.

A plan needs no tensors, so it covers any number of ranks and elements. This file has the types, the operations of a communicator and
`planned`, which adds the work; `collectives` and `schemes` have the closed forms. Tests compare them with a MeteredComm's counts.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from sparsync.comm.announcement import announcement_cost
from sparsync.comm.channels import LENGTH_NBYTES
from sparsync.comm.metered import all_reduce_cost
from sparsync.core import Cost, ParameterSpan, Span

MOST_RANKS = 10**5  # some forms look at each rank
Kind = Literal["send_recv", "all_gather", "all_to_all", "all_reduce"]
Peers = Literal["all", "ring", "node", "nodes"]
Size = TypeVar("Size")
Work = tuple[int, int]  # elements, calls
NOTHING: Work = (0, 0)
# Reads and writes per value for each kind of work: `accumulate` reads the residual and writes the sum, and so on. The gradient is extra.
_TOUCHES = {"accumulate": 2, "select": 1, "encode": 2, "decode": 3, "apply": 2}


@dataclass(frozen=True)
class Exchange:
    """One exchange among all ranks, which waits for the previous one: the traffic of its busiest rank.

    `nbytes` is the whole payload that a rank sends, as a MeteredComm counts it: P-1 times its part in an all_gather, 2 (P-1)/P of the
    tensor in an all_reduce, which has two rounds. A chain of dependent sends is one exchange of several `rounds`.
    """

    kind: Kind
    nbytes: float  # of the rank that sends the most
    messages: float  # of the rank that sends the most messages; empty messages are not sent
    rounds: float  # dependent steps, as Cost.steps: 1, or 2 for an all_reduce
    received: float  # payload of the rank that receives the most
    # The destinations of a rank: all others, the next in a ring, the next in its node, or the next node.
    peers: Peers = "all"


@dataclass(frozen=True)
class Plan:
    """The work of one scheme for one bucket of n elements on P ranks, in a settled step after any warm-up.

    `kernels` and `calls` give, for each kind of work ("accumulate", "select", "encode", "decode", "apply"), the elements that one rank
    processes and its number of calls. Each call also has a fixed cost.
    """

    exchanges: tuple[Exchange, ...] = ()  # each waits for the one before
    passes: float = 0.0  # bytes of memory read or written on one rank
    kernels: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    beside: tuple[Exchange, ...] = ()  # exchanges off the critical path
    state_nbytes: float = 0.0  # kept for this bucket between steps, on one rank

    def __add__(self, other: "Plan") -> "Plan":
        """Concatenate two plans."""
        kernels, calls = Counter(self.kernels), Counter(self.calls)
        kernels.update(other.kernels)
        calls.update(other.calls)
        return Plan(
            self.exchanges + other.exchanges,
            self.passes + other.passes,
            dict(kernels),
            dict(calls),
            self.beside + other.beside,
            self.state_nbytes + other.state_nbytes,
        )

    def cost(self) -> Cost:
        """Sum steps, messages and bytes sent over the exchanges; each counts its busiest rank.

        If all ranks send the same, a MeteredComm counts this on each of them, without `beside`.
        """
        return Cost(
            math.ceil(sum(exchange.rounds for exchange in self.exchanges)),
            math.ceil(sum(exchange.messages for exchange in self.exchanges)),
            math.ceil(sum(exchange.nbytes for exchange in self.exchanges)),
        )


@dataclass(frozen=True)
class Given:
    """The bucket to plan: `n` elements of `itemsize` bytes on `P` ranks.

    `layout` cuts the bucket into parameters, for schemes that treat layers or names; without one it is a single parameter. Some schemes
    decide at run time how much they send. For these, `figures` holds figures of a measured step, such as {"selected": counts}. A scheme's
    closed form names the figures it reads, and estimates missing ones.
    """

    n: int
    P: int
    itemsize: int = 4
    layout: tuple[ParameterSpan, ...] = ()
    # Fractions of an element and rotating roles change from step to step. None: any step.
    step: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)  # Any: a number, or a sequence in rank order

    def __post_init__(self) -> None:
        if self.n < 0 or not 1 <= self.P <= MOST_RANKS:
            raise ValueError(
                f"a plan is for n >= 0 elements and at most {MOST_RANKS:,} ranks, got P = {self.P}, n = {self.n}"
            )

    @property
    def value_nbytes(self) -> int:
        """Bytes of a value with error feedback, which is summed in float32 or wider."""
        return max(4, self.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a value with error feedback."""
        return torch.float64 if self.itemsize == 8 else torch.float32

    @property
    def parameters(self) -> tuple[ParameterSpan, ...]:
        """The layout; a single parameter by default."""
        return self.layout or (ParameterSpan("", Span(0, self.n)),)


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
    """Assemble the plan of these exchanges and this work. Exchanges without a round, those of a single rank, are left out.

    Work is the elements that a kind of kernel processes and the number of its calls: `accumulate` adds residual and gradient, `select`
    finds the largest elements, `encode` turns values and positions into bytes, `decode` turns bytes into values (including a rank's packet
    to itself, to know what rounding drops), and "apply" writes result and residual.
    `passes_to_select`: elements that selection reads in addition to the accumulating pass.
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


def plus(*parts: Work) -> Work:
    """Add up works."""
    return sum(elements for elements, _ in parts), sum(calls for _, calls in parts)


# A tally maps part sizes in bytes to the number of ranks with a part of that size. Near-equal parts have two sizes at any P, so a closed
# form takes no longer to evaluate with more ranks.
Tally = Mapping[int, int]


def near_equal(count: int, P: int) -> Tally:
    """Tally the lengths of `spans(count, P)`."""
    short, longer = divmod(count, P)
    return {length: ranks for length, ranks in ((short + 1, longer), (short, P - longer)) if ranks}


def tally(sizes: Mapping[Size, int] | Iterable[Size], nbytes: Callable[[Size], int] = int) -> Tally:
    """Count the ranks with parts of each size; `nbytes` converts a listed item to its size."""
    found: Counter[int] = Counter()
    for size, ranks in (sizes if isinstance(sizes, Mapping) else Counter(sizes)).items():
        found[nbytes(size)] += ranks
    return found


def packet_tally(counts: Sequence[int], lengths: Sequence[int], nbytes: Callable[[int, int], int]) -> Tally:
    """Tally packets of `counts[r]` elements in spans of `lengths[r]`; `nbytes(count, length)` gives their size."""
    return tally(zip(counts, lengths, strict=True), lambda pair: nbytes(*pair))


def all_gather_exchange(sizes: Tally) -> Exchange:
    """Make the all-gather of one part per rank."""
    P, longest = sum(sizes.values()), max(sizes)
    received = _total(sizes) - min(sizes)
    return Exchange("all_gather", (P - 1) * longest, P - 1 if longest else 0, _round(P), received)


def counts_exchange(P: int, nbytes: int = LENGTH_NBYTES) -> Exchange:
    """Make the all-gather of `nbytes` per rank."""
    return all_gather_exchange({nbytes: P})


def to_owners_exchange(sizes: Tally) -> Exchange:
    """Make the all-to-all in which each rank sends every other rank a part of the size that the other owns."""
    P = sum(sizes.values())
    messages = min(P - sizes.get(0, 0), P - 1)
    return Exchange("all_to_all", _total(sizes) - min(sizes), messages, _round(P), (P - 1) * max(sizes))


def all_reduce_exchange(count: int, element_nbytes: int, P: int) -> Exchange:
    """Make an all-reduce of `count` elements: to the owners of P near-equal chunks, and their sums to all."""
    cost = all_reduce_cost(count, element_nbytes, P, 0)  # no chunk is longer than the first
    # A rank receives its chunk from all others, and all other chunks.
    return Exchange("all_reduce", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


def announcement_exchange(P: int) -> Exchange:
    """Make the announcement of a bucket, an exchange without a round: it travels beside others."""
    cost = announcement_cost(P)
    return Exchange("all_gather", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


def _round(P: int) -> int:
    return 1 if P > 1 else 0


def _total(sizes: Tally) -> int:
    return sum(size * ranks for size, ranks in sizes.items())
