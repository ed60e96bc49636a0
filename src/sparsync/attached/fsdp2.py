"""The integration for FSDP2: a custom reduce-scatter on the shard axis, or an all-reduce hook on an axis of replicas."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.futures import Future

from sparsync.attached.fsdp2_gather import ParameterGather
from sparsync.attached.fsdp2_units import (
    ShardedParameter,
    Unit,
    parameter_lines,
    replicate_axis,
    trained_shards,
    units_of,
)
from sparsync.base.scheme import ReduceScatterScheme, Scheme, ShardState, own_shard_layout, shard_layout, shard_name
from sparsync.core import Bucket, Comm, Report, laid_out
from sparsync.runtime.comparison import weight_lines
from sparsync.runtime.connection import Reduction
from sparsync.runtime.handle import AttachedHandle
from sparsync.runtime.options import GradientOptions
from sparsync.runtime.parameters import check_undriven, trained


class Fsdp2Handle(AttachedHandle):
    """The handle of one axis of an FSDP2 model."""

    # Any: the arguments of Handle
    def __init__(self, *args: Any, units: list[Unit], module: nn.Module, **options: Any) -> None:
        super().__init__(*args, module=module, **options)
        self._units = units
        self._undo: list[Callable[[], None]] = []  # undo the changes to the model
        self._gather: ParameterGather | None = None
        self._seen: set[str] = set()  # the keys of this backward pass; empty between two passes
        self._in_flight: list[Future] = []  # the backward pass ends after them

    def detach(self) -> None:
        """Give the model back as it was before `attach`. Call it on all ranks, between two steps.

        Reports, summary and state stay readable; `set` and assigning a scheme raise RuntimeError.
        """
        self._flight.flush()
        while self._undo:
            self._undo.pop()()
        self._detached = True
        self._flight.stop()
        self._end_watching()
        if self._gather is not None:
            self._gather.detach()

    def close(self) -> None:
        super().close()
        if self._gather is not None:
            self._gather.close()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.gather_exactly()

    def parameter_reports(self) -> list[Report]:
        """List one report per all-gather of parameters that sent something, oldest first; none without `parameters`."""
        return list(self._gather.reports) if self._gather is not None else []

    def gather_exactly(self) -> None:
        """Send parameters unrounded in the next all-gather of each module.

        Call it on all ranks after you write parameters by hand. Loading a state into the model or into this handle calls it.
        """
        if self._gather is not None:
            self._gather.forget()

    def layout(self) -> dict[str, list[int]]:
        return {name: shape for unit in self._units for name, shape in unit.shapes.items()}

    def _submit(self, unit: Unit, bucket: Bucket, scheme: Reduction, into: Bucket) -> None:
        """Reduce a bucket. Returns at once if nothing reads `into` before the backward pass ends, otherwise once it is written."""
        prepare = self._rescaler.rescale if len(self._seen) == 1 else None
        allowed = self._max_in_flight(unit, bucket.grad) if unit.reads_late(into.grad.dtype) else 0

        def written() -> Bucket:  # a copy if FSDP2 may divide it in place
            return into if allowed else replace(into, grad=into.grad.clone())

        self._in_flight.append(self._flight.submit(bucket, scheme, prepare, written))
        try:
            while len(self._in_flight) > allowed:
                self._flight.wait(self._in_flight.pop(0))
        except BaseException:
            self._abandon()
            raise

    def _max_in_flight(self, unit: Unit, buffer: Tensor) -> int:
        """Limit how many buffers like this one are reduced at once."""
        return len(self._units)

    def _open(self, unit: Unit) -> int:
        """Open a step if needed, and return its number. A backward pass opens one; a unit that comes again in it opens another."""
        if not self._seen or unit.key in self._seen:
            self._seen.clear()
            self._go_back(self._step)
            self._loads.forget()
            self._pass_begins()
            self._step += 1
            # HACK: autograd has no public function for this; FSDP2 uses this one. Price: it may change with torch.
            Variable._execution_engine.queue_callback(self._close)  # pyright: ignore[reportAttributeAccessIssue]
        self._seen.add(unit.key)
        return self._step

    def _close(self) -> None:
        """End the step: wait for the buckets that the backward pass did not wait for."""
        pending, self._in_flight = self._in_flight, []
        self._seen.clear()
        try:
            for future in pending:
                self._flight.wait(future)
            self._connection.end_step()
        except BaseException:
            self._in_flight = pending  # all end soon: a failed step fails as a whole
            self._abandon()
            raise

    def _abandon(self) -> None:
        """Forget a failed step; the next unit opens another."""
        pending, self._in_flight = self._in_flight, []
        for future in pending:
            with suppress(Exception):  # the caller gets the error that ended the step
                future.wait()
        self._seen.clear()


class ShardHandle(Fsdp2Handle):
    """The handle of a scheme on the shard axis; its residuals belong to whole gradients."""

    state: ShardState  # pyright: ignore[reportIncompatibleVariableOverride]  # of a reduce-scatter form

    def __init__(self, *args: Any, units: list[Unit], **options: Any) -> None:
        # Residuals differ between copies of the shards.
        super().__init__(*args, units=units, part=units[0].part, **options)
        self._undo += [unit.replace_reduce_scatter(partial(self.reduce_scatter, unit)) for unit in units]
        self._undo += [unit.count_unused() for unit in units]

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state, with residuals by whole parameters, which fit any number of ranks."""
        state, (_, P) = super().state_dict(), self.place
        by_shard = state["scheme"].get("residual", {})
        whole = {
            each.name: each.join([by_shard[shard_name(each.name, owner)] for owner in range(P)])
            for each in self._trained()
            if shard_name(each.name, 0) in by_shard
        }
        return {**state, "scheme": {**state["scheme"], "residual": whole}}

    def _load(self, state: Mapping[str, Any]) -> None:
        scheme, known = dict(state["scheme"]), {each.name: each for each in self._trained()}
        scheme["residual"] = {
            shard_name(name, owner): shard
            for name, flat in scheme.get("residual", {}).items()
            for owner, shard in enumerate(known[name].cut(flat, self.place[1]))
        }
        super()._load({**state, "scheme": scheme})

    def _check(self, state: Mapping[str, Any]) -> None:
        super()._check(state)
        whole = state["scheme"].get("residual", {})
        if unknown := sorted(whole.keys() - {each.name for each in self._trained()}):
            raise ValueError(
                f"this state has a residual of {unknown[0]!r}, which this model does not train; load the state of the same model"
            )

    def reduce_scatter(self, unit: Unit, out: Tensor, x: Tensor, op: dist.ReduceOp.RedOpType | dist.ReduceOp) -> None:
        """Write this rank's chunk of the mean, or of the sum, of `x` over ranks to `out`, before the backward pass ends."""
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            self._abandon()
            raise ValueError(
                f"FSDP2 asked for {op} in module {unit.key!r}, and a scheme reduces with AVG or SUM; after "
                "set_gradient_divide_factor call set_force_sum_reduction_for_comms(True) on the same modules"
            )
        rank, P = self.place
        lengths = unit.lengths()
        bucket = Bucket(unit.key, x, self._open(unit), shard_layout(lengths, P))
        into = Bucket(unit.key, out, bucket.step, own_shard_layout(lengths, rank))
        self._submit(unit, bucket, ReduceScatterInto(self.state, out, op == dist.ReduceOp.AVG, P), into)

    def _max_in_flight(self, unit: Unit, buffer: Tensor) -> int:
        """Allow one buffer, because it is a whole gradient.

        Allow none if an all-reduce hook reads the result at once, and on CUDA, where FSDP2 frees the buffer when the call returns.
        """
        return 1 if buffer.device.type == "cpu" and unit.all_reduce_hook is None else 0

    def _trained(self) -> list[ShardedParameter]:
        return [each for unit in self._units for each in unit.trained()]


