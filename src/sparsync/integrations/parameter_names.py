"""The names of parameters: the same ones whether a model is compiled, checkpoints its activations, or neither.

Residuals, layouts and patterns go by name, so a state that a compiled model has saved fits the same model without torch.compile.
"""

import sys
from collections.abc import Iterator

from torch import nn

# What torch.compile and torch's checkpoint_wrapper call the module inside.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """Return the name of a module or parameter without the components that wrappers put into it; "" for the outermost module."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return the parameters of a module, each once, with their names."""
    return ((plain_name(name), parameter) for name, parameter in module.named_parameters())


def compiled_inside(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile has wrapped; `model` itself where it is none of those. Does not load torch._dynamo."""
    compiled = sys.modules.get("torch._dynamo.eval_frame")
    while compiled is not None and isinstance(model, compiled.OptimizedModule):
        model = model.get_submodule("_orig_mod")
    return model
