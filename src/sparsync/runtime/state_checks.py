"""The checks of a saved state before anything is loaded from it: format, integration, scheme, model, and each entry."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from sparsync.feedback import PER_RANK
from sparsync.runtime.state_file import VERSION

State = Mapping[str, Any]  # Any: as Handle.state_dict
Layout = Mapping[str, list[int]]  # the shape of each parameter, by name
_NAMED = 3  # how many names an error gives
_DCP = "torch.distributed.checkpoint."
_MOST = 2**62  # of a count
# The form of what all handles save, see `check_alike`; `check_form` checks more of each None.
_FORM = {"rank": 0, "ranks": 0, "part": "", "step": None, "scheme_name": "", "settings": "", "layout": {}, "scheme": {}}
_FORM |= {"rates": {}, "highest_rates": {}, "loss_scale": None}
_CLIPPING = {"mean": None, "steps": 0, "cuts": False}
# What attach exchanged, by integration; the residuals of each have other units.
_SAVED_WITH = {
    "gradients": "exchange=Gradients()",
    "adamw_steps": "exchange=Steps()",
    "local_steps": "exchange=LocalSteps()",
}


def check_version(state: State) -> None:
    """Raise ValueError unless `state` has this format version."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a state of sparsync is a dict, got {type(state).__name__}; load what state_dict returned")
    if state.get("version") != VERSION or isinstance(state["version"], bool):
        raise ValueError(
            f"this state has {'no format version' if 'version' not in state else 'format version ' + repr(state['version'])}, and this "
            f"sparsync reads version {VERSION}; load it with the sparsync that saved it"
        )


def check_form(state: State) -> None:
    """Raise ValueError unless `state` has the entries that all handles save, each of its type."""
    # States of earlier versions have none of these.
    state = {"integration": "", "recipe": "", "clipping": [], **state}
    check_alike("state", state, {**_FORM, "integration": "", "recipe": "", "clipping": (_CLIPPING,)})
    inner: dict[str, Any] = {"layout": dict.fromkeys(state["layout"], (0,))}
    inner |= {key: dict.fromkeys(state[key], 0.0) for key in ("rates", "highest_rates")}
    inner |= {"loss_scale": 0.0} if state["loss_scale"] is not None else {}
    inner |= {"clipping": [{"mean": None if each["mean"] is None else 0.0} for each in state["clipping"]]}
    check_alike("state", state, inner)
    if state["step"] != -1:
        check_count("state['step']", state["step"])
    for each in state["clipping"]:
        if each.keys() != _CLIPPING.keys():
            _refuse("state['clipping']", each, f"a list of dicts of {', '.join(_CLIPPING)}")


def check_model(state: State, integration: str, scheme: str, layout: Layout) -> None:
    """Raise ValueError unless `state` is of this integration and scheme, and of a model with these parameters."""
    if difference := other_model(state, integration, scheme, layout):
        raise ValueError(
            f"this is the state of another model or scheme: {difference}; load the state of the same model and scheme"
        )


def other_model(state: State, integration: str, scheme: str, layout: Layout) -> str:
    """Return the first difference of the integration, scheme and model of `state` from these; "" where there is none."""
    saved: Layout = state["layout"]
    # Older states do not name their integration, but these two have an entry of that name.
    known = (key for key in ("adamw_steps", "local_steps") if key in state)
    saved_by = state.get("integration") or next(known, "gradients")
    if saved_by != integration:
        named, here = (_SAVED_WITH.get(each, repr(each)) for each in (saved_by, integration))
        return f"it was saved with {named}, whose residuals are in other units than those of {here}"
    if state["scheme_name"] != scheme:
        return f"its scheme is {state['scheme_name']!r}, and this one is {scheme!r}"
    if not saved or not layout:  # the layout is not known
        return ""
    if more := [name for name in saved if name not in layout]:
        return f"it has a parameter {more[0]!r}, which this model has not"
    for name, shape in layout.items():
        if name not in saved:
            return f"it has no parameter {name!r}, which this model has"
        if list(saved[name]) != list(shape):
            return f"its parameter {name!r} has the shape {tuple(saved[name])}, and here {tuple(shape)}"
    return ""


def check_count(path: str, value: object, most: int = _MOST) -> None:
    """Raise ValueError unless `value` is a whole number from 0 to `most`."""
    if not _is_number(value) or not isinstance(value, int) or not 0 <= value <= most:
        _refuse(path, value, f"a whole number {'from 0 on' if most == _MOST else f'in [0, {most}]'}")


