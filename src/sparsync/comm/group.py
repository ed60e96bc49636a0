"""A communicator over a torch.distributed process group (gloo on CPU, NCCL on GPUs)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class GroupComm:
    """This rank's view of `group`; None is the default group.

    Give it a group nobody else uses: gloo matches collectives by order, so calls of another thread on the same group would mix, and
    one failed collective breaks the group for good. `private()` makes such a group.
    """

    group: dist.ProcessGroup | None = None
    ranks: list[int] = field(init=False)  # of the world, in the order of the group
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @classmethod
    def private(cls, group: dist.ProcessGroup | None = None, timeout_s: float = 300.0) -> "GroupComm":
        """A communicator on a new group with the ranks and backend of `group`. Collective over its ranks.

        After `timeout_s` seconds in one operation a rank gives up with an error.
        """
        base = group if group is not None else dist.group.WORLD
        if base is None:
            raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        new = dist.new_group(
            dist.get_process_group_ranks(base),
            timeout=timedelta(seconds=timeout_s),
            backend=dist.get_backend(base),
            use_local_synchronization=True,  # only the members call this, so a group need not be the world
        )
        assert isinstance(new, dist.ProcessGroup)  # only those outside the group get a number
        return cls(new)

    def send_recv(self, out: Tensor, to: int, into: Tensor, source: int) -> None:
        operations = []
        if out.numel():
            operations.append(dist.P2POp(dist.isend, _bytes(out), self.ranks[to], group=self.group))
        if into.numel():
            operations.append(dist.P2POp(dist.irecv, _bytes(into), self.ranks[source], group=self.group))
        if not operations:
            return
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:
            raise self._failure("send_recv", f"sending to rank {to}, receiving from rank {source}", error) from error

    def all_gather(self, x: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        counts = list(counts) if counts is not None else self._counts([x.numel()] * self.size)
        if self.size == 1:
            return [x]
        if len(set(counts)) > 1:  # gloo and NCCL gather equal lengths only; sending to each rank pads nothing
            return self._exchange("all_gather", torch.cat([_bytes(x)] * self.size), [x.nbytes] * self.size, counts, x)
        gathered = torch.empty(self.size, x.nbytes, dtype=torch.uint8, device=x.device)
        if x.numel():
            try:
                dist.all_gather_single(gathered.view(-1), _bytes(x), group=self.group)
            except RuntimeError as error:
                raise self._failure("all_gather", "with all ranks", error) from error
        return [row.view(x.dtype) for row in gathered]

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int] | None = None) -> list[Tensor]:
        if len(parts) != self.size:
            raise ValueError(f"all_to_all takes one part for each of {self.size} ranks, got {len(parts)}")
        counts = list(counts) if counts is not None else self._counts([part.numel() for part in parts])
        if self.size == 1:
            return [parts[0]]
        sent = torch.cat([_bytes(part) for part in parts])
        return self._exchange("all_to_all", sent, [part.nbytes for part in parts], counts, parts[0])

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone()
        if self.size > 1 and x.numel():
            try:
                dist.all_reduce(total, group=self.group)
            except RuntimeError as error:
                raise self._failure("all_reduce", "with all ranks", error) from error
        return total

    def _exchange(self, name: str, sent: Tensor, splits: list[int], counts: list[int], like: Tensor) -> list[Tensor]:
        incoming = [count * like.element_size() for count in counts]
        received = torch.empty(sum(incoming), dtype=torch.uint8, device=like.device)
        try:
            dist.all_to_all_single(received, sent, incoming, splits, group=self.group)
        except RuntimeError as error:
            raise self._failure(name, "with all ranks", error) from error
        # A slice of a byte tensor starts anywhere, a view as another type only where that type may.
        return [part.clone().view(like.dtype) for part in received.split(incoming)]

    def _counts(self, outgoing: list[int]) -> list[int]:
        """How many elements each rank sends here, when this rank sends them `outgoing`."""
        if self.size == 1:
            return outgoing
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        told = torch.tensor(outgoing, dtype=torch.int64, device=device)
        heard = torch.empty_like(told)
        try:
            dist.all_to_all_single(heard, told, group=self.group)
        except RuntimeError as error:
            raise self._failure("exchange of lengths", "with all ranks", error) from error
        return heard.tolist()  # a host sync: the sizes of the receive buffers depend on it

    def _failure(
        self, name: str, doing: str, error: Any
    ) -> RuntimeError:  # Any: gloo and NCCL raise their own subclasses
        return RuntimeError(f"rank {self.rank} of {self.size}: {name}, {doing}, failed: {error}")


def _bytes(x: Tensor) -> Tensor:
    """The same memory as bytes: gloo's collectives know no int16 and no float8, bytes they all know."""
    return x.view(torch.uint8)
