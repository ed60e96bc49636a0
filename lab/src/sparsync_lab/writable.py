"""The laboratory's cache folder, and a check that output files are writable before the work that fills them."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder for data that can be fetched or made again: sparsync in XDG_CACHE_HOME, or in ~/.cache by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sparsync"


def check_file(path: Path | None, option: str = "--out") -> None:
    """Create the folder of `path` if missing. Raises RuntimeError that names the option if no file can be written there.

    None is no file. Existing files are not changed, and no new file is left behind.
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
