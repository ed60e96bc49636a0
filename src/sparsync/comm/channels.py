"""Messages between two ranks over gloo that take one link delay, because their receives are posted ahead.

Gloo sends data only after the receiver has said that it is ready, which costs a second link delay. Here every message of a
step has a tag, its channel. When a message has arrived, its receiver posts a receive for the message two steps later on that channel:
of the same length, or a little longer if lengths vary. A receive posted for the very next message might come too late, because that may
be sent at once. Sender and receiver know the same history of a channel, so the sender knows how much of a message fits. The rest follows
in a second message, whose receive is posted when both ranks reach the exchange.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsync.comm.worker import Worker

LENGTH_NBYTES = 8  # the length prefix of a message, if the receiver does not know it
LOOK_S = 0.5  # how often a rank that waits for a send looks whether the connection is open
# The most bytes posted ahead of a message with up to 4 ranks, in memory that is held between steps.
MOST_AHEAD = 2**19
AHEAD = 2  # receives posted ahead per channel
_FIRST = 2**14  # if lengths vary, the room for the first message of a channel
_TAGS_OF_OTHERS = 16  # lower tags belong to announcements, and to messages without a receive posted ahead
# HACK: gloo's abort wakes nothing that waits, and a connection that closes does not wake a send that was written in part. So receives with
# this tag, with which nothing is sent, close all connections, and find out whether one is closed. Price: it relies on gloo's behaviour
# after a timeout; every exchange changes threads; and after such a failure a thread waits until the group's timeout.
_NOTHING_TAG = 3
_PLACES = 1024  # messages of a bucket between two ranks per step; further ones reuse the tags
_NUMBERS = 4096  # buckets; further ones reuse the tags
_NOT_AHEAD = 0
_REST = 2**28  # added to the tag of the rest of a message, because receives with the plain tag are for other messages

Item = TypeVar("Item")
Waits = Callable[[], AbstractContextManager[object]]


class Incoming(NamedTuple):
    """A message to receive: its channel (None: post nothing ahead), bytes (None: a prefix says it), and destination."""

    source: int
    tag: int | None
    nbytes: int | None
    into: Tensor | None = None  # uint8 of that length


class Outgoing(NamedTuple):
    """A message to send, as uint8, and its channel; `sized` adds the length as a prefix."""

    to: int
    tag: int | None
    part: Tensor
    sized: bool = False


@dataclass
class _Posted:
    """A receive that waits for the next message of a channel."""

    room: Tensor
    work: dist.Work


def channel(number: int, place: int, sized: bool) -> int:
    """Compute the tag of the message between two ranks at `place` in a bucket's step; messages with length prefixes have other tags."""
    return _TAGS_OF_OTHERS + ((number % _NUMBERS) * _PLACES + place % _PLACES) * 2 + sized


