"""Find and end all descendants of a process, including those whose parents have ended.

Linux reparents orphans to the nearest ancestor that is a subreaper (prctl(2)), so a subreaper can find, through /proc, everything that its
ranks have started, in whatever sessions and groups.
"""

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TIMEOUT_S = 10.0  # a killed process ends in milliseconds, unless the kernel blocks it
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def subreaper() -> Iterator[None]:
    """Adopt orphaned descendants of this process during the block, and kill remaining ones at its end.

    Processes started before are left alone.
    """
    before = descendants()
    _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        end_descendants(before)
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def die_with_parent() -> None:
    """Kill this process when the thread that started it ends: for a child between fork and exec."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descendants(of: int | None = None) -> set[int]:
    """List the ids of all descendants, of this process or another, that have not been waited for."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # The parent's number comes after the name in brackets, which may contain anything.
            children.setdefault(int(file.read_text().rpartition(")")[2].split()[1]), []).append(int(file.parent.name))
    found: set[int] = set()
    new = [of or os.getpid()]
    while new:
        new = [child for process in new for child in children.get(process, [])]
        found.update(new)
    return found


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill all descendants of this process but the spared ones, and wait for them. Raises RuntimeError if one does not end."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while left := descendants() - set(spared):
        if time.monotonic() > deadline_s:
            raise RuntimeError(
                f"processes {sorted(left)} do not end {TIMEOUT_S:g} s after SIGKILL; the kernel holds them"
            )
        for process in left:
            with suppress(ProcessLookupError, PermissionError):  # it has ended, or is a program of another user
                os.kill(process, signal.SIGKILL)
        for process in left:
            with suppress(ChildProcessError):  # not a child of this process yet, or not any more
                os.waitpid(process, os.WNOHANG)
        time.sleep(0.01)
