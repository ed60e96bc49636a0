"""Train fsdp_training.Net with attach, and compare with the scheme in a LocalWorld."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from helpers.fsdp_training import SHAPES, Net, as_fsdp, gradients, known, on
from helpers.known_gradients import row
from integrations.table import WithHandle, refusals
from sparsync import Bucket, Report
from sparsync.attached.fsdp2 import ReduceScatterInto
from sparsync.attached.fsdp2_units import ShardedParameter, units_of
from sparsync.base.scheme import own_shard_layout, shard_layout, shard_name
from sparsync.base.state import Rollback
from sparsync.comm import LocalWorld
from sparsync.core import Comm, laid_out
from sparsync.runtime.handle import Handle
from sparsync.testing.world import same_bits

Units = dict[str, list[str]]  # parameters of each bucket of a step, in the order of reduction
# What attach reduces over; both: fully_shard has the mesh of two axes (HSDP).
Axis = Literal["shard", "replicate", "both"]
Gradient = Callable[[int, int, str], Tensor]  # (rank, step, name), whole


@dataclass
class Done:
    """The record of one rank."""

    rows: list[dict[str, Tensor]]  # by step, whole gradients
    units: list[Units]  # by step
    reports: list[Report]
    residual: dict[str, Tensor]  # flat

    @property
    def grads(self) -> Tensor:
        return torch.cat([row[name].flatten() for row in self.rows for name in SHAPES])


class Sharding(WithHandle):
    """A model with attach over one axis of a mesh that has one rank on the other axis."""

    def __init__(
        self,
        id: str,
        axis: Axis,
        dtypes: Mapping[str, torch.dtype] | None = None,
        layered: bool = True,
        scaler: GradScaler | None = None,
        mesh: DeviceMesh | None = None,
        frozen: Sequence[str] = (),
        tied: bool = False,
    ) -> None:
        mesh = mesh or _mesh(range(dist.get_world_size()), axis)
        self.options: dict[str, Any] = {"scaler": scaler}
        if axis == "replicate":
            self.options["replicate"] = mesh["replicate"]
        self.rank = mesh["shard" if axis == "shard" else "replicate"].get_local_rank()
        self.model = self.net = Net()
        if tied:
            self.net.last.bias = self.net.first.bias
        for name, parameter in self.net.named_parameters():
            parameter.data = parameter.data.to((dtypes or {}).get(name, torch.float32))
            parameter.requires_grad_(name not in frozen)
        for module in (self.net.first, self.net.middle, self.net.last, self.net) if layered else (self.net,):
            fully_shard(module, mesh=mesh if axis == "both" else mesh["shard"])
        self.forward: Any = self.net  # or its compiled version
        self.handle = self.attach(id)
        self.names = {unit.key: [name for name in unit.names if name not in frozen] for unit in units_of(self.net)}
        self.rows: list[dict[str, Tensor]] = []
        self.units: list[Units] = []
        self.reports: list[Report] = []

    @classmethod
    def of_ranks(cls, ranks: Sequence[int], id: str, axis: Axis) -> "Sharding | None":
        """Make the training on some ranks of the world, None on the others. Collective."""
        mesh = _mesh(ranks, axis)
        return cls(id, axis, mesh=mesh) if dist.get_rank() in ranks else None

    def attach(self, id: str) -> Handle:
        with refusals():
            return on(self.net, row(id).make(), **self.options)

    def inputs(self, step: int) -> dict[str, Tensor]:
        return self.net.inputs(self.rank, step)

    def step(self, inputs: Mapping[str, Tensor] | None = None) -> None:
        self.net.zero_grad()
        self.forward(self.inputs(len(self.rows)) if inputs is None else inputs).backward()
        self.record()

    def accumulate(self, parts: Sequence[Mapping[str, Tensor]]) -> None:
        self.net.zero_grad()
        for number, part in enumerate(parts, 1):
            as_fsdp(self.net).set_requires_gradient_sync(number == len(parts))
            self.forward(part).backward()
        self.record()

    def record(self, grads: dict[str, Tensor] | None = None) -> None:
        """End a step with these gradients, or with the parameters' gradients."""
        self.rows.append({name: x.clone() for name, x in (grads or gradients(self.net)).items()})
        reports = self.handle.take_reports()
        self.units.append({report.key: self.names[report.key] for report in reports})
        self.reports += reports

    def done(self) -> Done:
        return Done(self.rows, self.units, self.reports, self.residual())