def check_known(path: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError unless each of `names` is in `known`, the parameters of the model."""
    if wrong := sorted(set(names) - set(known)):
        raise ValueError(f"{path} has {wrong[0]!r}, no parameter of this model; load the state of the same model")


def check_alike(path: str, saved: Any, like: Any, finite: bool = True) -> None:  # Any: a part of a state
    """Raise ValueError that names the path of the first entry of `saved` without the form of `like`.

    A dict has at least the keys of `like`. A list has as many items as `like`; for a tuple, any number of items, each like that of the
    tuple, if there is one. A tensor has the shape of `like`, is floating if that is, and finite unless `finite` is False. A number is
    finite, not negative, and whole if `like` is. None allows anything.
    """
    if isinstance(like, Tensor):
        floating, shape = like.is_floating_point(), like.shape
        if not isinstance(saved, Tensor) or saved.shape != shape or saved.is_floating_point() != floating:
            _refuse(path, saved, f"a tensor of {'' if floating else 'no '}floating type and shape {tuple(shape)}")
        if finite:
            _check_finite(path, saved)
    elif isinstance(like, Mapping):
        if not isinstance(saved, Mapping):
            _refuse(path, saved, "a dict")
        if missing := sorted(map(str, like.keys() - saved.keys())):
            raise ValueError(
                f"{path} lacks {', '.join(map(repr, missing[:_NAMED]))}; load what state_dict returned for this model"
            )
        for key, one in like.items():
            check_alike(f"{path}[{key!r}]", saved[key], one, finite)
    elif isinstance(like, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or (isinstance(like, list) and len(saved) != len(like)):
            _refuse(path, saved, f"a list of {len(like)} items" if isinstance(like, list) else "a list")
        for place, one in enumerate(saved if like else ()):
            check_alike(f"{path}[{place}]", one, like[place if isinstance(like, list) else 0], finite)
    elif isinstance(like, (bool, str)):
        if not isinstance(saved, type(like)):
            _refuse(path, saved, "True or False" if isinstance(like, bool) else "a text")
    elif isinstance(like, int):
        check_count(path, saved)
    elif like is not None and not (_is_number(saved) and 0 <= saved < math.inf):
        _refuse(path, saved, "a finite number that is not negative")


def _refuse(path: str, saved: object, wanted: str) -> NoReturn:
    found = (
        f"a tensor of {saved.dtype} and shape {tuple(saved.shape)}" if isinstance(saved, Tensor) else f"{saved!r:.100}"
    )
    raise ValueError(f"{path} must be {wanted}, got {found}; load what state_dict returned for this model")


def _check_finite(path: str, tensor: Tensor) -> None:
    if not bool(tensor.isfinite().all()):  # a host sync on CUDA
        raise ValueError(f"{path} holds NaN or Inf; load an older state")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_residuals(scheme: State, layout: Layout, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless a scheme's residuals are of parameters in `layout`, of these `sizes`, floating and finite."""
    if not isinstance(scheme, Mapping):
        raise ValueError(f"the state of a scheme is a dict, got {type(scheme).__name__}; load what state_dict returned")
    for key in PER_RANK:
        held = scheme.get(key, {})
        if not isinstance(held, Mapping):
            raise ValueError(f"the {key} in a state is a dict of tensors, got {type(held).__name__}")
        if layout and (unknown := [name for name in held if name not in layout]):
            more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
            raise ValueError(
                f"this state has a {key} of {', '.join(map(repr, unknown[:_NAMED]))}{more}, no parameter of this model; "
                "load the state of the same model"
            )
        for name, values in held.items():
            _check_vector(key, name, values, sizes)
    for path, tensor in tensors_in("state['scheme']", scheme):
        if tensor.is_floating_point():
            _check_finite(path, tensor)
    for inner in scheme.get("schemes", {}).values():
        check_residuals(inner, layout, sizes)


def refuse_distributed_checkpoint() -> None:
    """Raise TypeError where torch.distributed.checkpoint asks a handle for its state.

    HACK: it accepts anything with `state_dict` and `load_state_dict` (Stateful), and silently keeps one rank's tensor of each name. Only
    the caller's frames tell. Price: this depends on the name of torch's module.
    """
    frame, module = sys._getframe(1), ""
    while frame is not None and (module := frame.f_globals.get("__name__", "")).startswith("sparsync."):
        frame = frame.f_back
    if frame is not None and module.startswith(_DCP):
        raise TypeError(
            "torch.distributed.checkpoint would keep the state of one rank only, and lose all other residuals; save with "
            'dcp.save({"model": ..., **sparsync.checkpoint.entries(handle)}, checkpoint_id=folder), and load with '
            "sparsync.checkpoint.load(handle, folder)"
        )


def _check_vector(key: str, name: str, values: Any, sizes: Mapping[str, int]) -> None:  # Any: whatever a state holds
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.dim() != 1:
        what = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"the {key} of {name!r} must be a floating tensor with one dimension, this state has {what}")
    if values.numel() != sizes.get(name, values.numel()):
        raise ValueError(
            f"the {key} of {name!r} has {values.numel()} elements in this state, and the parameter {sizes[name]}; "
            "load the state of the same model"
        )


def tensors_in(path: str, state: Any) -> list[tuple[str, Tensor]]:  # Any: as Scheme.state_dict
    """Return the tensors of a state and where each is, as `path` and keys after it."""
    if isinstance(state, Tensor):
        return [(path, state)] if state.device != torch.device("meta") else []
    inner = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    )
    return [tensor for key, each in inner for tensor in tensors_in(f"{path}[{key!r}]", each)]
