"""Preflight: what would break, or silently do something unexpected, and the fix. This file examines DistributedDataParallel."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from sparsync.attached.ddp import DdpHandle, HookState, ignored, registered_hook
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import Choice, Exchange, Optimizers, choose, optimizer_findings, recipe_findings
from sparsync.exchanges.local_options import LocalSteps
from sparsync.exchanges.steps_options import Steps
from sparsync.exchanges.training_loop import check_bare
from sparsync.recipes import Bits
from sparsync.runtime import findings
from sparsync.runtime.findings import Finding
from sparsync.runtime.handle import Gradients
from sparsync.runtime.options import Options
from sparsync.runtime.parameter_names import inside_wrappers, named_parameters, trained


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
    """Return what `attach` with these arguments would refuse or warn of, refusals first; empty when all is well.

    It changes and sends nothing. Without a scheme it examines the recipe that `attach` would take. Pass the `optimizer` that trains the
    model: some schemes do harm under Adam, others need SGD without momentum.
    Raises TypeError for a model that is wrapped or sharded otherwise, and for anything but a module, a Scheme, an optimizer or several.
    """
    findings.check_models(model)
    if not isinstance(model, nn.Module):
        each_alone = partial(
            doctor, scheme=scheme, bits=bits, optimizer=optimizer, exchange=exchange, group=group, options=options
        )
        found = dict.fromkeys(finding for each in model for finding in each_alone(each))
        return sorted(found, key=lambda finding: finding.refused is None)
    model = inside_wrappers(model)
    fsdp = findings.is_fsdp2(model)
    choice = choose(scheme, bits, exchange, optimizer, *exchanging(model, group, options))
    scheme, chosen = choice.scheme, choice.exchange
    options = with_recipe(options, choice)
    reduced_for = optimizer if isinstance(chosen, Gradients) else None
    if fsdp and isinstance(chosen, LocalSteps):
        what = "local steps need the whole model on each rank, and FSDP2 shards it"
        cure = (
            "exchange steps over an axis of replicas, or gradients: exchange=sparsync.Steps() or sparsync.Gradients()"
        )
        found = [Finding(what, cure, ValueError)]
    elif fsdp:
        from sparsync.attached import fsdp2_doctor  # loads torch's FSDP

        found = fsdp2_doctor.examine(model, scheme, options.replicate, reduced_for, options.parameters)
    elif isinstance(model, DistributedDataParallel):
        gradients = isinstance(chosen, Gradients)
        found = [*_ddp(model, scheme), *(_of_gradients(model, scheme, reduced_for) if gradients else ())]
    else:
        check_bare(model)
        found = [*findings.not_floating(named_parameters(model))]
        found += findings.patterns([name for name, _ in named_parameters(model)], scheme)
        found += optimizer_findings(reduced_for, scheme)
        if exchange is None and isinstance(chosen, Gradients):
            what = f"{type(model).__name__} is wrapped by neither DistributedDataParallel nor fully_shard, and gradients stay as they are"
            cure = "wrap it; or call handle.reduce() before each step of the optimizer, and pass exchange=sparsync.Gradients()"
            found.append(Finding(what, cure))
    found += recipe_findings(choice, optimizer, exchange)
    steps = isinstance(chosen, Steps)
    if steps:
        found += _of_steps(model)
    found += findings.unrelated(optimizer, _trained(model), refused=ValueError if steps else None)
    return sorted(found, key=lambda finding: finding.refused is None)


def _trained(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that an optimizer has."""
    own = {id(each) for _, each in trained(model)}
    if findings.is_fsdp2(model):  # which may have its gathered ones in the model at present
        from sparsync.attached.fsdp2_units import units_of  # loads torch's FSDP

        own |= {number for unit in units_of(model) for number in unit.ids}
    return own


