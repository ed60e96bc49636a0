"""Reading files at paths that users give. A named pipe would wait for a writer without end, and a device may never end."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def opened(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes. Raises ValueError for anything else, without waiting for it, and OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # the latter changes nothing for a regular file
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file; write what a pipe or a device gives into a file first")
    return os.fdopen(descriptor, "rb")


def content(path: Path) -> bytes:
    """Return all bytes of a regular file. Raises as `opened`."""
    with opened(path) as file:
        return file.read()
