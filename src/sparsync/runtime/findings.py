"""The findings of a preflight, and the checks that all integrations share."""

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import matches

Axis = DeviceMesh | dist.ProcessGroup


@dataclass(frozen=True)
class Finding:
    """A problem of a model or a scheme. `refused`: the error that `attach` raises; None: it warns."""

    what: str
    cure: str
    refused: type[Exception] | None = None

    def __str__(self) -> str:
        return f"{self.what}; {self.cure}"


def warn_of(finding: Finding | str) -> None:
    """Warn of a finding or a text."""
    warnings.warn(str(finding), stacklevel=2)


def warn_or_raise(found: Iterable[Finding]) -> None:
    """Warn of findings, and raise the error of the first one that is refused."""
    for finding in found:
        if finding.refused:
            raise finding.refused(str(finding))
        warn_of(finding)


def check_scheme(scheme: object) -> None:
    """Raise TypeError for anything but an instance of Scheme."""
    if isinstance(scheme, Scheme):
        return
    cure = "subclass sparsync.Scheme to write one"
    if isinstance(scheme, type) and issubclass(scheme, Scheme):
        settings = "density=0.01" if "density" in getattr(scheme, "__dataclass_fields__", {}) else "..."
        cure = f"give an instance: {scheme.__name__}({settings})"
    if isinstance(scheme, str):
        cure = f"pass sparsync.schemes.from_text({scheme!r})"
    raise TypeError(f"scheme must be an instance of sparsync.Scheme such as TopK(density=0.01), got {scheme!r}; {cure}")


def check_model(model: object) -> None:
    """Raise TypeError for anything but an nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {model!r}; pass the module that you train")


def check_models(models: object) -> None:
    """Raise TypeError for anything but an nn.Module or a sequence of one or more."""
    for each in models if isinstance(models, (list, tuple)) and models else [models]:
        check_model(each)


def check_optimizer(optimizer: object) -> None:
    """Raise TypeError for anything but an optimizer or a sequence of one or more."""
    for each in optimizer if isinstance(optimizer, (list, tuple)) and optimizer else [optimizer]:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got {each!r}; pass the one that trains the model, such as "
                "optimizer=torch.optim.AdamW(model.parameters())"
            )


def patterns(names: list[str], scheme: Scheme) -> Iterator[Finding]:
    """Find patterns in a scheme's settings that match no parameter."""
    for setting in ("protect", "patterns"):
        given = getattr(scheme, setting, ())
        for pattern in [given] if isinstance(given, str) else given:
            if not any(matches(name, [pattern]) for name in names):
                yield Finding(
                    f"{setting}={pattern!r} matches no parameter",
                    f"parameters are called {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                )


def steps_in_backward(model: nn.Module) -> bool:
    """Tell whether an optimizer steps during the model's backward pass."""
    return any(getattr(parameter, "_in_backward_optimizers", None) for parameter in model.parameters())


def is_fsdp2(model: nn.Module) -> bool:
    """Tell whether fully_shard was called on this model, without loading torch's FSDP, which takes half a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(model, fsdp.FSDPModule)


def reducing_wrappers() -> tuple[type, ...]:
    """List torch's wrapper classes that reduce gradients, without FSDP2's. Loads none of them."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp is not None else []))


def not_floating(named: Iterable[tuple[str, Tensor]]) -> Iterator[Finding]:
    """Find trained parameters of a type that cannot be exchanged, such as complex ones."""
    for name, each in named:
        if each.requires_grad and not each.is_floating_point():
            cure = "freeze it"
            if each.is_complex():
                cure = "make it a real one, nn.Parameter(torch.view_as_real(...)), and call torch.view_as_complex on it in forward"
            yield Finding(f"{name} is {each.dtype}, and only floating parameters are exchanged", cure, TypeError)


def sparse_embeddings(model: nn.Module) -> Iterator[Finding]:
    """Find embeddings whose gradients are sparse tensors."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            what = f"the embedding {name!r} has sparse=True, and only dense gradients are reduced"
            yield Finding(what, "make it with sparse=False", ValueError)


def unrelated(
    optimizer: Optimizer | Sequence[Optimizer] | None, trained: Collection[int], refused: type[Exception] | None = None
) -> Iterator[Finding]:
    """Find optimizers without any parameter of the ids `trained`, for example made before fully_shard has replaced the parameters.

    Under mixed precision they may have copies instead, which the loop writes back.
    """
    given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
    every = [inner for each in given for inner in with_inner(each)]
    held = {id(each) for inner in every for group in getattr(inner, "param_groups", ()) for each in group["params"]}
    if held and trained and held.isdisjoint(trained):
        kinds = " and ".join(type(each).__name__ for each in given)
        yield Finding(
            f"this {kinds} has none of the model's trained parameters, so they do not train, unless it has copies that are written back",
            "make the optimizer from this model's parameters, after fully_shard or whatever replaces them",
            refused,
        )


def innermost(optimizer: Optimizer) -> Optimizer:
    """Unwrap the optimizer in another one, such as Accelerate's or ZeroRedundancyOptimizer; return others unchanged."""
    while isinstance(wrapped := getattr(optimizer, "optimizer", getattr(optimizer, "optim", None)), Optimizer):
        optimizer = wrapped
    return optimizer


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """List `optimizer` and the optimizers in its attributes, as in SAM and Lookahead, recursively, without duplicates."""
    every = [optimizer]
    for each in every:  # grows meanwhile
        inner = [one for one in vars(each).values() if isinstance(one, Optimizer)]
        every += [one for one in inner if not any(one is other for other in every)]
    return every
