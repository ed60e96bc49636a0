"""The parameters of a model: their names without wrappers, and the one handle at a time that trains them."""

import gc
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

# The names of the inner module in torch.compile and torch's checkpoint_wrapper. Names leave these out, so that a state fits either way.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


# By trained parameter: weak references to the handles that drive it, by axis of FSDP2. Not an attribute of the parameter, so that copies
# are not driven. Any: torch does not type this mapping.
_drivers: Any = WeakIdKeyDictionary()


def plain_name(name: str) -> str:
    """Strip the components of wrappers from the name of a module or parameter; "" for the outermost module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """List the parameters of a module with their names, without duplicates."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the parameters of a module that require gradients, with their names, without duplicates."""
    return [(name, parameter) for name, parameter in named_parameters(module) if parameter.requires_grad]


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Unwrap a module of torch.compile or Lightning's Fabric; return others unchanged. Loads neither package."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    # HACK: Fabric has no public name for the module that `fabric.setup` returns, nor for DDP's inside. Price: either may change with
    # Lightning; tests/test_adapter_lightning.py trains one.
    packages = (sys.modules.get(f"{package}.wrappers") for package in ("lightning.fabric", "lightning_fabric"))
    by_fabric = tuple(kind for each in packages if (kind := getattr(each, "_FabricModule", None)) is not None)
    while isinstance(model, (compiled, by_fabric)):
        model = model.get_submodule("_orig_mod" if isinstance(model, compiled) else "_forward_module")
    return model


def check_undriven(parameters: Iterable[tuple[str, nn.Parameter]], axis: str = "") -> None:
    """Raise ValueError if a handle drives one of these parameters. Two axes of an FSDP2 model may have a handle each."""
    named = list(parameters)
    if _driven(named, axis):
        gc.collect()  # a dropped handle may wait in a reference cycle
    if driven := _driven(named, axis):
        name, driver = driven
        end = "call detach() or close() on its handle" if driver.origin == "sparsync.attach" else "call close() on it"
        raise ValueError(
            f"{driver.origin} trains {name!r} of this model already, and two would each reduce its gradients or move its weights; "
            f"{end} first"
        )


def _driven(named: Iterable[tuple[str, nn.Parameter]], axis: str) -> tuple[str, Any] | None:  # Any: a StepBoundary
    """Find the first parameter with a driver that excludes another one on `axis`, and that driver."""
    for name, parameter in named:
        for other, reference in _drivers.get(parameter, {}).items():
            driver = reference()
            if driver is not None and not driver.closed and (not axis or not other or axis == other):
                return name, driver
    return None


def drive(parameters: Iterable[tuple[str, nn.Parameter]], driver: Any, axis: str = "") -> None:
    """Register `driver`, a StepBoundary, for these parameters, until it is closed or gone."""
    for _, parameter in parameters:
        _drivers[parameter] = {**_drivers.get(parameter, {}), axis: weakref.ref(driver)}
