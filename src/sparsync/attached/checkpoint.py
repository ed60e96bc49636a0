"""Checkpoints of residuals: a file for each rank, entries of a torch.distributed.checkpoint, or one list of all ranks' states.

Any number of ranks can continue from any of them. State differs from rank to rank under the same parameter names, and of several tensors
with one name torch.distributed.checkpoint saves only one, in silence: so here every rank's state has a different name.

The rule for folders. A state's name says model, step, rank and number of ranks: "sparsync-NAME.step100.rank0of4.safetensors". The states of
all ranks of one world at one step are a checkpoint; it is complete when none of them is missing. `load` takes the complete one of the
highest step, of two at one step that of as many ranks as there are now. `save` writes this rank's file, whole or not at all; whoever finds
the new checkpoint complete then removes all states of earlier steps, and those of the same step of another number of ranks. So a complete
one is there at all times, also where ranks or machines die while they save. A rank's own files of steps after the one that it loads or
saves belong to an attempt that ended, and go: no two attempts come to lie in one checkpoint. Nothing is sent between ranks.
"""

import gc
import io
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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

# Whose states a rank of this process keeps in a folder, by folder, model and rank: of two models there, one would replace the other's.
_keepers: dict[tuple[Path, str, int, int], weakref.ref[Any]] = {}  # Any: a Scheme or its reduce-scatter form

State = Mapping[str, Any]  # Any: as Handle.state_dict


@dataclass(frozen=True)
class _Place:
    """Where a state is: rank of world, and how to read it."""

    rank: int
    read: Callable[[], dict[str, Any]]
    where: str
    file: Path | None = None  # None: an entry of a torch.distributed.checkpoint


Found = dict[tuple[int, int], dict[int, _Place]]  # by step and number of ranks, and by rank


def save(handle: Handle, folder: str | Path, name: str = "") -> Path:
    """Write this rank's state into `folder`, whole or not at all, and return the file. Call it on every rank, between two steps.

    Older states are removed once those of all ranks are there; see above. The folder must be one that all ranks see. `name`: of the model,
    of letters, digits, _ and -, where several models are saved in one folder.
    Raises ValueError, and writes nothing, where the folder has another model's states under this name, or a complete checkpoint of a later
    step, which this run has not loaded. Raises OSError, for example when the disk is full, and leaves what was there as it was.
    """
    folder = Path(folder)
    slot, (rank, ranks) = _slot(handle.part, name), handle.place
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
    """Continue from what `save` wrote, or from a torch.distributed.checkpoint with `entries`; return how many steps had been made then.

    Call it on every rank, with the same folder, when all ranks have saved: `torch.distributed.barrier()` where one run does both. Compare
    what it returns with the step of the model's own checkpoint.
    With the same number of ranks, every rank gets its own state. With another one, P, new rank r gets the sum of the residuals of old
    ranks r, r + P, r + 2P, ..., so that the sum over ranks of every element stays the same; state that fits only the old number of ranks,
    such as thresholds of partitions, starts again.
    Under FSDP2 with a replicate axis this holds for the ranks with the same shard; the number of shards must stay.
    Raises ValueError, and changes nothing, when no checkpoint in the folder is complete, and for states that are damaged, of another
    model, scheme or format; the message names the file. Nothing in a file is executed.
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
    folder = Path(folder)
    return any(_STEM.fullmatch(stem) for stem, _ in [*_files(folder), *_entries(folder)])


def entries(handle: Handle, name: str = "") -> dict[str, Tensor]:
    """Return what to add to the state dict that torch.distributed.checkpoint saves: `dcp.save({"model": ..., **entries(handle)}, ...)`.

    It is one tensor of bytes, under a name that is this rank's. `load(handle, folder)` finds it. `name` as in `save`.
    """
    state, (rank, ranks) = handle.state_dict(), handle.place
    return {_stem(_slot(handle.part, name), state["step"] + 1, rank, ranks): _encoded(state)}


def gathered(handle: Handle, group: dist.ProcessGroup | None = None) -> list[dict[str, Any]] | None:
    """Gather all ranks' states, in rank order, on the first rank of `group`, the handle's group; return None on the others.

    Call it on every rank. For checkpoints that are one file, which the first rank writes; its memory holds the residuals of all ranks
    at once. Ranks send bytes of the format of `save`; nothing that they send is executed.
    """
    rank, ranks = handle.place
    device = _device_of(group)
    mine = _encoded(handle.state_dict()).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([mine.numel()], device=device), group=group)
    longest = max(int(each) for each in lengths)
    padded = mine.new_zeros(longest)
    padded[: mine.numel()] = mine
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
    """Load from the states of all ranks; where there are as many as now, those of other ranks may be without tensors."""
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
            f"it was saved after other exchanges than {where}; save on every rank between the same exchanges"
        )


def _refused(where: str, error: Exception) -> Exception:
    """Return the error that says which state is refused."""
    if isinstance(error, ValueError):
        return error if str(error).startswith(where) else ValueError(f"{where} cannot be loaded: {error}")
    if isinstance(error, (AttributeError, LookupError, TypeError)):
        return ValueError(f"{where} cannot be loaded: {type(error).__name__}: {error}; restore it from a copy")
    return error


def _check_replaceable(handle: Handle, state: State, folder: Path, slot: str) -> None:
    """Raise ValueError where saving would replace what another model, or a run that came further, has saved."""
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
    """Return whether another scheme, which is still there, has its states in this place."""
    keeper = _keepers.get((folder.resolve(), slot, *handle.place))
    kept = keeper and keeper()
    return kept is not None and kept is not handle.scheme


def _remove_replaced(found: Found, step: int, rank: int, ranks: int) -> None:
    """Remove what the checkpoint of this step and number of ranks replaces, where it is complete."""
    _remove_later(found, step, rank)
    if len(found.get((step, ranks), ())) < ranks:
        return
    for (other, size), places in found.items():
        if other < step or (other == step and size != ranks):
            _remove(places.values())


def _remove_later(found: Found, step: int, rank: int) -> None:
    """Remove this rank's files of later steps: no rank can be ahead of itself, so an attempt that ended has left them."""
    for (other, _), places in found.items():
        if other > step and rank in places:
            _remove([places[rank]])


