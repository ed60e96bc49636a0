"""What ranks tell each other before they reduce, so that those that differ get an error in place of a wrong result.

A rank that is at another step, or whose bucket has another size, would send other lengths than the others expect: gloo fills a buffer in
part when a message is shorter, and ends the process when it is longer. So no rank sends before it has heard from all others.
"""

import json
import re
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

NUMBERS = 4  # of 64 bits, in an announcement
_TAG = 1  # of announcements between two ranks
# In place of the third number, which is a digest: this rank cannot say yet what it reduces, see `GroupComm.any_of`.
UNDECIDED = -1
NAMED = 3  # differences that an error lists
LONGEST = 400  # characters of one value

# Where a setting begins in a text such as "TopK(density=0.01, values='int8')".
_SETTING = re.compile(r"(?<=[(, ])(?=\w+=)")
_BRACKETS = {")": "(", "]": "[", "}": "{"}


class RanksDifferError(RuntimeError):
    """Ranks do not agree on what they reduce. Raised on all ranks, before anything of it is sent."""


class Told(NamedTuple):
    """Some of what must be the same on all ranks, line by line, and what to do where it is not."""

    lines: Sequence[str]
    cure: str


@dataclass(frozen=True)
class Announcement:
    """What must be the same on all ranks. `numbers` are sent; `told` is what they stand for, once they differ."""

    numbers: tuple[int, int, int, int]
    told: Callable[[], Sequence[Told]]

    def difference(self, texts: Sequence[str]) -> RanksDifferError:
        """Return the error of the first part of `told` in which a rank differs from rank 0; `texts[r]` is the `text` of rank r."""
        ranks = [json.loads(text) for text in texts]
        other = next((rank for rank, parts in enumerate(ranks) if parts != ranks[0]), None)
        told = self.told()
        if other is None:
            return RanksDifferError(f"ranks differ in what they reduce; {told[0].cure}")
        pairs = enumerate(zip_longest(ranks[0], ranks[other], fillvalue=[]))
        place, (here, there) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
        cure = told[min(place, len(told) - 1)].cure
        return RanksDifferError(f"ranks differ: {differences(here, there, 0, other)}; {cure}")

    @property
    def text(self) -> str:
        """What `told` has, for the other ranks."""
        return json.dumps([list(each.lines) for each in self.told()])


def announcement_cost(P: int) -> Cost:
    """Return the cost of an announcement to each other rank.

    It is no exchange that another one waits for: it travels while the gradient is accumulated and while receivers tell their peers that
    their buffers are ready, which the transport needs anyway.
    """
    return Cost(0, P - 1, (P - 1) * NUMBERS * 8)


@dataclass(eq=False)
class Announced:
    """An announcement on its way to the other ranks, and theirs on the way here."""

    announcement: Announcement
    rows: list[Tensor]  # [4] each, in rank order
    works: list[tuple[dist.Work, int]]  # and for which rank


