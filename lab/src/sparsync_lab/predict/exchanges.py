"""The words of plans: exchanges in closed form, the work beside them, and what a plan is for.

A plan needs no tensors, so it goes to numbers of ranks and elements that no machine here holds. Here are the types, the operations of a
communicator, and `planned`, which adds the work; `collectives`, `schemes` and `rivals` have the forms. A MeteredComm counts what a scheme
really sends while it runs; tests compare the two.
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
Peers = Literal["all", "ring", "pair", "node", "nodes"]
Size = TypeVar("Size")
Work = tuple[int, int]  # elements, calls
NOTHING: Work = (0, 0)
# Bytes of a value are read or written so often: `accumulate` reads the residual and writes the sum, and so on. The gradient comes on top.
_TOUCHES = {"accumulate": 2, "select": 1, "encode": 2, "decode": 3, "apply": 2}


@dataclass(frozen=True)
class Exchange:
    """One exchange that all ranks take part in and that waits for the one before; what its busiest rank sends, and receives.

    `nbytes` is the payload a rank sends in all, as a MeteredComm counts: P-1 times its own part in an all_gather, 2 (P-1)/P of the
    tensor in an all_reduce, which has two rounds. A chain of sends each of which needs what the one before has brought is one exchange of
    many `rounds`.
    """

    kind: Kind
    nbytes: float  # of the rank that sends the most
    messages: float  # of the rank that sends the most messages; those without payload are not sent
    rounds: float  # dependent steps inside it, as Cost.steps: 1, or 2 for an all_reduce
    received: float  # payload of the rank that receives the most
    # To whom a rank sends: all others, the next in a ring, one in each round; the next in its node, or in the next node.
    peers: Peers = "all"


@dataclass(frozen=True)
class Plan:
    """What one scheme does with one bucket of n elements on P ranks in a settled step: no warm-up, no first step.

    `kernels` and `calls` say for each kind of work ("accumulate", "select", "encode", "decode", "apply"; "multiply", whose elements are
    multiplications, and "transform") how many elements one rank processes, and in how many calls, of which each has a fixed price.
    """

    exchanges: tuple[Exchange, ...] = ()  # each waits for the one before
    passes: float = 0.0  # bytes that are read or written in memory on one rank
    kernels: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    beside: tuple[Exchange, ...] = ()  # exchanges that nothing waits for: they travel at the same time
    state_nbytes: float = 0.0  # what the scheme keeps of this bucket between steps, on one rank

    def __add__(self, other: "Plan") -> "Plan":
        """Return the plan that does the one, then the other."""
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
        """Return steps, messages and bytes sent, added up over the exchanges; each counts its busiest rank.

        Where all ranks send the same this is what a MeteredComm counts on each of them; `beside` is not in it.
        """
        return Cost(
            math.ceil(sum(exchange.rounds for exchange in self.exchanges)),
            math.ceil(sum(exchange.messages for exchange in self.exchanges)),
            math.ceil(sum(exchange.nbytes for exchange in self.exchanges)),
        )


@dataclass(frozen=True)
class Given:
    """What a plan is for: a bucket of `n` elements of `itemsize` bytes on `P` ranks.

    `layout` cuts the bucket into parameters, for schemes that treat matrices, layers or names; without one it is a single parameter of no
    known shape. `figures` are those of a measured step that traffic depends on, for schemes that find at run time how much they send,
    such as {"union": K}: the form of a scheme names those it reads, and estimates what is missing.
    """

    n: int
    P: int
    itemsize: int = 4
    layout: tuple[ParameterSpan, ...] = ()
    # Fractions of an element, and roles in turn, fall differently from step to step. None: a step without anything special.
    step: int | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)  # Any: a number, or a sequence in rank order

    def __post_init__(self) -> None:
        for name, number in (("n", self.n), ("P", self.P), ("itemsize", self.itemsize)):
            if isinstance(number, bool) or not isinstance(number, int):
                raise ValueError(f"{name} of a plan must be a whole number of type int, got {number!r}")
        if self.n < 0 or self.P < 1:
            raise ValueError(f"a plan needs n >= 0 elements and P >= 1 ranks, got n = {self.n}, P = {self.P}")
        if self.P > MOST_RANKS:
            raise ValueError(f"a plan is for at most {MOST_RANKS:,} ranks, got P = {self.P}")
        if self.itemsize not in (2, 4, 8):
            raise ValueError(f"itemsize must be 2, 4 or 8, the bytes of a gradient's element, got {self.itemsize}")
        if self.layout and self.layout[-1].span.stop != self.n:
            raise ValueError(f"the layout has {self.layout[-1].span.stop} elements, n is {self.n}; they must agree")

    def by_rank(self, name: str) -> Sequence[Any] | None:  # Any: as `figures`
        """Return the figures of this name, one for each rank; None where they were not given."""
        found = self.figures.get(name)
        if found is not None and len(found) != self.P:
            raise ValueError(f"{name} needs a figure for each of {self.P} ranks, got {len(found)}")
        return found

    @property
    def value_nbytes(self) -> int:
        """Return the bytes of a value with error feedback, which is added up in float32 or better."""
        return max(4, self.itemsize)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of a value with error feedback."""
        return torch.float64 if self.itemsize == 8 else torch.float32

    @property
    def parameters(self) -> tuple[ParameterSpan, ...]:
        """Return the layout, of one parameter where none was given."""
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
    """Return the plan of these exchanges and this work; exchanges without a round are those of one rank, and left out.

    Work is the elements that each kind of kernel processes, and the number of its calls: `accumulate` adds residual and gradient,
    `select` looks for the largest elements, `encode` makes bytes of values and positions, `decode` values of bytes, also of a rank's
    own, to know what rounding drops, and "apply" writes result and residual.
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


def plus(*parts: Work) -> Work:
    """Return the sum of works."""
    return sum(elements for elements, _ in parts), sum(calls for _, calls in parts)


# The parts of packets are told as a tally, size in bytes -> how many ranks have a part of this size: near-equal parts have two sizes at any
# P, so that a form takes a time that does not grow with P.
Tally = Mapping[int, int]


def near_equal(count: int, P: int) -> Tally:
    """Return the tally of the lengths of `spans(count, P)`."""
    short, longer = divmod(count, P)
    return {length: ranks for length, ranks in ((short + 1, longer), (short, P - longer)) if ranks}


def tally(sizes: Mapping[Size, int] | Iterable[Size], nbytes: Callable[[Size], int] = int) -> Tally:
    """Return how many ranks have parts of each size; `nbytes` gives the size of what is tallied or listed."""
    found: Counter[int] = Counter()
    for size, ranks in (sizes if isinstance(sizes, Mapping) else Counter(sizes)).items():
        found[nbytes(size)] += ranks
    return found


def packet_tally(counts: Sequence[int], lengths: Sequence[int], nbytes: Callable[[int, int], int]) -> Tally:
    """Return the tally of packets of `counts[r]` elements in spans of `lengths[r]`, whose size `nbytes(count, length)` gives."""
    return tally(zip(counts, lengths, strict=True), lambda pair: nbytes(*pair))


def all_gather_exchange(sizes: Tally) -> Exchange:
    """Return the all-gather of one part from each rank to all others."""
    P, longest = sum(sizes.values()), max(sizes)
    received = _total(sizes) - min(sizes)
    return Exchange("all_gather", (P - 1) * longest, P - 1 if longest else 0, _round(P), received)


def counts_exchange(P: int, nbytes: int = LENGTH_NBYTES) -> Exchange:
    """Return the all-gather of `nbytes` from each rank."""
    return all_gather_exchange({nbytes: P})


def to_owners_exchange(sizes: Tally) -> Exchange:
    """Return the all-to-all in which each rank sends to every other the part of this size that is the other's."""
    P = sum(sizes.values())
    messages = min(P - sizes.get(0, 0), P - 1)
    return Exchange("all_to_all", _total(sizes) - min(sizes), messages, _round(P), (P - 1) * max(sizes))


