"""Files with one JSON object per line, which stay readable if the writing program is stopped."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def read(path: Path, made: Callable[[Any], Made], what: str) -> list[Made]:  # Any: what JSON holds
    """Convert each line with `made`; a missing file has no lines. An incomplete last line is ignored.

    Raises ValueError for an unreadable file and, with the line number, for any other line that is no `what`.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}; choose another --out") from error
    found: list[Made] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(made(json.loads(line)))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            if number < len(lines):
                raise ValueError(
                    f"{path}, line {number} is no {what} ({error!r}); delete it, or choose another --out"
                ) from None
    return found


def append(path: Path, *contents: dict[str, Any]) -> None:  # Any: what JSON holds
    """Append each of `contents` as a line to the file at `path`, which is created if missing. An incomplete last line is removed first.

    Raises RuntimeError if writing fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
            file.write(b"".join(json.dumps(each).encode() + b"\n" for each in contents))
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error
