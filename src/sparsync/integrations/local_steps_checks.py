"""What LocalSteps and AdamWSteps check before anything is sent: the model, settings, and that all ranks have the same."""

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.core import Comm
from sparsync.integrations.findings import is_fsdp2
from sparsync.integrations.local_steps_agreement import Buffers
from sparsync.integrations.parameter_names import named_parameters

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
MEASURED = "measured"


def check_model(model: nn.Module) -> None:
    """Raise TypeError for a model that is wrapped or sharded, ValueError for one without trained parameters."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or is_fsdp2(module):
            kind = type(module).__name__
        elif fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
            kind = "FullyShardedDataParallel"
        else:
            continue
        raise TypeError(
            f"this model is wrapped by {kind}, which reduces gradients at every step; local steps are for ranks that each hold the whole "
            "model and train it by themselves: pass the bare module"
        )
    trained = {name: each for name, each in named_parameters(model) if each.requires_grad}
    if not trained:
        raise ValueError("the model has no parameter with requires_grad=True; there is nothing to exchange")
    for name, each in trained.items():
        if not each.is_floating_point():
            raise TypeError(f"{name} is {each.dtype}; local steps exchange floating parameters, freeze it")
        if hasattr(each, "to_local"):
            raise TypeError(f"{name} is a DTensor; local steps are for ranks that each hold the whole model")


def check_trained(model: nn.Module, trained: Iterable[nn.Parameter], what: str) -> None:
    """Raise RuntimeError where the model trains a parameter that is not among those that `what` was made with."""
    known = {id(each) for each in trained}
    if thawed := [name for name, each in named_parameters(model) if each.requires_grad and id(each) not in known]:
        raise RuntimeError(
            f"{', '.join(thawed)} had no gradient when {what} was made, or was not there, and is trained now; make a new {what}"
        )


def check_own_steps(scheme: Scheme) -> None:
    """Raise ValueError for a scheme that makes steps of its own of what it reduces, which are steps here already."""
    if scheme.has_momentum:
        raise ValueError(
            f"{scheme.name} adds a momentum of its own to what it reduces, and here the steps of an optimizer are exchanged; "
            "use a scheme without, such as TwoShot or SparseLoCo"
        )


def check_settings(
    every: int,
    keep: float,
    fragments: int,
    delay: int,
    mixing: float | None,
    buffers: str,
    clip_factor: float | str | None,
    bucket_mb: float,
) -> None:
    """Raise ValueError where a setting is out of range."""
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    if not 0 <= keep <= 1:
        raise ValueError(
            f"keep must be in [0, 1], the part of what is not sent that stays in a rank's weights, got {keep}"
        )
    if not 1 <= fragments <= every:
        raise ValueError(f"fragments must be in [1, every={every}], got {fragments}")
    if not 0 <= delay <= every:
        raise ValueError(f"delay must be in [0, every={every}] steps, got {delay}")
    if mixing is not None and not 0 <= mixing < 1:
        raise ValueError(f"mixing must be in [0, 1), the part of a rank's own weights, or None, got {mixing}")
    if buffers not in get_args(Buffers):
        raise ValueError(f"buffers must be one of {', '.join(get_args(Buffers))}, got {buffers!r}")
    if clip_factor is not None and clip_factor != MEASURED and (isinstance(clip_factor, str) or clip_factor <= 0):
        raise ValueError(f"clip_factor must be above 0, {MEASURED!r} or None, got {clip_factor!r}")
    if bucket_mb <= 0:
        raise ValueError(f"bucket_mb must be above 0 megabytes, got {bucket_mb}")


def fingerprint_of(what: str, model: nn.Module, scheme: Scheme, settings: Mapping[str, object]) -> str:
    """Return what must be the same on all ranks of `what`, as text; parameters and buffers as a digest."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    layout = [(name, each.dtype, tuple(each.shape), each.requires_grad) for name, each in tensors]
    digest = hashlib.blake2b(repr(layout).encode(), digest_size=8).hexdigest()
    given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    elements = sum(each.numel() for each in model.parameters())
    return f"{what}({given}) of {elements} parameters (layout {digest}) by {scheme.config_fingerprint()}"


def described(outer: MakeOptimizer | None) -> str:
    """Return an outer optimizer's class and settings as text."""
    if outer is None:
        return "None"
    made = outer([nn.Parameter(torch.zeros(1))])
    if not isinstance(made, Optimizer):
        raise TypeError(f"outer must make a torch optimizer of a list of parameters, it made a {type(made).__name__}")
    return f"{type(made).__name__}({made.defaults})"


def compare(fingerprint: str, comm: Comm, device: torch.device) -> None:
    """Raise RuntimeError, on all ranks, where a rank's fingerprint differs."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    for other, theirs in enumerate(comm.all_gather(mine, [len(digest)] * comm.size)):
        if not torch.equal(theirs, mine):
            raise RuntimeError(
                f"ranks must agree, but rank {other} has other settings or another model than rank {comm.rank}, which has {fingerprint}; "
                "give all ranks the same"
            )
