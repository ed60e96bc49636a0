"""The checks of a saved state before anything is loaded from it: format, integration, scheme, model, and each entry."""

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from sparsync.feedback import PER_RANK
from sparsync.runtime.state_file import VERSION

Layout = Mapping[str, list[int]]  # the shape of each parameter, by name
_NAMED = 3  # how many names an error gives
_DCP = "torch.distributed.checkpoint."
_MOST = 2**62  # of a count
# The form of what all handles save; None is what `check_form` looks at more closely.
_FORM = {
    "rank": 0,
    "ranks": 0,
    "part": "",
    "step": None,
    "scheme_name": "",
    "settings": "",
    "layout": {},
    "rates": {},
    "highest_rates": {},
    "loss_scale": None,
    "scheme": {},
}
_CLIPPING = {"mean": None, "steps": 0, "cuts": False}
# What residuals hold, by integration: those of one have other units than those of another.
_SAVED_BY = {"gradients": "attach or GradientReducer", "adamw_steps": "AdamWSteps", "local_steps": "LocalSteps"}


def check_version(state: Mapping[str, Any]) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless `state` is of the format of this version."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a state of sparsync is a dict, got {type(state).__name__}; load what state_dict returned")
    if state.get("version") != VERSION or isinstance(state["version"], bool):
        raise ValueError(
            f"this state has {'no format version' if 'version' not in state else 'format version ' + repr(state['version'])}, and this "
            f"sparsync reads version {VERSION}; load it with the sparsync that saved it"
        )


def check_form(state: Mapping[str, Any]) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless `state` has the entries that all handles save, each of its type."""
    check_alike("state", state, _FORM)
    check_alike("state['layout']", state["layout"], dict.fromkeys(state["layout"], (0,)))
    for key in ("rates", "highest_rates"):
        check_alike(f"state[{key!r}]", state[key], dict.fromkeys(state[key], 0.0))
    if state["loss_scale"] is not None:
        check_alike("state", state, {"loss_scale": 0.0})
    if state["step"] != -1:
        check_count("state['step']", state["step"])
    check_alike("state", {"integration": "", **state}, {"integration": ""})
    if "clipping" in state:  # states of earlier versions have none
        _check_clipping(state["clipping"])


def _check_clipping(saved: Any) -> None:  # Any: whatever a state holds
    check_alike("state['clipping']", saved, _CLIPPING)
    if saved["mean"] is not None:
        check_alike("state['clipping']", saved, {"mean": 0.0})
    if saved.keys() != _CLIPPING.keys():
        _refuse("state['clipping']", saved, f"a dict of {', '.join(_CLIPPING)}")


def check_model(
    state: Mapping[str, Any], integration: str, scheme: str, layout: Layout
) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless `state` is of this integration and scheme, and of a model with these parameters."""
    if difference := other_model(state, integration, scheme, layout):
        raise ValueError(f"this is the state of another model or scheme: {difference}; load that of the same ones")


def other_model(
    state: Mapping[str, Any], integration: str, scheme: str, layout: Layout
) -> str:  # Any: as Handle.state_dict
    """Return the first difference between what `state` is of and this integration, scheme and model; "" where there is none."""
    saved: Layout = state["layout"]
    # States that an older version saved have no name of their integration; but only these two have entries of their own.
    saved_by = state.get("integration") or next(
        (key for key in ("adamw_steps", "local_steps") if key in state), "gradients"
    )
    if saved_by != integration:
        named, here = (_SAVED_BY.get(each, repr(each)) for each in (saved_by, integration))
        return f"it was saved by {named}, whose residuals are in other units than those of {here}"
    if state["scheme_name"] != scheme:
        return f"its scheme is {state['scheme_name']!r}, and this one is {scheme!r}"
    if not saved or not layout:  # the layout is not known
        return ""
    for name in saved:
        if name not in layout:
            return f"it has a parameter {name!r}, which this model has not"
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
    """Raise ValueError that names the path of the first entry of `saved` that has not the form of `like`.

    A dict has at least the keys of `like`, a list as many items; an empty tuple is a list of any items, one of one item a list of such
    items. Tensors have the same shape, and are floating or not; they are finite, unless `finite` is False. Numbers are finite and not
    negative, and whole where `like` is. None is anything.
    """
    if isinstance(like, Tensor):
        if not isinstance(saved, Tensor) or (saved.shape, saved.is_floating_point()) != (
            like.shape,
            like.is_floating_point(),
        ):
            _refuse(
                path,
                saved,
                f"a tensor of {'' if like.is_floating_point() else 'no '}floating type and shape {tuple(like.shape)}",
            )
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


def check_residuals(
    scheme: Mapping[str, Any], layout: Layout, sizes: Mapping[str, int]
) -> None:  # Any: as Scheme.state_dict
    """Raise ValueError unless what a scheme holds back is of parameters in `layout`, of these `sizes`, floating and finite."""
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
    for path, tensor in _tensors("state['scheme']", scheme):
        if tensor.is_floating_point():
            _check_finite(path, tensor)
    for inner in scheme.get("schemes", {}).values():
        check_residuals(inner, layout, sizes)


def refuse_distributed_checkpoint() -> None:
    """Raise TypeError where torch.distributed.checkpoint asks a handle for its state.

    HACK: it takes whatever has `state_dict` and `load_state_dict` for its own (Stateful), saves under the same names on all ranks, and
    keeps one rank's tensor of each, in silence. Only the caller's frames tell. Price: this depends on the name of torch's module.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("sparsync."):
        frame = frame.f_back
    if frame is not None and frame.f_globals.get("__name__", "").startswith(_DCP):
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


def _tensors(path: str, state: Any) -> list[tuple[str, Tensor]]:  # Any: as Scheme.state_dict
    if isinstance(state, Tensor):
        return [(path, state)] if state.device != torch.device("meta") else []
    inner = (
        state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, (list, tuple)) else ()
    )
    return [tensor for key, each in inner for tensor in _tensors(f"{path}[{key!r}]", each)]
