"""What is read from the user's optimizers and model in each step: settings that ranks compare, rates and clipping that residuals follow.

Ranks compare settings before each bucket, and every few steps a digest of the weights; see `Connection`.

Residuals are in units of a learning rate and a loss scale, and are rescaled when these change: rate * residual stays the same, so every
gradient is applied at its own rate, whenever it is sent. This ends at a tenth of the highest rate so far. Below, what is sent late is
applied at the lower rate: where a schedule ends at zero residuals would grow without bound, and be clipped or lost.

A step that clipping cuts to less than the usual share counts less in the residual too, or the unsent part of a spike would follow whole.
With f its share over the usual one, the residual becomes f times what it is after the step + (1 - f) times what it was before. Usual
clipping changes nothing, as it cuts what is sent later as well. The share is measured: the norm of each parameter's gradient when the
optimizer's step begins, over that of the reduced gradient when it was written.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from sparsync.base.scheme import ShardState, parameter_of
from sparsync.base.state import State
from sparsync.comm.announcement import Told
from sparsync.core import Bucket, digest
from sparsync.kernels import operations as kernels
from sparsync.runtime.between_steps import BackwardPasses
from sparsync.runtime.findings import innermost, with_inner

CHECK_WEIGHTS_EVERY = 100  # steps

_SETTINGS_CURE = (
    "give the optimizers of all ranks the same settings at every step: step schedules equally often on all ranks, give one that "
    "follows the loss the mean loss of all ranks, and freeze the same parameters on all of them"
)
_WEIGHTS_CURE = (
    "load the same weights on all ranks, or change them in the same way, before the same step; or pass check_weights_every=0, where ranks "
    "are machines whose arithmetic differs in last bits"
)
_SAVED_CURE = (
    "call sparsync.checkpoint.save on every rank after the same step, because each has residuals that the others lack: not inside "
    "`if rank == 0`"
)
_LOADED_CURE = "load the same states into model, optimizer and handle on all ranks, before the same step"
_SKIPPED_CURE = (
    "skip a step on all ranks or on none: decide by handle.clip_grad_norm_(max_norm), which returns the same norm on all of them, and not "
    "by a rank's own norm or loss"
)

# Settings also of an optimizer that has no such argument, because it takes its groups ready-made.
_COMMON = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})

Named = Iterable[tuple[str, Tensor]]


class Compared(NamedTuple):
    """What must be the same on all ranks at one step: a number, and what it stands for."""

    number: int = 0
    # Checkpoints, settings of optimizers, weights, and what came since the last step: loaded states, and gradients that were thrown away.
    told: tuple[Told, ...] = (Told([], ""),) * 5


class Comparison:
    """Reads what ranks compare: settings of `optimizers`, and every `every` steps (0: never) what `weights` returns.

    `names` has each parameter's name by its id. Nothing is compared while `applies`, the same on all ranks, returns False.
    `adopted` has the names of weights that were set from outside, which are compared in the next step; the owner fills and clears it, and
    `cure` says what to do where weights differ. `where_stepped`: weights are read when an optimizer has stepped, and not in the backward
    pass, for which some loops move each rank's weights, as SAM does. `saved`: a checkpoint was since the last step; the owner sets it.
    `loaded` says what was loaded before the next step, see `Loads`, and `thrown_away` how many backward passes came for nothing, see
    `BackwardPasses`. Raises ValueError for an `every` that is no whole number from 0 on.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        weights: Callable[[], Named] | None,
        every: int,
        applies: Callable[[], bool] = lambda: True,
        cure: str = _WEIGHTS_CURE,
        where_stepped: bool = False,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"check_weights_every must be a whole number of steps from 0 on (0: never), got {every!r}")
        self.optimizers, self.settings = optimizers, OptimizerSettings(optimizers, names)
        self.adopted: set[str] = set()
        self.saved = False
        self.loaded: Sequence[str] = ()
        self.thrown_away = 0
        self._weights, self._every, self._applies, self._cure = weights, every, applies, cure
        self._step = -1  # the last one that was compared
        self._read: list[str] | None = None  # lines of the weights, as the optimizer has left them
        self._watches = where_stepped and every > 0 and weights is not None and self._watch(optimizers)

    def compare(self, weights: Callable[[], Named], cure: str) -> None:
        """Compare other tensors from here on, with another cure."""
        self._weights, self._cure = weights, cure

    def at(self, step: int, steps: int = 1) -> Compared:
        """Return what to compare before `step`: weights too where a check was due in one of the last `steps` steps."""
        saved, self.saved = [f"a checkpoint saved before step {step}"] if self.saved else [], False
        if not self._applies():
            return Compared()
        number, settings = self.settings.read()
        due = bool(self._every) and step // self._every * self._every > step - steps
        if self._watches:
            self._step, self._read = step, self._read if steps == 1 else None
            due = due if steps > 1 else self._read is not None
        weights: list[str] = []
        if self._weights is not None and (due or self.adopted):
            named = ((name, each) for name, each in self._weights() if due or name in self.adopted)
            lines, self._read = self._read or weight_lines(named), None
            weights = [f"{line} {'' if due else 'set from outside '}before step {step}" for line in lines]
        loaded = [f"a state of the {each} loaded before step {step}" for each in self.loaded]
        thrown, count = [], self.thrown_away
        if count:
            passes = f"{count} backward pass{'es' if count > 1 else ''}"
            thrown = [f"{passes} before step {step} whose gradients were thrown away without a step"]
        for lines in (saved, weights, [*loaded, *thrown]):
            number ^= digest("\n".join(lines)) if lines else 0
        told = (
            Told(saved, _SAVED_CURE),
            Told(settings, _SETTINGS_CURE),
            Told(weights, self._cure),
            Told(loaded, _LOADED_CURE),
            Told(thrown, _SKIPPED_CURE),
        )
        return Compared(number, told)

    def _watch(self, optimizers: Iterable[Optimizer]) -> bool:
        """Read weights after steps of these optimizers and of those inside them; return whether any tells of its steps."""
        known = weakref.ref(self)  # an optimizer does not keep what is attached

        def after_step(*_: object) -> None:
            if (found := known()) is not None:
                found._read_weights()

        # Any: torch types what it returns as a function of named arguments
        hook: Any = torch.compiler.disable(after_step)
        every = [one for outer in optimizers for one in with_inner(outer)]
        telling = [each for each in every if "_optimizer_step_post_hooks" in vars(each)]
        for each in telling:
            each.register_step_post_hook(hook)
        return bool(telling)

    def _read_weights(self) -> None:
        """Read the weights for the next step, if they are to be compared there; the first time after the first step."""
        due = self._step <= 0 or (self._step + 1) % self._every == 0
        if due and self._read is None and self._weights is not None and self._applies():
            self._read = weight_lines(self._weights())


