"""Write data files into the user's cache atomically."""

import hashlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

from sparsync_lab.writable import cache_folder as cache_folder


class DataMissingError(RuntimeError):
    """A data set is neither installed nor given, and cannot be fetched; the message lists the fixes."""


def sha256(content: bytes) -> str:
    """Compute the SHA-256 digest of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def written(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts` in sequence to `path`, atomically for other processes.

    Raises RuntimeError if writing fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, prefix=f"{path.name}.", suffix=".partial", delete=False
        ) as file:
            file.writelines(parts)
        Path(file.name).replace(path)
    except OSError as error:
        raise RuntimeError(
            f"cannot write data to {path}: {error}; make the folder writable or set XDG_CACHE_HOME to one that is"
        ) from error
