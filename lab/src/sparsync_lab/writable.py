"""Where the laboratory writes: its cache, and files that are tried before the work whose result they are to hold."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of what can be fetched or made again: sparsync under XDG_CACHE_HOME, or under ~/.cache without it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparsync"


def check_file(path: Path | None, option: str = "--out") -> None:
    """Make the folder of `path` where it is missing. Raises RuntimeError that names the option where no file can be written there.

    None is no file. An existing file is not changed, and no new one is left behind.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() or path.is_dir():
            with path.open("ab"):
                pass
        elif not path.exists():  # pipes and devices are left alone
            new = path.resolve()  # where a link leads
            with new.open("xb"):
                pass
            new.unlink()
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another with {option}") from error
