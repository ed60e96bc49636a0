"""Steps of replicas that FSDP2 shards: a rank exchanges the steps of its shards with the ranks that hold the same shards."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparsync.attached.fsdp2_units import replicate_axis, units_of
from sparsync.exchanges.training_loop import GradientDivisor, Replica, distinct
from sparsync.runtime.findings import Axis
from sparsync.runtime.parameters import named_parameters


class ShardedReplica(Replica):
    """This rank's shards of one copy of a model. FSDP2 reduces gradients over the shards, and steps do the rest.

    `called`: as for Replica. Raises TypeError for a parameter that is not a DTensor.
    """

    axis = "replicas"

    def __init__(self, module: nn.Module, called: Sequence[nn.Module], replicate: Axis | None) -> None:
        self.module, self.bodies, self._units = module, [module], units_of(module)
        self.called = distinct([*called, module])
        self.replicas = replicate_axis(self._units, replicate)
        shards = self._units[0].shard_group
        assert shards is not None  # checked by the doctor
        self._shards, self.part = shards, f"shard{shards.rank()}of{shards.size()}" if shards.size() > 1 else ""
        self.owned = {name: each for name, each in named_parameters(module) if each.requires_grad}
        if plain := [name for name, each in self.owned.items() if not isinstance(each, DTensor)]:
            raise TypeError(f"{', '.join(plain)} is not sharded by FSDP2, which leaves its gradient alone; freeze it")
        # These share the memory of their shards.
        self.trained: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(_local(each.detach())) for name, each in self.owned.items()
        }

    def held(self) -> list[Tensor]:
        return [_local(each.detach()) for each in (*self.module.parameters(), *self.module.buffers())]

    def gradients(self) -> Iterator[Tensor | None]:
        return (None if each.grad is None else _local(each.grad) for each in self.owned.values())

    def take_gradients(self) -> None:
        for name, shard in self.trained.items():
            owner = self.owned[name]
            if _local(owner.detach()).data_ptr() != shard.data_ptr():
                raise RuntimeError(
                    f"the shard of {name!r} has moved in memory since `attach` was called, as by model.to(...); attach again"
                )
            shard.requires_grad_(owner.requires_grad)
            shard.grad = None if owner.grad is None else _local(owner.grad)

    def agreed(self, finite: bool) -> bool:
        """Tell whether all shards of this copy are finite: all of them take a step, or none."""
        if self._shards.size() == 1:
            return finite
        result = torch.tensor(float(finite), device=self._units[0].group.device)
        dist.all_reduce(result, dist.ReduceOp.MIN, group=self._shards)
        return bool(result)

    def whole(self, name: str, flat: Tensor) -> Tensor:
        owner: Any = self.owned[name]  # Any: a DTensor, checked by the constructor
        shard = flat.view(self.trained[name].shape)
        return DTensor.from_local(
            shard, owner.device_mesh, owner.placements, run_check=False, shape=owner.shape, stride=owner.stride()
        )

    def written(self) -> None:
        for unit in self._units:
            unit.module.reshard()  # gathered copies have older weights

    def divide_gradients(self, by: GradientDivisor) -> list[Callable[[], None]]:
        def divide_(names: list[str], shard: Tensor) -> None:
            if (divisor := owner()) is not None:
                shard.copy_(divisor.divided(names, shard))
                divisor.accumulated()

        owner, named = weakref.ref(by), [(unit, [each.name for each in unit.trained()]) for unit in self._units]
        undo = [unit.reduce_over_shards_only() for unit in self._units]  # last, when nothing can fail any more
        return [*(unit.use_all_reduce_hook(partial(divide_, names)) for unit, names in named), *undo]


def _local(tensor: Any) -> Tensor:  # Any: a DTensor, or a plain Tensor
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
