"""Which handle drives a scheme, and which one a model: one at a time.

A scheme, and each scheme inside it, serves one model, because its residuals belong to that model. What is known of a scheme or a parameter
is kept here, weakly, instead of in attributes; so a copy is free.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from sparsync.base.scheme import Scheme
from sparsync.feedback import PER_RANK


class Driver(Protocol):
    """What drives a scheme and a model until it is closed. `origin` is what the user called for it."""

    @property
    def closed(self) -> bool: ...

    @property
    def origin(self) -> str: ...


@dataclass
class Owned:
    """The handle that drives a scheme, and the model of its residuals, where known."""

    driver: weakref.ref[Any] | None = None  # Any: a Driver; a Protocol cannot be the argument at run time
    module: weakref.ref[nn.Module] | None = None


_owned: Any = WeakIdKeyDictionary()  # Any: a mapping, which torch has not typed; of Owned by scheme
# By trained parameter of a model: weak references to the handles that drive it, by axis of FSDP2.
_drivers: Any = WeakIdKeyDictionary()


def owned(scheme: Any) -> Owned:  # Any: a Scheme or its reduce-scatter form, here and below
    """Return what is known of `scheme`, to be changed in place."""
    return _owned.setdefault(scheme, Owned())


def check_undriven(parameters: Iterable[tuple[str, nn.Parameter]], axis: str = "") -> None:
    """Raise ValueError where a handle drives one of these parameters already. Handles of two axes of an FSDP2 model may."""
    named = list(parameters)
    if _driven(named, axis):
        gc.collect()  # a handle that is gone may wait in a cycle
    if found := _driven(named, axis):
        name, driver = found
        end = "call detach() or close() on its handle" if driver.origin == "sparsync.attach" else "call close() on it"
        raise ValueError(
            f"{driver.origin} trains {name!r} of this model already, and two would each reduce its gradients or move its weights; "
            f"{end} first"
        )


def drive(parameters: Iterable[tuple[str, nn.Parameter]], driver: Driver, axis: str = "") -> None:
    """Have `driver` drive these parameters until it is closed, or gone."""
    for _, parameter in parameters:
        _drivers[parameter] = {**_drivers.get(parameter, {}), axis: weakref.ref(driver)}


def _driven(parameters: Iterable[tuple[str, nn.Parameter]], axis: str) -> tuple[str, Any] | None:  # Any: as in Owned
    """Return the first of these parameters whose driver excludes another one on `axis`, and that driver."""
    for name, parameter in parameters:
        for other, reference in _drivers.get(parameter, {}).items():
            driver: Driver | None = reference()
            if driver is not None and not driver.closed and (not axis or not other or axis == other):
                return name, driver
    return None


def check_free(scheme: Any, module: nn.Module | None = None, driver: Any = None) -> None:
    """Raise ValueError if a handle other than `driver` drives `scheme` and is open, or if it holds residuals of a model but `module`.

    The same for each scheme inside it. None: `module` is not known.
    """
    for each in _with_inner(scheme):
        name, known = type(each).__name__, owned(each)
        this = f"this {name}" if each is scheme else f"the {name} inside this {type(scheme).__name__}"
        cure = f"make one for each model, {name}(...) with the same settings"
        if known.driver and known.driver() not in (None, driver):
            gc.collect()  # a handle that is gone may wait in a cycle
        drives: Driver | None = known.driver and known.driver()
        if drives is not None and drives is not driver and not drives.closed:
            raise ValueError(
                f"{this} is attached to a model already, and two models would mix their residuals in it; {cure}, or "
                "close the handle of the other one first"
            )
        other = module is not None and known.module is not None and known.module() is not module
        if other and holds(each.state_dict()):
            raise ValueError(
                f"{this} holds residuals of another model, which would be added to this one's gradients; {cure}"
            )


def take(scheme: Any, driver: Driver, module: nn.Module | None = None) -> None:
    """Have `driver` drive `scheme` and those inside it until it is closed, for `module` where that is known."""
    for each in _with_inner(scheme):
        owned(each).driver = weakref.ref(driver)
        if module is not None:
            owned(each).module = weakref.ref(module)


def release(scheme: Any) -> None:
    """Have nothing drive `scheme` and those inside it any more."""
    for each in _with_inner(scheme):
        owned(each).driver = None


def check_empty(scheme: Any) -> None:
    """Raise ValueError where `scheme` holds residuals."""
    if holds(scheme.state_dict()):
        raise ValueError(
            f"this {type(scheme).__name__} holds residuals of earlier steps, which would be sent again; give a new one"
        )


def module_of(scheme: Any) -> nn.Module | None:
    """Return the model of the residuals of `scheme`; None where that is not known, or the model is gone."""
    module = owned(scheme).module
    return module and module()


def _with_inner(scheme: Any) -> list[Any]:
    """Return `scheme` and all schemes inside it."""
    inner = scheme.inner_schemes if isinstance(scheme, Scheme) else []
    return [scheme, *(each for one in inner for each in _with_inner(one))]


def holds(state: Mapping[str, Any], keys: Sequence[str] = PER_RANK) -> bool:  # Any: as Scheme.state_dict
    """Return whether a state has residuals of these kinds: the same on all ranks that have made the same steps."""
    inner = state.get("schemes", {}).values()
    return any(state.get(key) for key in keys) or any(holds(each, keys) for each in inner)