class OptimizerSettings:
    """The settings of each parameter group of some optimizers, and the names of its parameters, with whether they are frozen.

    A setting is an argument of the optimizer's class. Anything else in a group is state that the optimizer keeps there, such as a number
    of steps or a rate that it has found itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._names, kinds = names, [type(innermost(each)) for each in optimizers]
        self._optimizers = list(zip(optimizers, [each.__name__ for each in kinds], map(_options, kinds), strict=True))
        # Lines and digest, made again only where something has changed.
        self._value_lines = lru_cache(maxsize=1)(self._made_value_lines)
        self._member_lines = lru_cache(maxsize=1)(self._made_member_lines)

    def read(self) -> tuple[int, list[str]]:
        """Return a digest of the present settings, and the settings line by line."""
        if not self._optimizers:
            return 0, []
        values, members = [], []
        for optimizer, kind, options in self._optimizers:
            for place, group in enumerate(optimizer.param_groups):
                settings = tuple((key, _plain(group[key])) for key in options if key in group)
                values.append((kind, place, len(optimizer.param_groups), settings))
                members.append(tuple((id(each), each.requires_grad) for each in group["params"]))
        (one, value_lines), (two, member_lines) = self._value_lines(*values), self._member_lines(*members)
        return one ^ two, [*value_lines, *member_lines]

    @staticmethod
    def _made_value_lines(*groups: tuple[str, int, int, tuple[tuple[str, object], ...]]) -> tuple[int, list[str]]:
        lines = []
        for kind, place, count, settings in groups:
            lines += [f"{count} parameter groups of {kind}"] if place == 0 else []
            lines += [f"{key}={value!r} in parameter group {place} of {kind}" for key, value in settings]
        return digest("\n".join(lines)), lines

    def _made_member_lines(self, *groups: object) -> tuple[int, list[str]]:
        """Return a line for each parameter, sorted, so that the same parameter has the same place on all ranks."""
        lines = sorted(
            f"{self._described(each)} in parameter group {place} of {kind}{'' if each.requires_grad else ', frozen'}"
            for optimizer, kind, _ in self._optimizers
            for place, group in enumerate(optimizer.param_groups)
            for each in group["params"]
        )
        return digest("\n".join(lines)), lines

    def _described(self, parameter: Tensor) -> str:
        name = self._names.get(id(parameter))
        return f"a parameter of {list(parameter.shape)}" if name is None else f"parameter {name!r}"


def weight_lines(weights: Named) -> list[str]:
    """Return a line with the digest of each tensor, which changes with any element, and where two are swapped. A host sync."""
    named = dict(weights)
    digests = kernels.digests([each.detach() for each in named.values()]).tolist()
    return [
        f"weights {name!r} with digest {one & (1 << 64) - 1:016x}" for name, one in zip(named, digests, strict=True)
    ]


@cache
def _options(kind: type) -> tuple[str, ...]:
    """Return the common settings, and the arguments of an optimizer's class and of its base classes."""
    made = [each for each in kind.__mro__ if "__init__" in vars(each)]
    arguments = {name for each in made for name in inspect.signature(each.__init__).parameters}
    return tuple(sorted(_COMMON | arguments - {"params"}))


