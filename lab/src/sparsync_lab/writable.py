"""The laboratory's cache folder, and a check that output files are writable before the work that fills them."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for data that can be fetched or made again: sparsync in XDG_CACHE_HOME, or in ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparsync"


def check_file(path: Path) -> None:
    """Create the folder of `path` if missing. Raises RuntimeError if no file can be written there.

    A new file stays empty.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another with --out") from error


def write(path: Path, content: str | bytes) -> None:
    """Write a file, and create its folder if missing. Raises RuntimeError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another place with --out") from error
