"""The format of a saved state: a safetensors file that holds a tree of tensors, numbers and strings, and a SHA-256 of every other byte.

Any reader of safetensors (https://github.com/huggingface/safetensors) shows the tensors. Reading runs nothing that a file could choose.
"""

import ctypes
import hashlib
import io
import json
import math
import mmap
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsync.base.regular_file import opened
from sparsync.core import add_note

VERSION = 1  # of the format of files and of what is in them

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NO_DIGEST = "0" * hashlib.sha256().digest_size * 2


def save(state: Mapping[str, Any], file: Path, unfinished: Path) -> None:  # Any: as Handle.state_dict
    """Write `state` to `file`, whole or not at all, by way of `unfinished` in the same folder.

    Raises OSError, for example when the disk is full, and TypeError for a state that holds anything but tensors, numbers, strings, None
    and lists, tuples and dicts of them.
    """
    try:
        unfinished.unlink(missing_ok=True)
        with unfinished.open("xb") as out:
            write(state, out)
            out.flush()
            os.fsync(out.fileno())
        unfinished.replace(file)
        _sync_folder(file.parent)
    except BaseException as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError):
            add_note(error, f"{file} was not written; what was there before is still whole. Make room, and save again")
        raise


def write(state: Mapping[str, Any], out: io.BufferedIOBase) -> None:
    """Write `state` to `out`. Raises as `save`."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_tree(state, "", tensors), separators=(",", ":"))
    # Largest items first, so that all are aligned.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    metadata = {"digest": _NO_DIGEST, "format": "sparsync", "version": str(VERSION), "state": tree}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        start, end = end, end + tensors[name].nbytes
        code = _CODES[tensors[name].dtype]
        header[name] = {"dtype": code, "shape": list(tensors[name].shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    length, parts = len(raw).to_bytes(8, "little"), [content_of(tensors[name]) for name in names]
    digest = hashlib.sha256(length + raw)
    for part in parts:
        digest.update(part)
    out.writelines([length, _with_digest(raw, _NO_DIGEST, digest.hexdigest()), *parts])


def read(file: Path, tensors: bool = True) -> dict[str, Any]:
    """Return the state in `file`; its tensors are mapped from the file until they are changed.

    Without `tensors` only the header is read: tensors are None, and the digest is not checked.
    Raises ValueError that names the file, what is wrong with it and the cure.
    """
    try:
        with opened(file) as content:
            if not os.fstat(content.fileno()).st_size:
                raise ValueError("it is empty")
            # A private copy of what is changed, so that tensors may be written to.
            return _parsed(mmap.mmap(content.fileno(), 0, access=mmap.ACCESS_COPY), tensors)
    except Exception as error:
        raise _unreadable(str(file), error) from error


def parsed(content: bytearray, where: str) -> dict[str, Any]:
    """Return the state that `write` wrote, with tensors that share the memory of `content`. Raises ValueError that names `where`."""
    try:
        return _parsed(content, True)
    except Exception as error:
        raise _unreadable(where, error) from error


def content_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous tensor, in its memory."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _unreadable(where: str, error: Exception) -> ValueError:
    reason = str(error) if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: {error}"
    return ValueError(
        f"{where} cannot be loaded: {reason}; restore it from a copy, load another checkpoint, or remove the folder and "
        "start without"
    )


def _parsed(content: Any, tensors: bool) -> dict[str, Any]:  # Any: what has a writable buffer
    size = len(content)
    start = 8 + int.from_bytes(content[:8], "little")
    if size < 8 or start > size:
        raise ValueError(f"it has {size} bytes, fewer than its header says")
    raw = bytes(content[8:start])
    try:
        header = json.loads(raw)
        metadata = header.pop("__metadata__")
        kind, version = metadata["format"], metadata["version"]
    except Exception as error:
        raise ValueError("its header is no header of a safetensors file that sparsync wrote") from error
    if kind != "sparsync":
        raise ValueError("it is a safetensors file of another program")
    if version != str(VERSION):
        raise ValueError(f"it has format version {version}, and this sparsync reads version {VERSION}")
    known = {}
    if tensors:
        _check_digest(content, raw, start, metadata.get("digest", ""))
        known = {name: _tensor(content, start, entry) for name, entry in header.items()}
    state = _state(json.loads(metadata["state"]), known if tensors else dict.fromkeys(header))
    if not isinstance(state, dict):
        raise ValueError("its header holds no state")
    return state


def _check_digest(content: Any, raw: bytes, start: int, known: str) -> None:
    if len(known) != len(_NO_DIGEST):
        raise ValueError("it has no checksum")
    digest = hashlib.sha256(content[:8] + _with_digest(raw, known, _NO_DIGEST))
    with memoryview(content) as view, view[start:] as tensors:
        digest.update(tensors)
    if digest.hexdigest() != known:
        raise ValueError("its checksum does not fit its content, so it was cut or changed after it was saved")


def _with_digest(raw: bytes, before: str, digest: str) -> bytes:
    """Return a header with another digest, which is its first entry."""
    return raw.replace(before.encode(), digest.encode(), 1)


def _tensor(content: Any, start: int, entry: Mapping[str, Any]) -> Tensor:
    dtype, shape, (begin, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    count = math.prod(shape)
    if not 0 <= begin <= end <= len(content) - start or end - begin != count * dtype.itemsize:
        raise ValueError("a tensor reaches beyond the end of the file")
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=dtype, count=count, offset=start + begin).view(shape)


def _tree(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return `value` for JSON, and put its tensors into `tensors`. A dict with a key that starts with $ stands for what JSON lacks."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.dtype in _CODES and not value.is_sparse:
        name = path
        while name in tensors or name == "__metadata__":
            name += "'"
        tensors[name] = value.detach().cpu().contiguous()
        return {"$tensor": name}
    if isinstance(value, (list, tuple)):
        items = [_tree(each, f"{path}/{i}", tensors) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        pairs = [(key, _tree(each, f"{path}/{key}" if path else str(key), tensors)) for key, each in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$items": [[_tree(key, path, tensors), each] for key, each in pairs]}
    kind = f"tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
    raise TypeError(
        f"a state holds a {kind} at {path!r}, which cannot be saved; a state_dict returns tensors, numbers, strings, None, and lists, "
        "tuples and dicts of these"
    )


def _state(tree: Any, tensors: Mapping[str, Tensor | None]) -> Any:
    """Return the state of a tree: the inverse of `_tree`."""
    if isinstance(tree, list):
        return [_state(each, tensors) for each in tree]
    if not isinstance(tree, dict):
        return tree
    if "$tensor" in tree:
        return tensors[tree["$tensor"]]
    if "$tuple" in tree:
        return tuple(_state(each, tensors) for each in tree["$tuple"])
    if "$items" in tree:
        return {_state(key, tensors): _state(each, tensors) for key, each in tree["$items"]}
    return {key: _state(each, tensors) for key, each in tree.items()}


def _sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
