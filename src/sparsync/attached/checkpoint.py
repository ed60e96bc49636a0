"""Checkpoints of residuals: a file for each rank, entries of a torch.distributed.checkpoint, or one list of all ranks' states.

Any number of ranks can continue from any of them. Ranks have different states under the same parameter names, of which
torch.distributed.checkpoint silently saves only one, so every rank's state has a different name here.

The rule for folders. A state's name gives model, step, rank and number of ranks: "sparsync-NAME.step100.rank0of4.safetensors". A checkpoint
is the states of all ranks at one step; it is complete if none is missing. `load` takes the complete one of the highest step; of two at one
step, the one with the present number of ranks. `save` writes this rank's file, whole or not at all; each rank that finds the new checkpoint
complete removes all states of earlier steps, and those of the same step from another number of ranks. So there is always a complete one,
even if ranks or machines die while they save. A rank also removes its own files of steps after the one that it loads or saves: they belong
to an attempt that ended. Nothing is sent between ranks; in the next step they find
out if some have saved and others have not.
"""

import gc
import io
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from sparsync.attached import distributed_checkpoint
from sparsync.runtime import state_file
from sparsync.runtime.handle import Handle
from sparsync.runtime.state_checks import check_version, other_model

_SUFFIX = ".safetensors"
_STEM = re.compile(
    r"(?P<slot>sparsync(-[\w-]+)?(\.[\w-]+)?)\.step(?P<step>\d+)\.rank(?P<rank>\d+)of(?P<ranks>\d+)", re.ASCII
)
_BEFORE_VERSIONS = "sparsync.*rank*of*.pt"
_MODEL_NAME = re.compile(r"[A-Za-z0-9_-]*")

# The scheme whose states lie in a folder, by folder, model and rank: another model of this process would replace them.
_keepers: dict[tuple[Path, str, int, int], weakref.ref[Any]] = {}  # Any: a Scheme or its reduce-scatter form

State = Mapping[str, Any]  # Any: as Handle.state_dict


@dataclass(frozen=True)
class _Place:
    """The place of one rank's state, and what its name says."""

    name: re.Match[str]  # of _STEM
    read: Callable[[], dict[str, Any]]
    where: str
    file: Path | None = None  # None: an entry of a torch.distributed.checkpoint


Found = dict[tuple[int, int], dict[int, _Place]]  # by step and number of ranks, and by rank


def save(handle: Handle, folder: str | Path, name: str = "") -> Path:
    """Write this rank's state into `folder`, whole or not at all, and return the file. Call it on every rank, between two steps.

    Older states are removed once those of all ranks are there. If only some ranks call it, all of them raise in the next step.

    Args:
        handle: what `attach` returned, or a GradientReducer.
        folder: a folder that all ranks see.
        name: of the model, if several models are saved in one folder: letters, digits, _ and -.

    Raises:
        ValueError: if the folder has another model's states under this name, or a complete checkpoint of a later step, which this run has
            not loaded. Nothing is written.
        OSError: for example if the disk is full. The files that were there stay.
    """
    folder = Path(folder)
    slot, (rank, ranks) = _slot(handle.part, name), handle.place
    handle.note_saved()  # also where writing fails
    state = handle.state_dict()
    step = state["step"] + 1
    _check_replaceable(handle, state, folder, slot)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_stem(slot, step, rank, ranks)}{_SUFFIX}"
    state_file.save(state, file, folder / f"{slot}.rank{rank}of{ranks}.unfinished")
    _keepers[folder.resolve(), slot, rank, ranks] = weakref.ref(handle.scheme)
    _remove_replaced(_found(_files(folder), slot), step, rank, ranks)
    return file


def load(handle: Handle, folder: str | Path, name: str = "") -> int:
    """Continue from what `save` wrote, or from a torch.distributed.checkpoint with `entries`.

    Call it on every rank, with the same folder, after all ranks have saved; a run that does both calls a barrier in between.
    With the same number of ranks, every rank gets its state back. With another number P, new rank r gets the residuals of old ranks r,
    r + P, r + 2P, ..., scaled so that the mean over ranks of every element stays; state for the old number of ranks, such as thresholds of
    partitions, starts again. Under FSDP2 with a replicate axis this holds for the ranks with the same shard; keep the number of shards.
    Nothing in a file is executed.

    Returns:
        The number of steps that had been made. Compare it with the step of the model's checkpoint.

    Raises:
        ValueError: if no checkpoint in the folder is complete, and for states that are damaged or of another model, scheme or format; the
            message names the file. Nothing changes.
    """
    folder = Path(folder)
    slot, (rank, ranks) = _slot(handle.part, name), handle.place
    found = _found([*_entries(folder), *_files(folder)], slot)
    complete = [each for each, places in found.items() if len(places) == each[1]]
    if not complete:
        raise ValueError(_incomplete(folder, found, slot, name))
    step, old = max(complete, key=lambda each: (each[0], each[1] == ranks, each[1]))
    places = [found[step, old][each] for each in range(old)]
    if old == ranks:
        states = [places[rank].read() if each == rank else _head(place) for each, place in enumerate(places)]
    else:
        states = [place.read() for place in places]
    _restore(handle, states, [place.where for place in places], step)
    _keepers[folder.resolve(), slot, rank, ranks] = weakref.ref(handle.scheme)
    _remove_later(found, step, rank)
    return step


