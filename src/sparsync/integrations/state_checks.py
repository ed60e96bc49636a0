"""The checks of a saved state before anything is loaded from it: format, scheme, model, and the residuals themselves."""

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsync.feedback import PER_RANK
from sparsync.integrations.state_file import VERSION

Layout = Mapping[str, list[int]]  # the shape of each parameter, by name
_NAMED = 3  # how many names an error gives
_DCP = "torch.distributed.checkpoint."


def check_version(state: Mapping[str, Any]) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless `state` is of the format of this version."""
    if not isinstance(state, Mapping):
        raise ValueError(f"a state of sparsync is a dict, got {type(state).__name__}; load what state_dict returned")
    if state.get("version") != VERSION:
        raise ValueError(
            f"this state has {'no format version' if 'version' not in state else 'format version ' + repr(state['version'])}, and this "
            f"sparsync reads version {VERSION}; load it with the sparsync that saved it"
        )


def check_model(state: Mapping[str, Any], scheme: str, layout: Layout) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless `state` is of this scheme and of a model with these parameters."""
    if difference := other_model(state, scheme, layout):
        raise ValueError(f"this is the state of another model or scheme: {difference}; load that of the same ones")


def other_model(state: Mapping[str, Any], scheme: str, layout: Layout) -> str:  # Any: as Handle.state_dict
    """Return the first difference between what `state` is of and this scheme and model; "" where there is none."""
    saved: Layout = state["layout"]
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


def check_numbers(state: Mapping[str, Any]) -> None:  # Any: as Handle.state_dict
    """Raise ValueError unless step, rates and loss scale are what they can be."""
    step, scale = state["step"], state["loss_scale"]
    if isinstance(step, bool) or not isinstance(step, int) or step < -1:
        raise ValueError(f"the last step of a state must be a whole number from -1 on, got {step!r}")
    rates = [*state["rates"].values(), *state["highest_rates"].values(), *([] if scale is None else [scale])]
    if wrong := [each for each in rates if not isinstance(each, (int, float)) or not 0 <= each < math.inf]:
        raise ValueError(f"learning rates and loss scales must be finite and not negative, got {wrong[0]!r}")


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
    for tensor in _tensors(scheme):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):  # a host sync on CUDA
            raise ValueError(
                "this state of a scheme holds NaN or Inf, which would stay in the residuals; load an older one"
            )
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


def _tensors(state: Any) -> list[Tensor]:  # Any: as Scheme.state_dict
    if isinstance(state, Tensor):
        return [state] if state.device != torch.device("meta") else []
    inner = state.values() if isinstance(state, Mapping) else state if isinstance(state, (list, tuple)) else ()
    return [tensor for each in inner for tensor in _tensors(each)]