def _remove(places: Any) -> None:  # Any: an iterable of _Place
    for place in places:
        if place.file is not None:
            place.file.unlink(missing_ok=True)  # another rank may remove the same ones now


def _incomplete(folder: Path, found: Found, slot: str, name: str) -> str:
    """Return the message for a folder that has no complete checkpoint."""
    if not found:
        if old := sorted(folder.glob(_BEFORE_VERSIONS)):
            return f"{old[0]} was saved by a sparsync before format version 1; load it with the version that saved it"
        others = sorted({match["slot"] for stem, _ in _files(folder) if (match := _STEM.fullmatch(stem))})
        hint = f" It has those of {', '.join(others)}; pass the name= they were saved with." if others else ""
        return f"{folder} has no state of {slot}; save one there with sparsync.checkpoint.save on every rank.{hint}"
    step, ranks = max(found)
    missing = sorted(set(range(ranks)) - found[step, ranks].keys())
    return (
        f"{folder} lacks the states of ranks {missing} of {ranks} at step {step}; save on every rank, into one folder"
    )


def _found(sources: Sequence[tuple[str, _Place]], slot: str) -> Found:
    found: Found = {}
    for stem, place in sources:
        match = _STEM.fullmatch(stem)
        if match and match["slot"] == slot and place.rank < int(match["ranks"]):
            found.setdefault((int(match["step"]), int(match["ranks"])), {})[place.rank] = place
    return found


def _files(folder: Path) -> list[tuple[str, _Place]]:
    files = {file.name.removesuffix(_SUFFIX): file for file in folder.glob("sparsync*" + _SUFFIX)}
    return [
        (stem, _Place(int(match["rank"]), lambda file=file: state_file.read(file), str(file), file))
        for stem, file in files.items()
        if (match := _STEM.fullmatch(stem))
    ]


def _entries(folder: Path) -> list[tuple[str, _Place]]:
    def read(stem: str, where: str) -> dict[str, Any]:
        return _decoded(distributed_checkpoint.read_tensor(stem, folder), where)

    return [
        (stem, _Place(int(match["rank"]), lambda stem=stem, where=where: read(stem, where), where))
        for stem in distributed_checkpoint.tensor_names(folder)
        if (match := _STEM.fullmatch(stem)) and (where := f"entry {stem!r} of {folder}")
    ]


def _head(place: _Place) -> dict[str, Any]:
    """Return a state without its tensors, where that saves reading them."""
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
    """Return a device whose tensors the group sends: the CPU where it can."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
