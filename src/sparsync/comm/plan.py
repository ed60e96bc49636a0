"""The types of a plan: what a scheme will do with a bucket, in numbers, before it does it.

A plan needs no tensors, so it goes to numbers of ranks and of elements that no machine here holds. `sparsync.predict` turns plans into
seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from sparsync.core import Cost

Kind = Literal["send_recv", "all_gather", "all_to_all", "all_reduce"]
Peers = Literal["all", "ring", "pair"]


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
    peers: Peers = "all"  # to whom a rank sends: all others, the next in a ring, or one in each round


@dataclass(frozen=True)
class Plan:
    """What one scheme does with one bucket of n elements on P ranks in a settled step: no warm-up, no first step.

    `kernels` and `calls` say for each kind of work ("accumulate", "select", "encode", "decode", "apply") how many elements one rank
    processes, and in how many calls, of which each has a fixed price.
    """

    exchanges: tuple[Exchange, ...] = ()  # each waits for the one before
    passes: float = 0.0  # bytes that are read or written in memory on one rank
    kernels: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)
    beside: tuple[Exchange, ...] = ()  # exchanges that nothing waits for: they travel at the same time
    state_nbytes: float = 0.0  # what the scheme keeps of this bucket between steps, on one rank

    def cost(self) -> Cost:
        """Return steps, messages and bytes sent, added up over the exchanges; each counts its busiest rank.

        Where all ranks send alike this is what a MeteredComm counts on each of them; `beside` is not in it, as it is not in a Report.
        """
        return Cost(
            math.ceil(sum(exchange.rounds for exchange in self.exchanges)),
            math.ceil(sum(exchange.messages for exchange in self.exchanges)),
            math.ceil(sum(exchange.nbytes for exchange in self.exchanges)),
        )
