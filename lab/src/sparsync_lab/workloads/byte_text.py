"""Texts as bytes, split by file into a training and a held-out part, and kept in a memory-mapped file."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from sparsync_lab.workloads.store import written

LONGEST_HEADER = 10_000  # bytes
PARTS = ("training", "held_out")  # in this order in the file


@dataclass(frozen=True)
class ByteText:
    """A text as bytes; `described` has its source, SHA-256 and size."""

    training: UInt8[Tensor, " training"]
    held_out: UInt8[Tensor, " held_out"]
    described: Mapping[str, Any]  # Any: JSON

    vocabulary: ClassVar[int] = 256


def is_held_out(name: str, one_of: int) -> bool:
    """Tell whether a file is held out: a hash of its name chooses about one of `one_of` files."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % one_of == 0


def split(files: Mapping[str, bytes], source: str, one_of: int) -> ByteText:
    """Concatenate `files` in the order of their names, and hold out about one in `one_of`."""
    header, parts = _header_and_parts(files, source, one_of)
    whole = torch.frombuffer(bytearray().join(parts), dtype=torch.uint8) if any(parts) else torch.empty(0).byte()
    return _cut(whole, header)


def folder_files(folder: Path, suffixes: Collection[str]) -> dict[str, bytes]:
    """Read the files below `folder` with these suffixes, by their relative paths; links are left out."""
    found = sorted(file for file in folder.rglob("*") if file.suffix in suffixes and not file.is_symlink())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in found if file.is_file()}


def prepared(path: Path, found: Callable[[], tuple[Mapping[str, bytes], str]], one_of: int) -> ByteText:
    """Read the text in the file `path`; if that is missing or damaged, write it first from `found()`, its files and its source.

    The file may have been prepared on another machine. Processes may do this concurrently: see `store.written`. Passes on errors of
    `found`, and raises RuntimeError if the file cannot be written.
    """
    if path.is_file():
        with suppress(ValueError):
            return read(path)
    header, parts = _header_and_parts(*found(), one_of)
    written(path, [json.dumps(header).encode() + b"\n", *parts])
    return read(path)


def read(path: Path) -> ByteText:
    """Map a prepared text from its file. Raises ValueError if the file is no such text, or not whole."""
    with path.open("rb") as file:
        line = file.readline(LONGEST_HEADER)
    try:
        content = json.loads(line)
        header = {key: content[key] for key in ("source", "sha256", "files", "bytes")}
        size = len(line) + sum(header["bytes"][part] for part in PARTS)
    except (ValueError, TypeError, LookupError):
        raise ValueError(f"{path} was not prepared here: its first line does not describe a text") from None
    if path.stat().st_size != size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected {size}; delete the file")
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    return _cut(whole[len(line) :], header)


def _header_and_parts(files: Mapping[str, bytes], source: str, one_of: int) -> tuple[dict[str, Any], list[bytes]]:
    """Describe a text, and list the contents of its files: training files first, then held-out ones."""
    held_out = {name: is_held_out(name, one_of) for name in files}
    names = {part: [name for name in sorted(files) if held_out[name] == (part == "held_out")] for part in PARTS}
    parts = [files[name] for part in PARTS for name in names[part]]
    digest = hashlib.sha256()
    for each in parts:
        digest.update(each)
    sizes = {part: sum(len(files[name]) for name in names[part]) for part in PARTS}
    counts = {part: len(names[part]) for part in PARTS}
    return {"source": source, "sha256": digest.hexdigest(), "files": counts, "bytes": sizes}, parts


def _cut(whole: UInt8[Tensor, " n"], header: Mapping[str, Any]) -> ByteText:
    cut = header["bytes"]["training"]
    return ByteText(whole[:cut], whole[cut:], header)
