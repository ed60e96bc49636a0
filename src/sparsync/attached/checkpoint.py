"""Checkpoints of residuals: a file per rank, entries of a torch.distributed.checkpoint, or one list of all ranks' states.

Any number of ranks can continue from any of them. Ranks have different states under the same parameter names, and
torch.distributed.checkpoint silently saves only one of these, so every rank's state has a different name here.

The rule for folders. A state's name gives model, step, rank and number of ranks: "sparsync-NAME.step100.rank0of4.pt". A checkpoint
is the states of all ranks at one step; it is complete if none is missing. `load` takes the complete checkpoint of the highest step, and
prefers the present number of ranks. `save` writes this rank's file, whole or not at all; each rank that then finds the checkpoint complete
removes all states of earlier steps, and states of the same step from another number of ranks. So there is always a complete checkpoint,
even if ranks or machines die while they save. A rank also removes its files of steps after the one that it loads or saves: they belong
to an attempt that ended. Nothing is sent between ranks; the next step raises if some have saved and others have not.
"""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from sparsync.runtime import state_file
from sparsync.runtime.handle import Handle
from sparsync.runtime.restorable import SavedState, check_fingerprint

_SUFFIX = ".pt"
_STEM = re.compile(
    r"(?P<slot>sparsync(-[\w-]+)?(\.[\w-]+)?)\.step(?P<step>\d+)\.rank(?P<rank>\d+)of(?P<ranks>\d+)", re.ASCII
)
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]*")


@dataclass(frozen=True)
class _Place:
    """The place of one rank's state, and its parsed name."""

    name: re.Match[str]  # of _STEM
    read: Callable[[], dict[str, Any]]
    where: str
    file: Path | None = None  # None: an entry of a torch.distributed.checkpoint


Found = dict[tuple[int, int], dict[int, _Place]]  # by step and number of ranks, and by rank


def save(handle: Handle, folder: str | Path, name: str = "") -> Path:
    """Write this rank's state into `folder`, whole or not at all, and return the file. Call it on every rank, between two steps.

    Older states are removed once the states of all ranks are there. If only some ranks call it, all of them raise in the next step.

    Args:
        handle: the handle from `attach`, or a GradientReducer.
        folder: a folder that all ranks see.
        name: of the model, if several models are saved in one folder: letters, digits, _ and -.

    Raises:
        ValueError: if the folder has a complete checkpoint of a later step, which this run has not loaded. Nothing is written.
        OSError: for example if the disk is full. Existing files stay.
    """
    folder = Path(folder)
    slot, (rank, ranks) = _slot(handle.part, name), handle.place
    handle.note_saved()  # even if writing fails
    state = handle.state_dict()
    step = state["step"] + 1
    found = _found(_files(folder), slot)
    if later := [each for each, places in found.items() if each[0] > step and len(places) == each[1]]:
        raise ValueError(
            f"{folder} has a complete checkpoint of step {max(later)[0]}, and this run is at step {step}; load it first, save into another "
            "folder, or remove its files"
        )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_stem(slot, step, rank, ranks)}{_SUFFIX}"
    state_file.save(state, file, folder / f"{slot}.rank{rank}of{ranks}.unfinished")
    _remove_replaced(_found(_files(folder), slot), step, rank, ranks)
    return file


def load(handle: Handle, folder: str | Path, name: str = "") -> int:
    """Continue from a checkpoint of `save`, or from a torch.distributed.checkpoint with `entries`.

    Call it on every rank, with the same folder, after all ranks have saved; a run that does both calls a barrier in between.
    With the same number of ranks, every rank gets its state back. With another number P, new rank r gets the residuals of old ranks r,
    r + P, r + 2P, ..., scaled so that the mean over ranks of every element stays; state for the old number of ranks, such as thresholds of
    partitions, starts again. Under FSDP2 with a replicate axis this holds for the ranks with the same shard; keep the number of shards.
    Nothing in a file is executed; `.metadata` of a torch.distributed.checkpoint is unpickled, as torch's own `load` does.

    Returns:
        The number of steps taken so far. Compare it with the step of the model's checkpoint.

    Raises:
        ValueError: if no checkpoint in the folder is complete, and for states that are damaged or of another model, scheme or format; the
            message names the file. Nothing changes.
    """
    folder = Path(folder)
    slot, (rank, ranks) = _slot(handle.part, name), handle.place
    found = _found([*_entries(folder), *_files(folder)], slot)
    complete = [each for each, places in found.items() if len(places) == each[1]]
    if not complete:
        missing = [
            f"step {step} has those of ranks {sorted(there)} of {ranks}" for (step, ranks), there in found.items()
        ]
        raise ValueError(
            f"{folder} has no state of {slot} for every rank ({'; '.join(missing) or 'none at all'}); save on every rank, into one folder, "
            "and load with the name= that you saved with"
        )
    step, old = max(complete, key=lambda each: (each[0], each[1] == ranks, each[1]))
    places = [found[step, old][each] for each in range(old)]
    needed = [rank] if old == ranks else range(old)
    _restore(handle, {places[each].where: places[each].read() for each in needed}, old)
    _remove_later(found, step, rank)
    return step


