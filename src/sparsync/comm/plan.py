"""The types of a plan: what a scheme will do with a bucket, in numbers, before it does it.

A plan needs no tensors, so it goes to numbers of ranks and of elements that no machine here holds. `sparsync.predict` turns plans into
seconds.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from sparsync.core import Cost, ParameterSpan, Span

Kind = Literal["send_recv", "all_gather", "all_to_all", "all_reduce"]
Peers = Literal["all", "ring", "pair", "node", "nodes"]


@dataclass(frozen=True)
class Exchange:
    """One exchange that all ranks take part in and that waits for the one before; what its busiest rank sends, and receives.

    `nbytes` is the payload a rank sends in all, as a MeteredComm counts: P-1 times its own part in an all_gather, 2 (P-1)/P of the
    tensor in an all_reduce. A chain of sends each of which needs what the one before has brought is one exchange of many `rounds`.
    """

    kind: Kind
    nbytes: float  # of the rank that sends the most
    messages: float  # of the rank that sends the most messages; those without payload are not sent
    rounds: float  # dependent steps inside it, as Cost.steps: 1, or 2 (P-1) for an all_reduce
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

        Where all ranks send alike this is what a MeteredComm counts on each of them; `beside` is not in it, as it is not in a Report.
        """
        return Cost(
            math.ceil(sum(exchange.rounds for exchange in self.exchanges)),
            math.ceil(sum(exchange.messages for exchange in self.exchanges)),
            math.ceil(sum(exchange.nbytes for exchange in self.exchanges)),
        )


@dataclass(frozen=True)
class Given:
    """What a plan is for: a bucket of `n` elements of `itemsize` bytes on `P` ranks, and what its traffic depends on besides.

    Where a scheme finds at run time how much it sends, the figures of a step can be given: then the plan is what that step sends. None
    stands for an estimate, which the scheme's form says. Sequences are in rank order. `layout` cuts the bucket into parameters, for
    schemes that treat matrices, layers or names; without one it is a single parameter of no known shape.
    """

    n: int
    P: int
    itemsize: int = 4
    layout: tuple[ParameterSpan, ...] = ()
    # Fractions of an element, and roles in turn, fall differently from step to step. None: a step without anything special.
    step: int | None = None
    union: int | None = None  # K, of how many positions anybody sends something
    selected: Sequence[int] | None = None  # how many elements each rank selected, in its partition where it has one
    lengths: Sequence[int] | None = (
        None  # elements of the partition that each rank examines, or of the region that it owns
    )
    outgoing: Sequence[Sequence[int]] | None = None  # [P][P] elements that each rank sends to the region of each
    held: Sequence[int] | None = None  # sums that survive in each rank's region
    wanted: Sequence[int] | None = None  # of these, how many each rank gathers once they are balanced; None: as held
    protected: int | None = None  # elements that are never skipped
    offsets: Sequence[int] | None = None  # ranks that are left out of a chunk, counted from its owner

    def __post_init__(self) -> None:
        for name in ("n", "P", "itemsize", "union", "protected"):
            figure = getattr(self, name)
            left_out = figure is None and name in ("union", "protected")
            if not left_out and (isinstance(figure, bool) or not isinstance(figure, int)):
                raise ValueError(f"{name} of a plan must be a whole number of type int, got {figure!r}")
        if self.n < 0 or self.P < 1:
            raise ValueError(f"a plan needs n >= 0 elements and P >= 1 ranks, got n = {self.n}, P = {self.P}")
        if self.itemsize not in (2, 4, 8):
            raise ValueError(f"itemsize must be 2, 4 or 8, the bytes of a gradient's element, got {self.itemsize}")
        for name in ("selected", "lengths", "outgoing", "held", "wanted"):
            figures = getattr(self, name)
            if figures is not None and len(figures) != self.P:
                raise ValueError(f"{name} needs a figure for each of {self.P} ranks, got {len(figures)}")
        if self.layout and self.layout[-1].span.stop != self.n:
            raise ValueError(f"the layout has {self.layout[-1].span.stop} elements, n is {self.n}; they must agree")

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
