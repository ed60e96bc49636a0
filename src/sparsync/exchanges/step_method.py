"""The base of all step methods, which exchange what optimizers do to the weights: AdamWSteps and LocalTraining.

Here: common and own weights, `averaged`, clipping, weights that are set from outside, failures, and what all of them save. A method
decides what is exchanged and when. The model is never wrapped.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsync.base.scheme import Scheme
from sparsync.comm.announcement import differences
from sparsync.comm.group import GroupComm
from sparsync.core import Comm, Report, digest
from sparsync.exchanges.own_weights import ShownWeights, frozen_and_copies
from sparsync.exchanges.training_loop import Replica
from sparsync.exchanges.weights import Weights, copy_from_first
from sparsync.runtime.findings import check_scheme
from sparsync.runtime.handle import Handle
from sparsync.runtime.loads import Loads
from sparsync.runtime.optimizers import CHECK_WEIGHTS_EVERY, Comparison, Members, ResidualRescaler
from sparsync.runtime.ownership import check_undriven, drive
from sparsync.runtime.parameter_names import trained
from sparsync.runtime.snapshot import Part, Snapshot

State = Mapping[str, Any]  # Any: as Handle.state_dict
_BUCKET_MB = 25.0


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of all step methods, the same on all ranks. Raises ValueError for a value out of range."""

    keep: float | None = (
        0.0  # in [0, 1], the part of what a rank has not sent that stays in its own weights; None: see `keep_for`
    )
    bucket_mb: float | None = (
        _BUCKET_MB  # megabytes of a bucket; None: all of the model, where a scheme sends every element, else 25
    )
    check_weights_every: int = CHECK_WEIGHTS_EVERY  # steps between two comparisons of the common weights, 0: never

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 <= self.keep <= 1:
            raise ValueError(
                f"keep must be in [0, 1], the share of unsent changes that stays in a rank's own weights, got {self.keep}"
            )
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0 megabytes, got {self.bucket_mb}")

    def keep_for(self, scheme: Scheme) -> float:
        """Return `keep`, or where it is None what suits the scheme."""
        return self.keep or 0.0

    def megabytes_for(self, scheme: Scheme) -> float:
        """Return `bucket_mb`, or where it is None what suits the scheme."""
        if self.bucket_mb is not None:
            return self.bucket_mb
        return _BUCKET_MB if scheme.leaves_out or not scheme.has_residual else math.inf

    def described(self) -> dict[str, object]:
        """Return the options by name, as ranks compare them."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class StepMethod(Handle):
    """A model and its optimizers, where each rank's weights are the common ones plus what it has not sent.

    Making one is collective over the ranks of `group`, or of `comm`: it compares settings, and copies parameters and buffers of rank 0.
    """

    replaces_optimizer = False  # whether `step` is called in place of the optimizer's
    cure_of_set: str  # what to do where each rank has set other weights from outside
    exchanges_buffers = False  # so that ranks need not compare them
    cure_of_unexchanged: str  # what to do where what nothing exchanges differs
    _scheme: Scheme  # pyright: ignore[reportIncompatibleVariableOverride]  # no reduce-scatter form

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
                "use a scheme without, such as TwoShot"
            )
        parameters = replica.trained
        check_undriven(replica.owned.items(), replica.axis)
        model, self._replica = replica.module, replica
        shared = self.replaces_optimizer and options.keep == 0
        self.model, self._weights = model, Weights(parameters, options.megabytes_for(scheme), fragments, shared)
        self._members = Members(model)
        self._types = {name: each.dtype for name, each in replica.owned.items()}
        names = {id(each): name for name, each in replica.owned.items()}
        comparison = Comparison(
            optimizers,
            names,
            self._weights.common,
            options.check_weights_every,
            cure_of_set=self.cure_of_set,
            # Not a method of this handle, which would then wait for the collector of garbage.
            unexchanged=replica.frozen if shared or self.exchanges_buffers else partial(frozen_and_copies, replica),
            cure_of_unexchanged=self.cure_of_unexchanged,
        )
        given = ", ".join(f"{name}={value!r}" for name, value in options.described().items())
        lines = [f"{type(options).__name__}({given})", scheme.config_fingerprint(), *_model_lines(model)]
        fingerprint = "\n".join([*lines, *comparison.settings.read()[1]])
        if comm is None:
            comm = GroupComm.private(group, timeout_s, fingerprint)
        else:
            _compare(fingerprint, comm, self._weights.buckets[0].device)
        super().__init__(scheme, comm, ResidualRescaler(scheme, {}), comparison, replica.part)
        copy_from_first(replica.held(), comm)
        self._weights.adopt(parameters)
        self._adopted = comparison.adopted  # parameters that were set from outside, and not compared since
        self._comm, self._keep = comm, options.keep_for(scheme)
        self._totals = {"bytes_sent": 0}
        self._callbacks: list[Callable[[Part | None], None]] = []  # see `on_move`
        self._shown: ShownWeights | None = None  # where own weights differ from the common ones
        self.on_detach: Sequence[Callable[[], None]] = ()  # what `detach` does besides
        drive(replica.owned.items(), self, replica.axis)

    @abstractmethod
    def step(self) -> list[Report]:
        """Count a step, and exchange what is due; return the reports of it. Call it on every rank."""

    def _settle(self) -> None:
        """Learn what the host does not know yet of the last step."""
        return

    @property
    @abstractmethod
    def clip_factor(self) -> float:
        """The length of a rank's own gradient over that of the mean gradient."""

    def clip_grad_norm_(self, max_norm: float, **options: Any) -> Tensor:  # Any: those of torch's function of this name
        """Clip this rank's own gradient at `clip_factor * max_norm`, and return its norm before.

        `max_norm` is the value for the mean gradient.
        """
        return nn.utils.clip_grad_norm_(list(self._replica.owned.values()), self.clip_factor * max_norm, **options)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the common weights, the same bits on all ranks, into the model, to evaluate or save it; own ones are back afterwards.

        Buffers stay this rank's own. Nothing is sent, so one rank may do it alone. With `Steps(keep=0.0)` they are there anyway.
        """
        if self._shown is None:
            yield
            return
        self._check_own()
        with self._shown.averaged():
            yield

    def stats(self) -> dict[str, int | float]:
        """Return the numbers of `steps` taken, of `exchanges` applied and not applied, and more.

        `bytes_sent`: by this rank. `bits`: sent for each trained parameter and step. `drift`: the distance of this rank's own weights
        from the common ones. `clip_factor`: see there.
        """
        if self._shown is not None:
            self._shown.show(common=False)
        steps = self._step + 1
        bits = 8 * self._totals["bytes_sent"] / (self._weights.elements * steps) if steps else 0.0
        more = {"bits": bits, "drift": self._weights.drift(), "clip_factor": self.clip_factor}
        return {"steps": steps, **self._totals, **more}

    def state_dict(self) -> dict[str, Any]:  # Any: as Handle
        """Return this rank's state, with weights and buffers. Save each rank's; see Handle."""
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
        """Return what this method saves besides common weights, buffers and totals."""

    def snapshot(self, *, shared: bool = True) -> Snapshot:
        found = super().snapshot(shared=shared)
        if found.shared is None:
            return found
        moved, rest = self._parts(found.shared[self.integration])
        return found._replace(moved=moved, shared={**found.shared, self.integration: rest})

    @abstractmethod
    def _parts(self, state: State) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what moves with the common weights, and the rest, without what is a rank's own."""

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; see Handle. With `moved` alone this is a beginning for `moves`, and nothing to train with."""
        with torch.no_grad():
            for move in snapshot.moves:
                self._replay(move)
        if snapshot.moved is not None and snapshot.shared is None:
            self._start_from(snapshot.moved)
        super().restore(snapshot)

    @abstractmethod
    def _start_from(self, moved: State) -> None:
        """Take what moves with the common weights of another rank."""

    @abstractmethod
    def _replay(self, move: Part) -> None:
        """Move the common weights as another rank has moved its own."""

    def on_move(self, callback: Callable[[Part | None], None]) -> Callable[[], None]:
        def end() -> None:
            self._callbacks = [each for each in self._callbacks if each is not callback]

        self._callbacks.append(callback)
        return end

    def _note_move(self, means: Sequence[Tensor], **more: Any) -> None:  # Any: numbers, names and settings
        """Tell of what moves the common weights now: `means` [n] and what else `_replay` needs."""
        for each in self._callbacks:
            each({"means": means, "groups": self._settings(), **more})

    def _settings(self) -> list[dict[str, Any]]:  # Any: settings
        """Return the settings of the optimizer of the common weights, by group."""
        return [_settings(group) for each in self._movers() for group in each.param_groups]

    def _take_settings(self, found: Sequence[Mapping[str, Any]]) -> None:  # Any: settings
        groups = [group for each in self._movers() for group in each.param_groups]
        for group, settings in zip(groups, found, strict=True):
            group.update(settings)

    @abstractmethod
    def _movers(self) -> Sequence[Optimizer]:
        """Return the optimizers whose settings say how the common weights move."""

    def _take_common(self, common: Sequence[Tensor]) -> None:
        for bucket, weights in zip(self._weights.buckets, common, strict=True):
            bucket.put_common(weights)
        self._note_other_move()

    def _note_other_move(self) -> None:
        for each in self._callbacks:
            each(None)

    def load_state_dict(self, state: State) -> None:
        """Continue from what `state_dict` returned; see Handle. Settings may have changed."""
        self._check_own()
        super().load_state_dict(state)

    def close(self) -> None:
        """Leave the common weights in the model, and give back connections and threads; see Handle."""
        if self._shown is not None:
            self._shown.release()
        super().close()

    def detach(self) -> None:
        """Have the model train as it did before `attach`, from the common weights. Call it on all ranks, between two steps."""
        for each in self.on_detach:
            each()
        self._detached = True
        self.close()

    def _check(self, state: State) -> None:
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

    def _load(self, state: State) -> None:
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
        """Adopt weights that were set from outside. Raises RuntimeError inside `averaged`, where these are not the own ones."""
        self._check_shown()
        self._adopt()

    def _check_shown(self) -> None:
        if self._shown is not None:
            self._shown.check()

    def _regrouped(self, comm: Comm) -> None:
        self._comm = comm

    def _set_outside(self) -> list[str]:
        """Return the names of the parameters that were set from outside, and not put back since to what they were."""
        changed = self._weights.changed()
        return changed if self._shown is None else self._shown.without_own(changed)

    @abstractmethod
    def _adopt(self) -> list[str]:
        """Take weights that were set from outside for the common ones, and return their names."""

    def _take_from_model(self, names: Sequence[str]) -> None:
        """Make the model's present values of these parameters the common weights."""
        if names:
            self._weights.adopt(names)
            self._adopted.update(names)
            self._note_other_move()

    def _loads_of(self, module: nn.Module | None, optimizers: Sequence[Optimizer]) -> Loads:
        return Loads(self._replica.bodies, optimizers, lambda: [each for _, each in self._weights.common()])

    def _go_back(self, last: int) -> list[str]:
        # Ranks compare it, because moments, and what is on its way, are the same on all of them.
        self._comparison.loaded = found = super()._go_back(last)
        return found

    def _check_trained(self) -> None:
        """Raise RuntimeError where the model trains a parameter that was not trained, or of another type, when this handle was made."""
        for name, each in self._replica.owned.items():
            if each.dtype != self._types[name]:
                raise RuntimeError(
                    f"{name} was {self._types[name]} when the model was attached and is {each.dtype} now, as after model.to(...); "
                    "convert it before sparsync.attach, or call handle.detach() and attach again"
                )
        if not self._members.changed():
            return
        known = {id(each) for each in self._replica.owned.values()}
        thawed = [name for name, each in trained(self.model) if id(each) not in known]
        if not thawed:
            self._members.note()
            return
        raise RuntimeError(
            f"{', '.join(thawed)} was frozen or missing when the model was attached, and is trained now; call "
            "handle.detach(), and attach again"
        )

    def _count(self, reports: Sequence[Report]) -> None:
        self._reports += reports
        self._totals["bytes_sent"] += sum((report.sent or report.cost).nbytes for report in reports)

    @contextmanager
    def _applying(self) -> Iterator[None]:
        """Have an error inside leave this rank with a step that was applied in part."""
        try:
            yield
        except BaseException as error:
            self._connection.close_partly_applied(error)
            raise


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: settings
    return {key: deepcopy(value) for key, value in group.items() if key != "params"}


