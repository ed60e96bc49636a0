"""P ranks in one process, which run one at a time in a fixed order. A deadlock is an error that says which rank waits for which.

A rank is a thread that runs until it must wait; then the next rank that can continue runs. The order depends only on the calls
of the ranks, so a program always gives the same bits. For tests with 1 to 64 ranks, and studies with 256 to 1024.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from sparsync.core import add_note, sum_in_rank_order

Result = TypeVar("Result")
MOST_RANKS = 4096


class DeadlockError(RuntimeError):
    """All ranks that have not returned are waiting, and none can continue."""


class _Stopped(BaseException):
    """Ends a rank's thread after another rank failed. It is a BaseException, so that `except Exception` in a scheme does not catch it."""


@dataclass(frozen=True)
class LocalWorld:
    """A world of `size` ranks inside this process."""

    size: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MOST_RANKS:
            raise ValueError(f"a world in one process has 1 to {MOST_RANKS:,} ranks, each a thread, got {self.size}")

    def run(self, fn: Callable[["LocalComm"], Result]) -> list[Result]:
        """Run `fn(comm)` on every rank, and return the results in rank order.

        The first error on any rank ends all of them and is raised here, with a note that names the rank. Raises DeadlockError when no
        rank can continue, and RuntimeError when a message was sent that no rank received.
        """
        scheduler = _Scheduler(self.size)
        results: list[Any] = [None] * self.size

        def body(rank: int) -> None:
            scheduler.start(rank)
            try:
                results[rank] = fn(LocalComm(rank, scheduler))
            except _Stopped:
                pass
            except BaseException as error:  # passed to the caller's thread, whatever it is
                add_note(error, f"(on rank {rank} of {self.size})")
                scheduler.fail(error)
            finally:
                scheduler.finish(rank)

        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        scheduler.begin()
        for thread in threads:
            thread.join()
        scheduler.close()
        return results


@dataclass
class LocalComm:
    """One rank's view of a LocalWorld."""

    rank: int
    scheduler: "_Scheduler" = field(repr=False)

    @property
    def size(self) -> int:
        return self.scheduler.size

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        _check_peer(to, self.size)
        _check_peer(source, self.size)
        mail = self.scheduler.mail
        if out.numel():
            mail[self.rank, to].append(out.clone())
        if not into.numel():
            return
        inbox = mail[source, self.rank]
        self.scheduler.wait(self.rank, lambda: bool(inbox), "send_recv", lambda: [source])
        message = inbox.popleft()
        if message.numel() != into.numel() or message.dtype != into.dtype:
            raise RuntimeError(
                f"rank {self.rank} expected {into.numel()} x {into.dtype} from rank {source}, which sent "
                f"{message.numel()} x {message.dtype}"
            )
        into.copy_(message)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        gathered = self.scheduler.rendezvous(self.rank, "all_gather", x.clone()).in_rank_order()
        _check_arrived(self.rank, "all_gather", gathered, counts)
        return gathered

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        if len(parts) != self.size:
            raise ValueError(f"all_to_all takes one tensor for each of {self.size} ranks, got {len(parts)}")
        table = self.scheduler.rendezvous(self.rank, "all_to_all", [part.clone() for part in parts]).in_rank_order()
        received = [row[self.rank] for row in table]
        _check_arrived(self.rank, "all_to_all", received, counts)
        return received

    def all_reduce(self, x: Tensor) -> Tensor:
        met = self.scheduler.rendezvous(self.rank, "all_reduce", x.clone())
        gathered = met.in_rank_order()
        _check_arrived(self.rank, "all_reduce", gathered, [x.numel()] * self.size)
        if met.total is None:
            met.total = sum_in_rank_order(gathered)
        return met.total.clone()


@dataclass
class _Rendezvous:
    name: str
    deposits: dict[int, Any] = field(default_factory=dict)
    left: int = 0
    total: Tensor | None = None  # of an all-reduce, which the first rank adds up for all

    def in_rank_order(self) -> list[Any]:
        return [self.deposits[rank] for rank in range(len(self.deposits))]


@dataclass
class _Waiting:
    ready: Callable[[], bool]
    name: str
    on: Callable[[], list[int]]


