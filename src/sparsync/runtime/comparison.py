"""Ranks compare the settings of their optimizers before each bucket, and every few steps a digest of the weights. See `Connection`."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsync.comm.announcement import Told
from sparsync.core import digest
from sparsync.kernels import operations as kernels
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
    """A number that must be the same on all ranks at one step, and the texts behind it."""

    number: int = 0
    # Checkpoints, settings of optimizers, weights, and what came since the last step: loaded states, and gradients that were thrown away.
    told: tuple[Told, ...] = (Told([], ""),) * 5


class Comparison:
    """Reads settings of `optimizers`, and every `every` steps (0: never) what `weights` returns, for ranks to compare.

    `names` maps the id of each parameter to its name. Nothing is compared while `applies`, the same on all ranks, returns False. `cure`
    says what to do if weights differ. `where_stepped`: weights are read after the optimizer's step, and not in the backward pass, for
    which some loops move each rank's weights, as SAM does. The owner sets the rest: `adopted`, the names of weights that were set from
    outside, which the next step compares; `saved`, if a checkpoint was written since the last step; `loaded`, see `Loads`; and
    `thrown_away`, the number of backward passes without a step, see `BackwardPasses`. Raises ValueError unless `every` is a whole number
    from 0 on.
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
        """Compare other tensors from here on, with another advice where they differ."""
        self._weights, self._cure = weights, cure

    def at(self, step: int, steps: int = 1) -> Compared:
        """Return what to compare before `step`: weights too, if a check was due in one of the last `steps` steps."""
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
        """Read weights after steps of these optimizers and of those inside them; return whether any of them calls step hooks."""
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
    """The settings of each parameter group of some optimizers, the names of its parameters, and which of them are frozen.

    A setting is an argument of the optimizer's class. Anything else in a group is state that the optimizer keeps there, such as a number
    of steps or a rate that it adapts.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._names, kinds = names, [type(innermost(each)) for each in optimizers]
        self._optimizers = list(zip(optimizers, [each.__name__ for each in kinds], map(_options, kinds), strict=True))
        # Lines and digest, made again only when something has changed.
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
