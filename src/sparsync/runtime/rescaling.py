"""Residuals follow the optimizer: its learning rate, the loss scale, its clipping, and steps that the loop skips.

Residuals are in units of a learning rate and a loss scale, and are rescaled when these change: rate * residual stays the same, so every
gradient is applied at the rate of its step, however late it is sent. This ends at a tenth of the highest rate so far. Below, late parts are
applied at the lower rate: if a schedule ends at zero, residuals would grow without bound, and be clipped or lost.

A step that clipping cuts to less than the usual share counts less in the residual too, or the unsent part of a spike would follow uncut.
With f = share / usual share, the residual becomes f * (after the step) + (1 - f) * (before it). Usual clipping changes nothing, because it
cuts what is sent later as well. The share is measured: the norm of a parameter's gradient when the optimizer's step begins, over the norm
of the reduced gradient when it was written.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import ShardState, parameter_of
from sparsync.base.state import State
from sparsync.core import Bucket
from sparsync.runtime.findings import innermost

FOLLOWED = 10.0  # highest rate / lowest rate that residuals follow: the largest factor that scales them up
USUAL_STEPS = 32  # the usual share is a mean over them; one spike lowers it by a 32nd at most
UNCUT = 0.999  # share / usual share from which a step counts as not clipped

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # of `step`, the optimizer first, as torch passes them to hooks


_ROW = 3  # successive steps with a thrown-away pass before each: the loop uses these gradients, for example one pass per loss
_MOST = 16  # thrown-away passes without a step: other optimizers step


def current_pass() -> int:
    """Get the number of the backward pass that runs in this thread, or -1."""
    # HACK: torch has no public function for this. Price: it may change with torch; tests skip steps and accumulate.
    return torch._C._current_graph_task_id()


class BackwardPasses:
    """Counts the backward passes since the last step whose gradients were thrown away: the next pass finds none, or zeros.

    `gradients` returns the parameters' gradients. Zeros that a pass itself has made, as seen by `begins`, count as kept.
    """

    def __init__(self, gradients: Callable[[], Iterable[Tensor | None]]) -> None:
        self._gradients = gradients
        self._task = -1  # the last backward pass
        self._came, self.thrown_away = False, 0
        self._nonzero: Tensor | None = None  # the first gradient of the pass is not zero; None: not known
        self._row: int | None = None  # of successive steps with a thrown-away pass before them; None: no step

    @property
    def skips(self) -> bool:
        """True if a thrown-away pass is a skipped step, and not the habit of this loop."""
        return self._row is not None and self._row < _ROW and self.thrown_away <= _MOST

    def stepped(self) -> None:
        """Begin again: a step was taken, or has failed."""
        self._row = (self._row or 0) + 1 if self.thrown_away else 0
        self._came, self.thrown_away = False, 0

    def came(self, kept: bool = True) -> None:
        """Note gradients that may be thrown away; not `kept`: the residuals do not depend on them."""
        self._came = kept

    def begins(self, gradient: Tensor | None = None) -> bool:
        """Note that `gradient` is about to be accumulated; return True if a pass begins and the last one was thrown away."""
        task = current_pass()
        if task in (self._task, -1):
            return False
        self._task = task
        thrown_away = self.gone()
        values = gradient._values() if gradient is not None and gradient.is_sparse else gradient
        self._nonzero = None if values is None else values.any()  # no host sync here
        return thrown_away

    def gone(self) -> bool:
        """Tell whether the gradients of the last pass were thrown away since the last call. Not inside a pass."""
        thrown_away = self._came and not self._kept()
        self.thrown_away += thrown_away
        self._came = self._came and not thrown_away
        return thrown_away

    def _kept(self) -> bool:
        """Tell whether any gradient is not zero, or still the zero of its pass. A host sync per zero, and for the first nonzero one."""
        gradients = [each._values() if each.is_sparse else each for each in self._gradients() if each is not None]
        if gradients and self._nonzero is not None and not bool(self._nonzero):
            return True  # such as a batch without any loss
        return any(bool(each.any()) for each in gradients)


@dataclass
class UsualShare:
    """The share of a reduced gradient that clipping usually leaves."""

    mean: float | None = None  # None: no step so far
    steps: int = 0  # in the mean
    cuts: bool = False  # a step was cut to less: residuals are then held before every step

    def weigh(self, share: float) -> float:
        """Add the share that the optimizer got of a step to the mean; return it over the usual share, at most 1."""
        usual = share if self.mean is None else self.mean
        self.steps = min(self.steps + 1, USUAL_STEPS)
        self.mean = usual + (share - usual) / self.steps
        if share >= UNCUT * usual:
            return 1.0
        self.cuts = True
        return share / usual


@dataclass
class ResidualUnits:
    """The learning rates and the loss scale of residuals, and the share of a gradient that clipping leaves."""

    rates: dict[str, float] = field(default_factory=dict)  # by parameter name, at least a tenth of the highest
    highest: dict[str, float] = field(default_factory=dict)  # so far, by parameter name
    scale: float | None = None  # None: there is no residual yet
    clipping: list[UsualShare] = field(default_factory=list)  # by optimizer, because each may be clipped separately

    def usual_share(self, optimizer: int) -> UsualShare:
        """Get the usual share of the optimizer with this number."""
        self.clipping += [UsualShare() for _ in range(optimizer + 1 - len(self.clipping))]
        return self.clipping[optimizer]

    def follow(self, name: str, rate: float) -> float:
        """Make `rate` the unit of a parameter's residual; return the factor that converts the residual.

        The factor is old rate / new rate, both at least 1 / FOLLOWED of the highest so far. A rate of zero changes nothing, because
        nothing is applied at it.
        """
        if rate == 0.0:
            return 1.0
        self.highest[name] = max(rate, self.highest.get(name, rate))
        new = max(rate, self.highest[name] / FOLLOWED)
        old = self.rates.get(name, new)
        self.rates[name] = new
        return old / new


class ResidualRescaler:
    """Rescales the residuals of a state when the rate of an optimizer or the scale of `scaler` has changed, or a step was clipped.

    `names` maps parameter ids to names. Without an optimizer, or without `follow_rates`, the rate counts as constant; without a scaler the
    scale is 1. `adds_up`: see Clipping. Raises TypeError unless `scaler` is a torch.amp.GradScaler.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        scaler: GradScaler | None = None,
        follow_rates: bool = True,
        adds_up: bool = False,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or ()
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise TypeError(
                f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}; pass the scaler itself"
            )
        self.units = ResidualUnits()
        self.names, self.scaler = dict(names), scaler
        # Weakly: the finalizer of a handle refers to this object, and an optimizer may keep its handle alive.
        self._optimizers = [weakref.ref(each) for each in optimizers] if follow_rates else []
        self._state: Any = None  # Any: a State, from `use` on
        self.clippings = [Clipping(each, self.names, adds_up) for each in optimizers]
        self._held: int | None = None  # the number of steps done when residuals were held; None: they are not held
        self.takes_back = False  # residuals are held before every step, for `take_back`
        self._thrown_away = False  # the last reduced gradients were thrown away without a step

    def use(self, state: State) -> None:
        """Rescale the residuals of another state from now on; they have the units of the last state's."""
        self._state, self._held = state, None

    def written(self, bucket: Bucket, rolled_back: bool) -> None:
        """Note a reduced bucket; `rolled_back`: a bucket of its step holds NaN or Inf, see Rollback."""
        if self.clippings:
            if (passes := self._passes()) is not None:
                passes.came(not rolled_back)
            names = [entry.name for entry in bucket.layout]
            sharded = isinstance(self._state, ShardState)
            norms = _norms([entry.span.of(bucket.grad) for entry in bucket.layout])
            for each in self.clippings:
                each.written([parameter_of(name) for name in names] if sharded else names, norms)

    def rolled_back(self) -> None:
        """Note that the last reduction was rolled back later."""
        if (passes := self._passes()) is not None:
            passes.came(kept=False)

    def rescale(self) -> None:
        """Convert the residuals to the units of this step. Call it once per step, before its first bucket."""
        self.settle()
        self._undo_thrown_away()
        if factors := self.factors():
            self._state.rescale(factors)
        cuts = any(self.units.usual_share(number).cuts for number in range(len(self.clippings)))
        if self.takes_back or cuts:
            self.hold()

    def pass_begins(self, failed: bool) -> None:
        """Note that a backward pass is about to add to the gradients; `failed`: the last step has failed, so there is nothing to undo."""
        if (passes := self._passes()) is not None and passes.begins():
            self._thrown_away |= passes.skips and not failed

    def undo(self, failed: bool) -> None:
        """Undo the last reduction if its gradients were thrown away, before a state is saved. `failed` as for `pass_begins`."""
        if (passes := self._passes()) is not None and passes.gone():
            self._thrown_away |= passes.skips and not failed
        self._undo_thrown_away()

    def _passes(self) -> BackwardPasses | None:
        """Get the count of backward passes; None with several optimizers, because not all may step after every pass."""
        return self.clippings[0].passes if len(self.clippings) == 1 else None

    def _undo_thrown_away(self) -> None:
        """Restore the residuals from before thrown-away gradients; zeros the first time, when no copy is held."""
        if self._thrown_away:
            self._state.weigh(dict.fromkeys(self.names.values(), 0.0))
            self.clippings[0].forget()
            self.units.usual_share(0).cuts = True
            self._held = None
        self._thrown_away = False

    def hold(self) -> None:
        """Copy the residuals before a step."""
        if self._held != (self.done or 0):
            self._state.vectors.hold()
            self._held = self.done or 0

    def applied(self) -> None:
        """Note that the step was applied, if this object does not watch the optimizer."""
        self._held = None

    @property
    def done(self) -> int | None:
        """The number of steps that the first optimizer has taken; None if it is not watched."""
        return self.clippings[0].done if self.clippings else None

    def count(self, done: int | None) -> None:
        """Set the number of steps that the first optimizer has taken, if it is watched."""
        if self.clippings and done is not None:
            self.clippings[0].done = done

    def take_back(self, names: Iterable[str]) -> None:
        """Restore the residuals of these parameters from before a step that was not applied, if a copy is held."""
        if self.takes_back and self._held == (self.done or 0):
            self._state.weigh(dict.fromkeys(names, 0.0))
        self._held = None

    def settle(self) -> None:
        """Weigh the residuals by the share of the last step that the optimizer has applied."""
        factors: dict[str, float] = {}
        for number, clipping in enumerate(self.clippings):
            if (found := clipping.take()) is None:
                continue
            names, share = found
            # The optimizer gets gradients without the loss scale.
            factor = self.units.usual_share(number).weigh(share * (self.units.scale or 1.0))
            factors |= dict.fromkeys(names, factor)
        if cut := {name: factor for name, factor in factors.items() if factor < 1.0}:
            self._state.weigh(cut)
        self._held = None if factors else self._held

    def restart(self) -> None:
        """Begin with the units of the next step, after the residuals were dropped. Keeps `UsualShare.cuts`."""
        self.forget()
        self.units.rates, self.units.highest, self.units.scale = {}, {}, None
        self.units.clipping = [UsualShare(cuts=each.cuts) for each in self.units.clipping]

    def forget(self) -> None:
        """Forget the last step, because another state was loaded."""
        self._held, self._thrown_away = None, False
        for each in self.clippings:
            each.forget()
        if (passes := self._passes()) is not None:
            passes.came(kept=False)

    def close(self) -> None:
        """Settle, and stop watching the optimizers. Safe to call again."""
        self.settle()
        for each in self.clippings:
            each.close()

    def factors(self) -> dict[str, float]:
        """Compute the factors of parameters whose units have changed since the last call: `follow` times new scale / old scale."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # a host sync on CUDA
        before, self.units.scale = self.units.scale or scale, scale
        changed = dict.fromkeys(self.names.values(), scale / before) if before != scale else {}
        for group in (
            group for each in self._optimizers if (found := each()) is not None for group in found.param_groups
        ):
            rate = float(group["lr"])
            for name in (self.names[id(each)] for each in group["params"] if id(each) in self.names):
                factor = self.units.follow(name, rate)
                if factor != 1.0:
                    changed[name] = changed.get(name, 1.0) * factor
        return changed


class Clipping:
    """Measures the clipping in the steps of `optimizer`, until `close`. `names` maps parameter ids to names, and may grow.

    A gradient that is reduced again before a step replaces the first one; with `adds_up` it is added, and its norm is unknown.
    The optimizer does not keep this object alive.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], adds_up: bool = False) -> None:
        self._names, self._adds_up = names, adds_up
        self._written: dict[str, Tensor] = {}  # norms by parameter name, when the gradient was written,
        self._applied: dict[str, Tensor] = {}  # and when the step began
        self._loss_scale: Tensor | float = 1.0  # still in the applied gradient
        self.passes: BackwardPasses | None = None  # told of every step
        self.done = 0  # steps
        known = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            clipping = known()
            return clipping._before_step(optimizer, args, kwargs) if clipping is not None else None

        self._hook = innermost(optimizer).register_step_pre_hook(before_step)
        weakref.finalize(self, self._hook.remove).atexit = False

    def close(self) -> None:
        """Stop watching. Safe to call again."""
        self._hook.remove()

    def written(self, names: Iterable[str], norms: Sequence[Tensor]) -> None:
        """Note a reduced gradient by the names and norms of its parameters."""
        for name, norm in zip(names, norms, strict=True):
            self._written[name] = norm * torch.nan if self._adds_up and name in self._written else norm

    def forget(self) -> None:
        """Forget the steps since the last `take`."""
        self._written, self._applied = {}, {}

    def take(self) -> tuple[list[str], float] | None:
        """Take the parameters of the latest step, and the share of their reduced gradient that it applied.

        None if there was no step since the last call, or if a norm is unknown or not finite. The share is of the norm of all gradients
        together, because a sparse gradient may be zero in some parameters.
        """
        if not self._applied:
            return None
        names = list(self._applied)
        applied, written = _values([*self._applied.values()]), _values([self._written[name] for name in names])
        scale = float(self._loss_scale)
        self.forget()
        # A parameter that no rank used keeps a gradient of zero, even if something else was written for it.
        used = [other for one, other in zip(applied, written, strict=True) if one != 0] or written
        before = math.hypot(*used) * scale
        share = math.hypot(*applied) / before if before else math.nan
        return (names, share) if math.isfinite(share) else None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        named = "closure" in kwargs
        closure = kwargs["closure"] if named else args[1] if len(args) > 1 else None
        if closure is None:
            self._measure(optimizer)
            return None

        def measured() -> Any:  # Any: the result of the closure
            loss = closure()
            self._measure(optimizer)
            return loss

        return (args, {**kwargs, "closure": measured}) if named else ((*args[:1], measured, *args[2:]), kwargs)

    def _measure(self, optimizer: Optimizer) -> None:
        self.done += 1
        if self.passes is not None:
            self.passes.stepped()
        names, gradients = self._names, {}
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            name, grad = names.get(id(parameter)), parameter.grad
            if grad is not None and name in self._written and grad.layout == torch.strided:
                gradients[name] = grad.to_local() if hasattr(grad, "to_local") else grad
        self._applied = dict(zip(gradients, _norms(list(gradients.values())), strict=True))
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        self._loss_scale = 1.0 if scale is None else scale


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Compute the norm of each tensor, at least in float32, without a host sync."""
    if not tensors:
        return []
    wide = any(each.dtype == torch.float64 for each in tensors)
    # HACK: torch has no public function for many norms in a few CUDA kernels. Price: it may change with torch.
    return torch._foreach_norm(tensors, 2, torch.float64 if wide else torch.float32)  # pyright: ignore[reportPrivateImportUsage]


def _values(norms: list[Tensor]) -> list[float]:
    """Read norms as numbers: a host sync on CUDA."""
    return torch.stack([each.to(norms[0].device) for each in norms]).tolist()
