"""Checkpoints of residuals: a file for each rank, entries of a torch.distributed.checkpoint, or one list of all ranks' states.

Any number of ranks can continue from any of them. State differs from rank to rank under the same parameter names, and of several tensors
with one name torch.distributed.checkpoint saves only one, in silence: so here every rank's state has a name of its own.
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
from sparsync.integrations import local_steps
from sparsync.integrations.handle import Handle

_SUFFIX = ".pt"
_ANY_STATE = re.compile(r"sparsync\.(.+\.)?rank\d+of\d+")


def save(handle: Handle, folder: str | Path) -> Path:
    """Write this rank's state into `folder`, whole or not at all, and return the file. Call it on every rank, between two steps."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = handle.state_dict()
    file = folder / (_name(handle.part, state["rank"], state["ranks"]) + _SUFFIX)
    unfinished = file.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(file)
    return file


def load(handle: Handle, folder: str | Path) -> None:
    """Continue from what `save` wrote, or from a torch.distributed.checkpoint with `entries`; call it on every rank, with the same folder.

    With the same number of ranks, every rank gets its own state. With another one, P, new rank r gets the sum of the residuals of old
    ranks r, r + P, r + 2P, ..., so that the sum over ranks of every element stays the same; state that fits only the old number of ranks,
    such as thresholds of partitions, starts again.
    Under FSDP2 with a replicate axis this holds for the ranks with the same shard; the number of shards must stay.
    Raises ValueError when the folder lacks the state of a rank, or has those of several numbers of ranks or of different steps.
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
    """Return whether `folder` has states of any handle, complete or not."""
    return any(map(_ANY_STATE.fullmatch, [*_files(Path(folder)), *_entry_names(Path(folder))]))


def entries(handle: Handle) -> dict[str, bytes]:
    """Return what to add to the state dict that torch.distributed.checkpoint saves: `dcp.save({"model": ..., **entries(handle)}, ...)`."""
    state = handle.state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return {_name(handle.part, state["rank"], state["ranks"]): buffer.getvalue()}


def gathered(handle: Handle, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]] | None:
    """Gather all ranks' states, in rank order, on the first rank of `group`, the handle's group; return None on the others.

    Call it on every rank. For checkpoints that are one file, which the first rank writes; its memory holds the residuals of all ranks
    at once.
    """
    (mine,) = entries(handle).values()
    rank, ranks = handle.place
    states: list[Any] | None = [None] * ranks if rank == 0 else None
    dist.gather_object(mine, states, group=group, group_dst=0)
    return states and [torch.load(io.BytesIO(each), weights_only=True, map_location="cpu") for each in states]


def restore(handle: Handle, states: Sequence[Mapping[str, Any]]) -> None:
    """Continue from what `gathered` returned on the first rank; call it on every rank, with all states. See `load`."""
    if not states:
        raise ValueError("there are no states to continue from; pass what sparsync.checkpoint.gathered returned")
    _restore(handle, states, "this checkpoint")


def resized(states: Sequence[Mapping[str, Any]], rank: int, ranks: int) -> dict[str, Any]:  # Any: as Handle.state_dict
    """Return the state of rank `rank` of `ranks`, made from those of all ranks of another number, in rank order; see `load`."""
    state = {**states[0], "rank": rank, "ranks": ranks}
    residuals = [each["scheme"].get("residual", {}) for each in states]
    if any(residuals):
        state["scheme"] = {**states[0]["scheme"], "residual": redistributed(residuals, ranks)[rank]}
    if "adamw_steps" in state:
        # Each rank continues from the second moments and buffers of one. The ratio depends on the number of ranks, and is measured anew.
        state["adamw_steps"] = {**states[rank % len(states)]["adamw_steps"], "ratio": {}}
    if "local_steps" in state:
        state["local_steps"] = local_steps.merged([each["local_steps"] for each in states], rank)
    return state


def _load(handle: Handle, names: Sequence[str], read: Callable[[str], Mapping[str, Any]], folder: Path) -> None:
    pattern = re.compile(_name(re.escape(handle.part), r"(\d+)", r"(\d+)"))
    found = {(int(match[1]), int(match[2])) for match in map(pattern.fullmatch, names) if match}
    worlds = {ranks for _, ranks in found}
    if len(worlds) != 1:
        raise ValueError(
            f"{folder} has the states of worlds of {sorted(worlds)} ranks; leave one of them there"
            if worlds
            else f"{folder} has no state of sparsync{handle.part and f' for {handle.part}'}; save one there with "
            "sparsync.checkpoint.save on every rank"
        )
    (ranks,) = worlds
    if missing := sorted(set(range(ranks)) - {rank for rank, _ in found}):
        raise ValueError(
            f"{folder} lacks the states of ranks {missing} of {ranks}; save on every rank, into one folder"
        )
    _restore(handle, [read(_name(handle.part, rank, ranks)) for rank in range(ranks)], str(folder))


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
