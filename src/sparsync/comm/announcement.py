"""What ranks tell each other before they reduce, so that those that differ get an error in place of a wrong result.

A rank that is at another step, or whose bucket has another size, would send other lengths than the others expect: gloo fills a buffer in
part when a message is shorter, and ends the process when it is longer. So no rank sends before it has heard from all others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.comm.plan import Exchange
from sparsync.comm.waiting import wait_each
from sparsync.core import Cost

NUMBERS = 4  # of 64 bits, in an announcement
_TAG = 1  # of announcements between two ranks; everything else has 0


class RanksDifferError(RuntimeError):
    """Ranks do not agree on what they reduce. Raised on all ranks, before anything of it is sent."""


@dataclass(frozen=True)
class Announcement:
    """What must be the same on all ranks. `numbers` are sent; `lines` tell what they stand for, line by line, once they differ."""

    numbers: tuple[int, int, int, int]
    lines: Callable[[], Sequence[str]]
    cure: str

    def difference(self, texts: Sequence[Sequence[str]]) -> RanksDifferError:
        """Return the error that names the first line in which two ranks differ; `texts[r]` are the lines of rank r."""
        other = next((rank for rank, lines in enumerate(texts) if list(lines) != list(texts[0])), None)
        if other is None:
            return RanksDifferError(f"ranks differ in what they reduce; {self.cure}")
        here, there = next(pair for pair in zip_longest(texts[0], texts[other]) if pair[0] != pair[1])
        return RanksDifferError(
            f"ranks differ: rank 0 has {here or 'nothing more'}, rank {other} has {there or 'nothing more'}; {self.cure}"
        )


def announcement_cost(P: int) -> Cost:
    """Return the cost of an announcement to each other rank.

    It is no exchange that another one waits for: it travels while the gradient is accumulated and while receivers tell their peers that
    their buffers are ready, which the transport needs anyway.
    """
    return Cost(0, P - 1, (P - 1) * NUMBERS * 8)


def announcement_exchange(P: int) -> Exchange:
    """Return the announcement as an exchange, of no round of its own: it travels beside others."""
    cost = announcement_cost(P)
    return Exchange("all_gather", cost.nbytes, cost.messages, cost.steps, cost.nbytes)


@dataclass
class Announcements:
    """The announcements of the ranks of a group, each in the order in which it is made. Receives are posted one announcement ahead."""

    group: dist.ProcessGroup
    rank: int
    size: int
    current: Announcement | None = None  # not yet compared
    _rows: list[Tensor] = field(default_factory=list)
    _works: list[dist.Work] = field(default_factory=list)
    _receives: list[dist.Work] = field(default_factory=list)

    def send(self, announcement: Announcement) -> None:
        """Send an announcement to all other ranks, without waiting."""
        assert self.current is None, "the last announcement was not compared yet"
        own = torch.tensor(announcement.numbers)
        self.current, self._works = announcement, []
        if self._on_gpu:
            rows = torch.empty((self.size, NUMBERS), dtype=torch.int64, device="cuda")
            work = all_gather_single(rows, own.cuda(), self.group, async_op=True)
            assert work is not None
            self._rows, self._works = list(rows), [work]
            return
        self._post()
        self._rows[self.rank].copy_(own)
        for other in self._others:
            self._works.append(_started(dist.isend(own, group=self.group, group_dst=other, tag=_TAG)))

    def differ(self) -> bool:
        """Wait for the announcements of the other ranks, and return whether any two differ. Raises RuntimeError as the group does."""
        works, self._works, self._receives = [*self._receives, *self._works], [], []
        wait_each(works, self._others * 2)
        rows = [row.tolist() for row in self._rows]  # a host sync on a GPU: nothing may be sent before it
        self._rows = []
        if not self._on_gpu:
            self._post()
        return any(row != rows[0] for row in rows)

    def exchange_texts(self, own: str) -> list[str]:
        """Return what each rank passes, in rank order. For errors: it takes two more exchanges, of messages as long as the longest."""
        device = "cuda" if self._on_gpu else "cpu"
        encoded = own.encode()
        lengths = torch.empty(self.size, dtype=torch.int64, device=device)
        all_gather_single(lengths, torch.tensor([len(encoded)], device=device), self.group)
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8).to(device)
        texts = torch.empty(self.size * longest, dtype=torch.uint8, device=device)
        all_gather_single(texts, padded, self.group)
        rows = texts.cpu().view(self.size, longest)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _post(self) -> None:
        if not self._rows:
            self._rows = [torch.empty(NUMBERS, dtype=torch.int64) for _ in range(self.size)]
            self._receives = [
                _started(dist.irecv(self._rows[other], group=self.group, group_src=other, tag=_TAG))
                for other in self._others
            ]

    @property
    def _others(self) -> list[int]:
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def _on_gpu(self) -> bool:
        return dist.get_backend(self.group) == "nccl"


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # only for a rank outside the group
    return work


def all_gather_single(
    out: Tensor, own: Tensor, group: dist.ProcessGroup | None, async_op: bool = False
) -> dist.Work | None:
    """Fill `out` with what each rank passes as `own`, in rank order: the function of torch, which before 2.13 has an older name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(out, own, group=group, async_op=async_op)
