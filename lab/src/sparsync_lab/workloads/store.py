"""Data files in the user's cache: checked at every read, written in one step, fetched again when damaged."""

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from sparsync_lab.writable import cache_folder as cache_folder


class DataMissingError(RuntimeError):
    """A data set is neither installed nor given nor can be fetched; the message lists every cure."""


def sha256(content: bytes) -> str:
    """Return the SHA-256 digest of `content` in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def cached(path: Path, check: Callable[[bytes], None], fetch: Callable[[], bytes]) -> bytes:
    """Return the content of `path`, fetched and written there first when it is absent or damaged.

    `check` raises ValueError for damaged content. Processes may do this at the same time: each reads a whole file or none, and the last
    to finish leaves its own. Passes on the errors of `fetch`; raises DataMissingError when the fetched content is damaged too, and
    RuntimeError when the cache cannot be written.
    """
    if path.is_file():
        content = path.read_bytes()
        if _passes(check, content):
            return content
    content = fetch()
    try:
        check(content)
    except ValueError as error:
        raise DataMissingError(
            f"the content fetched for {path} is damaged: {error}; try again, or put a good copy there"
        ) from None
    written(path, [content])
    return content


def written(path: Path, parts: Iterable[bytes]) -> None:
    """Write `parts`, one after the other, to `path` so that another process reads all of it or nothing.

    Raises RuntimeError where it cannot be written.
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


def _passes(check: Callable[[bytes], None], content: bytes) -> bool:
    try:
        check(content)
    except ValueError:
        return False
    return True