@dataclass
class Announcements:
    """The announcements of the ranks of a group, each in the order in which it is made. Several may be on their way.

    They travel over gloo, also where the tensors of the group travel over NCCL: to compare them a rank waits for the others' hosts, and not
    for its device. Receives are posted for as many steps ahead as those of channels.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    # Receives match announcements in the order in which they were posted.
    _ahead: deque[tuple[list[Tensor], list[tuple[dist.Work, int]]]] = field(default_factory=deque)
    _posting: threading.Lock = field(default_factory=threading.Lock)
    _on_their_way: int = 0
    _most: int = 1  # on their way at once

    def __post_init__(self) -> None:
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]

    def send(self, announcement: Announcement) -> Announced:
        """Send an announcement to all other ranks, without waiting."""
        own = torch.tensor(announcement.numbers)
        with self._posting:
            self._post(self._on_their_way)
            self._on_their_way += 1
            self._most = max(self._most, self._on_their_way)
            rows, works = self._ahead.popleft()
        rows[self.rank] = own
        for other in self._others:
            works.append((self.group.send([own], other, _TAG), other))
        return Announced(announcement, rows, works)

    def heard(self, announced: Announced) -> list[list[int]]:
        """Wait for the announcements of the other ranks, and return those of all, in rank order. Raises RuntimeError as the group does."""
        works, announced.works = announced.works, []
        for work, other in works:
            wait_for(work, f"rank {other}")
        with self._posting:
            self._on_their_way -= 1
            # Another rank may have ended after this step; where it has not, the next one raises.
            with suppress(RuntimeError):
                self._post(self._on_their_way)
        return [row.tolist() for row in announced.rows]

    def exchange_texts(self, own: str) -> list[str]:
        """Return what each rank passes, in rank order. For errors: it takes two more exchanges, of messages as long as the longest."""
        encoded = own.encode()
        lengths = torch.empty(self.size, dtype=torch.int64)
        all_gather_single(lengths, torch.tensor([len(encoded)]), self.group)
        longest = max(int(lengths.max()), 1)
        padded = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
        texts = torch.empty(self.size * longest, dtype=torch.uint8)
        all_gather_single(texts, padded, self.group)
        rows = texts.view(self.size, longest)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]

    def _post(self, on_their_way: int) -> None:
        """Post receives for the announcements of the next steps."""
        while len(self._ahead) + on_their_way < AHEAD * self._most:
            rows = list(torch.empty((self.size, NUMBERS), dtype=torch.int64))
            works = [(self.group.recv([rows[other]], other, _TAG), other) for other in self._others]
            self._ahead.append((rows, works))


def all_gather_single(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `out` with what each rank passes as `own`, in rank order: the function of torch, which before 2.13 has an older name."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(out, own, group=group)


def differences(here: Sequence[str], there: Sequence[str], rank: int, other: int) -> str:
    """Return what `rank` and `other` have where their lines differ; of two lines with the same settings only those that differ.

    Lines are compared by their places. The first few differences are listed, and the others are counted.
    """
    unequal = [pair for pair in zip_longest(here, there, fillvalue="") if pair[0] != pair[1]]
    found = [pair for lines in unequal for pair in _settings(*lines) or [_excerpts(*lines)]]
    listed = [f"rank {rank} has {mine}, rank {other} has {theirs}" for mine, theirs in found[:NAMED]]
    return "; ".join([*listed, *([f"and {len(found) - NAMED} more"] if len(found) > NAMED else [])])


def _settings(here: str, there: str) -> list[tuple[str, str]]:
    """Return the settings in which two lines differ; none where more than their values differs."""
    mine, theirs = _SETTING.split(here), _SETTING.split(there)
    if mine[0] != theirs[0] or [_name(each) for each in mine] != [_name(each) for each in theirs]:
        return []
    places = [place for place, part in enumerate(mine) if part != theirs[place]]
    return [(_setting(mine, place), _setting(theirs, place)) for place in places]


def _name(setting: str) -> str:
    return setting.partition("=")[0]


def _setting(parts: Sequence[str], place: int) -> str:
    """Return the setting at a place, inside what it is a setting of: "TopK(density=0.01)"."""
    setting = parts[place].rstrip(", (")
    while setting and setting.count(setting[-1]) > setting.count(_BRACKETS.get(setting[-1], setting[-1])):
        setting = setting[:-1]
    before, closed = "".join(parts[:place]), 0
    for end in range(len(before) - 1, -1, -1):
        closed += (before[end] == ")") - (before[end] == "(")
        if closed < 0 and (owner := re.search(r"\w+$", before[:end])):
            return f"{owner[0]}({setting})"
    return setting


def _excerpts(here: str, there: str) -> tuple[str, str]:
    """Return two lines, long ones from a little before they differ to a little after."""
    common = next((place for place, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0)
    start = max(0, common - LONGEST // 4) if max(len(here), len(there)) > LONGEST else 0

    def excerpt(text: str) -> str:
        cut = text[start : start + LONGEST]
        return f"{'... ' if start else ''}{cut}{' ...' if len(text) > start + LONGEST else ''}" or "nothing more"

    return excerpt(here), excerpt(there)
