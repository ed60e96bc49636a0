"""The names of parameters, the same whether a model is compiled or checkpoints its activations, so that a state fits either way."""

import sys
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
