"""Files with a JSON object a line, which a program that is stopped leaves readable."""

import json
from pathlib import Path
from typing import Any


def append(path: Path, content: dict[str, Any]) -> None:  # Any: what JSON holds
    """Append `content` as a line to the file at `path`, which is made where it is not there. A line that broke off is cut off first.

    Raises RuntimeError where it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            whole = file.read().rfind(b"\n") + 1
            file.truncate(whole)
            file.write(json.dumps(content).encode() + b"\n")
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror}; choose another folder with --out") from error
