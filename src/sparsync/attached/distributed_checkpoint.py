"""Reading single tensors of a torch.distributed.checkpoint folder without executing anything in its files.

torch's FileSystemReader unpickles `.metadata`, which may call any function. Here a pickle makes only the classes of metadata and sets
attributes on their instances; an object that does nothing replaces every other class and function.
"""

import pickle
import warnings
from collections import OrderedDict
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem as dcp_filesystem
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from sparsync.base.regular_file import opened

_FILE = ".metadata"
# A pickle may set attributes on instances of these.
_RECORDS: tuple[Any, ...] = (
    *filter(is_dataclass, vars(dcp_metadata).values()),
    dcp_filesystem._StorageInfo,
    OrderedDict,
)
_ALLOWED = (*_RECORDS, dcp_metadata._MEM_FORMAT_ENCODING, torch.Size)
_CLASSES = {(each.__module__, each.__name__): each for each in _ALLOWED}


def tensor_names(folder: Path) -> list[str]:
    """Return the names of the tensors in a torch.distributed.checkpoint; none for another folder. Raises as `read_tensor`."""
    if not (folder / _FILE).exists():
        return []
    entries = _Reader(folder).read_metadata().state_dict_metadata
    return [name for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)]


def read_tensor(name: str, folder: Path) -> Tensor:
    """Return a one-dimensional tensor of bytes. Raises ValueError that names what cannot be read."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    entry = metadata.state_dict_metadata.get(name)
    try:
        for path in [stored.relative_path for index, stored in metadata.storage_data.items() if index.fqn == name]:
            if Path(path).name != path:
                raise ValueError(f"it lies in {path!r}, outside of the folder")
            opened(folder / path).close()
        if not isinstance(entry, TensorStorageMetadata):
            raise TypeError("it is no tensor")
        found: dict[str, Any] = {name: torch.empty(*entry.size, dtype=torch.uint8)}
        with warnings.catch_warnings():
            # That torch.distributed is disabled: it is not, and each rank reads its own entry by itself.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(found, storage_reader=reader, no_dist=True)
        return found[name]
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise ValueError(
            f"{folder} has no entry {name!r} that can be read ({type(error).__name__}: {error}); restore it from a copy"
        ) from error


class _Reader(FileSystemReader):
    """A FileSystemReader that takes only metadata from `.metadata`, and reads it once."""

    _known: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._known is not None:
            return self._known
        file = Path(self.path) / _FILE
        try:
            with opened(file) as content:
                metadata = _Unpickler(content).load()
            if not isinstance(metadata, Metadata) or not isinstance(metadata.state_dict_metadata, dict):
                raise TypeError(f"it holds a {type(metadata).__name__}")
        except Exception as error:
            raise ValueError(
                f"{file} is no metadata of a torch.distributed.checkpoint ({type(error).__name__}: {error}); restore it from a copy"
            ) from error
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._known = metadata
        return metadata


def _build(unpickler: Any) -> None:  # Any: typeshed knows nothing of its stack
    """Set the attributes of a pickle on an instance of a record, and on nothing else."""
    target = unpickler.stack[-2]
    if type(target) not in (*_RECORDS, _Nothing):
        raise pickle.UnpicklingError(f"it sets attributes on {target!r}")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


# HACK: the unpickler in Python, because that in C sets attributes on anything, classes and members of enumerations too. Price: a private
# class, and some seconds for a million entries.
class _Unpickler(pickle._Unpickler):
    dispatch: ClassVar = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}

    def find_class(self, module: str, name: str) -> Any:  # Any: a class, or torch's dtypes and layouts
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        found = vars(torch).get(name) if module == "torch" else None
        return found if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)) else _Nothing


class _Nothing:
    """Replaces anything else, and takes any arguments."""

    def __new__(cls, *args: object, **kwargs: object) -> "_Nothing":
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        return

    def ignore(self, *args: object) -> None:
        return

    __setstate__ = __setitem__ = append = extend = add = ignore
