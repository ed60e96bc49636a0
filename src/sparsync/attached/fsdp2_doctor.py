"""Preflight for FSDP2: what would break, or silently do something unexpected, and the fix."""

from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from sparsync.attached.fsdp2_units import (
    Unit,
    counts_unused,
    replicate_axis,
    takes_all_reduce_hook,
    takes_custom_communication,
    units_of,
)
from sparsync.attached.parameter_format import ParameterFormat
from sparsync.base.scheme import Scheme
from sparsync.runtime import findings
from sparsync.runtime.findings import Axis, Finding
from sparsync.runtime.parameter_names import named_parameters
from sparsync.wire import Values

HOOK_SINCE, CUSTOM_SINCE, UNUSED_SINCE = "2.8", "2.10", "2.13"  # versions of torch, each the lowest that was tried
_TWO_AXES = (
    'mesh = init_device_mesh(device, (nodes, gpus), mesh_dim_names=("replicate", "shard")); fully_shard(module, mesh=mesh) '
    "for each module; attach(model, scheme)"
)


def examine(
    model: nn.Module,
    scheme: Scheme,
    replicate: Axis | None,
    optimizer: Optimizer | None = None,
    parameters: Values | ParameterFormat | None = None,
) -> list[Finding]:
    """Return what `attach(model, scheme, replicate=replicate, optimizer=optimizer, parameters=parameters)` would refuse or warn of."""
    findings.check_scheme(scheme)
    units = units_of(model)
    found = list(_meshes(units))
    if found:
        return found
    names = [name for unit in units for name in unit.names]
    found += _ignored(model, names)
    replicas = replicate_axis(units, replicate)
    found += _shard_axis(units, scheme) if replicas is None else _replicate_axis(units, replicas)
    found += _gathered(units, parameters) if parameters is not None else []
    found += _unused(units, scheme, replicas is None)
    return [*found, *findings.patterns(names, scheme), *findings.optimizers(optimizer, scheme)]


def _meshes(units: list[Unit]) -> Iterator[Finding]:
    """Find what makes it unclear which ranks reduce together."""
    if not units:
        yield Finding("this model has no parameters that FSDP2 shards", "call fully_shard on it first", ValueError)
    elif any(len(unit.groups) > 1 for unit in units):
        name = next(unit.key for unit in units if len(unit.groups) > 1)
        yield Finding(
            f"module {name!r} has several groups of parameters with different meshes (shard_placement_fn), and FSDP2 takes no custom "
            "communication there",
            "give all parameters of a module one mesh",
            RuntimeError,
        )
    elif any(unit.shard_group is None for unit in units):
        yield Finding(
            "replicate() all-reduces gradients in full before any hook sees them",
            f"use fully_shard over a shard axis of 1 rank instead: {_TWO_AXES}, with gpus = 1",
            RuntimeError,
        )
    elif len({_ranks(unit.shard_group) for unit in units}) > 1:
        yield Finding(
            "modules of this model are sharded over different ranks, and a scheme reduces over one group of them",
            "attach to each part separately, or give all modules the same mesh",
            RuntimeError,
        )
    elif len({_ranks(unit.replicate_group) for unit in units}) > 1:
        yield Finding(
            "modules of this model have different replicate axes, or only some have one",
            "give fully_shard the same mesh for each module",
            RuntimeError,
        )
    elif any(unit.in_other_meshes for unit in units):
        yield Finding(
            "parameters were DTensors before they were sharded (tensor parallelism), which was never tried",
            "use a mesh of a shard and a replicate axis only",
            RuntimeError,
        )


def _ignored(model: nn.Module, names: list[str]) -> Iterator[Finding]:
    others = [name for name, each in named_parameters(model) if each.requires_grad and name not in names]
    if others and len(others) + len(names) > len(dict(model.named_parameters())):
        return  # a wrapper changed the names, so they cannot be compared
    if others:
        yield Finding(
            f"the gradients of {', '.join(others[:4])}{', ...' if len(others) > 4 else ''} are not reduced, because FSDP2 ignores them",
            "leave them out of ignored_params, or reduce them yourself",
        )


def _shard_axis(units: list[Unit], scheme: Scheme) -> Iterator[Finding]:
    group = units[0].shard_group
    assert group is not None
    if not takes_custom_communication():
        yield _lacks("a custom reduce-scatter", CUSTOM_SINCE)
        return
    try:
        scheme.reduce_scatter_form()
    except ValueError as error:
        what, _, cure = str(error).partition("; ")
        yield Finding(what, cure, ValueError)
    if group.size() == 1:
        yield Finding(
            "the shard axis has 1 rank, so FSDP2 reduces nothing over it",
            'name the axis to reduce over: attach(model, scheme, replicate=mesh["replicate"])',
            ValueError,
        )
    if not all(unit.has_default_reduce_scatter for unit in units):
        yield Finding(
            "a module already has a custom reduce-scatter: another scheme's, set_custom_reduce_scatter, "
            "set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm",
            "call detach() on the other handle, or leave those settings out",
            RuntimeError,
        )
    if any(unit.premultiplies for unit in units):
        yield _premultiplied()
    if group.size() > 1 and units[0].copies > 1 and not any(unit.all_reduce_hook for unit in units):
        yield Finding(
            f"the mesh that the shard axis was taken from has {units[0].copies} copies of each shard, and nothing reduces over them",
            'attach a scheme there too: attach(model, scheme, replicate=mesh["replicate"])',
        )
    yield from findings.backends(group, units[0].devices)