def same_on_all_ranks(
    id: str, ranks: Sequence[Done | None], axis: Axis, gradient: Gradient = known, frozen: Sequence[str] = ()
) -> None:
    """Check that all ranks did, bit for bit, what the scheme does in a LocalWorld, and that frozen parameters have no gradient."""
    there = [rank for rank in ranks if rank is not None]
    whole = _of_shards if axis == "shard" else _of_replicas
    rows, residuals = whole(id, len(there), there[0].units, gradient)
    for rank, residual in zip(there, residuals, strict=True):
        assert rank.units == there[0].units
        for found, wanted in zip(rank.rows, rows, strict=True):
            assert found.keys() == wanted.keys() == SHAPES.keys() - set(frozen)
            for name in found:
                assert same_bits(found[name].flatten(), wanted[name].flatten()), name
        assert rank.residual.keys() == residual.keys()
        assert all(same_bits(rank.residual[name], residual[name]) for name in residual)
        assert all(report.sent == report.cost for report in rank.reports)


Expected = tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]  # gradients by step, residuals by rank


def _of_replicas(id: str, P: int, units: list[Units], gradient: Gradient) -> Expected:
    def program(comm: Comm) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        state, rows, skipped = row(id).make().start(), [], Rollback()
        for step, keys in enumerate(units):
            rows.append({})
            for key, names in keys.items():
                parts = [gradient(comm.rank, step, name).flatten() for name in names]
                layout = laid_out((name, part.numel()) for name, part in zip(names, parts, strict=True))
                bucket = Bucket(key, torch.cat(parts), step, layout)
                skipped.reduced(state, bucket, state.reduce(bucket, comm))
                rows[-1] |= {slot.name: slot.span.of(bucket.grad) for slot in layout}
        return rows, state.state_dict().get("residual", {})

    found = LocalWorld(P).run(program)
    return found[0][0], [residual for _, residual in found]


def _of_shards(id: str, P: int, units: list[Units], gradient: Gradient) -> Expected:
    trained = {name for names in units[0].values() for name in names}
    shards = {
        name: ShardedParameter(name, shape, 0, _length(shape, P)) for name, shape in SHAPES.items() if name in trained
    }

    def program(comm: Comm) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
        state, rows, skipped = row(id).make().reduce_scatter_form().start(), [], Rollback()
        for step, keys in enumerate(units):
            rows.append({})
            for key, names in keys.items():
                cut = [shards[name].cut(gradient(comm.rank, step, name).flatten(), P) for name in names]
                x = torch.cat([parts[owner] for owner in range(P) for parts in cut])
                average = x.dtype in (torch.float32, torch.bfloat16)
                if not average:  # FSDP2 divides by about the root of P before a sum; with 2 ranks by 2
                    x /= 2
                lengths = [(name, shards[name].length) for name in names]
                out = x.new_empty(sum(length for _, length in lengths))
                bucket, into = (
                    Bucket(key, x, step, shard_layout(lengths, P)),
                    ReduceScatterInto(state, out, average, P),
                )
                written = Bucket(key, out, step, own_shard_layout(lengths, comm.rank))
                skipped.reduced(into, written, into.reduce(bucket, comm))
                rows[-1] |= {slot.name: slot.span.of(out) for slot in laid_out(lengths)}
        return rows, state.state_dict().get("residual", {})

    found = LocalWorld(P).run(program)
    rows = [
        {name: each.join([rows[step][name] for rows, _ in found]) for name, each in shards.items()}
        for step in range(len(units))
    ]
    residuals = [
        {
            name: each.join([kept[shard_name(name, owner)] for owner in range(P)])
            for name, each in shards.items()
            if kept
        }
        for _, kept in found
    ]
    return rows, residuals


def _length(shape: Sequence[int], P: int) -> int:
    return -(-shape[0] // P) * torch.Size(shape[1:]).numel()


def _mesh(ranks: Sequence[int], axis: Axis) -> DeviceMesh:
    shape = (1, len(ranks)) if axis == "shard" else (len(ranks), 1)
    return DeviceMesh("cpu", torch.tensor(list(ranks)).view(shape), mesh_dim_names=("replicate", "shard"))
