"""A communicator over a torch.distributed process group (gloo on CPU, NCCL on GPUs)."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from sparsync.comm.announcement import UNDECIDED, Announcement, Announcements, RanksDifferError, Told, wait_each
from sparsync.comm.interrupts import abort, abort_on_interrupt, was_interrupted
from sparsync.comm.meeting import GRACE_S, Meeting, StoreSilentError, asked, within
from sparsync.core import digest, spans, sum_in_rank_order


class ConnectionLostError(RuntimeError):
    """An operation between ranks failed, perhaps because another rank did."""


REPORTS_S = 3.0  # how long a rank waits, after a failure, for the others to report theirs
# The types that gloo's all_reduce can sum.
_GLOO_SUMS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
)


@dataclass(frozen=True)
class Origin:
    """The process in which this was made. A fork of it, such as a DataLoader's worker, inherits the objects, but no thread of them."""

    process: int = field(default_factory=os.getpid)

    @property
    def is_here(self) -> bool:
        """Whether that is the present process, and not a fork of it."""
        return os.getpid() == self.process

    def check(self) -> None:
        """Raise RuntimeError in a fork of that process."""
        if not self.is_here:
            raise RuntimeError(
                f"this is process {os.getpid()}, forked from process {self.process}, which made the handle or communicator: threads and "
                "connections of it are not here; use it in the process that made it"
            )


