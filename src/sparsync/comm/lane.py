"""The exchanges of one bucket over a group: a communicator's operations, in one of three ways.

CPU tensors travel over gloo on channels, whose receives are posted ahead.

CUDA tensors travel by one NCCL collective per exchange, enqueued on the current stream: the host does not wait for the device.
Before it enqueues anything, it waits for the other ranks' announcements over gloo. So a rank that is missing or at another step is
detected within the timeout and named, and no device waits for it.

Gloo does not send CUDA tensors between two ranks. If it is the backend for CUDA, such tensors travel as copies in host memory, on the same
channels, with the same bits and bytes as on the CPU. All parts of an exchange are copied at once.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sparsync.comm.announcement import Announced, all_gather_single
from sparsync.comm.channels import MOST_AHEAD, Incoming, Outgoing, Waits, channel, wait_for
from sparsync.core import Span, spans, sum_in_rank_order

if TYPE_CHECKING:
    from sparsync.comm.group import GroupComm

PIECE_NBYTES = 2**18  # bytes of a piece in a long all-reduce
_PIECES = 2**29  # plus the bucket's number: the tag of pieces, whose receives are posted when the all-reduce begins


class Lane:
    """A communicator over `comm` for one bucket, or for calls that were not announced.

    Every message between two ranks for the bucket with this `number` has a channel, the same in every step. `number` None:
    nothing is posted ahead. Several threads may use different lanes of a group at once. `waits` is entered around every wait.
    """

    def __init__(
        self,
        comm: "GroupComm",
        number: int | None = None,
        announced: Announced | None = None,
        waits: Waits = nullcontext,
        made: int = 0,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.announcements = made  # the number that this rank has made
        self._comm, self._number, self._announced, self._waits = comm, number, announced, waits
        # The places of the next messages, by rank. Two ranks agree on the places between them, even if one sends fewer
        # messages to others by `send_recv`. All other operations take a place for every rank, as all ranks call them.
        self._sent, self._arrived = [0] * self.size, [0] * self.size
        # Every rank sends to the next rank first, then to the one after that.
        self._sources = [(self.rank - i) % self.size for i in range(1, self.size)]
        self._targets = [(self.rank + i) % self.size for i in range(1, self.size)]

    def settle(self) -> None:
        """Wait for the other ranks' announcements of this bucket, once. Raises RanksDifferError if they differ."""
        announced, self._announced = self._announced, None
        if announced is not None:
            self._comm.settle(announced, self._waits)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        if not out.numel() and not into.numel():
            return
        if self._is_staged(out):
            arrived = _on_host(into.nbytes).view(into.dtype)
            self.send_recv(_to_host([out])[0], to, arrived, source)
            into.copy_(arrived, non_blocking=True)
            return
        with self._comm.named("send_recv", f"sending to rank {to}, receiving from rank {source}"):
            if not self._comm.collective(out):
                incoming, outgoing = list[Incoming](), list[Outgoing]()
                if into.numel():
                    incoming.append(
                        Incoming(source, self._tag(self._arrived, source), into.nbytes, into.view(torch.uint8))
                    )
                if out.numel():
                    outgoing.append(Outgoing(to, self._tag(self._sent, to), out.view(torch.uint8)))
                for arrived in self._through_channels(incoming, outgoing):
                    if arrived.data_ptr() != into.data_ptr():
                        into.view(torch.uint8).copy_(arrived)
                return
            self.settle()
            group, ranks = self._comm.open(), self._comm.ranks
            operations = [dist.P2POp(dist.irecv, into.view(torch.uint8), ranks[source], group)] if into.numel() else []
            operations += [dist.P2POp(dist.isend, out.view(torch.uint8), ranks[to], group)] if out.numel() else []
            for work in dist.batch_isend_irecv(operations):
                work.wait()

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [x]
        if self._is_staged(x):
            return self._returned(self.all_gather(_to_host([x])[0], counts), x)
        return self._exchange("all_gather", [x] * self.size, counts)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        if self.size == 1:
            return [parts[0]]
        if self._is_staged(parts[0]):
            return self._returned(self.all_to_all(_to_host(parts), counts), parts[self.rank])
        return self._exchange("all_to_all", parts, counts)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum chunk r of all ranks on rank r, in rank order, and gather the sums: two exchanges with as many bytes as a ring."""
        if self._is_staged(x):
            return _to_device([self.all_reduce(_to_host([x])[0])], x)[0]
        if self.size == 1 or not x.numel():
            return x.clone()
        if self._comm.collective(x):
            total = x.clone()
            self.settle()
            with self._comm.named("all_reduce"):
                dist.all_reduce(total, group=self._comm.open())
            return total
        with self._comm.named("all_reduce"):
            if x.nbytes > self.size * MOST_AHEAD:
                return self._summed_in_pieces(x)
            total, lengths = torch.empty_like(x), [len(chunk) for chunk in spans(x.numel(), self.size)]
            chunks = total.split(lengths)
            chunks[self.rank].copy_(sum_in_rank_order(self._moved(x.split(lengths), [lengths[self.rank]] * self.size)))
            self._moved([chunks[self.rank]] * self.size, lengths, chunks)
            return total

    def _is_staged(self, x: Tensor) -> bool:
        """Return whether `x` travels as a copy in host memory, which takes a host sync."""
        return self.size > 1 and x.device.type != "cpu" and not self._comm.collective(x)

    def _returned(self, arrived: list[Tensor], local: Tensor) -> list[Tensor]:
        """Copy tensors that arrived in host memory to the device of `local`, this rank's part, which has not travelled."""
        returned = _to_device([part[:0] if rank == self.rank else part for rank, part in enumerate(arrived)], local)
        returned[self.rank] = local
        return returned

    def _exchange(self, name: str, parts: Sequence[Tensor], counts: Sequence[int] | None) -> list[Tensor]:
        """Send `parts[r]` to rank r, and return the received parts in rank order."""
        with self._comm.named(name):
            if not self._comm.collective(parts[0]):
                return self._moved(parts, counts)
            if counts is None:
                lengths = torch.tensor([part.numel() for part in parts]).split(1)
                counts = [int(length) for length in self._moved(lengths, [1] * self.size)]
            return self._collected(name, parts, counts)

    def _moved(
        self, parts: Sequence[Tensor], counts: Sequence[int] | None, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """Exchange as `_exchange` does, over channels. Without `counts`, every message has a length prefix."""
        dtype, sized, received = parts[0].dtype, counts is None, [parts[self.rank]] * self.size
        incoming, outgoing = list[Incoming](), list[Outgoing]()
        for source in self._sources:
            tag = self._tag(self._arrived, source, sized)
            if counts is not None and not counts[source]:
                received[source] = parts[0].new_empty(0)
                continue
            nbytes = None if counts is None else counts[source] * dtype.itemsize
            incoming.append(Incoming(source, tag, nbytes, None if into is None else into[source].view(torch.uint8)))
        for to in self._targets:
            tag = self._tag(self._sent, to, sized)
            if sized or parts[to].numel():
                outgoing.append(Outgoing(to, tag, parts[to].view(torch.uint8), sized))
        for message, arrived in zip(incoming, self._through_channels(incoming, outgoing), strict=True):
            aligned = arrived.clone() if sized and arrived.storage_offset() % dtype.itemsize else arrived
            received[message.source] = aligned.view(dtype)
        return received

    def _collected(self, name: str, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Exchange as `_exchange` does, by one collective; the received parts are views of one buffer.

        Parts that are adjacent in memory are not copied first. All-gathers of nearly equal lengths are padded.
        """
        self.settle()
        x, group, longest, itemsize = parts[0], self._comm.open(), max(counts), parts[0].element_size()
        if name == "all_gather" and self.size * longest <= 2 * sum(counts):
            received, sent = x.new_empty(self.size * longest), x.view(torch.uint8)
            if x.numel() < longest:
                sent = pad(sent, (0, (longest - x.numel()) * itemsize))
            if longest:
                all_gather_single(received.view(torch.uint8), sent, group)
            return [row[:count] for row, count in zip(received.view(self.size, longest), counts, strict=True)]
        received = x.new_empty(sum(counts))
        arriving, leaving = [count * itemsize for count in counts], [part.nbytes for part in parts]
        dist.all_to_all_single(received.view(torch.uint8), _flat(parts), arriving, leaving, group)
        return list(received.split(list(counts)))

    def _summed_in_pieces(self, x: Tensor) -> Tensor:
        """Reduce as `all_reduce` does, in pieces: while one is added up, the next ones travel, so that the link is never idle."""
        channels, tag, total = self._comm.channels(), _PIECES + (self._number or 0), torch.empty_like(x)
        chunks = spans(x.numel(), self.size)
        count = -(-len(chunks[0]) * x.element_size() // PIECE_NBYTES)  # pieces in a chunk
        pieces = [
            [Span(chunk.start + piece.start, chunk.start + piece.stop) for piece in spans(len(chunk), count)]
            for chunk in chunks
        ]
        owned = chunks[self.rank]
        arrived = {source: x.new_empty(len(owned)) for source in self._sources}

        def receive(into: Tensor, source: int) -> tuple[dist.Work, int]:
            return channels.receive(into.view(torch.uint8), source, tag), source

        def send(part: Tensor, to: int) -> tuple[dist.Work, int]:
            return channels.send(part.view(torch.uint8), to, tag), to

        inside = [slice(piece.start - owned.start, piece.stop - owned.start) for piece in pieces[self.rank]]
        adding = [[receive(arrived[source][place], source) for source in self._sources] for place in inside]
        gathering = [
            receive(pieces[source][number].of(total), source) for number in range(count) for source in self._sources
        ]
        self.settle()
        sends = [send(pieces[to][number].of(x), to) for number in range(count) for to in self._targets]
        for piece, place, works in zip(pieces[self.rank], inside, adding, strict=True):
            with self._waits():
                for work, other in works:
                    wait_for(work, other)
            addends = [piece.of(x) if rank == self.rank else arrived[rank][place] for rank in range(self.size)]
            mine = piece.of(total)
            mine.copy_(sum_in_rank_order(addends))
            sends += [send(mine, to) for to in self._targets]
        with self._waits(), channels.sent(sends):
            for work, other in gathering:
                wait_for(work, other)
        return total

    def _tag(self, places: list[int], rank: int, sized: bool = False) -> int | None:
        """Take the tag of the next message to or from a rank; None if nothing is posted ahead."""
        place, places[rank] = places[rank], places[rank] + 1
        return None if self._number is None else channel(self._number, place, sized)

    def _through_channels(self, incoming: Sequence[Incoming], outgoing: Sequence[Outgoing]) -> list[Tensor]:
        return self._comm.channels().exchange(incoming, outgoing, self.settle, self._waits)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of all parts: a view if they are adjacent in memory."""
    filled = [part.view(torch.uint8) for part in parts if part.numel()]
    if not filled:
        return parts[0].new_empty(0, dtype=torch.uint8)
    begins = accumulate((part.numel() for part in filled), initial=filled[0].data_ptr())
    storages = {part.untyped_storage().data_ptr() for part in filled}
    if len(storages) == 1 and all(part.data_ptr() == begin for part, begin in zip(filled, begins, strict=False)):
        return filled[0].as_strided((sum(part.numel() for part in filled),), (1,))
    return torch.cat(filled)


def _on_host(nbytes: int) -> Tensor:
    """Allocate host memory that a GPU reads and writes without an intermediate copy."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())


def _to_host(parts: Sequence[Tensor]) -> list[Tensor]:
    """Copy all parts to host memory in one copy, and wait for it."""
    flat = _flat(parts)
    copied = _on_host(flat.numel())
    copied.copy_(flat, non_blocking=True)
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()  # a host sync: gloo reads it
    return [part.view(parts[0].dtype) for part in copied.split([part.nbytes for part in parts])]


def _to_device(parts: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    """Copy all parts to the device of `like` in one copy on the current stream."""
    lengths = [part.nbytes for part in parts]
    flat = torch.cat([part.view(torch.uint8) for part in parts], out=_on_host(sum(lengths)))
    copied = flat.to(like.device, non_blocking=True)
    return [part.view(like.dtype) for part in copied.split(lengths)]