class _Scheduler:
    """The running rank, the waiting ranks, and the messages in transit. Only the running thread uses it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.error: BaseException | None = None
        # A rank runs when its lock is released. A Semaphore does the same, slower.
        self._go = [threading.Lock() for _ in range(size)]
        for lock in self._go:
            lock.acquire()
        self._waiting: dict[int, _Waiting] = {}
        self._finished: set[int] = set()
        self._rendezvous: dict[int, _Rendezvous] = {}
        self._collectives = [0] * size  # calls so far, by rank

    def begin(self) -> None:
        self._go[0].release()

    def start(self, rank: int) -> None:
        self._go[rank].acquire()

    def wait(self, rank: int, ready: Callable[[], bool], name: str, on: Callable[[], list[int]]) -> None:
        """Let the other ranks run until `ready()`. `on()` names the ranks waited for."""
        if self.error is not None:
            raise _Stopped
        if ready():
            return
        self._waiting[rank] = _Waiting(ready, name, on)
        following = self._next(rank)
        if following is None:
            message = self._deadlock()
            del self._waiting[rank]  # it continues, with the error
            raise DeadlockError(message)
        if following != rank:
            self._go[following].release()
            self._go[rank].acquire()
        self._waiting.pop(rank, None)
        if self.error is not None:
            raise _Stopped

    def rendezvous(self, rank: int, name: str, deposit: object) -> _Rendezvous:
        """Wait for all ranks at this rank's next collective, and return it with all deposits."""
        number = self._collectives[rank]
        self._collectives[rank] += 1
        entry = self._rendezvous.setdefault(number, _Rendezvous(name))
        if entry.name != name:
            other = next(iter(entry.deposits))
            raise RuntimeError(
                f"collective number {number}: rank {rank} called {name}, rank {other} called {entry.name}; "
                "all ranks must make the same calls in the same order"
            )
        entry.deposits[rank] = deposit
        self.wait(
            rank,
            lambda: len(entry.deposits) == self.size,
            name,
            lambda: [other for other in range(self.size) if other not in entry.deposits],
        )
        entry.left += 1
        if entry.left == self.size:
            del self._rendezvous[number]
        return entry

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error

    def finish(self, rank: int) -> None:
        """Let the next rank run after this one has returned; after an error, let all waiting ranks end, one by one."""
        self._finished.add(rank)
        following = self._next(rank)
        if following is None and len(self._finished) < self.size:
            self.fail(DeadlockError(self._deadlock()))
            following = self._next(rank)
        if following is not None:
            self._go[following].release()

    def close(self) -> None:
        if self.error is not None:
            raise self.error
        unread = {pair: len(messages) for pair, messages in self.mail.items() if messages}
        if unread:
            pairs = ", ".join(f"{count} from rank {a} to rank {b}" for (a, b), count in sorted(unread.items()))
            raise RuntimeError(f"messages were sent that no rank received: {pairs}")

    def _next(self, rank: int) -> int | None:
        for distance in range(1, self.size + 1):
            other = (rank + distance) % self.size
            if other in self._finished:
                continue
            waiting = self._waiting.get(other)
            if self.error is not None or waiting is None or waiting.ready():
                return other
        return None

    def _deadlock(self) -> str:
        lines = [
            f"rank {rank} in {waiting.name} waits for rank{'s' if len(waiting.on()) > 1 else ''} "
            + ", ".join(
                f"{other}{' (which has returned)' if other in self._finished else ''}" for other in waiting.on()
            )
            for rank, waiting in sorted(self._waiting.items())
        ]
        return "deadlock: " + "; ".join(lines)


def _check_peer(rank: int, size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"a rank must be in [0, {size - 1}], got {rank}")


def _check_arrived(rank: int, name: str, parts: Sequence[Tensor], counts: Sequence[int] | None) -> None:
    """Raise RuntimeError if a tensor does not have the expected length, or the type of this rank's tensor."""
    if counts is not None and len(counts) != len(parts):
        raise ValueError(f"counts of {name} must have one length for each of {len(parts)} ranks, got {list(counts)}")
    for source, part in enumerate(parts):
        expected = counts[source] if counts is not None else part.numel()
        if part.numel() != expected or part.dtype != parts[rank].dtype:
            raise RuntimeError(
                f"{name}: rank {rank} expected {expected} x {parts[rank].dtype} from rank {source}, which sent "
                f"{part.numel()} x {part.dtype}"
            )
