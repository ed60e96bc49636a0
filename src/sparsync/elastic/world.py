"""The default process group of a run: its end, what its loss looks like, and what is sent over it as a whole."""

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from sparsync.comm.group import ConnectionLostError
from sparsync.comm.interrupts import abort
from sparsync.comm.meeting import RanksMissingError, StoreSilentError

_PIECE = 1 << 22  # bytes of one message of a transfer, which the timeout of the process group is about
_LOSSES = ("gloo/", "Gloo ", "[Rank", "pair closure")  # in errors of torch's own collectives: files and texts of gloo's


def is_loss(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, says that another rank cannot be reached."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StoreSilentError):
            return False  # without the store nobody knows who goes on
        if isinstance(seen, (ConnectionLostError, RanksMissingError, dist.DistError)):
            return True
        if isinstance(seen, RuntimeError) and any(each in str(seen) for each in _LOSSES):
            return True  # of torch's own collectives
        seen = seen.__cause__ or seen.__context__
    return False


def end_world() -> None:
    """Close the default process group, if there is one."""
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        with suppress(RuntimeError):
            abort(group)
        dist.destroy_process_group()
    # HACK: torch names groups by a number, which counts one that could not be made, and ranks with other numbers never find each other.
    # Price: a private name, which may change with torch.
    dist.distributed_c10d._world.group_count = 0


def send(what: object, to: int) -> None:
    """Send an object of tensors, numbers and text to a rank of the default group."""
    buffer = io.BytesIO()
    torch.save(what, buffer)
    whole = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    dist.send(torch.tensor([whole.numel()]), to)
    for piece in whole.split(_PIECE):
        dist.send(piece, to)


def receive(source: int, moved: Callable[[], None] = lambda: None) -> tuple[Any, int]:  # Any: what was sent
    """Return what `send` sends, and its bytes; `moved` is called after each part."""
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source)
    memory = bytearray(int(length))
    for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_PIECE):
        dist.recv(piece, source)
        moved()
    return torch.load(io.BytesIO(memory), weights_only=True), len(memory)
