"""The default process group of a run: its end, the errors that mean a loss, and transfers of whole states over it."""

import io
import re
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparsync import ConnectionLostError
from sparsync.comm import GroupComm

Result = TypeVar("Result")
Group = Any  # a process group, or a ProcessGroupGloo; torch's stubs lack its `send` and `recv`
_PIECE = 1 << 22  # bytes of one message of a transfer; the process group's timeout holds per message
_LOSSES = ("gloo/", "Gloo ", "[Rank", "pair closure")  # files and texts of gloo, in errors of torch's collectives

_AWAITED = re.compile(r"waiting for rank (\d+): .*Timed out", re.DOTALL)  # in errors of sparsync's exchanges
_TAG = 3  # of the receive that aborts
_LONGEST = 300  # characters of an error in a note


class StoreSilentError(RuntimeError):
    """The store of a run does not answer: its process hangs, has ended, or cannot be reached."""


def asked(seconds: float, call: Callable[[], Result]) -> Result:
    """Call `call`, which asks a store. Raises StoreSilentError if it takes longer than `seconds`, or if the store is gone.

    In spite of its timeout, a TCPStore waits forever for a server that neither answers nor closes the connection.
    """
    results, failed = list[Result](), list[BaseException]()

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # raised again by the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="sparsync-store", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed and not isinstance(failed[0], RuntimeError):
        raise failed.pop()
    if failed or not results:
        why = f"is gone: {failed[0]}" if failed else f"has not answered for {seconds:g} s"
        raise StoreSilentError(f"the store of this run {why}") from (failed.pop() if failed else None)
    return results.pop()


def abort(group: Group) -> None:
    """Close the connections of a group, so that all waits on them fail, on any thread."""
    with suppress(RuntimeError):
        group.abort()
        own = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        if own.name() == "gloo":
            # HACK: gloo's abort does not wake threads that already wait. A receive that times out closes all connections of its group,
            # which wakes all of them but those that wait for a send written in part. A receive from a dead rank raises at once and closes
            # nothing, so try every rank. Price: it relies on gloo's behaviour after a timeout, and on a tag without other users.
            for other in (rank for rank in range(group.size()) if rank != group.rank()):
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], other, _TAG).wait(timedelta(milliseconds=1))


def is_loss(error: BaseException) -> bool:
    """Tell whether an error, or one of its causes, means that another rank cannot be reached."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, StoreSilentError):
            return False  # without the store nobody knows who continues
        if isinstance(seen, (ConnectionLostError, dist.DistError)):
            return True
        if isinstance(seen, RuntimeError) and any(each in str(seen) for each in _LOSSES):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def waited_for(error: BaseException) -> int | None:
    """Read from an error which rank this one waited for until the timeout; None if it does not name one."""
    match = _AWAITED.search(str(error))
    return int(match[1]) if match else None


def brief(error: BaseException) -> str:
    """Shorten an error to its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:_LONGEST]


def forget_frames(error: BaseException) -> None:
    """Clear the local variables in an error's traceback, because process groups are among them."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def end_world() -> None:
    """Close the default process group, if there is one."""
    if dist.is_initialized():
        with suppress(RuntimeError):
            abort(world())
        dist.destroy_process_group()
    # HACK: torch names groups by a counter, which also counts groups that could not be made; ranks with different counts never find each
    # other. Price: a private name, which may change with torch.
    dist.distributed_c10d._world.group_count = 0


def world() -> dist.ProcessGroup:
    """Return the default process group."""
    group = dist.group.WORLD
    assert group is not None
    return group


def comm_of(name: str, timeout_s: float) -> GroupComm:
    """Make a communicator of the default process group. Ranks report no causes, because a meeting shows who is lost."""
    try:
        comm = GroupComm.private(timeout_s=timeout_s, agreed=name)
    except RuntimeError as error:
        raise ConnectionLostError(f"ranks that have met could not connect to each other: {error}") from error
    comm.reports_s = 0.0
    return comm


def send(what: object, group: Group, to: int, check: Callable[[], None] = lambda: None) -> None:
    """Send tensors, numbers and text to a rank of a group; `check` is called after each part."""
    buffer = io.BytesIO()
    torch.save(what, buffer)
    whole = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    group.send([torch.tensor([whole.numel()])], to, 0).wait()
    for piece in whole.split(_PIECE):
        group.send([piece], to, 0).wait()
        check()


def receive(group: Group, source: int, moved: Callable[[], None] = lambda: None) -> tuple[Any, int]:  # Any: see `send`
    """Receive what `send` sends, and return it with its number of bytes; `moved` is called after each part."""
    length = torch.zeros(1, dtype=torch.int64)
    group.recv([length], source, 0).wait()
    memory = bytearray(int(length))
    for piece in torch.frombuffer(memory, dtype=torch.uint8).split(_PIECE):
        group.recv([piece], source, 0).wait()
        moved()
    return torch.load(io.BytesIO(memory), map_location="cpu", weights_only=True), len(memory)
