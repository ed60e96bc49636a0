"""Preflight: the refusals and warnings of `attach`, with the fixes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from sparsync.attached.ddp import DdpHandle, HookState, ignored, registered_hook
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Choice, Exchange, Optimizers, choose, optimizer_findings, recipe_findings
from sparsync.exchanges.steps_options import LocalSteps, Steps
from sparsync.exchanges.training_loop import check_bare
from sparsync.recipes import Bits
from sparsync.runtime import findings
from sparsync.runtime.findings import Finding
from sparsync.runtime.handle import Gradients
from sparsync.runtime.options import Options
from sparsync.runtime.parameters import inside_wrappers, named_parameters, trained


@dataclass(frozen=True)
class Examined:
    """The arguments of `attach` as it uses them, and the findings, refusals first."""

    models: list[nn.Module]
    called: list[nn.Module]  # as given: possibly wrapped by torch.compile or Fabric
    choice: Choice
    options: Options
    ranks: int  # number of ranks that exchange
    parameters: int  # trained, of all models
    findings: list[Finding]


def doctor(
    model: nn.Module | Sequence[nn.Module],
    scheme: Scheme | None = None,
    *,
    bits: Bits | None = None,
    optimizer: Optimizers | None = None,
    exchange: Exchange | None = None,
    group: dist.ProcessGroup | None = None,
    scaler: GradScaler | None = None,
    options: Options = Options(),
) -> list[Finding]:
    """List the refusals and warnings of `attach` with these arguments, refusals first; empty if all is well.

    It changes and sends nothing. Without a scheme it examines the recipe that `attach` would take. Pass the `optimizer` that trains the
    model: some schemes do harm under Adam, others need SGD without momentum.
    Raises TypeError for a model that is wrapped or sharded in another way, and for an argument of another type.
    """
    return examine(model, scheme, bits, optimizer, exchange, group, options).findings


def examine(
    model: nn.Module | Sequence[nn.Module],
    scheme: Scheme | None,
    bits: Bits | None,
    optimizer: Optimizers | None,
    exchange: Exchange | None,
    group: dist.ProcessGroup | None,
    options: Options,
) -> Examined:
    """Examine the arguments of `attach`; return its choices and the findings."""
    findings.check_models(model)
    called = [model] if isinstance(model, nn.Module) else list(model)
    models = [inside_wrappers(each) for each in called]
    ranks, sharded = _exchanging(models[0], group, options)
    trained = [each for model in models for each in model.parameters() if each.requires_grad and not is_lazy(each)]
    parameters = sum(each.numel() for each in trained)
    choice = choose(scheme, bits, exchange, optimizer, ranks, sharded, parameters)
    if choice.recipe is not None and options.parameters is None:
        options = replace(options, parameters=choice.recipe.parameters)
    found = [*_together(models, choice, group)]
    for each in models:
        found += _of_model(each, choice, optimizer, options)
    if isinstance(choice.exchange, Gradients):
        found += optimizer_findings(optimizer, choice.scheme)
        wrapped = isinstance(models[0], DistributedDataParallel) or findings.is_fsdp2(models[0])
        if exchange is None and not wrapped:
            kind = type(models[0]).__name__
            what = (
                f"{kind} is wrapped by neither DistributedDataParallel nor fully_shard, and gradients stay as they are"
            )
            cure = "wrap it; or call handle.reduce() before each step of the optimizer, and pass exchange=sparsync.Gradients()"
            found.append(Finding(what, cure))
    found += recipe_findings(choice, optimizer, exchange, parameters)
    found = sorted(dict.fromkeys(found), key=lambda finding: finding.refused is None)
    return Examined(models, called, choice, options, ranks, parameters, found)


def _together(models: Sequence[nn.Module], choice: Choice, group: dist.ProcessGroup | None) -> Iterator[Finding]:
    """Find arguments that contradict one another: several models, or a group and a wrapped model."""
    wrapped = [each for each in models if isinstance(each, DistributedDataParallel)]
    fsdp, several = any(map(findings.is_fsdp2, models)), len(models) > 1
    if several and fsdp:
        what = "of several models only those of DistributedDataParallel and bare ones are attached together"
        yield Finding(what, "make those of fully_shard parts of one module, and shard and attach that", ValueError)
    if several and isinstance(choice.exchange, Gradients):
        what = f"several models are attached together for steps and local steps, and here {type(choice.scheme).__name__} sends gradients"
        cure = (
            "attach each model by itself, with the same optimizer: attach(model, scheme, "
            "exchange=sparsync.Gradients(), optimizer=optimizer); or pass exchange=sparsync.Steps()"
        )
        yield Finding(what, cure, ValueError)
    if len(wrapped) not in (0, len(models)) or len({id(each.process_group) for each in wrapped}) > 1:
        what = "models that are attached together must have the same ranks"
        yield Finding(what, "wrap all of them with the same process_group=, or none", ValueError)
    if group is not None and (fsdp or wrapped):
        what = "group= is only for a bare model"
        yield Finding(
            what, "leave it out here, and give DistributedDataParallel process_group=, FSDP2 a mesh", ValueError
        )


def _of_model(model: nn.Module, choice: Choice, optimizer: Optimizers | None, options: Options) -> Iterator[Finding]:
    """Find problems of this model or its wrapper."""
    scheme, exchange, fsdp = choice.scheme, choice.exchange, findings.is_fsdp2(model)
    if fsdp and isinstance(exchange, LocalSteps):
        what = "local steps need the whole model on each rank, and FSDP2 shards it"
        cure = (
            "exchange steps over an axis of replicas, or gradients: exchange=sparsync.Steps() or sparsync.Gradients()"
        )
        yield Finding(what, cure, ValueError)
    elif fsdp:
        from sparsync.attached import fsdp2_units  # loads torch's FSDP

        yield from fsdp2_units.examine(model, scheme, options)
    elif isinstance(model, DistributedDataParallel):
        if (hook := _another_hook(model)) is not None:
            yield hook
        left_alone = ignored(model)
        yield from findings.not_floating(each for each in trained(model.module) if each[0] not in left_alone)
        yield from findings.patterns([name for name, _ in named_parameters(model.module)], scheme)
    else:
        check_bare(model)
        if isinstance(exchange, Gradients) and findings.steps_in_backward(model):
            what = "an optimizer steps during the backward pass, with gradients that are not reduced yet"
            yield Finding(what, "step it after they are reduced", RuntimeError)
        yield from findings.not_floating(named_parameters(model))
        yield from findings.patterns([name for name, _ in named_parameters(model)], scheme)
    if isinstance(exchange, Gradients):
        yield from findings.sparse_embeddings(model)
    steps = isinstance(exchange, Steps)
    if steps:
        yield from _renormed_embeddings(model)
    yield from findings.unrelated(optimizer, _trained(model), refused=ValueError if steps else None)


def _renormed_embeddings(model: nn.Module) -> Iterator[Finding]:
    """Find embeddings that change their weights in forward passes, on each rank by its own inputs."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            what = f"the embedding {name!r} has max_norm and changes its weights in forward passes, so that weights differ between ranks"
            yield Finding(what, "make it without max_norm, or pass exchange=sparsync.Gradients()", ValueError)