def holds_states(folder: str | Path) -> bool:
    """Tell whether `folder` has states of any handle, complete or not."""
    folder = Path(folder)
    return bool(_files(folder) or _entries(folder))


def entries(handle: Handle, name: str = "") -> dict[str, Tensor]:
    """Encode this rank's state for a torch.distributed.checkpoint: `dcp.save({"model": ..., **entries(handle)}, ...)`.

    Returns one tensor of bytes under this rank's name; `load(handle, folder)` finds it. `name` as in `save`.
    """
    state, (rank, ranks) = handle.state_dict(), handle.place
    return {_stem(_slot(handle.part, name), state["step"] + 1, rank, ranks): state_file.encoded(state)}


def gathered(handle: Handle, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]] | None:
    """Gather all ranks' states, in rank order, on the first rank of `group`, the handle's group; return None on the others.

    Call it on every rank. For checkpoints in one file, written by the first rank, which holds the residuals of all ranks in memory at once.
    """
    rank, ranks = handle.place
    states: list[Any] | None = [None] * ranks if rank == 0 else None  # Any: tensors, once received
    dist.gather_object(state_file.encoded(handle.state_dict()), states, group=group, group_dst=0)
    if states is None:
        return None
    return [state_file.decoded(each, f"the state of rank {source}") for source, each in enumerate(states)]


def restore(handle: Handle, states: Sequence[SavedState]) -> None:
    """Continue from the states that `gathered` returned on the first rank; call it on every rank, with all of them. See `load`."""
    if not states:
        raise ValueError("there are no states to continue from; pass the list from sparsync.checkpoint.gathered")
    (rank, ranks), count = handle.place, len(states)
    needed = [rank] if count == ranks else range(count)
    _restore(handle, {f"the state of rank {each}": states[each] for each in needed}, count)


def _restore(handle: Handle, states: Mapping[str, SavedState], count: int) -> None:
    """Load from the states of `count` ranks, by name in messages: all of them, or this rank's if the number of ranks is the same."""
    where = ""
    try:
        for where, state in states.items():  # noqa: B007  # the message names it
            check_fingerprint(state, handle.fingerprint())
        loaded = list(states.values())
        handle.load_state_dict(loaded[0] if count == handle.place[1] else handle.resized(loaded))
    except ValueError as error:
        raise ValueError(f"{where} cannot be loaded: {error}") from error


def _remove_replaced(found: Found, step: int, rank: int, ranks: int) -> None:
    """Remove the states that the checkpoint of this step and number of ranks replaces, if it is complete."""
    _remove_later(found, step, rank)
    if len(found.get((step, ranks), ())) < ranks:
        return
    for (other, size), places in found.items():
        if other < step or (other == step and size != ranks):
            _remove(places.values())


def _remove_later(found: Found, step: int, rank: int) -> None:
    """Remove this rank's files of later steps: an attempt that ended has left them."""
    _remove(places[rank] for (other, _), places in found.items() if other > step and rank in places)


def _remove(places: Iterable[_Place]) -> None:
    for place in places:
        if place.file is not None:
            place.file.unlink(missing_ok=True)  # another rank may have removed it


def _found(places: Sequence[_Place], slot: str) -> Found:
    found: Found = {}
    for place in places:
        step, rank, ranks = (int(place.name[part]) for part in ("step", "rank", "ranks"))
        if place.name["slot"] == slot and rank < ranks:
            found.setdefault((step, ranks), {})[rank] = place
    return found


def _files(folder: Path) -> list[_Place]:
    names = [(file, _STEM.fullmatch(file.name.removesuffix(_SUFFIX))) for file in folder.glob(f"sparsync*{_SUFFIX}")]
    return [_Place(name, partial(state_file.read, file), str(file), file) for file, name in names if name]


def _entries(folder: Path) -> list[_Place]:
    """List the states in a torch.distributed.checkpoint; none for another folder."""
    if not (folder / ".metadata").exists():
        return []
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    sizes = {name: entry.size for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    return [
        _Place(name, partial(_read_entry, name[0], sizes[name[0]], folder), f"entry {name[0]!r} of {folder}")
        for name in map(_STEM.fullmatch, sizes)
        if name
    ]


def _read_entry(stem: str, size: torch.Size, folder: Path) -> dict[str, Any]:
    content = {stem: torch.empty(size, dtype=torch.uint8)}
    with warnings.catch_warnings():
        # This warning is wrong: torch.distributed is not disabled, but every rank reads its entry alone.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_load(content, checkpoint_id=folder, no_dist=True)
    return state_file.decoded(content[stem], f"entry {stem!r} of {folder}")


def _slot(part: str, name: str) -> str:
    if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
        raise ValueError(
            f"name must consist of letters, digits, _ and -, because files are named after it, got {name!r}"
        )
    return f"sparsync{name and '-' + name}{part and '.' + part}"


def _stem(slot: str, step: int, rank: int, ranks: int) -> str:
    return f"{slot}.step{step}.rank{rank}of{ranks}"