class ReplicateHandle(Fsdp2Handle):
    """The handle of a scheme on an axis of replicas; its residuals belong to this rank's shards."""

    switches = True

    def __init__(self, *args: Any, units: list[Unit], **options: Any) -> None:
        shards = units[0].shard_group
        assert shards is not None
        part = f"shard{shards.rank()}of{shards.size()}" if shards.size() > 1 else ""
        super().__init__(*args, units=units, part=part, **options)
        self._partial: dict[str, Tensor] = {}  # by unit: sums that wait for set_requires_all_reduce(True)
        self._undo += [unit.reduce_over_shards_only() for unit in units]
        self._undo += [unit.use_all_reduce_hook(partial(self.all_reduce, unit)) for unit in units]
        self._undo += [unit.count_unused() for unit in units]

    def _residual_sizes(self) -> dict[str, int]:
        return {each.name: each.length for unit in self._units for each in unit.trained()}

    def all_reduce(self, unit: Unit, shard: Tensor) -> None:
        """Replace `shard` by the scheme's estimate of its mean over replicas before the backward pass ends.

        After set_requires_all_reduce(False), keep the shard for a later call instead, and set the gradients to zero.
        """
        if (before := self._partial.pop(unit.key, None)) is not None:
            shard += before
        if not unit.group.all_reduce_grads:  # the latest argument of set_requires_all_reduce
            self._partial[unit.key] = shard.clone()
            shard.zero_()
            return
        bucket = Bucket(unit.key, shard, self._open(unit), laid_out(unit.lengths()))
        self._submit(unit, bucket, self.state, bucket)

    def _abandon(self) -> None:
        super()._abandon()
        self._partial.clear()