def _trained(model: nn.Module) -> set[int]:
    """Collect the ids of the parameters that an optimizer may have."""
    ids = {id(each) for _, each in trained(model)}
    if findings.is_fsdp2(model):  # the model may hold gathered parameters at present
        from sparsync.attached.fsdp2_units import units_of  # loads torch's FSDP

        ids |= {number for unit in units_of(model) for number in unit.ids}
    return ids


def _exchanging(model: nn.Module, group: dist.ProcessGroup | None, options: Options) -> tuple[int, bool]:
    """Count the ranks that exchange; return True too if each has only a shard of the model, as under FSDP2 without replicas."""
    sharded = False
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    elif findings.is_fsdp2(model):
        from sparsync.attached.fsdp2_units import replicate_axis, units_of  # loads torch's FSDP

        units = units_of(model)
        group = replicate_axis(units, options.replicate) if units else None
        sharded = group is None
    return dist.get_world_size(group) if dist.is_initialized() else 1, sharded


def _another_hook(model: DistributedDataParallel) -> Finding | None:
    """Find a hook that the model has already, because DDP takes only one."""
    hook = registered_hook(model)
    if hook is not None and not hook.free:
        what, cure = "this model is already attached to a scheme", "call handle.detach() first"
        if isinstance(hook.handle, DdpHandle):
            cure = f"give its handle another scheme, handle.scheme = ..., or {cure}"
    elif (
        any(not isinstance(state, HookState) for _, state in getattr(model, "_comm_hooks", ()))
        or getattr(model, "mixed_precision", None) is not None
        or findings.steps_in_backward(model.module)
    ):
        what = "this model already has a communication hook"
        cure = (
            "wrap the module again without one: without mixed_precision=, without an optimizer that steps in the backward pass, and "
            "without comm_hook= or ddp_comm_hook= of a trainer"
        )
    else:
        return None
    return Finding(f"{what}, and DDP takes only one communication hook", cure, RuntimeError)
