"""Temporary folders that are gone when their block ends, and after SIGKILL when the next one is made.

The program that made a folder holds a lock on it, which the kernel takes back however the program ends.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "sparsync-lab-"
YOUNG_S = 60.0  # a folder younger than this may be one that is not locked yet


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder; remove it afterwards, and before that those of programs that were killed."""
    remove_stale()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # closed in children that are started with exec
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        remove(folder)
        os.close(lock)


def remove(folder: Path) -> None:
    """Remove a folder of `temporary_folder`; nothing else, and nothing where it is gone already."""
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale() -> None:
    """Remove this user's temporary folders whose programs have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is locked, somebody else's, or gone meanwhile
            about = folder.stat(follow_symlinks=False)
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(folder)
            finally:
                os.close(lock)