def holds_states(folder: str | Path) -> bool:
    """Return whether `folder` has states of any handle, complete or not."""
    return bool(_files(Path(folder)) or _entries(Path(folder)))


def entries(handle: Handle, name: str = "") -> dict[str, Tensor]:
    """Return what to add to the state dict that torch.distributed.checkpoint saves: `dcp.save({"model": ..., **entries(handle)}, ...)`.

    It is one tensor of bytes under this rank's name, which `load(handle, folder)` finds. `name` as in `save`.
    """
    state, (rank, ranks) = handle.state_dict(), handle.place
    return {_stem(_slot(handle.part, name), state["step"] + 1, rank, ranks): _encoded(state)}


def gathered(handle: Handle, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]] | None:
    """Return all ranks' states, in rank order, on the first rank of `group`, the handle's group; None on the others.

    Call it on every rank. For checkpoints in one file, which the first rank writes; it holds the residuals of all ranks in memory at once.
    Ranks send bytes in the format of `save`; nothing that they send is executed.
    """
    rank, ranks = handle.place
    device = _device_of(group)
    mine = _encoded(handle.state_dict()).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=device), group=group)
    padded = pad(mine, (0, int(max(lengths)) - mine.numel()))
    received = [torch.empty_like(padded) for _ in range(ranks)] if rank == 0 else None
    dist.gather(padded, received, group=group, group_dst=0)
    if received is None:
        return None
    return [
        _decoded(content[: int(length)], f"the state of rank {sender}")
        for sender, (content, length) in enumerate(zip(received, lengths, strict=True))
    ]


def restore(handle: Handle, states: Sequence[State]) -> None:
    """Continue from what `gathered` returned on the first rank; call it on every rank, with all states. See `load`."""
    if not states:
        raise ValueError("there are no states to continue from; pass what sparsync.checkpoint.gathered returned")
    _restore(handle, states, [f"the state of rank {rank}" for rank in range(len(states))])


def _restore(handle: Handle, states: Sequence[State], where: Sequence[str], step: int | None = None) -> None:
    """Load from the states of all ranks. If there are as many as now, those of other ranks need no tensors."""
    rank, ranks = handle.place
    own = len(states) == ranks
    for number, (state, named) in enumerate(zip(states, where, strict=True)):
        try:
            check_version(state) if own else handle.check_state(state)
            if (state["rank"], state["ranks"], state["part"]) != (number, len(states), handle.part):
                raise ValueError(
                    f"it is of rank {state['rank']} of {state['ranks']}, and rank {number} of {len(states)} is needed here; "
                    "leave all files under the names that save gave them"
                )
            _check_agrees(handle.integration, states[0], state, where[0], step)
        except Exception as error:
            raise _refused(named, error) from error
    try:
        handle.load_state_dict(states[rank] if own else handle.resized(states))
    except Exception as error:
        raise _refused(where[rank] if own else f"{where[0]} and those of the other ranks", error) from error


def _check_agrees(integration: str, first: State, state: State, where: str, step: int | None) -> None:
    """Raise ValueError unless two ranks' states are of one checkpoint."""
    if step is not None and state["step"] + 1 != step:
        raise ValueError(
            f"it holds step {state['step'] + 1}, and its name says {step}; leave all files under their names"
        )
    if state["step"] != first["step"]:
        raise ValueError(
            f"it holds step {state['step'] + 1}, and {where} step {first['step'] + 1}; save on every rank between the same steps"
        )
    applied, others = (each.get(integration, {}).get("applied") for each in (first, state))
    if applied != others:
        raise ValueError(
            f"it was saved after another exchange than {where}; save on every rank after the same exchange"
        )


def _refused(where: str, error: Exception) -> Exception:
    """Return the error that names the refused state."""
    if isinstance(error, ValueError):
        return error if str(error).startswith(where) else ValueError(f"{where} cannot be loaded: {error}")
    if isinstance(error, (AttributeError, LookupError, TypeError)):
        return ValueError(f"{where} cannot be loaded: {type(error).__name__}: {error}; restore it from a copy")
    return error


