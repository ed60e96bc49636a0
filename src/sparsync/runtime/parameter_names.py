"""The names of parameters, the same whether a model is compiled or checkpoints its activations, so that a state fits either way."""

import sys
import weakref
from collections.abc import Iterator

from torch import nn

# What torch.compile and torch's checkpoint_wrapper call the module inside.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the components of wrappers; "" for the outermost module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of a module, each once, with their names."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def trained(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of a module that require gradients, each once, with their names."""
    return [(name, parameter) for name, parameter in named_parameters(module) if parameter.requires_grad]


class Members:
    """The modules and parameters of a model, and which are trained, as they were at the last `note`. Refers to them weakly."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[weakref.ref[nn.Module]] = []
        self._noted: object = None

    def changed(self) -> bool:
        """Return whether any came, went, or was frozen or not. Makes no names, which is slow, so that each step can ask."""
        return self._noted is None or self._now() != self._noted

    def note(self) -> None:
        """Note the present ones."""
        if (model := self._model()) is not None:
            self._modules = [weakref.ref(each) for each in model.modules()]
            self._noted = self._now()

    def _now(self) -> object:
        modules = [found for each in self._modules if (found := each()) is not None]
        return (
            [
                parameter is not None and parameter.requires_grad and id(parameter)
                for module in modules
                for parameter in module._parameters.values()
            ],
            [id(each) for module in modules for each in module._modules.values()],
        )


def inside_wrappers(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile or Lightning's Fabric has wrapped, or `model` itself. Loads neither package."""
    compiled = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", ())
    # HACK: Fabric has no public name for the module that `fabric.setup` returns, nor for DDP's inside. Price: either may change with
    # Lightning; tests/test_adapter_lightning.py trains one.
    packages = (sys.modules.get(f"{package}.wrappers") for package in ("lightning.fabric", "lightning_fabric"))
    by_fabric = tuple(kind for each in packages if (kind := getattr(each, "_FabricModule", None)) is not None)
    while isinstance(model, (compiled, by_fabric)):
        model = model.get_submodule("_orig_mod" if isinstance(model, compiled) else "_forward_module")
    return model
