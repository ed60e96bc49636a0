"""Integrations: where a training loop passes its gradients to a scheme."""

from importlib import import_module


def __getattr__(name: str) -> object:
    if name == "checkpoint":  # loaded when first used, as the names of the package itself are
        return import_module("sparsync.integrations.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
