"""The costs of a communicator's operations in closed form, and a wrapper that counts them.

NCCL's all_reduce may use another algorithm than the one counted here: it sends as many bytes per rank, but other numbers of messages and
steps. Only the network interface counts the bytes that really left the machine.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from sparsync.comm.channels import LENGTH_NBYTES
from sparsync.core import Comm, Cost


def send_cost(nbytes: int) -> Cost:
    """Compute the cost of one message, which is not sent if it is empty."""
    return Cost(steps=1, messages=1 if nbytes else 0, nbytes=nbytes)


def all_gather_cost(nbytes: int, P: int, counts_known: bool = True) -> Cost:
    """Compute the cost of one message of `nbytes` to every other rank, all at once."""
    if P == 1:
        return Cost()
    if not counts_known:
        return Cost(1, P - 1, (P - 1) * (nbytes + LENGTH_NBYTES))
    return Cost(1, P - 1 if nbytes else 0, (P - 1) * nbytes)


def all_to_all_cost(nbytes: Sequence[int], rank: int, counts_known: bool = True) -> Cost:
    """Compute the cost of one message to every other rank, all at once; `nbytes[r]` go to rank r.

    An empty message is sent only if its length is not known.
    """
    P = len(nbytes)
    if P == 1:
        return Cost()
    if not counts_known:
        return Cost(1, P - 1, sum(nbytes) - nbytes[rank] + LENGTH_NBYTES * (P - 1))
    sent = [part for other, part in enumerate(nbytes) if other != rank and part]
    return Cost(1, len(sent), sum(sent))


def all_reduce_cost(count: int, element_nbytes: int, P: int, rank: int) -> Cost:
    """Compute the cost of sending P near-equal chunks to their owners, and the sum of this rank's chunk to all."""
    if P == 1:
        return Cost()
    owned = count // P + (rank < count % P)
    messages = min(count, P) + (P - 2 if owned else 0)  # to other owners of any element, and to all others
    return Cost(2, messages, element_nbytes * (count + (P - 2) * owned))


@dataclass
class MeteredComm:
    """A communicator that forwards every call to `inner`, counts this rank's traffic and times the calls.

    `sent` and `wait_s` grow until `take()` returns and clears them.
    """

    inner: Comm
    sent: Cost = field(default_factory=Cost)
    wait_s: float = 0.0

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def take(self) -> tuple[Cost, float]:
        """Return the traffic and the seconds inside the communicator since the last call, and reset both."""
        taken = self.sent, self.wait_s
        self.sent, self.wait_s = Cost(), 0.0
        return taken

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        began = time.perf_counter()
        self.inner.send_recv(out, to, into, source)
        self._count(send_cost(out.nbytes), began)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        began = time.perf_counter()
        gathered = self.inner.all_gather(x, counts)
        self._count(all_gather_cost(x.nbytes, self.size, counts is not None), began)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        began = time.perf_counter()
        received = self.inner.all_to_all(parts, counts)
        self._count(all_to_all_cost([part.nbytes for part in parts], self.rank, counts is not None), began)
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        began = time.perf_counter()
        total = self.inner.all_reduce(x)
        self._count(all_reduce_cost(x.numel(), x.element_size(), self.size, self.rank), began)
        return total

    def _count(self, cost: Cost, began: float) -> None:
        self.sent += cost
        self.wait_s += time.perf_counter() - began
