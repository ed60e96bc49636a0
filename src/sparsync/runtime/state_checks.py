"""The fingerprint of a saved state: compared once, before anything is loaded. What has the right one is trusted."""

from collections.abc import Mapping
from typing import Any

from sparsync.runtime.state_file import VERSION

SavedState = Mapping[str, Any]  # Any: as Handle.state_dict
# What attach exchanged, by integration; the residuals of each have other units.
_SAVED_WITH = {
    "gradients": "exchange=Gradients()",
    "adamw_steps": "exchange=Steps()",
    "local_steps": "exchange=LocalSteps()",
}


def check_fingerprint(state: SavedState, own: SavedState) -> None:
    """Raise ValueError unless `state` is of the format, integration, scheme and model of `own`, a `Handle.fingerprint`."""
    if state.get("version") != VERSION:
        raise ValueError(
            f"this state has format version {state.get('version')}, and this sparsync reads version {VERSION}; load it with the sparsync "
            "that saved it, or start without"
        )
    if difference := other_model(state, own):
        raise ValueError(
            f"this is the state of another model or scheme: {difference}; load the state of the same model and scheme"
        )


def other_model(state: SavedState, own: SavedState) -> str:
    """Return the first difference of the integration, scheme and model of `state` from those of `own`; "" where there is none."""
    if state["integration"] != own["integration"]:
        named, here = (_SAVED_WITH.get(each["integration"], repr(each["integration"])) for each in (state, own))
        return f"it was saved with {named}, whose residuals are in other units than those of {here}"
    if state["scheme_name"] != own.get("scheme_name", state["scheme_name"]):
        return f"its scheme is {state['scheme_name']!r}, and this one is {own['scheme_name']!r}"
    saved, layout = state["layout"], own["layout"]
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
