"""Whether a file can be written, found out before the work whose result it is to hold."""

from pathlib import Path


def check_file(path: Path) -> None:
    """Make the folder of `path` where it is missing. Raises RuntimeError where no file can be written there.

    A file that is there stays as it is, and a new one is not left behind.
    """
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
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another file with --out") from error