def _model_lines(model: nn.Module) -> list[str]:
    """Return what must be the same of the model on all ranks, line by line."""
    kinds = {"parameter": model.named_parameters(), "buffer": model.named_buffers()}
    layout = [
        f"{kind} {name!r} of {list(each.shape)} in {each.dtype}{', trained' if each.requires_grad else ''}"
        for kind, tensors in kinds.items()
        for name, each in tensors
    ]
    return [f"a model of {sum(each.numel() for each in model.parameters())} parameters", *layout]


def _compare(fingerprint: str, comm: Comm, device: torch.device) -> None:
    """Raise RuntimeError, on all ranks, that names the lines in which a rank's fingerprint differs."""
    mine = torch.frombuffer(bytearray(fingerprint.encode()), dtype=torch.uint8).to(device)
    digests = comm.all_gather(torch.tensor([digest(fingerprint)], device=device), [1] * comm.size)
    if all(torch.equal(each, digests[0]) for each in digests):
        return
    texts = [bytes(each.tolist()).decode() for each in comm.all_gather(mine)]
    other = next(rank for rank, text in enumerate(texts) if text != fingerprint)
    found = differences(fingerprint.split("\n"), texts[other].split("\n"), comm.rank, other)
    raise RuntimeError(f"ranks must agree, but {found}; give all ranks the same settings and the same model")
