"""Ctrl-C while a rank waits for others.

Python runs the handler of a signal between two instructions of the main thread, and a wait of torch.distributed is one instruction: of
this thread, or of autograd, which waits for what another thread reduces. So a separate thread is woken by the signal itself. Where
the main thread has not moved half a second later, it aborts the connections; what waits on them then fails, and the handler runs.

Only for the handler that Python installs, which raises KeyboardInterrupt: a program with another handler may intend to continue.
"""

import os
import signal
import sys
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

MOVES_S = 0.5  # how long the main thread has to raise KeyboardInterrupt by itself
_TAG = 3  # of the receive that aborts: one of those that channels leave to others


class Connected(Protocol):
    """What has connections that may be aborted; None once they are closed."""

    @property
    def group(self) -> dist.ProcessGroup | None: ...


# By id, because what is connected need not be hashable.
_connected: weakref.WeakValueDictionary[int, Connected] = weakref.WeakValueDictionary()
_interrupted: weakref.WeakValueDictionary[int, Connected] = weakref.WeakValueDictionary()
_lock = threading.Lock()
_installed: list[int] = []  # the end of the pipe that signals are written to
_registered: list[bool] = []  # once forks are prepared for
_kept: list[Connected] = []  # in a fork


def abort_on_interrupt(connected: Connected) -> None:
    """Abort the connections of `connected` on Ctrl-C, from now on, where the main thread cannot raise KeyboardInterrupt.

    Does nothing where another part of the program, such as asyncio, is woken by signals already, or where the first call comes from
    another thread than the main one. A fork of this process keeps `connected`, and all that it refers to, until it ends.
    """
    with _lock:
        if not _registered:
            os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_in_fork)
            _registered.append(True)
        _connected[id(connected)] = connected
        if not _installed and threading.current_thread() is threading.main_thread():
            _install()


def was_interrupted(connected: Connected) -> bool:
    """Return whether Ctrl-C aborted these connections: other ranks are not waited for then."""
    return _interrupted.get(id(connected)) is connected


def _install() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    others = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(reader)
        os.close(writer)
        return
    _installed.append(writer)
    threading.Thread(target=_watch, args=(reader,), name="sparsync-interrupts", daemon=True).start()


def _in_fork() -> None:
    """Leave the pipe to the parent, as a signal of a forked child is none of the parent's; and its connections.

    Gloo's destructors act on sockets and an epoll instance that the child shares with its parent, whose exchanges they end with SIGABRT.
    """
    if _installed and threading.current_thread() is threading.main_thread():
        found = signal.set_wakeup_fd(-1)
        if found not in (-1, _installed[0]):
            signal.set_wakeup_fd(found)
    _kept.extend(_connected.values())
    _connected.clear()
    _lock.release()


def _watch(reader: int) -> None:
    while signals := os.read(reader, 64):
        if signal.SIGINT in signals and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            _interrupt()


def _interrupt() -> None:
    before = _place()
    time.sleep(MOVES_S)
    if _place() != before:
        return
    with _lock:
        waiting = [(connected, connected.group) for connected in _connected.values()]
    for connected, group in waiting:
        if group is not None:
            _interrupted[id(connected)] = connected
            abort(group)


def abort(group: Any) -> None:  # Any: a process group, also one of gloo's by itself, of which torch's stubs know little
    """Close the connections of `group`, and make everything that waits on them fail, on whatever thread."""
    with suppress(RuntimeError):
        group.abort()
        own = group._get_backend(torch.device("cpu")) if isinstance(group, dist.ProcessGroup) else group
        if own.name() == "gloo":
            # HACK: gloo's abort leaves those waiting who wait already. A receive that times out closes all connections of its group,
            # and wakes them; one from a rank that is gone raises at once and closes nothing, so each rank is tried. Price: it rests on
            # what gloo does after a timeout, and on a tag without other users.
            others = (rank for rank in range(group.size()) if rank != group.rank())
            for other in others:
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], other, _TAG).wait(timedelta(milliseconds=1))


def _place() -> tuple[int, int]:
    """Return where the main thread is: its frame, and the instruction in it."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return id(frame), frame.f_lasti
