"""Which handle drives a scheme: one at a time, and for one model, because the residuals that a scheme holds are of one model.

So for the schemes inside a scheme.
"""

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from sparsync.base.scheme import Scheme
from sparsync.feedback import PER_RANK

_LINK = "_sparsync_owner"  # the attribute of a scheme that is an _Owner


class Driver(Protocol):
    """What drives a scheme until it is closed."""

    @property
    def closed(self) -> bool: ...


class _Owner:
    """The handle that drives a scheme, and the model its residuals are of; both weak. A copy of a scheme has none."""

    def __init__(self) -> None:
        self.driver: weakref.ref[Any] | None = None  # Any: a Driver; a Protocol cannot be the argument at run time
        self.module: weakref.ref[nn.Module] | None = None

    def __reduce__(self) -> tuple[type["_Owner"], tuple[()]]:
        return _Owner, ()


def check_free(
    scheme: Any,  # Any: a Scheme or its reduce-scatter form
    module: nn.Module | None = None,
    driver: Any = None,  # Any: a Driver, see _Owner
) -> None:
    """Raise ValueError while a handle other than `driver` drives `scheme`, and where it holds residuals of another model than `module`.

    The same holds for each scheme inside it, as PerParameter has them. A handle that is closed or detached drives nothing. None: it is
    not known of which model they will be.
    """
    for each in _with_inner(scheme):
        owner = vars(each).get(_LINK)
        if owner is None:
            continue
        name, outer = type(each).__name__, type(scheme).__name__
        this = f"this {name}" if each is scheme else f"the {name} inside this {outer}"
        cure = f"make one for each model, {name}(...) with the same settings"
        drives: Driver | None = owner.driver and owner.driver()
        if drives is not None and drives is not driver and not drives.closed:
            raise ValueError(
                f"{this} is attached to a model already, and two models would mix their residuals in it; {cure}, or "
                "close the handle of the other one first"
            )
        before = owner.module and owner.module()
        if module is not None and owner.module is not None and before is not module and _holds(each.state_dict()):
            raise ValueError(
                f"{this} holds residuals of another model, which would be added to this one's gradients; {cure}"
            )


def take(scheme: Any, driver: Driver, module: nn.Module | None = None) -> None:  # Any: as `check_free`
    """Have `driver` drive `scheme` and those inside it from now on, for `module` where that is known."""
    for each in _with_inner(scheme):
        owner = vars(each).setdefault(_LINK, _Owner())
        owner.driver = weakref.ref(driver)
        if module is not None:
            owner.module = weakref.ref(module)


def release(scheme: Any) -> None:  # Any: as `check_free`
    """Have nothing drive `scheme` and those inside it any more."""
    for each in _with_inner(scheme):
        if (owner := vars(each).get(_LINK)) is not None:
            owner.driver = None


def check_empty(scheme: Any) -> None:  # Any: as `check_free`
    """Raise ValueError where `scheme` holds residuals."""
    if _holds(scheme.state_dict()):
        raise ValueError(
            f"this {type(scheme).__name__} holds residuals of earlier steps, which would be sent again; give a new one"
        )


def module_of(scheme: Any) -> nn.Module | None:  # Any: as `check_free`
    """Return the model that the residuals of `scheme` are of; None where that is not known, or the model is gone."""
    owner = vars(scheme).get(_LINK)
    return owner.module() if owner is not None and owner.module is not None else None


def _with_inner(scheme: Any) -> list[Any]:  # Any: as `check_free`
    """Return `scheme`, and all schemes inside it and inside those."""
    inner = scheme.inner_schemes if isinstance(scheme, Scheme) else []
    return [scheme, *(each for one in inner for each in _with_inner(one))]


def _holds(state: Mapping[str, Any]) -> bool:  # Any: as Scheme.state_dict
    """Return whether a state has residuals, of it or of schemes inside: the same on all ranks that have made the same steps."""
    return any(state.get(key) for key in PER_RANK) or any(map(_holds, state.get("schemes", {}).values()))
