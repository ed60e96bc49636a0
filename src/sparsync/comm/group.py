"""A communicator over a torch.distributed process group: gloo for CPU tensors and announcements, NCCL on GPUs."""

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sparsync.comm.announcement import UNDECIDED, Announced, Announcement, Announcements, RanksDifferError
from sparsync.comm.channels import Channels, Waits, abort
from sparsync.comm.lane import Lane
from sparsync.comm.meeting import GRACE_S, Meeting, RanksMissingError, StoreSilentError, asked, within
from sparsync.comm.worker import Origin
from sparsync.core import digest


class ConnectionLostError(RuntimeError):
    """An operation between ranks failed, perhaps because another rank failed."""


REPORTS_S = 3.0  # how long a rank waits after a failure for the others' reports
FINISH_S = 30.0  # how long a rank that closes without a failure waits for its device


# The communicators of this process, by id. A fork keeps them until it ends, because gloo's destructors act on sockets and an epoll
# instance that the fork shares with its parent, and would end the parent's exchanges with SIGABRT.
_connected: "weakref.WeakValueDictionary[int, GroupComm]" = weakref.WeakValueDictionary()
_kept = list["GroupComm"]()
os.register_at_fork(after_in_child=lambda: _kept.extend(_connected.values()))


class GroupComm:
    """This rank's view of `group`; None is the default group.

    Use a group without other users: gloo matches collectives by order, so calls of another thread on the group would mix, and one
    failed collective breaks the group permanently. `private()` creates such a group, and `reconnect()` a new one after a failure. All
    ranks must call the same operations with the same lengths: only announcements are compared.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: dist.ProcessGroup | None = _existing(group)  # None once closed
        if "cpu" not in (config := dist.get_backend_config(self.group)):
            raise ValueError(
                f"a communicator needs a group that sends CPU tensors too, for what ranks compare, but its backends are {config}; "
                "use GroupComm.private(), which adds gloo, or make the group with backend='cpu:gloo,cuda:nccl'"
            )
        self.ranks = dist.get_process_group_ranks(self.group)  # global ranks, in the order of the group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.origin = Origin()
        self.reports_s = REPORTS_S  # how long a rank waits for others to report a failure; 0: none reports
        self.timeout_s = 0.0  # how long a rank waits for the others; 0: as long as the process group does
        self._base: dist.ProcessGroup | None = None  # the argument of `private`
        self._meeting: Meeting | None = None
        self._name = ""  # the name of the meeting that created this group, the same on all ranks
        self._announcements: Announcements | None = None
        self._unsettled = deque[Announced]()
        self._undecided = 0  # announcements that no lane counts yet
        self._difference = ""  # the error of announcements that differed
        self._settling = threading.Lock()
        self._heard: list[list[int]] | None = None  # the others' announcements while this rank was undecided
        self._channels: Channels | None = None
        self._lane = Lane(self)  # for this communicator's operations

    @classmethod
    def private(
        cls, group: dist.ProcessGroup | None = None, timeout_s: float = 300.0, fingerprint: str = "", agreed: str = ""
    ) -> "GroupComm":
        """Create a communicator on a new group with the ranks and backend of `group`, and gloo for the CPU. Collective over its ranks.

        A rank that waits longer than `timeout_s` seconds, here or in one operation, raises RuntimeError. If their `fingerprint`
        differs, all ranks raise RuntimeError, naming the lines that differ. Ranks that know that all take part and agree pass `agreed`,
        a name that is new to `group`; they then skip the meeting, which saves many round trips to the store.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0 seconds, got {timeout_s}")
        base = _existing(group)
        rank, size = dist.get_rank(base), dist.get_world_size(base)
        store, calls = _store_of(base), f"sparsync/{dist.get_rank(base)}"
        if agreed:
            return cls._connected(base, Meeting(store, f"sparsync/{agreed}", rank, size), timeout_s, agreed=True)
        doing = f"rank {rank} of {size} makes a private group"
        number = asked(timeout_s + GRACE_S, lambda: store.add(calls, 1), doing)  # every rank counts its calls
        meeting = Meeting(store, f"sparsync/{base.group_name}/{number}", rank, size)
        return cls._connected(base, meeting, timeout_s, fingerprint)

    @classmethod
    def _connected(
        cls,
        base: dist.ProcessGroup,
        meeting: Meeting,
        timeout_s: float,
        fingerprint: str = "",
        fix: str = "",
        agreed: bool = False,
    ) -> "GroupComm":
        _check_not_destroyed(base)
        ranks, rank = dist.get_process_group_ranks(base), dist.get_rank(base)
        # The first meeting is number 1.
        name = f"{meeting.name}/0" if agreed else meeting.meet(fingerprint, timeout_s, fix)
        backend, config = dist.get_backend(base), dist.get_backend_config(base)
        if "cpu" not in config:
            backend = f"cpu:gloo,{config}"

        # HACK: dist.new_group needs all ranks of the world; otherwise it names the group by the number of the rank's groups. If that
        # differs between ranks, they wait for each other forever. Price: a function that torch may change.
        def make() -> Any:
            return c10d._new_process_group_helper(
                len(ranks),
                rank,
                ranks,
                backend,
                meeting.store,
                cast("c10d.GroupName", name),  # a str; torch before 2.10 has no such type
                timeout=timedelta(seconds=timeout_s),
                device_id=base.bound_device_id,
            )[0]

        doing = f"rank {rank} of {len(ranks)} connects to the other ranks"
        try:
            # NCCL uses this thread's current device; gloo's rendezvous has no timeout if the store hangs.
            made = make() if "nccl" in config else within(timeout_s + GRACE_S, make, doing)
        except RuntimeError as error:
            others = "" if agreed else _reports(meeting, name, "", min(REPORTS_S, timeout_s))
            raise RanksMissingError(
                f"rank {rank} of {len(ranks)}: no private group with all ranks within {timeout_s:g} s: {error}{others and f' ({others})'}"
            ) from error
        assert isinstance(made, dist.ProcessGroup)  # only ranks outside the group get a number
        if not agreed:
            # If a rank closed while others still connect, they would fail.
            meeting.wait_for_all(f"{name}/connected", min(REPORTS_S, timeout_s))
        c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(ranks)}
        comm = cls(made)
        comm._base, comm.timeout_s, comm._meeting, comm._name = base, timeout_s, meeting, name
        _connected[id(comm)] = comm
        return comm

    def reconnect(self, fingerprint: str = "", fix: str = "") -> "GroupComm":
        """Create a communicator on new connections between the same ranks. Collective over them. Raises as `private` does.

        `fix` is the advice of the error if fingerprints differ.
        """
        assert self._base is not None and self._meeting is not None, "only a private communicator can reconnect"
        self.origin.check()
        return GroupComm._connected(self._base, self._meeting, self.timeout_s, fingerprint, fix)

    def finish(self) -> None:
        """Wait, at most 30 s, until the device has finished its NCCL operations. Call it before `close` if nothing has failed.

        The host may be steps ahead of the device, and closing connections during an exchange leaves tensors half written.
        """
        if self.group is not None and "nccl" in dist.get_backend_config(self.group) and torch.cuda.is_initialized():
            doing = f"rank {self.rank} of {self.size} waits for its GPU"
            within(FINISH_S, partial(torch.cuda.synchronize, torch.cuda.current_device()), doing)

    def close(self, for_good: bool = False) -> None:
        """Close the connections of a private communicator: ranks that wait for this one get an error now, not after the timeout.

        Does nothing in a fork, which shares its parent's sockets. `for_good` also forgets the group passed to `private`, whose
        threads and connections end when nothing refers to it.
        """
        assert self._base is not None or self.group is None, "only a private communicator can be closed"
        if not self.origin.is_here:
            return
        # In one statement, because two threads may close, and destroying None destroys the world.
        group, self.group = self.group, None
        if for_good:
            self._base = None
        if group is None:
            return
        with suppress(ValueError):  # already destroyed, with the world
            abort(group)  # a traceback may refer to a waiting operation, which keeps sockets open
            dist.destroy_process_group(group)
        # Gloo closes its sockets when nothing refers to the group any more.
        for announced in list(self._unsettled):
            announced.works.clear()
        self._unsettled.clear()
        self._announcements = self._channels = None

    def close_and_report(self, cause: str, within_s: float | None = None) -> str:
        """Close after a failure, exchange causes with the other ranks, and return their reports as text.

        `cause` is this rank's report; "" if it only lost its connections. The text omits ranks without a cause, and names ranks that
        have not reported within `within_s` seconds (None: `reports_s`). Returns "" in a fork, and if this communicator is already
        closed.
        """
        if self.group is None or not self.origin.is_here:
            return ""
        destroyed = _is_destroyed(self.group)
        self.close()
        if destroyed or not self.reports_s:  # the program destroyed the group, and perhaps the store with it
            return ""
        assert self._meeting is not None
        within_s = self.reports_s if within_s is None else within_s
        return _reports(self._meeting, self._name, cause, min(within_s, self.timeout_s))

    def announce(self, announcement: Announcement, number: int = 0, waits: Waits = nullcontext) -> Lane:
        """Announce the following operations to all ranks; the first operation raises RanksDifferError if ranks differ.

        Returns the lane for these operations, which this communicator uses from now on. `number` and `waits`: see Lane.
        """
        announced, made, self._undecided = None, self._undecided, 0
        rows, self._heard = self._heard, None
        if rows is not None:  # the others have announced it, and know that this rank was undecided
            self._check_the_same(rows, announcement)
            if list(announcement.numbers) not in rows:
                raise RuntimeError(
                    f"rank {self.rank} of {self.size} differs from the other ranks in what it reduces; {announcement.told()[0].fix}"
                )
        elif self.size > 1:
            with self.named("comparison"):
                announced, made = self._announcing().send(announcement), made + 1
            self._unsettled.append(announced)
        self._lane = Lane(self, number, announced, waits, made)
        return self._lane

    def settle(self, announced: Announced | None = None, waits: Waits = nullcontext) -> None:
        """Wait until all ranks have announced the same, up to `announced`, by default in the current lane. Raises RanksDifferError."""
        if announced is None:
            self._lane.settle()
            return
        # One thread at a time, in the order of the announcements: exchanges that explain a difference match by order.
        with waits(), self._settling:
            if self._difference:
                raise RanksDifferError(self._difference)
            while announced in self._unsettled:
                oldest = self._unsettled[0]
                with self.named("comparison"):
                    rows = self._announcing().heard(oldest)
                self._check_the_same(rows, oldest.announcement)
                self._unsettled.popleft()

    def _check_the_same(self, rows: list[list[int]], announcement: Announcement) -> None:
        """Raise RanksDifferError, on all ranks, if decided ranks announced different numbers, or any rank is at another step."""
        decided = [row for row in rows if row[2] != UNDECIDED]
        if all(row[:2] == rows[0][:2] for row in rows) and all(row == decided[0] for row in decided):
            return
        with self.named("comparison"):
            texts = self._announcing().exchange_texts(announcement.text)
        difference = announcement.difference(texts)
        self._difference = str(difference)
        raise difference

    def any_of(self, present: Sequence[str], names: Sequence[str], step: int, reduced: int) -> set[str]:
        """Return the subset of `names` that is `present` on any rank; `step` and `reduced` are as in the next announcement.

        A rank that has all names knows the answer, and sends nothing extra. A rank that lacks some announces that, and
        waits for the others' announcements, which costs one more link delay. If another rank has all, it has already announced its next
        operations. If all ranks lack some, but not the same ones, they exchange lists. Do not call it while an announcement is
        unsettled.
        """
        if self.size == 1 or len(present) == len(names):
            return set(present)
        text, self._undecided = "\n".join(present), 1
        with self.named("comparison"):
            announced = self._announcing().send(Announcement((step, reduced, UNDECIDED, digest(text)), list))
            rows = self._announcing().heard(announced)
            if any(row[2] != UNDECIDED for row in rows):
                self._heard = rows
                return set(names)
            if any(row[:2] != rows[0][:2] for row in rows) or all(row == rows[0] for row in rows):
                return set(present)  # the next announcement detects ranks at different steps
            texts = self._announcing().exchange_texts(text)
        return {name for other in texts for name in other.split("\n")} & set(names)

    def _announcing(self) -> Announcements:
        group = self.open()
        self._announcements = self._announcements or Announcements(group, self.rank, self.size)
        return self._announcements

    def collective(self, x: Tensor) -> bool:
        """Return whether `x` travels by collectives of its device's backend, such as NCCL, and not by gloo's messages."""
        return x.device.type != "cpu" and self.open()._get_backend(x.device).name() != "gloo"

    def channels(self) -> Channels:
        """Return the channels of the group, which its lanes share."""
        group = self.open()
        if self._channels is None:
            self._channels = Channels(group)
        return self._channels

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        self._lane.send_recv(out, to, into, source)

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        return self._lane.all_gather(x, counts)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        return self._lane.all_to_all(parts, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._lane.all_reduce(x)

    def open(self) -> dist.ProcessGroup:
        """Return the group. Raises RuntimeError in a fork, and if it was closed or destroyed."""
        self.origin.check()
        if self.group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size}: this communicator is closed; use reconnect()")
        _check_not_destroyed(self.group)
        return self.group

    @contextmanager
    def named(self, name: str, doing: str = "with all ranks") -> Iterator[None]:
        """Turn a failure inside into an error that names the operation and its ranks."""
        self.origin.check()  # not inside, where a failure aborts the group
        try:
            yield
        except (RanksDifferError, ConnectionLostError):
            raise
        except RuntimeError as error:
            group = self.group  # another thread may close this communicator
            if self._base is not None and group is not None:
                # Abort now, because other ranks wait while this error's traceback refers to the group.
                abort(group)
            raise ConnectionLostError(f"rank {self.rank} of {self.size}: {name}, {doing}, failed: {error}") from error