def _plain(value: object) -> object:
    """Return a number, a text or a tuple of them in one form, and "" for anything else."""
    if isinstance(value, Tensor):
        return _plain(value.item()) if value.numel() == 1 else ""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, (bool, str)) or value is None else ""


FOLLOWED = 10.0  # highest rate / lowest rate that residuals follow: the most that they are scaled up by
USUAL_STEPS = 32  # of which the usual share is the mean; one spike lowers it by a 32nd at most
UNCUT = 0.999  # share of the usual one from which a step counts as not clipped

# The arguments of a step, as torch passes them to hooks: the optimizer comes first.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class UsualShare:
    """The share of a reduced gradient that clipping usually leaves."""

    mean: float | None = None  # None: no step was seen yet
    steps: int = 0  # of which it is the mean
    cuts: bool = False  # whether any step was cut to less: residuals are then held before each step

    def weigh(self, share: float) -> float:
        """Return the share that the optimizer got of a step over the usual share, at most 1."""
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
    clipping: list[UsualShare] = field(default_factory=list)  # of each optimizer, which may be clipped by itself

    def usual_share(self, optimizer: int) -> UsualShare:
        """Return the usual share of the optimizer with this number."""
        self.clipping += [UsualShare() for _ in range(optimizer + 1 - len(self.clipping))]
        return self.clipping[optimizer]

    def follow(self, name: str, rate: float) -> float:
        """Return the factor that brings the residual of a parameter to this rate, which becomes its unit.

        The factor is old rate / new rate, each at least 1 / FOLLOWED of the highest so far. A rate of zero, at which nothing is applied,
        changes nothing.
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

    `names` has each parameter's name by its id. Without an optimizer, or without `follow_rates`, the rate counts as constant; without a
    scaler the scale is 1. `adds_up`: see Clipping. Raises TypeError for a scaler that is no torch.amp.GradScaler.
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
        # Weakly: what closes a handle that is gone refers to this, and an optimizer may keep its handle.
        self._optimizers = [weakref.ref(each) for each in optimizers] if follow_rates else []
        self._state: Any = None  # Any: a State, from `use` on
        self.clippings = [Clipping(each, self.names, adds_up) for each in optimizers]
        self._held: int | None = None  # steps that were done when residuals were held; None: they are not
        self.takes_back = False  # residuals are held before every step, for `take_back`
        self._thrown_away = False  # the gradients that were reduced last, and no step was taken with them

    def use(self, state: State) -> None:
        """Rescale the residuals of another state from now on; they are in the units of the last one's."""
        self._state, self._held = state, None

    def written(self, bucket: Bucket, rolled_back: bool) -> None:
        """Note a reduced bucket; `rolled_back`: it holds NaN or Inf, or another one of its step does, see Rollback."""
        if self.clippings:
            if (passes := self._passes()) is not None:
                passes.came(not rolled_back)
            names = [entry.name for entry in bucket.layout]
            sharded = isinstance(self._state, ShardState)
            norms = _norms([entry.span.of(bucket.grad) for entry in bucket.layout])
            for each in self.clippings:
                each.written([parameter_of(name) for name in names] if sharded else names, norms)

    def rolled_back(self) -> None:
        """Note that the last reduction was rolled back after all."""
        if (passes := self._passes()) is not None:
            passes.came(kept=False)

    def rescale(self) -> None:
        """Bring the residuals to the units of this step. Call it once a step, before its first bucket."""
        self.settle()
        self._undo_thrown_away()
        if factors := self.factors():
            self._state.rescale(factors)
        cuts = any(self.units.usual_share(number).cuts for number in range(len(self.clippings)))
        if self.takes_back or cuts:
            self.hold()

    def pass_begins(self, failed: bool) -> None:
        """Note that a backward pass is about to add to the gradients; `failed`: the last one, of which nothing is undone."""
        if (passes := self._passes()) is not None and passes.begins() and passes.skips and not failed:
            self._thrown_away = True

    def undo(self, failed: bool) -> None:
        """Undo the last reduction where its gradients were thrown away, for a state to be saved; `failed`: as for `pass_begins`."""
        if (passes := self._passes()) is not None and passes.gone() and passes.skips and not failed:
            self._thrown_away = True
        self._undo_thrown_away()

    def _passes(self) -> BackwardPasses | None:
        """Return what counts backward passes; None with several optimizers, which need not step after each pass."""
        return self.clippings[0].passes if len(self.clippings) == 1 else None

    def _undo_thrown_away(self) -> None:
        """Make the residuals what they were before gradients that no step was taken with; zero the first time, when nothing is held."""
        if self._thrown_away:
            self._state.weigh(dict.fromkeys(self.names.values(), 0.0))
            self.clippings[0].forget()
            self.units.usual_share(0).cuts = True
            self._held = None
        self._thrown_away = False

    def hold(self) -> None:
        """Copy the residuals before a step."""
        if not self._holds:
            self._state.vectors.hold()
            self._held = self.done or 0

    def applied(self) -> None:
        """Note that the step was applied, where this does not watch the optimizer."""
        self._held = None

    @property
    def done(self) -> int | None:
        """The steps that the first optimizer has taken; None where it is not watched."""
        return self.clippings[0].done if self.clippings else None

    def count(self, done: int | None) -> None:
        """Make `done` the number of steps that the first optimizer has taken, where it is watched."""
        if self.clippings and done is not None:
            self.clippings[0].done = done

    @property
    def _holds(self) -> bool:
        return self._held is not None and self._held == (self.done or 0)

    def take_back(self, names: Iterable[str]) -> None:
        """Make the residuals of these parameters what they were before a step that was not applied, if they were held for that."""
        if self.takes_back and self._holds:
            self._state.weigh(dict.fromkeys(names, 0.0))
        self._held = None

    def settle(self) -> None:
        """Make the residuals what the last step has left, as far as the optimizer has applied it."""
        factors: dict[str, float] = {}
        for number, clipping in enumerate(self.clippings):
            if (found := clipping.take()) is None:
                continue
            names, share = found
            # The optimizer gets gradients without the loss scale.
            factor = self.units.usual_share(number).weigh(share * (self.units.scale or 1.0))
            factors |= dict.fromkeys(names, factor)
        if not factors:
            return
        if cut := {name: factor for name, factor in factors.items() if factor < 1.0}:
            self._state.weigh(cut)
        self._held = None

    def restart(self) -> None:
        """Begin with the units of the next step: there is no residual any more. Whether any step was cut stays known."""
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
        """Return the factor of each parameter whose units have changed since the last call: `follow` times new scale / old scale."""
        scale = 1.0 if self.scaler is None else float(self.scaler.get_scale())  # a host sync on CUDA
        before, self.units.scale = self.units.scale or scale, scale
        changed = dict.fromkeys(self.names.values(), scale / before) if before != scale else {}
        optimizers = [found for each in self._optimizers if (found := each()) is not None]
        for group in (group for each in optimizers for group in each.param_groups):
            rate = float(group["lr"])
            for name in (self.names[id(each)] for each in group["params"] if id(each) in self.names):
                factor = self.units.follow(name, rate)
                if factor != 1.0:
                    changed[name] = changed.get(name, 1.0) * factor
        return changed


