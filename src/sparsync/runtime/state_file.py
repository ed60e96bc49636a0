"""The format of a saved state: the zip file of `torch.save`, with a comment of the version and the SHA-256 of all bytes before it.

Torch's weights_only reader loads it, so a file cannot choose code to run.
"""

import ctypes
import hashlib
import io
import mmap
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from sparsync.core import add_note

VERSION = 4  # of the file format and its content

# The end of a zip file: the length of its comment, in two bytes, and the comment.
_END = re.compile(rb"\x4b\x00sparsync (\d) ([0-9a-f]{64})")
_LENGTH = 2 + 0x4B


def save(state: Mapping[str, Any], file: Path, unfinished: Path) -> None:  # Any: as Handle.state_dict
    """Write `state` to `file`, whole or not at all, by way of `unfinished` in the same folder.

    Raises OSError, for example when the disk is full, and TypeError for a state that holds anything but tensors, numbers, strings, None
    and lists, tuples and dicts of them.
    """
    content = _written(state)
    try:
        with unfinished.open("wb") as out:
            out.write(content.getbuffer())
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(file)
        _sync_folder(file.parent)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            add_note(error, f"{file} was not written; the older file is still whole. Make room, and save again")
        raise


def read(file: Path) -> dict[str, Any]:
    """Read the state in `file`; its tensors are mapped from the file until they are changed.

    Raises ValueError that names the file, what is wrong with it and the fix.
    """
    try:
        with (
            file.open("rb") as opened,
            mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content,
            memoryview(content) as view,
        ):
            _check(view)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise _unreadable(str(file), error) from error


def encoded(state: Mapping[str, Any]) -> Tensor:
    """Encode a state as `save` writes it, into a tensor of bytes. Raises TypeError as `save`."""
    return torch.frombuffer(_written(state).getbuffer(), dtype=torch.uint8)


def decoded(content: Tensor, where: str) -> dict[str, Any]:
    """Decode the state from the bytes of `encoded`. Raises ValueError that names `where`."""
    content = content.cpu().contiguous()
    try:
        raw = ctypes.string_at(content.data_ptr(), content.nbytes)
        _check(memoryview(raw))
        return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise _unreadable(where, error) from error


def _written(state: Mapping[str, Any]) -> io.BytesIO:
    out = io.BytesIO()
    torch.save(dict(state), out)
    out.seek(0)
    if unknown := get_unsafe_globals_in_checkpoint(out):
        raise TypeError(
            f"a state holds {unknown[0]}, which cannot be saved; a state_dict returns tensors, numbers, strings, None, and lists, tuples "
            "and dicts of these"
        )
    end = out.seek(-2, os.SEEK_END)  # torch writes no comment
    digest = hashlib.sha256(out.getbuffer()[:end]).hexdigest()
    out.write(b"\x4b\x00" + f"sparsync {VERSION} {digest}".encode())
    return out


def _check(content: memoryview) -> None:
    end = _END.fullmatch(bytes(content[-_LENGTH:]))
    if end is None:
        raise ValueError(f"it is not a state of format version {VERSION}, or was cut after it was saved")
    if int(end[1]) != VERSION:
        raise ValueError(f"it has format version {int(end[1])}, and this sparsync reads version {VERSION}")
    if hashlib.sha256(content[:-_LENGTH]).hexdigest().encode() != end[2]:
        raise ValueError("its checksum does not fit its content, so it was cut or changed after it was saved")


def _unreadable(where: str, error: Exception) -> ValueError:
    reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
    return ValueError(
        f"{where} cannot be loaded: {reason}; restore it from a copy, load another checkpoint, or remove the folder and "
        "start without"
    )


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, if the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
