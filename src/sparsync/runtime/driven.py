"""Which handle drives a model: one at a time, because two would each reduce its gradients or move its weights."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class Driver(Protocol):
    """What drives a model until it is closed. `origin` is what the user called for it."""

    @property
    def closed(self) -> bool: ...

    @property
    def origin(self) -> str: ...


# Any: a mapping, which torch has not typed. By trained parameter: weak references to the handles that drive it, by axis of FSDP2. Not an
# attribute of the parameter, so that a copy is free.
_drivers: Any = WeakIdKeyDictionary()


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


def _driven(parameters: Iterable[tuple[str, nn.Parameter]], axis: str) -> tuple[str, Any] | None:  # Any: a Driver
    """Return the first of these parameters whose driver excludes another one on `axis`, and that driver."""
    for name, parameter in parameters:
        for other, reference in _drivers.get(parameter, {}).items():
            driver: Driver | None = reference()
            if driver is not None and not driver.closed and (not axis or not other or axis == other):
                return name, driver
    return None