@dataclass
class Channels:
    """The channels of this rank to the others in a gloo group without other users."""

    group: dist.ProcessGroup
    # By tag and rank, for the next messages: receives that this rank has posted, and bytes that the other rank has posted.
    _posted: defaultdict[tuple[int, int], deque[_Posted]] = field(default_factory=lambda: defaultdict(deque))
    _room: defaultdict[tuple[int, int], deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _idle: deque[Worker] = field(default_factory=deque)  # for the next waits

    def exchange(
        self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing], settle: Callable[[], None], waits: Waits
    ) -> list[Tensor]:
        """Send and receive messages, and return the received ones, as uint8.

        `settle` waits until ranks know that they do the same. It is called before anything is sent that may not fit, and before this
        returns. `waits` is entered around every wait. Raises RuntimeError as the group does, naming the other rank.
        """
        # Receives first: their ready messages share connections with the data of sends, which would delay them.
        arriving = [
            _Arriving(message, None if message.tag is None else _next(self._posted[message.tag, message.source]))
            for message in incoming
        ]
        for arrival in arriving:
            arrival.post(self)
        sends = [
            _Leaving(message, 0 if message.tag is None else _next(self._room[message.tag, message.to]) or 0)
            for message in outgoing
        ]
        for send in sends:
            send.send_what_fits(self)
        settle()
        for send in sends:
            send.send_rest(self)
        with waits(), self.sent([(work, send.message.to) for send in sends for work in send.works]):
            received = [arrival.wait(self) for arrival in arriving]
        for arrival in arriving:
            self._post_ahead(arrival)
        for send in sends:
            if send.message.tag is not None:
                rooms = self._room[send.message.tag, send.message.to]
                rooms.extend([self._room_after(send.nbytes, send.message.sized)] * (AHEAD - len(rooms)))
        return received

    def receive(self, into: Tensor, source: int, tag: int) -> dist.Work:
        """Post a receive."""
        return self.group.recv([into], source, tag)

    def send(self, part: Tensor, to: int, tag: int) -> dist.Work:
        """Begin to send."""
        return self.group.send([part], to, tag)

    @contextmanager
    def sent(self, works: Sequence[tuple[dist.Work, int]]) -> Iterator[None]:
        """Wait for operations that send, each to a rank, beside the block and after it.

        A worker waits, which gloo may not wake, and this thread looks now and then. Raises RuntimeError if the operations fail, or a
        connection is closed.
        """
        if not works:
            yield
            return
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = Worker(joined=False)
        left = deque(works)
        done = worker.submit(partial(_wait_for_all, left))
        try:
            yield
            while not futures.wait([done], LOOK_S).done:
                for _, to in list(left)[:1]:  # a rank that has its message may be gone
                    try:
                        self.receive(torch.empty(1, dtype=torch.uint8), to, _NOTHING_TAG)
                    except RuntimeError as error:
                        if not futures.wait([done], LOOK_S).done:
                            raise RuntimeError(f"waiting for rank {to}: {error}") from error
            done.result()
        finally:
            del done  # its error refers to this frame
        self._idle.append(worker)

    def _post_ahead(self, arrived: "_Arriving") -> None:
        source, tag, known, _ = arrived.message
        if tag is None:
            return
        nbytes = self._room_after(arrived.nbytes, known is None)
        posted = self._posted[tag, source]
        with suppress(RuntimeError):  # the other rank may have ended; if that is a failure, the next exchange raises
            while len(posted) < AHEAD:
                room = torch.empty(nbytes, dtype=torch.uint8)
                posted.append(_Posted(room, self.receive(room, source, tag)))

    def _room_after(self, nbytes: int, sized: bool) -> int:
        """Compute the bytes that both sides post ahead after a message of `nbytes`; fewer with many ranks."""
        most = min(MOST_AHEAD, 4 * MOST_AHEAD // self.group.size())
        return min(max(_FIRST, nbytes + nbytes // 4) if sized else nbytes, most)


def _next(ahead: deque[Item]) -> Item | None:
    return ahead.popleft() if ahead else None


class _Arriving:
    """A message in transit to this rank: the receive that was posted ahead, and the rest."""

    def __init__(self, message: Incoming, posted: _Posted | None) -> None:
        self.message, self._posted = message, posted
        self._tag = _NOT_AHEAD if message.tag is None else message.tag
        self.nbytes = message.nbytes or 0  # including the length prefix
        self._rest: dist.Work | None = None
        self._whole: Tensor | None = None

    def post(self, channels: Channels) -> None:
        """Post a receive for the rest that does not fit into the room posted ahead, if the length is known."""
        source, _, nbytes, into = self.message
        if nbytes is None:
            if self._posted is None:
                room = torch.empty(_FIRST, dtype=torch.uint8)
                self._posted = _Posted(room, channels.receive(room, source, self._tag))
            return
        here = 0 if self._posted is None else self._posted.room.numel()
        if nbytes > here:
            self._take_rest(channels, torch.empty(nbytes, dtype=torch.uint8) if into is None else into, here)

    def wait(self, channels: Channels) -> Tensor:
        """Wait for the message and return it."""
        if self._posted is not None:
            wait_for(self._posted.work, self.message.source)
        if self.message.nbytes is None:
            return self._wait_sized(channels)
        if self._rest is not None:
            wait_for(self._rest, self.message.source)
        if self._posted is None:
            assert self._whole is not None
            return self._whole
        return self._complete(self._posted.room, self.nbytes)

    def _wait_sized(self, channels: Channels) -> Tensor:
        assert self._posted is not None
        room = self._posted.room
        payload = int(room[:LENGTH_NBYTES].view(torch.int64))
        self.nbytes = LENGTH_NBYTES + payload
        here = room[LENGTH_NBYTES:]
        if payload > here.numel():
            self._take_rest(channels, torch.empty(payload, dtype=torch.uint8), here.numel())
            assert self._rest is not None
            wait_for(self._rest, self.message.source)
        return self._complete(here, payload)

    def _take_rest(self, channels: Channels, whole: Tensor, here: int) -> None:
        self._whole = whole
        self._rest = channels.receive(whole[here:], self.message.source, self._tag + _REST)

    def _complete(self, here: Tensor, nbytes: int) -> Tensor:
        """Return the whole message; `here` is its beginning, or all of it."""
        whole = self._whole if self._whole is not None else self.message.into
        if whole is None:
            return here[:nbytes]
        here = here[:nbytes]
        whole[: here.numel()].copy_(here)
        return whole


class _Leaving:
    """A message in transit to another rank: the part that fits into the room posted there, and the rest."""

    def __init__(self, message: Outgoing, room: int) -> None:
        self.message, self.works = message, list[dist.Work]()
        self._tag = _NOT_AHEAD if message.tag is None else message.tag
        part, self.nbytes = message.part, message.part.numel()
        first = room
        if message.sized:
            length = torch.tensor([self.nbytes]).view(torch.uint8)
            self.nbytes += LENGTH_NBYTES
            first = room or _FIRST
            here = part[: first - LENGTH_NBYTES]
            self._first, self._rest = torch.cat([length, here]), part[here.numel() :]
        else:
            self._first, self._rest = part[:first], part[first:]
        self._fits = room > 0

    def send_what_fits(self, channels: Channels) -> None:
        if self._fits and self._first.numel():
            self.works.append(channels.send(self._first, self.message.to, self._tag))

    def send_rest(self, channels: Channels) -> None:
        if not self._fits and self._first.numel():
            self.works.append(channels.send(self._first, self.message.to, self._tag))
        if self._rest.numel():
            self.works.append(channels.send(self._rest, self.message.to, self._tag + _REST))


def wait_for(work: dist.Work, rank: int) -> None:
    """Wait for an operation; an error says for which rank."""
    try:
        work.wait()
    except RuntimeError as error:
        raise RuntimeError(f"waiting for rank {rank}: {error}") from error


def _wait_for_all(left: deque[tuple[dist.Work, int]]) -> None:
    """Wait for operations in order, and remove each."""
    while left:
        wait_for(*left[0])
        left.popleft()


def abort(group: Any) -> None:  # Any: a process group, or a gloo group by itself, which torch's stubs hardly know
    """Close the connections of `group`: all operations that wait on them fail, on any thread, sends within LOOK_S."""
    with suppress(RuntimeError):
        group.abort()
        backend = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        if backend.name() == "gloo":
            # A receive that times out closes all connections of its group; a receive from a rank that is gone
            # raises at once and closes nothing, so try all ranks.
            others = (rank for rank in range(group.size()) if rank != group.rank())
            for other in others:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], other, _NOTHING_TAG).wait(timedelta(milliseconds=1))