def _check_replaceable(handle: Handle, state: State, folder: Path, slot: str) -> None:
    """Raise ValueError if saving would replace the states of another model, or of a run that came further."""
    found = _found(_files(folder), slot)
    if found and _is_kept(handle, folder, slot):
        gc.collect()  # a model that is gone may wait in a cycle
        if _is_kept(handle, folder, slot):
            raise ValueError(
                f"{folder} has the states of another model of this process; give each model a name: save(handle, folder, name=...), "
                "and load with the same one"
            )
    for each in sorted(found, reverse=True):
        place = next(iter(found[each].values()))
        try:
            head = _head(place)
            difference = other_model(head, handle.integration, state["scheme_name"], state["layout"])
        except Exception:  # a damaged file may be replaced
            continue
        if difference:
            raise ValueError(
                f"{place.where} is of another model or scheme: {difference}; pass name=..., with another name for each model, or save "
                "into another folder"
            )
    if later := [each for each, places in found.items() if each[0] > state["step"] + 1 and len(places) == each[1]]:
        raise ValueError(
            f"{folder} has a complete checkpoint of step {max(later)[0]}, and this run is at step {state['step'] + 1}; load it first, save "
            "into another folder, or remove its files"
        )


def _is_kept(handle: Handle, folder: Path, slot: str) -> bool:
    """Return whether another scheme, which still exists, keeps its states here."""
    keeper = _keepers.get((folder.resolve(), slot, *handle.place))
    kept = keeper and keeper()
    return kept is not None and kept is not handle.scheme


def _remove_replaced(found: Found, step: int, rank: int, ranks: int) -> None:
    """Remove what the checkpoint of this step and number of ranks replaces, if it is complete."""
    _remove_later(found, step, rank)
    if len(found.get((step, ranks), ())) < ranks:
        return
    for (other, size), places in found.items():
        if other < step or (other == step and size != ranks):
            _remove(places.values())


def _remove_later(found: Found, step: int, rank: int) -> None:
    """Remove this rank's files of later steps, which an attempt that ended has left."""
    _remove(places[rank] for (other, _), places in found.items() if other > step and rank in places)


def _remove(places: Iterable[_Place]) -> None:
    for place in places:
        if place.file is not None:
            place.file.unlink(missing_ok=True)  # another rank may remove the same ones now


def _incomplete(folder: Path, found: Found, slot: str, name: str) -> str:
    """Return the message for a folder without a complete checkpoint."""
    if not found:
        if old := sorted(folder.glob(_BEFORE_VERSIONS)):
            return f"{old[0]} was saved by a sparsync before format version 1; load it with the version that saved it"
        others = sorted({place.name["slot"] for place in _files(folder)})
        hint = f" It has those of {', '.join(others)}; pass the name= they were saved with." if others else ""
        return f"{folder} has no state of {slot}; save one there with sparsync.checkpoint.save on every rank.{hint}"
    step, ranks = max(found)
    missing = sorted(set(range(ranks)) - found[step, ranks].keys())
    return (
        f"{folder} lacks the states of ranks {missing} of {ranks} at step {step}; save on every rank, into one folder"
    )


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
    def place(name: re.Match[str]) -> _Place:
        stem, where = name[0], f"entry {name[0]!r} of {folder}"
        return _Place(name, lambda: _decoded(distributed_checkpoint.read_tensor(stem, folder), where), where)

    return [place(name) for name in map(_STEM.fullmatch, distributed_checkpoint.tensor_names(folder)) if name]


def _head(place: _Place) -> dict[str, Any]:
    """Return a state, without its tensors if they can be skipped."""
    return place.read() if place.file is None else state_file.read(place.file, tensors=False)


def _slot(part: str, name: str) -> str:
    if not isinstance(name, str) or not _MODEL_NAME.fullmatch(name):
        raise ValueError(
            f"name must consist of letters, digits, _ and -, because files are named after it, got {name!r}"
        )
    return f"sparsync{name and '-' + name}{part and '.' + part}"


def _stem(slot: str, step: int, rank: int, ranks: int) -> str:
    return f"{slot}.step{step}.rank{rank}of{ranks}"


def _encoded(state: State) -> Tensor:
    buffer = io.BytesIO()
    state_file.write(state, buffer)
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def _decoded(content: Tensor, where: str) -> dict[str, Any]:
    return state_file.parsed(bytearray(state_file.content_of(content.cpu().contiguous())), where)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group sends: the CPU if it can."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