def exchanging(model: nn.Module, group: dist.ProcessGroup | None, options: Options) -> tuple[int, bool]:
    """Return how many ranks exchange with this one, and whether each has a shard of the model only, as under FSDP2 without replicas."""
    sharded = False
    if isinstance(model, DistributedDataParallel):
        group = model.process_group
    elif findings.is_fsdp2(model):
        from sparsync.attached.fsdp2_units import replicate_axis, units_of  # loads torch's FSDP

        units = units_of(model)
        group = replicate_axis(units, options.replicate) if units else None
        sharded = group is None
    return dist.get_world_size(group) if dist.is_initialized() else 1, sharded


def with_recipe(options: Options, choice: Choice) -> Options:
    """Return the options with those of a recipe where they say nothing."""
    if choice.recipe is None or options.parameters is not None:
        return options
    return replace(options, parameters=choice.recipe.parameters)


def _ddp(model: DistributedDataParallel, scheme: Scheme) -> Iterator[Finding]:
    if (hook := _hook(model)) is not None:
        yield hook
    if getattr(model, "_use_python_reducer", False):
        what = "DDP was made with torch.compile's python reducer, which does not pass buckets to hooks"
        cure = 'set torch._dynamo.config.optimize_ddp = "ddp_optimizer" before wrapping the model'
        yield Finding(what, cure, RuntimeError)
    if getattr(model, "skip_all_reduce_unused_params", False):
        what = "with skip_all_reduce_unused_params=True, DDP leaves out buckets without telling the hook"
        yield Finding(what, "make the model without it; find_unused_parameters=True works", RuntimeError)
    if getattr(model, "static_graph", False):
        what = "with static_graph=True, DDP does not support gradients that are accumulated under no_sync()"
        yield Finding(what, "leave static_graph out if you use no_sync()")
    left_alone = ignored(model.module)
    yield from findings.not_floating((name, each) for name, each in trained(model.module) if name not in left_alone)
    devices = {parameter.device.type for parameter in model.module.parameters() if parameter.requires_grad}
    yield from findings.backends(model.process_group, devices)
    yield from findings.patterns([name for name, _ in named_parameters(model.module)], scheme)


def _of_gradients(model: DistributedDataParallel, scheme: Scheme, optimizer: Optimizers | None) -> Iterator[Finding]:
    """Find what does not suit the exchange of gradients."""
    for name, _ in findings.sparse_embeddings(model.module):
        what = f"the embedding {name!r} has sparse=True, and its gradient is reduced in full, as a dense one"
        yield Finding(what, "make it with sparse=False for the scheme to reduce it")
    yield from optimizer_findings(optimizer, scheme)


def _of_steps(model: nn.Module) -> Iterator[Finding]:
    """Find what does not suit the exchange of steps."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            what = f"the embedding {name!r} has max_norm and changes its weights in forward passes, which would part ranks with own weights"
            yield Finding(what, "make it without max_norm, or pass exchange=sparsync.Gradients()", ValueError)


def _hook(model: DistributedDataParallel) -> Finding | None:
    """Find the hook that the model has already; DDP takes one."""
    hook = registered_hook(model)
    if getattr(model, "mixed_precision", None) is not None:
        what = "DDP's mixed_precision installs a communication hook, and DDP takes only one"
        cure = "use torch.autocast, or a model in 16 bits, instead"
    elif findings.steps_in_backward(model.module):
        what = "an optimizer that steps during the backward pass installs a communication hook, and DDP takes only one"
        cure = "step the optimizer after the backward pass"
    elif hook is not None and not hook.free:
        what = "this model is already attached to a scheme, and DDP takes only one communication hook"
        cure = "call handle.detach() before"
        if isinstance(hook.handle, DdpHandle):
            cure = f"give its handle another scheme, handle.scheme = ..., or {cure}"
    elif any(not isinstance(state, HookState) or not state.free for _, state in getattr(model, "_comm_hooks", ())):
        what = "this model already has a communication hook, and DDP takes only one"
        cure = (
            "wrap the module again, and register none; under Accelerate leave comm_hook= out of DistributedDataParallelKwargs, under "
            "Lightning ddp_comm_hook= out of DDPStrategy"
        )
    else:
        return None
    return Finding(what, cure, RuntimeError)
