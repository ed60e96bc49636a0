"""Reading single tensors of a torch.distributed.checkpoint folder without running what its files say.

torch's FileSystemReader unpickles `.metadata`, which may name any function to call. Here only the classes of metadata itself are made; in
the place of any other class or function stands an object that does nothing.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

_FILE = ".metadata"
_CLASSES = {
    (dcp_metadata.__name__, name)
    for name in (
        *(
            "ChunkStorageMetadata",
            "TensorProperties",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        ),
        *("StorageMeta", "Metadata", "MetadataIndex"),
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
}


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a torch.distributed.checkpoint; none where `folder` is none. Raises as `read_tensor`."""
    if not (folder / _FILE).is_file():
        return []
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]


def read_tensor(name: str, folder: Path) -> Tensor:
    """Return one tensor of one dimension and of bytes. Raises ValueError that names what cannot be read."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata.get(name)
    try:
        for index, stored in metadata.storage_data.items():
            if index.fqn == name and Path(stored.relative_path).name != stored.relative_path:
                raise ValueError(f"it lies in {stored.relative_path!r}, outside of the folder")
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError("it is no tensor")
        found: dict[str, Any] = {name: torch.empty(*entry.size, dtype=torch.uint8)}
        dcp_load(found, storage_reader=reader, no_dist=True)
        return found[name]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise ValueError(
            f"{folder} has no entry {name!r} that can be read ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


class _Reader(FileSystemReader):
    """A FileSystemReader that takes nothing but metadata from the file of that name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / _FILE
        try:
            with file.open("rb") as opened:
                metadata = _Unpickler(opened).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        except Exception as error:
            raise ValueError(
                f"{file} is no metadata of a torch.distributed.checkpoint ({type(error).__name__}: {error}); restore it from a copy"
            ) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:  # Any: a class, or torch's dtypes and layouts
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else _Nothing


class _Nothing:
    """What stands for anything else, whatever it is made of or given."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        return

    def ignore(self, *args: object) -> None:
        return

    __setstate__ = __setitem__ = append = extend = add = ignore
