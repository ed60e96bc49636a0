"""A virtual clock for each rank of a LocalWorld, moved by a network while scheme code runs: no rank waits in real time.

A collective ends for all ranks when the slowest has come to it and the network has carried it. A message of `send_recv` takes its own
time from its sender to its receiver, through the links that the two share with others. Where all ranks come at the same time to a flat
network, that is the closed form of `Tiers.seconds`, to the last bit; where they do not, it shows what the closed form leaves out.

Ranks of a LocalWorld run one at a time, in an order of calls and not of virtual times, so a shared link keeps a list of when it is busy,
and a message takes the first gap that is long enough for it.
"""

import math
from bisect import bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from sparsync.comm.local import LocalComm, LocalWorld
from sparsync.comm.metered import COUNT_NBYTES, all_reduce_cost
from sparsync.comm.plan import Exchange, Kind
from sparsync.predict.network import Tier, Tiers

Result = TypeVar("Result")


@dataclass
class Clock:
    """The virtual times of P ranks, in seconds since they all began."""

    network: Tiers
    P: int
    now_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)  # of which inside the communicator
    _meetings: dict[int, "_Meeting"] = field(default_factory=dict)
    _called: list[int] = field(default_factory=list)
    _mail: dict[tuple[int, int], deque[float]] = field(default_factory=lambda: defaultdict(deque))
    _busy: dict[tuple[int, int, bool], "_Busy"] = field(default_factory=lambda: defaultdict(_Busy))

    def __post_init__(self) -> None:
        self.now_s = self.now_s or [0.0] * self.P
        self.wait_s = [0.0] * self.P
        self._called = [0] * self.P

    def work(self, rank: int, seconds: int | float) -> None:
        """Let `rank` compute for this long. Raises ValueError for a negative time."""
        if seconds < 0:
            raise ValueError(f"rank {rank} cannot compute for {seconds:g} s; give 0 or more")
        self.now_s[rank] += seconds

    def come(self, rank: int, kind: Kind, sent: Sequence[int] | int, ring: bool = False) -> "_Meeting":
        """Note that `rank` has come to its next collective, with so many bytes for each rank, or for all others in all."""
        number = self._called[rank]
        self._called[rank] += 1
        meeting = self._meetings.setdefault(number, _Meeting(number, kind, ring))
        meeting.begin_s = max(meeting.begin_s, self.now_s[rank])
        meeting.sent[rank] = sent
        return meeting

    def leave(self, rank: int, meeting: "_Meeting", counts_first: bool) -> None:
        """Move the clock of `rank` to the end of a collective to which all have come."""
        if meeting.end_s is None:
            counts_s = self.network.seconds(_counts(self.P), self.P) if counts_first else 0.0
            meeting.end_s = meeting.begin_s + counts_s + self._collective_s(meeting)
        self.wait_s[rank] += meeting.end_s - self.now_s[rank]
        self.now_s[rank] = meeting.end_s
        meeting.left += 1
        if meeting.left == self.P:
            del self._meetings[meeting.number]

    def _collective_s(self, meeting: "_Meeting") -> float:
        """Return how long the network takes, from what each rank sends to each other.

        A flat network and a ring take it from the busiest rank. Groups count what their ranks send to ranks outside.
        """
        P, sent = self.P, meeting.sent
        if P == 1:
            return 0.0
        if meeting.ring:
            return self.network.seconds(_ring_of(meeting.kind, [_total(sent[r], r) for r in range(P)], P), P)
        totals = [_total(sent[rank], rank) for rank in range(P)]
        everything = sum(totals)
        if isinstance(sent[0], int):  # as much to every other rank
            each = [total // (P - 1) for total in totals]
            received, matrix = [sum(each) - own for own in each], None
            messages = max((P - 1 if total else 0) for total in totals)
        else:
            matrix = [row if not isinstance(row, int) else [row] * P for row in (sent[rank] for rank in range(P))]
            received = [sum(matrix[s][r] for s in range(P) if s != r) for r in range(P)]
            messages = max(sum(1 for r, part in enumerate(matrix[s]) if part and r != s) for s in range(P))
        if everything and meeting.kind in self.network.rings:
            return self.network.seconds(_exchange(meeting.kind, max(totals), messages, max(received)), P)
        crossed, busiest = [], 0.0
        for tier in self.network.tiers:
            if tier.ranks >= P and tier.ranks > 1:
                continue
            crossed += tier.links_of(P)
            for ranks, up, down in self._crossing(tier, totals, received, matrix):
                link = tier.link(ranks.start)
                busiest = max(busiest, link.up_s(up), link.down_s(down))
        latency_s = max(link.latency_s for link in crossed)
        per_message_s = max(link.per_message_s for link in self.network.tiers[0].links_of(P))
        return latency_s + messages * per_message_s + busiest

    def _crossing(
        self, tier: Tier, totals: list[int], received: list[int], matrix: list[Sequence[int]] | None
    ) -> list[tuple[range, float, float]]:
        """Return, for each group, its ranks and the bytes that leave it and that arrive."""
        P, found = self.P, []
        for start in range(0, P, tier.ranks):
            ranks = range(start, min(start + tier.ranks, P))
            up = float(sum(totals[rank] for rank in ranks))
            down = float(sum(received[rank] for rank in ranks))
            if len(ranks) > 1:
                if matrix is None:
                    inside = sum(totals[rank] for rank in ranks) * (len(ranks) - 1) / (P - 1)
                else:
                    inside = float(sum(matrix[a][b] for a in ranks for b in ranks if a != b))
                up, down = up - inside, down - inside
            found.append((ranks, up, down))
        return found

    def post(self, rank: int, to: int, nbytes: int) -> float:
        """Send one message, and return when the sender has sent it. Its arrival is kept for `receive`."""
        begin_s = self.now_s[rank]
        shared = self.network.apart(rank, to)
        if not shared:
            raise ValueError(f"rank {rank} cannot send a message to itself, and {to} is the same rank")
        own = self.network.tiers[0]
        sent_s = begin_s + own.link(rank).per_message_s
        done_s = sent_s
        for tier in shared:
            for end, upwards in ((rank, True), (to, False)):
                link = tier.link(end)
                busy_s = link.up_s(nbytes) if upwards else link.down_s(nbytes)
                done_s = max(done_s, self._busy[tier.ranks, end // tier.ranks, upwards].take(sent_s, busy_s))
        self._mail[rank, to].append(done_s + self.network.latency_s(rank, to))
        return self._busy[1, rank, True].until_s

    def receive(self, rank: int, source: int, sent_s: float) -> None:
        """Move the clock of `rank` to when it has sent its own message and the next one from `source` has come."""
        arrived_s = self._mail[source, rank].popleft()
        self.wait_until(rank, max(sent_s, arrived_s))

    def wait_until(self, rank: int, end_s: float) -> None:
        """Let `rank` wait, if that time is not over."""
        self.wait_s[rank] += max(0.0, end_s - self.now_s[rank])
        self.now_s[rank] = max(self.now_s[rank], end_s)


@dataclass
class ClockedComm:
    """A communicator that passes every call on to `inner`, and moves the clock of this rank by what the call would take."""

    inner: LocalComm
    clock: Clock

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def now_s(self) -> float:
        """The virtual time of this rank."""
        return self.clock.now_s[self.rank]

    def work(self, seconds: int | float) -> None:
        """Let this rank compute for so many virtual seconds."""
        self.clock.work(self.rank, seconds)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        sent_s = self.clock.post(self.rank, to, out.nbytes) if out.numel() and to != self.rank else self.now_s
        self.inner.send_recv(out, to, into, source)
        if into.numel() and source != self.rank:
            self.clock.receive(self.rank, source, sent_s)
        else:
            self.clock.wait_until(self.rank, sent_s)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        meeting = self.clock.come(self.rank, "all_gather", (self.size - 1) * x.nbytes)
        gathered = self.inner.all_gather(x, counts)
        self.clock.leave(self.rank, meeting, counts is None)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        meeting = self.clock.come(self.rank, "all_to_all", [part.nbytes for part in parts])
        received = self.inner.all_to_all(parts, counts)
        self.clock.leave(self.rank, meeting, counts is None)
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        sent = all_reduce_cost(x.numel(), x.element_size(), self.size, self.rank).nbytes
        meeting = self.clock.come(self.rank, "all_reduce", sent, ring=True)
        total = self.inner.all_reduce(x)
        self.clock.leave(self.rank, meeting, False)
        return total


def run(network: Tiers, P: int, fn: Callable[[ClockedComm], Result]) -> tuple[list[Result], Clock]:
    """Run `fn(comm)` on P ranks of a LocalWorld, and return its results in rank order and the clock at the end."""
    clock = Clock(network, P)
    return LocalWorld(P).run(lambda comm: fn(ClockedComm(comm, clock))), clock


@dataclass
class _Meeting:
    number: int
    kind: Kind
    ring: bool
    begin_s: float = 0.0
    sent: dict[int, Sequence[int] | int] = field(default_factory=dict)
    end_s: float | None = None
    left: int = 0


@dataclass
class _Busy:
    """When one direction of a link carries something: intervals in order of time, none of them overlapping."""

    intervals: list[tuple[float, float]] = field(default_factory=list)
    until_s: float = 0.0  # the end of the interval taken last

    def take(self, from_s: int | float, busy_s: int | float) -> int | float:
        """Take the first gap of this length that begins at `from_s` or later, and return its end."""
        begin_s = from_s
        place = max(0, bisect_right(self.intervals, (from_s, math.inf)) - 1)
        for begun, ended in self.intervals[place:]:
            if ended <= begin_s:
                continue
            if begin_s + busy_s <= begun:
                break
            begin_s = max(begin_s, ended)
        self.until_s = begin_s + busy_s
        if busy_s:
            insort(self.intervals, (begin_s, self.until_s))
        return self.until_s


def _total(sent: Sequence[int] | int, rank: int) -> int:
    return sent if isinstance(sent, int) else sum(sent) - sent[rank]


def _counts(P: int) -> Exchange:
    return _exchange("all_gather", COUNT_NBYTES * (P - 1), P - 1, COUNT_NBYTES * (P - 1))


def _exchange(kind: Kind, nbytes: int | float, messages: int | float, received: int | float) -> Exchange:
    return Exchange(kind, nbytes=nbytes, messages=messages, rounds=1, received=received)


def _ring_of(kind: Kind, totals: Sequence[int], P: int) -> Exchange:
    rounds = 2 * (P - 1)
    return Exchange(kind, nbytes=max(totals), messages=rounds, rounds=rounds, received=max(totals), peers="ring")
