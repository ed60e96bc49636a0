"""Checkpoints of what schemes keep back: a file for each rank, entries of a torch.distributed.checkpoint, or all ranks' states in one list.

Any number of ranks may go on.

State differs from rank to rank under the same names, and torch.distributed.checkpoint keeps one of several tensors of a name without a
word: so here every rank's state has a name of its own.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from sparsync.feedback import redistributed
from sparsync.integrations.handle import Handle

_SUFFIX = ".pt"
_ANY = re.compile(r"sparsync\.(.+\.)?rank\d+of\d+")


def save(handle: Handle, folder: str | Path) -> Path:
    """The file in `folder` that now holds this rank's state, written whole or not at all. Call it on every rank, between two steps."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = handle.state_dict()
    file = folder / (_name(handle.part, state["rank"], state["ranks"]) + _SUFFIX)
    partly = file.with_suffix(".partly")
    torch.save(state, partly)
    partly.replace(file)
    return file


def load(handle: Handle, folder: str | Path) -> None:
    """Goes on from what `save` wrote, or from a torch.distributed.checkpoint with `entries`; call it on every rank, with the same folder.

    With the number of ranks of then, every rank gets its own state. With another one, new rank r gets the sum of the residuals of old
    ranks r, r + P, r + 2P, ..., so that the sum over ranks of every element stays the same; what cannot be carried over, such as
    thresholds of partitions, starts anew.
    Under FSDP2 with a replicate axis this holds for the ranks with the same shard, whose number must stay.
    Raises ValueError when the folder lacks the states of some rank, or holds those of several numbers of ranks or of
    different steps.
    """
    folder = Path(folder)
    files = _files(folder)
    if files:
        _load(
            handle,
            list(files),
            lambda name: torch.load(files[name], weights_only=True, map_location="cpu", mmap=True),
            folder,
        )
    else:
        _load(handle, _entry_names(folder), lambda name: _read_entry(name, folder), folder)


def holds_states(folder: str | Path) -> bool:
    """Whether `folder` holds states of any handle, complete or not."""
    return any(map(_ANY.fullmatch, [*_files(Path(folder)), *_entry_names(Path(folder))]))


def entries(handle: Handle) -> dict[str, bytes]:
    """What to add to the state dict that torch.distributed.checkpoint saves: `dcp.save({"model": ..., **entries(handle)}, ...)`."""
    state = handle.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_name(handle.part, state["rank"], state["ranks"]): buffer.getvalue()}


def gathered(handle: Handle, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]] | None:
    """All ranks' states, in rank order, on the first rank of `group`, that of the handle; None on the others. Call it on every rank.

    For checkpoints that are one file, which the first rank writes; they hold the residuals of all ranks at once, as does its memory.
    """
    (mine,) = entries(handle).values()
    rank, ranks = handle.place
    found: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(mine, found, group=group, group_dst=0)
    return found and [torch.load(io.BytesIO(each), weights_only=True, map_location="cpu") for each in found]


def restore(handle: Handle, states: Sequence[Mapping[str, Any]]) -> None:
    """Goes on from what `gathered` returned on the first rank; call it on every rank, of any number, with all states. See `load`."""
    if not states:
        raise ValueError(
            "there are no states to go on from; pass what sparsync.integrations.checkpoint.gathered returned"
        )
    _restore(handle, states, "this checkpoint")


def resized(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:  # Any: as Handle.state_dict
    """The state of rank `rank` of `ranks`, from those of all ranks of another world, in rank order; see `load`."""
    state = {**states[0], "rank": rank, "ranks": ranks}
    residuals = [each["scheme"].get("residual", {}) for each in states]
    if any(residuals):
        state["scheme"] = {**states[0]["scheme"], "residual": redistributed(residuals, ranks)[rank]}
    return state


def _load(handle: Handle, names: Sequence[str], read: Callable[[str], Mapping[str, Any]], folder: Path) -> None:
    pattern = re.compile(_name(re.escape(handle.part), r"(\d+)", r"(\d+)"))
    found = {(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match}
    worlds = {then for _, then in found}
    if len(worlds) != 1:
        raise ValueError(
            f"{folder} holds the states of worlds of {sorted(worlds)} ranks; leave one of them there"
            if worlds
            else f"{folder} holds no state of sparsync{handle.part and f' for {handle.part}'}; save one there with "
            "sparsync.integrations.checkpoint.save on every rank"
        )
    (then,) = worlds
    if missing := sorted(set(range(then)) - {rank for rank, _ in found}):
        raise ValueError(f"{folder} lacks the states of ranks {missing} of {then}; save on every rank, into one folder")
    _restore(handle, [read(_name(handle.part, old, then)) for old in range(then)], str(folder))


def _restore(handle: Handle, states: Sequence[Mapping[str, Any]], where: str) -> None:
    rank, ranks = handle.place
    steps = {state["step"] for state in states}
    if len(steps) > 1:
        raise ValueError(
            f"the states in {where} are of different steps, {sorted(steps)}; save on every rank between the same steps"
        )
    handle.load_state_dict(states[rank] if len(states) == ranks else resized(states, rank, ranks))


def _files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in folder.glob("sparsync.*" + _SUFFIX)}


def _name(part: str, rank: int | str, ranks: int | str) -> str:
    return f"sparsync.{part + '.' if part else ''}rank{rank}of{ranks}"


def _entry_names(folder: Path) -> list[str]:
    if not (folder / ".metadata").exists():
        return []
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _read_entry(name: str, folder: Path) -> Mapping[str, Any]:
    entry: dict[str, Any] = {name: b""}
    dcp_load(entry, storage_reader=FileSystemReader(folder), no_dist=True)
    return torch.load(io.BytesIO(entry[name]), weights_only=True, map_location="cpu")