class Clipping:
    """Measures the clipping in the steps of `optimizer`, until `close`. `names` has each parameter's name by its id, and may grow.

    A gradient that is reduced again before a step replaces the first; with `adds_up` it is added, and its norm is not known.
    The optimizer does not keep this object alive.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str], adds_up: bool = False) -> None:
        self._names, self._adds_up = names, adds_up
        self._written: dict[str, Tensor] = {}  # norms by parameter name, when the gradient was written,
        self._applied: dict[str, Tensor] = {}  # and when the step began
        self._loss_scale: Tensor | float = 1.0  # that the applied gradient still has
        self.passes: BackwardPasses | None = None  # None: not watched
        self.done = 0  # steps
        known = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            found = known()
            return found._before_step(optimizer, args, kwargs) if found is not None else None

        self._hook = innermost(optimizer).register_step_pre_hook(before_step)
        weakref.finalize(self, self._hook.remove).atexit = False

    def close(self) -> None:
        """Stop watching. Safe to call again."""
        self._hook.remove()

    def written(self, names: Iterable[str], norms: Sequence[Tensor]) -> None:
        """Note a reduced gradient, whose parameters have these names and norms."""
        for name, norm in zip(names, norms, strict=True):
            self._written[name] = norm * torch.nan if self._adds_up and name in self._written else norm

    def forget(self) -> None:
        """Forget the steps whose share was not taken."""
        self._written, self._applied = {}, {}

    def take(self) -> tuple[list[str], float] | None:
        """Return the parameters of the latest step, and which share of their reduced gradient it applied; then forget it.

        None where there was no step since the last call, or where a norm is not known or not finite. The share is that of the norm of all
        gradients together, because a sparse gradient may be zero in some parameters.
        """
        if not self._applied:
            return None
        names = list(self._applied)
        applied, written = _values(self._applied.values()), _values(self._written[name] for name in names)
        scale = float(self._loss_scale)
        self.forget()
        # A parameter that no rank used keeps a gradient of zero, whatever was written for it.
        used = [other for one, other in zip(applied, written, strict=True) if one != 0] or written
        before = math.hypot(*used) * scale
        share = math.hypot(*applied) / before if before else math.nan
        return (names, share) if math.isfinite(share) else None

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._measure(optimizer)
            return None

        def measured() -> Any:  # Any: what the closure returns
            loss = closure()
            self._measure(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": measured}
        return (*args[:1], measured, *args[2:]), kwargs

    def _measure(self, optimizer: Optimizer) -> None:
        self.done += 1
        if self.passes is not None:
            self.passes.stepped()
        names, found = self._names, {}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        for parameter in parameters:
            name, grad = names.get(id(parameter)), parameter.grad
            if grad is not None and name in self._written and grad.layout == torch.strided:
                found[name] = grad.to_local() if hasattr(grad, "to_local") else grad
        self._applied = dict(zip(found, _norms(list(found.values())), strict=True))
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimizer divides by it in its step
        self._loss_scale = 1.0 if scale is None else scale


def _norms(tensors: list[Tensor]) -> Sequence[Tensor]:
    """Return the norm of each tensor, at least in float32, without a host sync."""
    if not tensors:
        return []
    wide = any(each.dtype == torch.float64 for each in tensors)
    # HACK: torch has no public function for many norms in a few CUDA kernels. Price: it may change with torch.
    return torch._foreach_norm(tensors, 2, torch.float64 if wide else torch.float32)  # pyright: ignore[reportPrivateImportUsage]


def _values(norms: Iterable[Tensor]) -> list[float]:
    """Return numbers: a host sync on CUDA."""
    known = list(norms)
    return torch.stack([each.to(known[0].device) for each in known]).tolist()