@dataclass
class GroupComm:
    """This rank's view of `group`; None is the default group.

    Give it a group without other users: gloo matches collectives by order, so calls of another thread on the same group would mix, and
    one failed collective breaks the group permanently. `private()` makes such a group, `reconnect()` another after a failure.
    """

    group: dist.ProcessGroup | None = None  # None afterwards only once closed
    ranks: list[int] = field(init=False)  # of the world, in the order of the group
    rank: int = field(init=False)
    size: int = field(init=False)
    origin: Origin = field(default_factory=Origin, init=False, repr=False)
    _base: dist.ProcessGroup | None = field(default=None, init=False, repr=False)  # the group that `private` was given
    _timeout_s: float = field(default=0.0, init=False, repr=False)
    _meeting: Meeting | None = field(default=None, init=False, repr=False)
    _name: str = field(default="", init=False, repr=False)  # of the meeting that made this group, the same on all ranks
    _announcements: Announcements | None = field(default=None, init=False, repr=False)
    _announced: bool = field(default=False, init=False, repr=False)  # `announce` was called
    _announcements_made: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self.group = _existing(self.group)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    @classmethod
    def private(
        cls, group: dist.ProcessGroup | None = None, timeout_s: float = 300.0, fingerprint: str = ""
    ) -> "GroupComm":
        """Return a communicator on a new group with the ranks and backend of `group`. Collective over its ranks.

        A rank that waits longer than `timeout_s` seconds, in here or in one operation, raises RuntimeError. So do all ranks when
        their `fingerprint` differs; the error names the lines in which it does.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be above 0 seconds, got {timeout_s}")
        base = _existing(group)
        rank, size = dist.get_rank(base), dist.get_world_size(base)
        store, own = _store_of(base), f"sparsync/{dist.get_rank(base)}"
        doing = f"rank {rank} of {size} makes a private group"
        number = asked(timeout_s + GRACE_S, lambda: store.add(own, 1), doing)  # each rank counts its own calls
        meeting = Meeting(store, f"sparsync/{base.group_name}/{number}", rank, size)
        return cls._connected(base, meeting, timeout_s, fingerprint)

    @classmethod
    def _connected(
        cls, base: dist.ProcessGroup, meeting: Meeting, timeout_s: float, fingerprint: str, cure: str = ""
    ) -> "GroupComm":
        _check_not_destroyed(base)
        ranks, rank = dist.get_process_group_ranks(base), dist.get_rank(base)
        name, backend = meeting.meet(fingerprint, timeout_s, cure), dist.get_backend(base)

        # HACK: dist.new_group needs all ranks of the world, or else names the group by how many groups a rank belongs to; where that
        # differs between ranks, they wait for each other without end. Price: a function that torch may change.
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
            # NCCL belongs to the device that is current on this thread; gloo's rendezvous has no timeout if the store hangs.
            made = make() if "nccl" in backend else within(timeout_s + GRACE_S, make, doing)
        except RuntimeError as error:
            others = _reports(meeting, name, "", min(REPORTS_S, timeout_s))
            raise RuntimeError(
                f"rank {rank} of {len(ranks)}: no private group with all ranks within {timeout_s:g} s: {error}{others and f' ({others})'}"
            ) from error
        assert isinstance(made, dist.ProcessGroup)  # only those outside the group get a number
        c10d._world.pg_group_ranks[made] = {member: place for place, member in enumerate(ranks)}
        comm = cls(made)
        comm._base, comm._timeout_s, comm._meeting, comm._name = base, timeout_s, meeting, name
        abort_on_interrupt(comm)
        return comm

    def reconnect(self, fingerprint: str = "", cure: str = "") -> "GroupComm":
        """Return a communicator on fresh connections between the same ranks. Collective over them. Raises as `private`.

        `cure` is what the error says where fingerprints differ.
        """
        assert self._base is not None and self._meeting is not None, "only a private communicator can reconnect"
        self.origin.check()
        return GroupComm._connected(self._base, self._meeting, self._timeout_s, fingerprint, cure)

    def close(self) -> None:
        """Close the connections of a private communicator: ranks that wait for this one get an error now, not after the timeout.

        In a fork it does nothing: sockets are shared, and those of the parent would be closed.
        """
        assert self._base is not None, "only a private communicator can be closed"
        if self.group is None or not self.origin.is_here:
            return
        with suppress(ValueError):  # destroyed already, with the world
            self.group.abort()
            dist.destroy_process_group(self.group)
        # Gloo closes its sockets when nothing refers to the group any more.
        self.group = self._announcements = None

    def close_and_report(self, cause: str, within_s: float = REPORTS_S) -> str:
        """Close after a failure, exchange causes with the other ranks, and return what they report.

        `cause` is what this rank reports; "" where it only lost its connections. Ranks that report no cause are left out, and those that
        have not reported within `within_s` seconds are named. Returns "" when this communicator was closed before, and in a fork.
        """
        if self.group is None or not self.origin.is_here:
            return ""
        destroyed = _is_destroyed(self.group)
        self.close()
        if destroyed:  # by this rank's own program, and perhaps the store with it
            return ""
        assert self._meeting is not None
        return _reports(
            self._meeting, self._name, cause, 0.0 if was_interrupted(self) else min(within_s, self._timeout_s)
        )

    def announce(self, announcement: Announcement) -> None:
        """Tell all ranks what the operations that follow are about; the next one raises RanksDifferError where ranks differ.

        Once this was called, operations are compared by what is announced alone. Until then every operation makes an announcement of its
        own, of its name and lengths.
        """
        self._announced = True
        if self.size > 1:
            self._made(announcement)

    def settle(self) -> None:
        """Wait for the announcements of the other ranks, if they were not waited for yet. Raises RanksDifferError where they differ."""
        made = self._announcements
        if made is None or made.current is None:
            return
        announcement = made.current
        with self._named("comparison"):
            rows = made.heard()
            if any(row[2] == UNDECIDED for row in rows):
                self._made(announcement)  # those ranks have heard of this rank now, and say what they reduce
                rows = made.heard()
            if all(row == rows[0] for row in rows):
                return
            texts = made.exchange_texts(announcement.text)
        raise announcement.difference(texts)

    def any_of(self, own: Sequence[str], names: Sequence[str], step: int, reduced: int) -> set[str]:
        """Return which of `names` any rank has among its `own`; `step` and `reduced` are as in the next announcement.

        A rank that has all of them knows, and sends nothing more than it does anyway. One that lacks some announces so, and waits for the
        announcements of the others: one delay of the link more. Where all ranks lack some, but not the same, they tell each other which.
        """
        if self.size == 1 or len(own) == len(names):
            return set(own)
        text = "\n".join(own)
        self._announced = True
        made = self._made(Announcement((step, reduced, UNDECIDED, digest(text)), list))
        with self._named("comparison"):
            rows = made.heard()
            if any(row[2] != UNDECIDED for row in rows):
                return set(names)
            if any(row[:2] != rows[0][:2] for row in rows) or all(row == rows[0] for row in rows):
                return set(own)  # ranks at different steps find that out by what they announce next
            texts = made.exchange_texts(text)
        return {each for other in texts for each in other.split("\n")} & set(names)

    def take_announced(self) -> int:
        """Return how many announcements this rank has made since the last call."""
        taken, self._announcements_made = self._announcements_made, 0
        return taken

    def _made(self, announcement: Announcement) -> Announcements:
        group = self._open()
        if self._announcements is None:
            self._announcements = Announcements(group, self.rank, self.size)
        with self._named("comparison"):
            self._announcements.send(announcement)
        self._announcements_made += 1
        return self._announcements

    def _compare(self, line: str) -> None:
        """Where nothing was announced, compare between the ranks what they are about to do, which `line` says."""
        if not self._announced and self.size > 1:
            cure = "call the same operation, with the same lengths, on all ranks"
            self._made(Announcement((digest(line), 0, 0, 0), lambda: [Told([line], cure)]))
            self.settle()

    def _check_arriving(self, outgoing: list[int], counts: list[int], dtype: torch.dtype) -> None:
        """Where nothing was announced, compare the lengths that arrive with those that are expected."""
        if not self._announced and self.size > 1:
            self._compare(f"all_to_all of {dtype}")
            arriving = self._counts(outgoing)
            right = "lengths as expected"
            self._compare(right if arriving == counts else f"lengths {arriving} where {counts} are expected")

    def _check_pair(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        """Where nothing was announced, compare the length that arrives from `source` with the one expected."""
        if self._announced:
            return
        group = self._open()
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sent, arriving = (torch.tensor([part.nbytes], device=device) for part in (out, into))
        empty = sent[:0]
        self._transfer([(arriving if into.numel() else empty, source)], [(sent if out.numel() else empty, to)])
        if int(arriving) != into.nbytes:
            raise ValueError(
                f"rank {self.rank} expects {into.nbytes} bytes from rank {source}, which sends {int(arriving)}; "
                "give send_recv tensors of the same length and type on both ranks"
            )

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        for peer in (to, source):
            if not 0 <= peer < self.size:
                raise ValueError(f"a rank must be in [0, {self.size - 1}], got {peer}")
        if not out.numel() and not into.numel():
            return
        with self._named("send_recv", f"sending to rank {to}, receiving from rank {source}"):
            self._check_pair(out, to, into, source)
            self._transfer([(into, source)], [(out, to)])

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        known = self._known("all_gather", counts, x.numel())
        if self.size == 1:
            return [x]
        self._compare(f"all_gather of {'unknown' if known is None else known} elements of {x.dtype}")
        counts = known or self._counts([x.numel()] * self.size)
        return self._exchange("all_gather", [x] * self.size, counts)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        if len(parts) != self.size:
            raise ValueError(f"all_to_all takes one tensor for each of {self.size} ranks, got {len(parts)}")
        outgoing = [part.numel() for part in parts]
        known = self._known("all_to_all", counts, outgoing[self.rank])
        if self.size == 1:
            return [parts[0]]
        if known is None:
            self._compare(f"all_to_all of unknown elements of {parts[0].dtype}")
        else:
            self._check_arriving(outgoing, known, parts[0].dtype)
        counts = known or self._counts(outgoing)
        return self._exchange("all_to_all", parts, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        self._compare(f"all_reduce of {x.numel()} elements of {x.dtype}")
        if self.size == 1 or not x.numel():
            return x.clone()
        if x.device.type == "cpu" and x.dtype not in _GLOO_SUMS:
            return self._sum_in_rank_order(x)
        total = x.clone()
        self.settle()
        with self._named("all_reduce"):
            dist.all_reduce(total, group=self._open())
        return total

    def _sum_in_rank_order(self, x: Tensor) -> Tensor:
        """Sum chunk r of all ranks on rank r, and gather the sums; as many bytes as a ring sends."""
        chunks = spans(x.numel(), self.size)
        lengths = [len(chunk) for chunk in chunks]
        received = self.all_to_all([chunk.of(x) for chunk in chunks], [lengths[self.rank]] * self.size)
        return torch.cat(self.all_gather(sum_in_rank_order(received), lengths))

    def _exchange(self, name: str, parts: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
        """Send `parts[r]` to rank r and return what each rank sent here: every rank sends to the next one, then to the one after it, ..."""
        received = [parts[0].new_empty(count) for count in counts]
        received[self.rank] = parts[self.rank]
        distances = range(1, self.size)
        incoming = [(received[source], source) for source in ((self.rank - i) % self.size for i in distances)]
        outgoing = [(parts[to], to) for to in ((self.rank + i) % self.size for i in distances)]
        with self._named(name):
            self._transfer(incoming, outgoing)
        return received

    def _transfer(self, incoming: list[tuple[Tensor, int]], outgoing: list[tuple[Tensor, int]]) -> None:
        """Fill each tensor of `incoming` from its rank and send each of `outgoing` to its rank; empty ones take no message.

        Receives are posted before sends. Gloo sends data only after the receiver's ready message, which travels on the same connection:
        behind a rank's own data it would be late, and the two ranks would send one after the other, at half the speed of the link.
        For the same reason this does not use gloo's own all_to_all and all_gather. Nothing is sent before ranks have announced the same.
        """
        group = self._open()
        # As bytes, which all of gloo's operations support; int16 and float8 they do not.
        receives = [(part.view(torch.uint8), rank) for part, rank in incoming if part.numel()]
        sends = [(part.view(torch.uint8), rank) for part, rank in outgoing if part.numel()]
        if all(part.device.type == "cpu" for part, _ in receives + sends):
            # What a batch does on the CPU, without its checks.
            works = [dist.irecv(part, group=group, group_src=rank) for part, rank in receives]
            self.settle()
            works += [dist.isend(part, group=group, group_dst=rank) for part, rank in sends]
        else:
            self.settle()
            operations = [dist.P2POp(dist.irecv, part, self.ranks[rank], group) for part, rank in receives]
            operations += [dist.P2POp(dist.isend, part, self.ranks[rank], group) for part, rank in sends]
            works = dist.batch_isend_irecv(operations)
        wait_each(works, [rank for _, rank in receives + sends])

    def _known(self, name: str, counts: Sequence[int] | None, own: int) -> list[int] | None:
        """Return `counts` as a list, checked as far as this rank can: a wrong length breaks the group permanently."""
        if counts is None:
            return None
        if len(counts) != self.size or counts[self.rank] != own:
            raise ValueError(
                f"counts of {name} must have one length for each of {self.size} ranks and {own} for rank {self.rank}, "
                f"got {list(counts)}"
            )
        return list(counts)

    def _counts(self, outgoing: list[int]) -> list[int]:
        """Return how many elements each rank sends here, when this rank sends them `outgoing`."""
        group = self._open()
        self.settle()
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        sent = torch.tensor(outgoing, dtype=torch.int64, device=device)
        received = torch.empty_like(sent)
        with self._named("exchange of lengths"):
            dist.all_to_all_single(received, sent, group=group)
        return received.tolist()  # a host sync: the sizes of the receive buffers depend on it

    def _open(self) -> dist.ProcessGroup:
        self.origin.check()
        if self.group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size}: this communicator is closed; use reconnect()")
        _check_not_destroyed(self.group)
        return self.group

    @contextmanager
    def _named(self, name: str, doing: str = "with all ranks") -> Iterator[None]:
        """Raise what fails inside as an error that says what was done with which ranks."""
        self.origin.check()  # not inside: what fails there aborts the group
        try:
            yield
        except (RanksDifferError, ConnectionLostError):
            raise
        except RuntimeError as error:
            if self._base is not None and self.group is not None:
                # Now, and not when nothing refers to the group any more, as this error's traceback does while others wait for this rank.
                abort(self.group)
            others = "" if self._announced or self._meeting is None else self.close_and_report("")
            text = f"rank {self.rank} of {self.size}: {name}, {doing}, failed: {error}{others and f' ({others})'}"
            raise ConnectionLostError(text) from error


def _reports(meeting: Meeting, name: str, cause: str, wait_s: float) -> str:
    """Tell the other ranks of the group called `name` why it failed here, and return what they tell within `wait_s` seconds."""
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
    found = group if group is not None else dist.group.WORLD
    assert found is not None
    _check_not_destroyed(found)
    return found


def _check_not_destroyed(group: dist.ProcessGroup) -> None:
    if _is_destroyed(group):
        raise RuntimeError(
            "the process group has been destroyed, by torch.distributed.destroy_process_group; call that after the last step, or make the "
            "handle again after init_process_group"
        )


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    # HACK: torch has no public function for this. Price: a table that torch may change; tests/test_ranks_differ.py destroys groups.
    return group not in c10d._world.pg_map
