"""The units that FSDP2 gathers and reduces: their parameters, the layout of its buffers, and the checks before attaching.

HACK: torch has no public function for the layout of FSDP2's buffers, so this file, and only this one, reads private attributes of
torch.distributed.fsdp. Price: they change with torch, and differ before 2.13; tests/test_fsdp.py and test_fsdp_gather.py use all of them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, is_bw

from sparsync.base.scheme import Scheme
from sparsync.runtime import findings
from sparsync.runtime.findings import Axis, Finding
from sparsync.runtime.options import Options
from sparsync.runtime.parameters import plain_name

# Of output, input and op; an all-gather has no op. Any: torch's ReduceOp
Exchange = Callable[[Tensor, Tensor, Any], None]
ROOT = "(root)"  # the key of the outermost unit
_NOT_DIVIDED = (torch.float32, torch.bfloat16)  # FSDP2 divides other types before and after the reduction


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter as FSDP2 holds it: cut into shards along `dim`; the last ones may be shorter or empty."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    length: int  # of a shard, with its padding

    def join(self, shards: Sequence[Tensor]) -> Tensor:
        """Join the shards of all ranks into the whole parameter, flat."""
        if self.dim == 0:
            return torch.cat(list(shards))[: math.prod(self.shape)]
        shape = list(self.shape)
        shape[self.dim] //= len(shards)
        return torch.cat([shard.view(shape) for shard in shards], dim=self.dim).flatten()

    def cut(self, whole: Tensor, ranks: int) -> list[Tensor]:
        """Cut a whole parameter into the shards of all ranks, flat, padded with zeros."""
        if self.dim == 0:
            padded = whole.new_zeros(ranks * self.length)
            padded[: whole.numel()] = whole
            return list(padded.split(self.length)) if self.length else [padded] * ranks
        return [shard.flatten() for shard in whole.view(self.shape).chunk(ranks, dim=self.dim)]


@dataclass(eq=False)
class Unit:
    """The parameters of one or more modules, which FSDP2 reduces together."""

    key: str
    module: FSDPModule
    group: Any  # torch's FSDPParamGroup, private
    names: list[str]  # of `parameters`, in their order

    @property
    def parameters(self) -> list[Any]:  # Any: torch's FSDPParam, private
        return self.group.fsdp_params

    def named(self) -> list[tuple[str, Any]]:  # Any: as above
        """List the parameters with their names."""
        return list(zip(self.names, self.parameters, strict=True))

    @property
    def ids(self) -> dict[int, str]:
        """The names of the optimizer's parameters, by id."""
        return {id(each.sharded_param): name for name, each in self.named()}

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The shape of each whole parameter, by name."""
        return {name: list(each._orig_size) for name, each in self.named()}

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the shards; None without shards, as with replicate()."""
        info = self.group.mesh_info
        return info.shard_process_group if isinstance(info, FSDPMeshInfo) else None

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard if fully_shard was given a mesh of two axes (HSDP); None otherwise."""
        info = self.parameters[0].mesh_info  # `reduce_over_shards_only` changes the group's
        return info.replicate_process_group if isinstance(info, HSDPMeshInfo) else None

    def reduce_over_shards_only(self) -> Callable[[], None]:
        """Make FSDP2 skip its all-reduce over the replicate axis, if it has one; return the undo function.

        FSDP2 then takes its path for a mesh of one axis, and the all-reduce hook gets gradients reduced over the shards only. The
        parameters stay DTensors on the mesh of two axes.
        """
        group, info = self.group, self.group.mesh_info
        if not isinstance(info, HSDPMeshInfo):
            return lambda: None
        shards = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
        if hasattr(info, "reduce_scatter_process_group"):  # of set_separate_reduce_scatter_group
            shards.reduce_scatter_process_group = info.reduce_scatter_process_group

        def exchange(before: FSDPMeshInfo, after: FSDPMeshInfo) -> None:
            if group.post_forward_mesh_info is before:  # FSDP2 reshards to fewer ranks if the two differ
                group.post_forward_mesh_info = after
            group.mesh_info = after

        exchange(info, shards)
        return lambda: exchange(shards, info)

    @property
    def part(self) -> str:
        """The name of this rank's copy of the shards, in the mesh that contains the shard axis; "" if there is one copy."""
        group, mesh = self.shard_group, self.group.mesh_info.mesh
        root: Any = mesh._get_root_mesh()  # Any: torch says that it may have no coordinate
        assert group is not None
        copies = root.size() // group.size()
        names, own = root.mesh_dim_names or (), set(mesh.mesh_dim_names or ())
        if copies == 1:
            return ""
        number = 0
        if not own <= set(names):  # joined axes: the place of the first rank is unique to this copy
            number = root.mesh.flatten().tolist().index(int(mesh.mesh.min()))
        else:
            for axis, (name, place) in enumerate(zip(names, root.get_coordinate(), strict=True)):
                number = number if name in own else number * root.size(axis) + place
        return f"replica{number}of{copies}"

    @property
    def all_gather(self) -> Any:  # Any: as above
        return self.group._all_gather_comm

    def replace_reduce_scatter(self, exchange: Exchange) -> Callable[[], None]:
        """Reduce gradients by `exchange`; return the undo function."""
        return _replaced(self.module.set_custom_reduce_scatter, self.group._reduce_scatter_comm, exchange)

    def replace_all_gather(self, exchange: Exchange) -> Callable[[], None]:
        """Gather parameters by `exchange`; return the undo function."""
        return _replaced(self.module.set_custom_all_gather, self.all_gather, exchange)

    @property
    def gathers_one_type(self) -> bool:
        """True if parameters are gathered in one type, over the same ranks in both passes, and not as bytes."""
        types = {each.mp_policy.param_dtype or each.sharded_param.dtype for each in self.parameters}
        own = any(hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather") for each in self.parameters)
        return len(types) == 1 and not own and not self.group._use_post_forward_mesh

    @property
    def owners(self) -> list[nn.Module]:
        """The modules that hold these parameters, without duplicates."""
        return list({id(each._module_info.module): each._module_info.module for each in self.parameters}.values())

    @property
    def all_reduce_hook(self) -> Any:  # Any: anybody's
        return self.group._all_reduce_hook

    def use_all_reduce_hook(self, hook: Callable[[Tensor], None]) -> Callable[[], None]:
        """Call `hook` with each reduced shard; return the undo function."""
        self.module.set_all_reduce_hook(hook)
        return lambda: setattr(self.group, "_all_reduce_hook", None)  # torch's function takes no None

    def count_unused(self) -> Callable[[], None]:
        """Count parameters without gradient as zero; return the undo function."""
        before = self.group.reduce_scatter_unused_params
        self.group.reduce_scatter_unused_params = True
        return lambda: setattr(self.group, "reduce_scatter_unused_params", before)

    def trained(self) -> list[ShardedParameter]:
        """List the trained parameters, in the order of the buffers: by type first, in torch 2.15 and later."""
        named, order = self.named(), getattr(self.group, "_reduce_scatter_param_indices", None)
        named = [named[index] for index in order] if order else named  # no order before the first forward pass
        return [
            ShardedParameter(
                name, tuple(each._orig_size), each.fsdp_placement.dim, each.padded_sharded_param_size.numel()
            )
            for name, each in named
            if each.sharded_param.requires_grad
        ]

    def lengths(self) -> list[tuple[str, int]]:
        """List name and shard length of the trained parameters."""
        return [(each.name, each.length) for each in self.trained()]

    def reads_late(self, dtype: torch.dtype) -> bool:
        """Tell whether the gradients are views of a reduced buffer of this type that nothing reads before the backward pass ends.

        FSDP2 reads them earlier if it divides or converts them, adds them to others or moves them to the CPU; so do hooks on them.
        """
        if hasattr(self.group, "_orig_dtype"):  # until torch 2.14; later every parameter has a type
            types = {self.group._orig_dtype}
        else:
            types = {each.sharded_grad_dtype for each in self.parameters if each.sharded_param.requires_grad}
        unchanged = dtype in _NOT_DIVIDED and types <= {dtype, None}
        divided = self.group.force_sum_reduction_for_comms
        return unchanged and not divided and not any(map(_read_at_once, self.parameters))


class _Custom:
    """An exchange with the methods of torch's ReduceScatter and AllGather."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:  # Any: of int or SymInt
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any = None, async_op: bool = False
    ) -> None:
        self._exchange(output_tensor, input_tensor, op)


def _replaced(
    set_comm: Any, before: Any, exchange: Exchange
) -> Callable[[], None]:  # Any: of torch's classes, or anybody's
    set_comm(_Custom(exchange))
    return partial(set_comm, before)


def units_of(model: nn.Module) -> list[Unit]:
    """List the units of a model that have parameters, outer modules first, with the names of their modules as keys."""
    modules = [(plain_name(name), module) for name, module in model.named_modules()]
    prefixes = {id(module): f"{name}." if name else "" for name, module in modules}
    units: dict[int, Unit] = {}
    for name, module in modules:
        if not isinstance(module, FSDPModule):
            continue
        state: Any = module._get_fsdp_state()  # Any: private
        group = state._fsdp_param_group  # raises if a module has several, on different meshes
        if group is not None and group.fsdp_params and id(state) not in units:
            infos = [parameter._module_info for parameter in group.fsdp_params]
            names = [prefixes[id(info.module)] + info.param_name for info in infos]
            units[id(state)] = Unit(name or ROOT, module, group, names)
    return list(units.values())


def inside_backward() -> bool:
    """Tell whether this thread is inside a backward pass."""
    return is_bw()


def replicate_axis(units: Sequence[Unit], given: Axis | None) -> dist.ProcessGroup | None:
    """Find the ranks that reduce gradients after FSDP2 has reduced them over shards; None for the shard axis."""
    if given is None:
        return units[0].replicate_group
    return given.get_group() if isinstance(given, DeviceMesh) else given


def parameter_lines(units: Iterable[Unit]) -> list[str]:
    """Describe name, shape and type of each parameter of these units."""
    named = [pair for unit in units for pair in unit.named()]
    return [
        f"parameter {name!r} of {list(each._orig_size)} in {each._sharded_param_data.dtype}" for name, each in named
    ]


def trained_shards(units: Iterable[Unit]) -> list[tuple[str, Tensor]]:
    """List name and shard of the trained parameters of these units that have memory already."""
    return [
        (name, each._sharded_param_data)
        for unit in units
        for name, each in unit.named()
        if each.sharded_param.requires_grad and not each._sharded_param_data.is_meta
    ]


def examine(model: nn.Module, scheme: Scheme, options: Options) -> Iterator[Finding]:
    """Find the refusals and warnings of `attach`."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        what = f"FSDP2 of torch {torch.__version__} has no hooks for another exchange"
        yield Finding(what, "install torch 2.13 or later", RuntimeError)
        return
    units = units_of(model)
    unclear = _meshes(units)
    if unclear is not None:
        yield unclear
        return
    yield from findings.not_floating((name, each.sharded_param) for unit in units for name, each in unit.named())
    yield from findings.patterns([name for unit in units for name in unit.names], scheme)
    for unit in units if options.parameters is not None else ():
        if not unit.gathers_one_type:
            what = f"the parameters of module {unit.key!r} have several types, a custom all-gather, or fewer ranks in the backward pass"
            cure = (
                "give a module's parameters one type and reshard_after_forward=True or False, or leave parameters= out"
            )
            yield Finding(f"{what}, and such gathers cannot be rounded", cure, RuntimeError)
    replicas, shards, own = replicate_axis(units, options.replicate), units[0].shard_group, units[0].replicate_group
    if replicas is None:
        try:
            scheme.reduce_scatter_form()
        except ValueError as error:
            what, _, cure = str(error).partition("; ")
            yield Finding(what, cure, ValueError)
        if len(_ranks(shards)) == 1:
            what = "the shard axis has 1 rank, so FSDP2 reduces nothing over it"
            cure = 'attach to the other axis of the mesh: options=sparsync.Options(replicate=mesh["replicate"])'
            yield Finding(what, cure, ValueError)
    elif {*_ranks(shards)} & {*_ranks(replicas)} != {dist.get_rank()} or _ranks(own) not in ((), _ranks(replicas)):
        what = f"replicate= names ranks {list(_ranks(replicas))}, and the shard axis has ranks {list(_ranks(shards))}"
        cure = "name the other axis of the mesh in replicate=, which shares only this rank; with HSDP leave it out"
        yield Finding(what, cure, ValueError)


def _meshes(units: list[Unit]) -> Finding | None:
    """Find meshes that leave unclear which ranks reduce together."""
    if not units:
        return Finding("this model has no parameters that FSDP2 shards", "call fully_shard on it first", ValueError)
    if any(unit.shard_group is None for unit in units):
        what = "replicate() all-reduces gradients in full before any hook sees them"
        cure = "use fully_shard over a mesh of two axes, (ranks, 1), named replicate and shard"
    elif len({(_ranks(unit.shard_group), _ranks(unit.replicate_group)) for unit in units}) > 1:
        what = "modules of this model are sharded over different meshes, and a scheme reduces over one"
        cure = "attach to each part separately, or give all modules the same mesh"
    elif any(parameter.is_dtensor for unit in units for parameter in unit.parameters):
        what = "parameters were DTensors before they were sharded (tensor parallelism), which was never tried"
        cure = "use a mesh of a shard and a replicate axis only"
    else:
        return None
    return Finding(what, cure, RuntimeError)


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _read_at_once(parameter: Any) -> bool:  # Any: FSDPParam
    sharded = parameter.sharded_param
    has_hooks = bool(getattr(sharded, "_post_accumulate_grad_hooks", None))
    return sharded.grad is not None or parameter.offload_to_cpu or has_hooks