def _replicate_axis(units: list[Unit], group: dist.ProcessGroup) -> Iterator[Finding]:
    shards, own = units[0].shard_group, units[0].replicate_group
    assert shards is not None
    if not takes_all_reduce_hook():
        yield _lacks("an all-reduce hook", HOOK_SINCE)
        return
    if own is not None and _ranks(own) != _ranks(group):
        yield Finding(
            f"replicate= names ranks {list(_ranks(group))}, and the mesh that fully_shard was given has ranks {list(_ranks(own))} on its "
            "replicate axis",
            "leave replicate= out",
            ValueError,
        )
    if any(unit.has_partial_sum for unit in units):
        yield Finding(
            "FSDP2 holds gradients that it has not all-reduced yet, because of set_requires_all_reduce(False)",
            "attach between two steps",
            RuntimeError,
        )
    in_both = set(dist.get_process_group_ranks(shards)) & set(dist.get_process_group_ranks(group))
    if in_both != {dist.get_rank()}:
        yield Finding(
            f"ranks {sorted(in_both)} are on the shard axis and on the replicate axis, which may share only this rank, {dist.get_rank()}",
            'name the other axis of the mesh: attach(model, scheme, replicate=mesh["replicate"])',
            ValueError,
        )
    if any(unit.all_reduce_hook for unit in units):
        yield Finding(
            "a module already has an all-reduce hook, and FSDP2 takes only one",
            "call detach() on the other handle",
            RuntimeError,
        )
    gloo = any(findings.backend(shards, device) == "gloo" for device in units[0].devices)
    if gloo and shards.size() > 1 and any(unit.premultiplies for unit in units):
        yield _premultiplied()
    yield from findings.backends(group, units[0].devices)


def _gathered(units: list[Unit], parameters: Values | ParameterFormat) -> Iterator[Finding]:
    """Find what the rounded all-gather of parameters cannot do."""
    if not takes_custom_communication():
        yield _lacks("a custom all-gather", CUSTOM_SINCE)
        return
    if not isinstance(parameters, ParameterFormat) and parameters not in get_args(Values):
        yield Finding(
            f"parameters={parameters!r} is no format",
            f"leave it out for FSDP2's own all-gather, or give one of {', '.join(get_args(Values))}",
            ValueError,
        )
    group = units[0].shard_group
    assert group is not None
    if group.size() == 1:
        yield Finding("the shard axis has 1 rank, so FSDP2 gathers no parameters", "leave parameters= out", ValueError)
    for unit in units:
        if not unit.has_default_all_gather:
            yield Finding(
                f"module {unit.key!r} already has a custom all-gather: another handle's, set_custom_all_gather, "
                "set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm",
                "call detach() on the other handle, or leave those settings out",
                RuntimeError,
            )
        if unit.gathers_over_fewer:
            yield Finding(
                f"module {unit.key!r} gathers its parameters over fewer ranks in the backward pass",
                "give fully_shard reshard_after_forward=True or False",
                RuntimeError,
            )
        if len(unit.gathered_types) > 1 or "bytes" in unit.gathered_types:
            yield Finding(
                f"the parameters of module {unit.key!r} are gathered as bytes, because they have several types or a custom all-gather, and "
                "bytes cannot be rounded",
                "give a module's parameters one type, or leave parameters= out",
                RuntimeError,
            )
    yield from findings.backends(group, units[0].devices)


def _unused(units: list[Unit], scheme: Scheme, on_shards: bool) -> Iterator[Finding]:
    """Find what becomes of a parameter without gradient where this torch leaves it out."""
    if counts_unused() or (on_shards and not _needs_layout(scheme)):
        return
    yield Finding(
        f"FSDP2 of torch {torch.__version__} does not reduce a parameter without a gradient; the backward pass of such a "
        "step raises",
        f"use all parameters in each step, or install torch {UNUSED_SINCE} or later",
    )


def _needs_layout(scheme: Scheme) -> bool:
    with suppress(ValueError):  # it has no such form, which is another finding
        return scheme.reduce_scatter_form().needs_layout
    return False


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _lacks(what: str, since: str) -> Finding:
    return Finding(
        f"FSDP2 of torch {torch.__version__} does not take {what}",
        f"install torch {since} or later; the documentation's page 'Attach' lists what works with which torch",
        RuntimeError,
    )


def _premultiplied() -> Finding:
    return Finding(
        "set_gradient_divide_factor has FSDP2 ask for ReduceOp.PREMUL_SUM, which neither gloo nor sparsync has",
        "call set_force_sum_reduction_for_comms(True) on the same modules",
        RuntimeError,
    )
