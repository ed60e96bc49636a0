"""Announcements: what ranks compare before they reduce, so that a mismatch is an error and not a wrong result.

A rank at another step, or with a bucket of another size, would send other lengths than the others expect: gloo fills a buffer in part if
a message is too short, and ends the process if it is too long. So no rank sends before it has heard from all others.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.comm.channels import AHEAD, wait_for
from sparsync.core import Cost

NUMBERS = 4  # 64-bit numbers in an announcement
_TAG = 1  # the tag of announcements between two ranks
# Replaces the third number, a digest, while this rank does not know yet what it reduces: see `GroupComm.any_of`.
UNDECIDED = -1
NAMED = 3  # differences that an error lists
LONGEST = 400  # characters of a value in an error


class RanksDifferError(RuntimeError):
    """Ranks do not agree on what they reduce. All ranks raise it, before sending any of it."""


class Told(NamedTuple):
    """Lines that must be the same on all ranks, and the fix if they differ."""

    lines: Sequence[str]
    fix: str


@dataclass(frozen=True)
class Announcement:
    """Numbers that must be the same on all ranks. If they differ, `told` explains them."""

    numbers: tuple[int, int, int, int]
    told: Callable[[], Sequence[Told]]

    def difference(self, texts: Sequence[str]) -> RanksDifferError:
        """Describe the first part of `told` in which a rank differs from rank 0; `texts[r]` is the `text` of rank r."""
        ranks = [json.loads(text) for text in texts]
        other = next((rank for rank, parts in enumerate(ranks) if parts != ranks[0]), None)
        told = self.told()
        if other is None:
            return RanksDifferError(f"ranks differ in what they reduce; {told[0].fix}")
        pairs = enumerate(zip_longest(ranks[0], ranks[other], fillvalue=[]))
        place, (here, there) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        fix = told[min(place, len(told) - 1)].fix
        return RanksDifferError(f"ranks differ: {differences(here, there, 0, other)}; {fix}")

    @property
    def text(self) -> str:
        """The lines of `told`, as JSON for the other ranks."""
        return json.dumps([list(part.lines) for part in self.told()])


def announcement_cost(P: int) -> Cost:
    """Compute the cost of an announcement to every other rank.

    It takes no step: it travels while the gradient is accumulated, and while receivers tell senders that their buffers are
    ready, as the transport requires.
    """
    return Cost(0, P - 1, (P - 1) * NUMBERS * 8)


@dataclass(eq=False)
class Announced:
    """An announcement in transit to the other ranks, and theirs in transit to this one."""

    announcement: Announcement
    rows: list[Tensor]  # tensors [4], in rank order
    works: list[tuple[dist.Work, int]]  # the receives, with their ranks


@dataclass
class Announcements:
    """The announcements of a group's ranks, in the order in which they are made. Several may be in transit.

    They travel over gloo even if the group's tensors travel over NCCL: a rank that compares them waits for the other hosts, not
    for its device. Receives are posted as many steps ahead as for channels.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    # Receives match announcements in the order in which receives were posted.
    _ahead: deque[tuple[list[Tensor], list[tuple[dist.Work, int]]]] = field(default_factory=deque)
    # Whoever announces has posted the receive for this rank's before, so gloo writes it soon. Until then something must refer to it.
    _sent: deque[tuple[Tensor, list[dist.Work]]] = field(default_factory=deque)
    _posting: threading.Lock = field(default_factory=threading.Lock)
    _on_their_way: int = 0
    _most: int = 1  # the largest value of _on_their_way

    def __post_init__(self) -> None:
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]

    def send(self, announcement: Announcement) -> Announced:
        """Send an announcement to all other ranks, without waiting."""
        numbers = torch.tensor(announcement.numbers)
        with self._posting:
            self._post(self._on_their_way)
            self._on_their_way += 1
            self._most = max(self._most, self._on_their_way)
            rows, works = self._ahead.popleft()
        rows[self.rank] = numbers
        self._sent.append((numbers, [self.group.send([numbers], to, _TAG) for to in self._others]))
        while len(self._sent) > 2 * AHEAD * self._most:
            self._sent.popleft()
        return Announced(announcement, rows, works)

    def heard(self, announced: Announced) -> list[list[int]]:
        """Wait for the other ranks' announcements, and return all ranks' numbers in order. Raises RuntimeError as the group does."""
        works, announced.works = announced.works, []
        for work, other in works:
            wait_for(work, other)
        with self._posting:
            self._on_their_way -= 1
            # Another rank may have ended after this step. If that is a failure, the next step raises.
            with suppress(RuntimeError):
                self._post(self._on_their_way)
        return [row.tolist() for row in announced.rows]

    def exchange_texts(self, text: str) -> list[str]:
        """Gather the texts of all ranks, in order, for errors: two more exchanges, with messages as long as the longest text."""
        encoded = text.encode()
        lengths = torch.empty(self.size, dtype=torch.int64)
        all_gather_single(lengths, torch.tensor([len(encoded)]), self.group)
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
        texts = torch.empty(self.size * longest, dtype=torch.uint8)
        all_gather_single(texts, padded, self.group)
        rows = texts.view(self.size, longest)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _post(self, on_their_way: int) -> None:
        """Post receives for the next announcements."""
        while len(self._ahead) + on_their_way < AHEAD * self._most:
            rows = list(torch.empty((self.size, NUMBERS), dtype=torch.int64))
            works = [(self.group.recv([rows[other]], other, _TAG), other) for other in self._others]
            self._ahead.append((rows, works))


def all_gather_single(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Gather every rank's `x` into `out`, in order, by torch's function, which has another name before 2.13."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, x, group=group)


def differences(here: Sequence[str], there: Sequence[str], rank: int, other: int) -> str:
    """Describe the lines in which `rank` and `other` differ, compared one by one: the first few, and the number of further ones."""
    unequal = [pair for pair in zip_longest(here, there, fillvalue="") if pair[0] != pair[1]]
    listed = [
        f"rank {rank} has {mine}, rank {other} has {theirs}"
        for mine, theirs in (_excerpts(*pair) for pair in unequal[:NAMED])
    ]
    return "; ".join([*listed, *([f"and {len(unequal) - NAMED} more"] if len(unequal) > NAMED else [])])


def _excerpts(here: str, there: str) -> tuple[str, str]:
    """Shorten long lines to the part around the first difference."""
    common = next((place for place, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, common - LONGEST // 4) if max(len(here), len(there)) > LONGEST else 0

    def excerpt(text: str) -> str:
        cut = text[start : start + LONGEST]
        return f"{'... ' if start else ''}{cut}{' ...' if len(text) > start + LONGEST else ''}" or "nothing more"

    return excerpt(here), excerpt(there)
