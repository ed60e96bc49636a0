"""A communicator over a subset of another one's ranks, which uses only point-to-point messages.

It creates no process group, so a scheme can divide its ranks into nodes without other ranks taking part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsync.core import Comm, sum_in_rank_order


@dataclass
class SubsetComm:
    """The ranks `members` of `parent`, in this order; the calling rank is one of them."""

    parent: Comm
    members: list[int]

    @property
    def rank(self) -> int:
        return self.members.index(self.parent.rank)

    @property
    def size(self) -> int:
        return len(self.members)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        self.parent.send_recv(out, self.members[to], into, self.members[source])

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        return self.all_to_all([x] * self.size, counts)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        if counts is None:
            sent = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device=parts[0].device)
            told = self.all_to_all(sent.split(1), [1] * self.size)
            counts = [int(count) for count in told]  # a host sync: buffer sizes depend on it
        received = [torch.empty(0)] * self.size
        received[self.rank] = parts[self.rank]
        # In round i every rank sends to the rank i places on, so that no rank receives from two at once.
        for distance in range(1, self.size):
            to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            received[source] = parts[0].new_empty(counts[source])
            self.send_recv(parts[to], to, received[source], source)
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum in rank order, for a few numbers. Bytes sent per rank: (P-1) * nbytes(x)."""
        return sum_in_rank_order(self.all_gather(x, [x.numel()] * self.size))