class ReduceScatterInto(Reduction):
    """A reduce-scatter in the form that a Connection calls: `reduce` writes this rank's chunk of the mean or sum to `out`."""

    def __init__(self, state: ShardState, out: Tensor, average: bool, ranks: int) -> None:
        self.name, self._state, self._out = state.name, state, out
        self._average, self._ranks = average, ranks

    def reduce(self, bucket: Bucket, comm: Comm) -> Report:
        return self._state.reduce_scatter(bucket, self._out, comm, self._average)

    @property
    def has_residual(self) -> bool:
        return self._state.has_residual

    def rollback(self, bucket: Bucket) -> None:
        self._state.return_shards(bucket, self._ranks if self._average else 1)


def attach(model: nn.Module, scheme: Scheme, options: GradientOptions) -> Fsdp2Handle:
    """Reduce the gradients of an FSDP2 model by `scheme` over one axis; return the handle to its reports and state.

    The axis is the shard axis if fully_shard was given a mesh of one axis and `replicate` is None. The scheme is then a reduce-scatter:
    TwoShot, ExactOkTopk, SkipReduce or Dense. With `replicate`, every scheme reduces the shards that FSDP2 has reduced already; you can
    call `attach` once per axis. If fully_shard was given a mesh of two axes (HSDP), the scheme replaces FSDP2's all-reduce over the first.
    `parameters` says how the shard axis exchanges parameters, see Options.
    Collective over the ranks of the axis. A parameter without gradient counts as zero. A step that fails on any rank raises in the
    backward pass on all ranks of the axis; call reset_iter_state() on the model, then continue.
    See docs/attach.md.
    """
    units, parameters = units_of(model), options.parameters
    replicas = replicate_axis(units, options.replicate)
    names = {number: name for unit in units for number, name in unit.ids.items()}
    form = scheme.reduce_scatter_form() if replicas is None else scheme
    rescaler = options.rescaler(names, adds_up=True)
    driven, axis_name = trained(model), "shards" if replicas is None else "replicas"
    check_undriven(driven, axis_name)
    weights = None if replicas is None else partial(trained_shards, units)
    comparison = options.comparison(names, weights)
    lines = [repr(scheme), f"parameters={parameters}", *parameter_lines(units)]
    if weights is not None:
        lines += [f"{each} at the start" for each in weight_lines(weights())]
    comm = options.connected(units[0].shard_group if replicas is None else replicas, *lines)
    kind = ShardHandle if isinstance(form, ReduceScatterScheme) else ReplicateHandle
    handle = kind(form, comm, rescaler, comparison, units=units, module=model, driven=driven, axis=axis_name)
    if parameters is not None:
        shards = options.connected(units[0].shard_group, f"parameters={parameters}")
        handle._gather = ParameterGather(units, parameters, shards)
    return handle
