"""Preflight for DistributedDataParallel: what would break, or quietly do something else than expected, and the cure."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sparsync.protocols import Scheme
from sparsync.selection.parameters import matches

_BACKENDS = {"cpu": ("gloo",), "cuda": ("nccl",)}  # what send, recv and all_reduce were tried or read on


@dataclass(frozen=True)
class Finding:
    """One thing wrong with a model or a scheme. `refused`: `attach` raises this; None: it warns."""

    what: str
    cure: str
    refused: type[Exception] | None = None

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


def doctor(ddp_model: DistributedDataParallel, scheme: Scheme) -> list[Finding]:
    """What `attach(ddp_model, scheme)` would refuse or warn of, worst first; empty when all is well. Changes nothing, sends nothing."""
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"doctor takes a DistributedDataParallel model, got {type(ddp_model).__name__}; wrap it first")
    found = [*_hooks(ddp_model), *_gradients(ddp_model), *_patterns(ddp_model, scheme)]
    return sorted(found, key=lambda finding: finding.refused is None)


def _hooks(model: DistributedDataParallel) -> Iterator[Finding]:
    if getattr(model, "mixed_precision", None) is not None:
        yield Finding(
            "DDP's mixed_precision has a communication hook of its own, and DDP takes one",
            "use torch.autocast, or a model in 16 bits, instead",
            RuntimeError,
        )
    elif any(getattr(parameter, "_in_backward_optimizers", None) for parameter in model.module.parameters()):
        yield Finding(
            "an optimizer that steps during the backward pass has a communication hook of its own, and DDP takes one",
            "step the optimizer after the backward pass",
            RuntimeError,
        )
    elif getattr(model, "_comm_hooks", None):
        yield Finding(
            "this model has a communication hook already, and DDP takes one", "wrap the module anew", RuntimeError
        )
    if getattr(model, "_use_python_reducer", False):
        yield Finding(
            "DDP was made with torch.compile's python reducer, which hands hooks something else than buckets",
            'set torch._dynamo.config.optimize_ddp = "ddp_optimizer" before wrapping the model',
            RuntimeError,
        )
    if getattr(model, "static_graph", False):
        yield Finding(
            "with static_graph=True, DDP does not support gradients that are accumulated under no_sync()",
            "leave static_graph out if you use no_sync()",
        )


def _gradients(model: DistributedDataParallel) -> Iterator[Finding]:
    for name, module in model.module.named_modules():
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            yield Finding(
                f"the embedding {name!r} has sparse=True, and its gradient is reduced in full, as a dense one",
                "make it with sparse=False for the scheme to reduce it",
            )
    devices = {parameter.device.type for parameter in model.module.parameters() if parameter.requires_grad}
    for device in sorted(devices):
        backend = _backend(model.process_group, device)
        if backend not in _BACKENDS.get(device, ()):
            yield Finding(
                f"gradients on {device} would be sent by {backend}, which lacks operations that schemes need, or was never tried",
                "make a group with gloo for CPU models and nccl for CUDA models",
                RuntimeError,
            )


def _backend(group: dist.ProcessGroup | None, device: str) -> str:
    """The name of what serves tensors on this device; a group may have a backend for each."""
    try:
        assert group is not None
        return group._get_backend(torch.device(device)).name()
    except RuntimeError:
        return "no backend"


def _patterns(model: DistributedDataParallel, scheme: Scheme) -> Iterator[Finding]:
    """Names that somebody gave and that no parameter has; a scheme's own default patterns need not match."""
    names = [name for name, _ in model.module.named_parameters()]
    for setting in ("protect", "dense", "patterns"):
        given = getattr(scheme, setting, ())
        if isinstance(given, str) or given == getattr(type(scheme), setting, ()):
            continue
        for pattern in given:
            if not any(matches(name, [pattern]) for name in names):
                yield Finding(
                    f"{setting}={pattern!r} matches no parameter",
                    f"parameters are called {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                )
