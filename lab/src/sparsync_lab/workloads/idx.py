"""Reader of the IDX format, in which the MNIST family of data sets comes: a big-endian header, then unsigned bytes.

Format: http://yann.lecun.com/exdb/mnist/ (bytes 0, 0, type, number of dimensions; each dimension in 32 bits; the data).
"""

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from sparsync_lab import regular_file

UNSIGNED_BYTE = 0x08


def read(path: Path) -> bytes:
    """Return the uncompressed content of a file, which is compressed where its name ends in .gz. Raises ValueError when it is damaged."""
    content = regular_file.content(path)
    return unpacked(content, str(path)) if path.suffix == ".gz" else content


def unpacked(content: bytes, name: str) -> bytes:
    """Return the bytes that gzip compressed to `content`. Raises ValueError, naming the file, where it is cut off or damaged."""
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{name} is not a whole gzip file: {error}") from None


def parse(content: bytes, name: str, dimensions: int) -> UInt8[Tensor, "..."]:
    """Return the array in an IDX file of unsigned bytes with that many dimensions. Raises ValueError, naming the file, otherwise."""
    header = 4 + 4 * dimensions
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if content[:4] != magic:
        raise ValueError(
            f"{name} must begin with the bytes {magic.hex(' ')} (IDX, unsigned bytes, {dimensions} dimensions), got "
            f"{content[:4].hex(' ') or 'an empty file'}"
        )
    if len(content) < header:
        raise ValueError(f"{name} ends within its header: {len(content)} bytes, the header alone has {header}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"{name} announces {' x '.join(map(str, shape))} = {math.prod(shape)} bytes of data, "
            f"{len(content) - header} follow; the file is cut off or damaged"
        )
    # A bytearray, because torch must not share memory that Python takes for constant.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[header:].reshape(shape)
