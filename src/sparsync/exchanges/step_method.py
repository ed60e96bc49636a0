"""The base of AdamWSteps and LocalTraining, which exchange changes of the weights.

MovedWeights lets ranks that join or have failed follow the others: by a snapshot, and by each move since. StepMethod has the common
weights, weights set from outside, failures, and the saved state. A subclass decides what to exchange and when. The model is never wrapped.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.comm.group import GroupComm
from sparsync.core import Comm, Report
from sparsync.exchanges.own_weights import ShownWeights
from sparsync.exchanges.steps_options import StepOptions
from sparsync.exchanges.training_loop import Replica
from sparsync.exchanges.weights import Weights, copy_from_first
from sparsync.runtime.between_steps import Loads
from sparsync.runtime.comparison import Comparison
from sparsync.runtime.findings import check_scheme
from sparsync.runtime.handle import Handle
from sparsync.runtime.parameters import check_undriven, drive, trained
from sparsync.runtime.rescaling import ResidualRescaler
from sparsync.runtime.restorable import Part, SavedState, Snapshot


class MovedWeights(Handle):
    """A handle that moves the common weights itself, and reports every move."""

    _weights: Weights
    _callbacks: list[Callable[[Part | None], None]]  # see `on_move`

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        taken = super().snapshot(shared=shared)
        if taken.shared is None:
            return taken
        moved, rest = self._parts(taken.shared[self.integration])
        return taken._replace(moved=moved, shared={**taken.shared, self.integration: rest})

    @abstractmethod
    def _parts(self, state: SavedState) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a saved state into the part that moves with the common weights, and the rest, without what only this rank has."""

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; see Handle. With `moved` alone this is only a start for `moves`: do not train with it."""
        with torch.no_grad():
            for move in snapshot.moves:
                self._replay(move)
        if snapshot.moved is not None and snapshot.shared is None:
            self._start_from(snapshot.moved)
        super().restore(snapshot)

    @abstractmethod
    def _start_from(self, moved: SavedState) -> None:
        """Take the common weights of another rank, and what moves with them."""

    @abstractmethod
    def _replay(self, move: Part) -> None:
        """Move the common weights as another rank has moved its own."""

    def on_move(self, callback: Callable[[Part | None], None]) -> Callable[[], None]:
        def end() -> None:
            self._callbacks = [each for each in self._callbacks if each is not callback]

        self._callbacks.append(callback)
        return end

    def _note_move(self, means: Sequence[Tensor], **more: Any) -> None:  # Any: numbers, names and settings
        """Report a move of the common weights: `means` [n], and what else `_replay` needs."""
        for each in self._callbacks:
            each({"means": means, "groups": self._settings(), **more})

    def _settings(self) -> list[dict[str, Any]]:  # Any: settings
        """List the settings of the optimizer of the common weights, by group."""
        return [_settings(group) for each in self._movers() for group in each.param_groups]

    def _take_settings(self, found: Sequence[Mapping[str, Any]]) -> None:  # Any: settings
        groups = [group for each in self._movers() for group in each.param_groups]
        for group, settings in zip(groups, found, strict=True):
            group.update(settings)

    @abstractmethod
    def _movers(self) -> Sequence[Optimizer]:
        """List the optimizers whose settings determine how the common weights move."""

    def _take_common(self, common: Sequence[Tensor]) -> None:
        for bucket, weights in zip(self._weights.buckets, common, strict=True):
            bucket.put_common(weights)
        self._note_other_move()

    def _note_other_move(self) -> None:
        for each in self._callbacks:
            each(None)


class StepMethod(MovedWeights):
    """A model and its optimizers. A rank's weights are the common ones, or these minus a share of its unsent changes.

    The constructor is collective over the ranks of `group` or `comm`: it compares settings, and copies rank 0's parameters and buffers.
    """

    replaces_optimizer = False  # `step` is called in place of the optimizer's

    def __init__(
        self,
        replica: Replica,
        optimizers: Sequence[Optimizer],
        scheme: Scheme,
        options: StepOptions,
        group: dist.ProcessGroup | None,
        comm: Comm | None,
        timeout_s: float,
        fragments: int = 1,
    ) -> None:
        check_scheme(scheme)
        if scheme.has_momentum:
            raise ValueError(
                f"{scheme.name} adds its own momentum to what it reduces, and here the steps of an optimizer are exchanged; "
                "use a scheme without momentum, such as TwoShot"
            )
        parameters = replica.trained
        check_undriven(replica.owned.items(), replica.axis)
        self.model, self._replica = replica.module, replica
        shared = self.replaces_optimizer and options.keep == 0
        self._callbacks = []
        self._weights = Weights(parameters, options.megabytes_for(scheme), fragments, shared)
        self._dtypes = {id(each): each.dtype for each in replica.owned.values()}
        names = {id(each): name for name, each in replica.owned.items()}
        comparison = Comparison(optimizers, names, self._weights.common, options.check_weights_every)
        if comm is None:
            given = ", ".join(f"{name}={value!r}" for name, value in options.described().items())
            lines = [f"{type(options).__name__}({given})", repr(scheme), *_model_lines(self.model)]
            comm = GroupComm.private(group, timeout_s, "\n".join([*lines, *comparison.settings.read()[1]]))
        super().__init__(scheme, comm, ResidualRescaler({}), comparison, replica.part)
        copy_from_first(replica.held(), comm)
        self._weights.adopt(parameters)
        self._adopted = comparison.adopted  # parameters set from outside and not compared since
        self._comm, self._keep = comm, options.keep_for(scheme)
        self._totals = {"bytes_sent": 0}
        self._shown: ShownWeights | None = None  # if own weights differ from the common ones
        self.on_detach: Sequence[Callable[[], None]] = ()  # called by `detach`
        drive(replica.owned.items(), self, replica.axis)

    @abstractmethod
    def step(self) -> list[Report]:
        """Count a step, exchange what is due, and return the reports. Call it on every rank."""

    def _settle(self) -> None:
        """Read from the device how the last step ended, if the host does not know."""
        return

    @property
    @abstractmethod
    def clip_factor(self) -> float:
        """The norm of a rank's gradient over the norm of the mean gradient."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Evaluate or save the model with the common weights, the same bits on all ranks; this rank's are back afterwards.

        Buffers stay this rank's. Nothing is sent, so one rank may do it alone. With `Steps(keep=0.0)` the model always has these weights.
        """
        if self._shown is None:
            yield
            return
        self._check_own()
        with self._shown.averaged():
            yield

    def stats(self) -> dict[str, int | float]:
        """Count the `steps` taken, the `exchanges` applied and not applied, and more.

        `bytes_sent`: by this rank. `bits`: sent per trained parameter per step. `drift`: the distance of this rank's weights from the
        common ones. `clip_factor`: see there.
        """
        if self._shown is not None:
            self._shown.show(common=False)
        steps = self._step + 1
        bits = 8 * self._totals["bytes_sent"] / (self._weights.elements * steps) if steps else 0.0
        more = {"bits": bits, "drift": self._weights.drift(), "clip_factor": self.clip_factor}
        return {"steps": steps, **self._totals, **more}

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state, with weights and buffers. Save the states of all ranks; see Handle."""
        self._check_own()
        self._settle()
        own = {
            "common": {name: each.clone() for name, each in self._weights.common()},
            "buffers": {name: each.detach().clone() for name, each in self.model.named_buffers()},
            "totals": dict(self._totals),
            **self._method_state(),
        }
        return {**super().state_dict(), self.integration: own}

    @abstractmethod
    def _method_state(self) -> dict[str, Any]:
        """Return the state of this method beside common weights, buffers and totals."""

    def load_state_dict(self, state: SavedState) -> None:
        """Continue from a state; see Handle. Settings may have changed."""
        self._check_own()
        super().load_state_dict(state)

    def close(self) -> None:
        """Leave the common weights in the model, and give back connections and threads; see Handle."""
        if self._shown is not None:
            self._shown.release()
        super().close()

    def detach(self) -> None:
        """Undo `attach`: the model trains on from the common weights. Call it on all ranks, between two steps."""
        for each in self.on_detach:
            each()
        self._detached = True
        self.close()

    def _check(self, state: SavedState) -> None:
        super()._check(state)
        saved = state[self.integration]
        for kind, own in {"common": dict(self._weights.common()), "buffers": dict(self.model.named_buffers())}.items():
            other = [
                name for name, each in own.items() if name not in saved[kind] or saved[kind][name].shape != each.shape
            ]
            if other:
                raise ValueError(
                    f"this state has no {other[0]!r} of {own[other[0]].numel()} elements among its {kind}, which this model "
                    "trains or keeps; load the state of the same model, with the same parameters frozen"
                )

    def _load(self, state: SavedState) -> None:
        saved = state[self.integration]
        common = self._weights.from_saved(saved["common"])
        super()._load(state)
        self._take_common(common)
        for name, buffer in self.model.named_buffers():
            if name in saved["buffers"]:
                buffer.detach().copy_(saved["buffers"][name])
        self._totals = dict(saved["totals"])
        self._adopted.clear()

    def _residual_sizes(self) -> dict[str, int]:
        return {name: each.numel() for name, each in self._weights.trained.items()}

    def _check_own(self) -> None:
        """Adopt weights that were set from outside. Raises RuntimeError inside `averaged`, where the model has the common weights."""
        self._check_shown()
        self._adopt()

    def _check_shown(self) -> None:
        if self._shown is not None:
            self._shown.check()

    def _regrouped(self, comm: Comm) -> None:
        self._comm = comm

    def _set_outside(self) -> list[str]:
        """Name the parameters that were set from outside, and not put back since."""
        changed = self._weights.last_written.changed()
        return changed if self._shown is None else self._shown.without_own(changed)

    @abstractmethod
    def _adopt(self) -> list[str]:
        """Make weights that were set from outside the common ones, and return their names."""

    def _take_from_model(self, names: Sequence[str]) -> None:
        """Make the model's present values of these parameters the common weights."""
        if names:
            self._weights.adopt(names)
            self._adopted.update(names)
            self._note_other_move()

    def _loads_of(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Loads:
        return Loads(self._replica.bodies, optimizers, lambda: [each for _, each in self._weights.common()])

    def _go_back(self, last: int) -> list[str]:
        # Ranks compare this, because all of them share moments and exchanges on their way.
        self._comparison.loaded = found = super()._go_back(last)
        return found

    def _check_trained(self) -> None:
        """Raise RuntimeError if the model trains a parameter that was frozen, missing or of another type when this handle was made."""
        if all(self._dtypes.get(id(each)) == each.dtype or not each.requires_grad for each in self.model.parameters()):
            return
        others = [name for name, each in trained(self.model) if self._dtypes.get(id(each)) != each.dtype]
        raise RuntimeError(
            f"{', '.join(others)} was frozen, missing or of another type when the model was attached, and is trained now; call "
            "handle.detach(), and attach again"
        )

    def _count(self, reports: Sequence[Report]) -> None:
        self._reports += reports
        self._totals["bytes_sent"] += sum((report.sent or report.cost).nbytes for report in reports)

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """Mark the step as applied in part if the block raises."""
        try:
            yield
        except BaseException as error:
            self._connection.partly_applied = True
            self._connection.close(error)
            raise


def _model_lines(model: nn.Module) -> list[str]:
    """Describe what the model must have in common on all ranks, line by line."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    layout = [
        f"{kind} {name!r} of {list(each.shape)} in {each.dtype}{', trained' if each.requires_grad else ''}"
        for kind, tensors in kinds.items()
        for name, each in tensors
    ]
    return [f"a model of {sum(each.numel() for each in model.parameters())} parameters", *layout]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: settings
    return {key: deepcopy(value) for key, value in group.items() if key != "params"}
