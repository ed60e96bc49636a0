"""Preflight for FSDP2: what would break, or silently do something unexpected, and the fix."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from sparsync.attached.fsdp2_units import Unit, counts_unused, replicate_axis, units_of
from sparsync.base.scheme import Scheme
from sparsync.exchanges.choice import optimizer_findings
from sparsync.runtime import findings
from sparsync.runtime.findings import Axis, Finding
from sparsync.runtime.parameter_format import ParameterFormat
from sparsync.runtime.parameter_names import named_parameters
from sparsync.wire import Values

HOOK_SINCE, CUSTOM_SINCE, UNUSED_SINCE = "2.8", "2.10", "2.13"  # versions of torch, each the lowest that was tried
_PREMULTIPLIED = Finding(
    "set_gradient_divide_factor has FSDP2 ask for ReduceOp.PREMUL_SUM, which neither gloo nor sparsync has",
    "call set_force_sum_reduction_for_comms(True) on the same modules",
    RuntimeError,
)
_SETTINGS = (
    "set_allocate_memory_from_process_group_for_comm or set_symm_mem_for_comm",
    "call detach() on the other handle, or leave those settings out",
)


def examine(
    model: nn.Module,
    scheme: Scheme,
    replicate: Axis | None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    parameters: Values | ParameterFormat | None = None,
) -> list[Finding]:
    """Return what `attach` would refuse or warn of."""
    units = units_of(model)
    unclear = _meshes(units)
    if unclear is not None:
        return [unclear]
    names = [name for unit in units for name in unit.names]
    replicas = replicate_axis(units, replicate)
    return [
        *_ignored(model, names),
        *findings.not_floating((name, each.sharded_param) for unit in units for name, each in unit.named()),
        *(_shard_axis(units, scheme) if replicas is None else _replicate_axis(units, replicas)),
        *(_gathered(units, parameters) if parameters is not None else ()),
        *_unused(scheme, replicas is None),
        *findings.patterns(names, scheme),
        *optimizer_findings(optimizer, scheme),
    ]


def _meshes(units: list[Unit]) -> Finding | None:
    """Find what makes it unclear which ranks reduce together."""
    if not units:
        return Finding("this model has no parameters that FSDP2 shards", "call fully_shard on it first", ValueError)
    if several := [unit.key for unit in units if len(unit.groups) > 1]:
        what = f"module {several[0]!r} has several groups of parameters with different meshes (shard_placement_fn)"
        cure = "give all parameters of a module one mesh"
        return Finding(f"{what}, and FSDP2 takes no custom communication there", cure, RuntimeError)
    if any(unit.shard_group is None for unit in units):
        what = "replicate() all-reduces gradients in full before any hook sees them"
        cure = (
            "use fully_shard over a shard axis of 1 rank instead: "
            'mesh = init_device_mesh(device, (nodes, gpus), mesh_dim_names=("replicate", "shard")); '
            "fully_shard(module, mesh=mesh) for each module; attach(model, scheme), with gpus = 1"
        )
    elif len({_ranks(unit.shard_group) for unit in units}) > 1:
        what = "modules of this model are sharded over different ranks, and a scheme reduces over one group of them"
        cure = "attach to each part separately, or give all modules the same mesh"
    elif len({_ranks(unit.replicate_group) for unit in units}) > 1:
        what = "modules of this model have different replicate axes, or only some have one"
        cure = "give fully_shard the same mesh for each module"
    elif any(unit.in_other_meshes for unit in units):
        what = "parameters were DTensors before they were sharded (tensor parallelism), which was never tried"
        cure = "use a mesh of a shard and a replicate axis only"
    else:
        return None
    return Finding(what, cure, RuntimeError)


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
    group = _shards(units)
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        yield _lacks("a custom reduce-scatter", CUSTOM_SINCE)
        return
    try:
        scheme.reduce_scatter_form()
    except ValueError as error:
        what, _, cure = str(error).partition("; ")
        yield Finding(what, cure, ValueError)
    if group.size() == 1:
        what = "the shard axis has 1 rank, so FSDP2 reduces nothing over it"
        cure = 'name the axis to reduce over: attach(model, scheme, replicate=mesh["replicate"])'
        yield Finding(what, cure, ValueError)
    if any(_is_custom(unit.reduce_scatter) for unit in units):
        setting, cure = _SETTINGS
        what = "a module already has a custom reduce-scatter: another scheme's, set_custom_reduce_scatter"
        yield Finding(f"{what}, {setting}", cure, RuntimeError)
    if any(unit.premultiplies for unit in units):
        yield _PREMULTIPLIED
    if group.size() > 1 and units[0].copies > 1 and not any(unit.all_reduce_hook for unit in units):
        what = f"the mesh that the shard axis was taken from has {units[0].copies} copies of each shard, and nothing reduces over them"
        yield Finding(what, 'attach a scheme there too: attach(model, scheme, replicate=mesh["replicate"])')
    yield from findings.backends(group, units[0].devices)


def _replicate_axis(units: list[Unit], group: dist.ProcessGroup) -> Iterator[Finding]:
    shards, own = _shards(units), units[0].replicate_group
    if not hasattr(FSDPModule, "set_all_reduce_hook"):
        yield _lacks("an all-reduce hook", HOOK_SINCE)
        return
    if own is not None and _ranks(own) != _ranks(group):
        what = f"replicate= names ranks {list(_ranks(group))}, and the mesh that fully_shard was given has ranks {list(_ranks(own))}"
        yield Finding(f"{what} on its replicate axis", "leave replicate= out", ValueError)
    if any(unit.has_partial_sum for unit in units):
        what = "FSDP2 holds gradients that it has not all-reduced yet, because of set_requires_all_reduce(False)"
        yield Finding(what, "attach between two steps", RuntimeError)
    in_both, rank = sorted({*_ranks(shards)} & {*_ranks(group)}), dist.get_rank()
    if in_both != [rank]:
        what = (
            f"ranks {in_both} are on the shard axis and on the replicate axis, which may share only this rank, {rank}"
        )
        cure = 'name the other axis of the mesh: attach(model, scheme, replicate=mesh["replicate"])'
        yield Finding(what, cure, ValueError)
    if any(unit.all_reduce_hook for unit in units):
        what = "a module already has an all-reduce hook, and FSDP2 takes only one"
        yield Finding(what, "call detach() on the other handle", RuntimeError)
    gloo = any(findings.backend(shards, device) == "gloo" for device in units[0].devices)
    if gloo and shards.size() > 1 and any(unit.premultiplies for unit in units):
        yield _PREMULTIPLIED
    yield from findings.backends(group, units[0].devices)


def _gathered(units: list[Unit], parameters: Values | ParameterFormat) -> Iterator[Finding]:
    """Find what the rounded all-gather of parameters cannot do."""
    if not hasattr(FSDPModule, "set_custom_all_gather"):
        yield _lacks("a custom all-gather", CUSTOM_SINCE)
        return
    formats = get_args(Values)
    if not isinstance(parameters, ParameterFormat) and parameters not in formats:
        cure = f"leave it out for FSDP2's own all-gather, or give one of {', '.join(formats)}"
        yield Finding(f"parameters={parameters!r} is no format", cure, ValueError)
    if _shards(units).size() == 1:
        yield Finding("the shard axis has 1 rank, so FSDP2 gathers no parameters", "leave parameters= out", ValueError)
    for unit in units:
        if _is_custom(unit.all_gather):
            setting, cure = _SETTINGS
            what = f"module {unit.key!r} already has a custom all-gather: another handle's, set_custom_all_gather"
            yield Finding(f"{what}, {setting}", cure, RuntimeError)
        if unit.gathers_over_fewer:
            what = f"module {unit.key!r} gathers its parameters over fewer ranks in the backward pass"
            yield Finding(what, "give fully_shard reshard_after_forward=True or False", RuntimeError)
        if len(unit.gathered_types) > 1 or "bytes" in unit.gathered_types:
            what = f"the parameters of module {unit.key!r} are gathered as bytes, because they have several types or a custom all-gather"
            cure = "give a module's parameters one type, or leave parameters= out"
            yield Finding(f"{what}, and bytes cannot be rounded", cure, RuntimeError)
    yield from findings.backends(_shards(units), units[0].devices)


def _unused(scheme: Scheme, on_shards: bool) -> Iterator[Finding]:
    """Find whether this torch leaves out a parameter without gradient that the scheme needs."""
    if counts_unused() or (on_shards and not _needs_layout(scheme)):
        return
    what = f"FSDP2 of torch {torch.__version__} does not reduce a parameter without a gradient"
    cure = f"use all parameters in each step, or install torch {UNUSED_SINCE} or later"
    yield Finding(f"{what}; the backward pass of such a step raises", cure)


def _needs_layout(scheme: Scheme) -> bool:
    with suppress(ValueError):  # it has no such form, which is another finding
        return scheme.reduce_scatter_form().needs_layout
    return False


def _shards(units: list[Unit]) -> dist.ProcessGroup:
    group = units[0].shard_group
    assert group is not None  # `_meshes` has found it
    return group


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _is_custom(comm: Any) -> bool:  # Any: torch's own, or anybody's
    return not type(comm).__name__.startswith("Default")


def _lacks(what: str, since: str) -> Finding:
    return Finding(
        f"FSDP2 of torch {torch.__version__} does not take {what}",
        f"install torch {since} or later; the documentation's page 'What works where' lists what works with which torch",
        RuntimeError,
    )