def _reports(meeting: Meeting, name: str, cause: str, wait_s: float) -> str:
    """Tell the other ranks of the group `name` why it failed here, and format their reports within `wait_s` seconds."""
    try:
        reports = meeting.report(name, cause, wait_s)
    except StoreSilentError as error:
        return str(error)
    others = [(rank, reported) for rank, reported in enumerate(reports) if rank != meeting.rank and reported != ""]
    return "; ".join(
        f"rank {rank} does not answer" if reported is None else f"rank {rank} reports {reported}"
        for rank, reported in others
    )


def _store_of(group: dist.ProcessGroup) -> Any:  # Any: torch's stubs have several stores and no common class
    """Return the store of a group, which all of its ranks share."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return c10d._world.pg_map[group][1]  # torch before 2.10


def _existing(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
    existing = group if group is not None else dist.group.WORLD
    assert existing is not None
    _check_not_destroyed(existing)
    return existing


def _check_not_destroyed(group: dist.ProcessGroup) -> None:
    if _is_destroyed(group):
        raise RuntimeError(
            "the process group has been destroyed, by torch.distributed.destroy_process_group; call that after the last step, or make the "
            "handle again after init_process_group"
        )


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    # HACK: torch has no public function for this. Price: a table that torch may change; tests/test_ranks_differ.py covers it.
    return group not in c10d._world.pg_map