def all_to_all_exchange(nbytes: Sequence[Sequence[int]]) -> Exchange:
    """Return the all-to-all in which rank r sends `nbytes[r][p]` to rank p; what is its own does not travel."""
    P = len(nbytes)
    sent = [[part for p, part in enumerate(row) if p != rank] for rank, row in enumerate(nbytes)]
    received = [sum(row[p] for rank, row in enumerate(nbytes) if rank != p) for p in range(P)]
    messages = max(sum(1 for part in row if part) for row in sent)
    return Exchange("all_to_all", max(map(sum, sent)), messages, _round(P), max(received))


def all_reduce_exchange(count: int, element_nbytes: int, P: int) -> Exchange:
    """Return an all-reduce of `count` elements: to the owners of P near-equal chunks, and their sums to all."""
    cost = all_reduce_cost(count, element_nbytes, P, 0)  # no chunk is longer than the first
    # A rank receives its chunk from all others, and the chunks of all others.
    return Exchange("all_reduce", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


def announcement_exchange(P: int) -> Exchange:
    """Return the announcement of a bucket as an exchange without a round: it travels beside others."""
    cost = announcement_cost(P)
    return Exchange("all_gather", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


def _round(P: int) -> int:
    return 1 if P > 1 else 0


def _total(sizes: Tally) -> int:
    return sum(size * ranks for size, ranks in sizes.items())
