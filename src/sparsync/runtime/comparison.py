"""Compares ranks: optimizer settings before each bucket, and every few steps a digest of the weights. See `Connection`."""

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
    "give the optimizers of all ranks the same settings at every step: step schedules equally often on all ranks, pass the mean loss of "
    "all ranks to a schedule that follows the loss, and freeze the same parameters on all of them"
)
_WEIGHTS_CURE = (
    "load the same weights on all ranks, or change them in the same way, before the same step; or pass check_weights_every=0 if the "
    "arithmetic of the machines differs in last bits"
)
_SAVED_CURE = (
    "call sparsync.checkpoint.save on every rank after the same step, not inside `if rank == 0`: every rank has residuals that the others "
    "lack"
)
_LOADED_CURE = "load the same states into model, optimizer and handle on all ranks, before the same step"
_SKIPPED_CURE = (
    "skip a step on all ranks or on none: decide by handle.clip_grad_norm_(max_norm), which returns the same norm on all of them, not by "
    "the norm or loss of one rank"
)

# Settings even without such an argument of the optimizer: it may take ready-made groups.
_COMMON = frozenset({"lr", "weight_decay", "momentum", "betas", "eps"})

Named = Iterable[tuple[str, Tensor]]


class Compared(NamedTuple):
    """A number that must be the same on all ranks at a step, and the texts behind it."""

    number: int = 0
    # Checkpoints, optimizer settings, weights, and since the last step: loaded states, and thrown-away gradients.
    told: tuple[Told, ...] = (Told([], ""),) * 5


class Comparison:
    """Reads settings of `optimizers`, and every `every` steps (0: never) the tensors of `weights`, for ranks to compare.

    `names` maps parameter ids to names. Nothing is compared while `applies`, the same on all ranks, returns False. `where_stepped`: read
    weights after the optimizer's step, not in the backward pass, for which some loops move the weights of a rank, as SAM does. The owner
    sets `adopted`, the names of weights set from outside, which the next step compares; `saved`, if a checkpoint was written since the last
    step; `loaded`, see `Loads`; and `thrown_away`, the number of backward passes without a step, see `BackwardPasses`.
    Raises ValueError unless `every` is a whole number from 0 on.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        names: Mapping[int, str],
        weights: Callable[[], Named] | None,
        every: int,
        applies: Callable[[], bool] = lambda: True,
        where_stepped: bool = False,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 0:
            raise ValueError(f"check_weights_every must be a whole number of steps from 0 on (0: never), got {every!r}")
        self.optimizers, self.settings = optimizers, OptimizerSettings(optimizers, names)
        self.adopted: set[str] = set()
        self.saved = False
        self.loaded: Sequence[str] = ()
        self.thrown_away = 0
        self._weights, self._every, self._applies, self._cure = weights, every, applies, _WEIGHTS_CURE
        self._step = -1  # the last compared step
        self._read: list[str] | None = None  # lines of the weights after the optimizer's step
        self._watches = where_stepped and every > 0 and weights is not None and self._watch(optimizers)

    def compare(self, weights: Callable[[], Named], cure: str) -> None:
        """Compare other tensors from here on, with other advice if they differ."""
        self._weights, self._cure = weights, cure

    def at(self, step: int, steps: int = 1) -> Compared:
        """Read what to compare before `step`: weights too, if a check was due in the last `steps` steps."""
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
        """Read weights after steps of these optimizers and of inner ones; return whether any of them runs step hooks."""
        known = weakref.ref(self)  # an optimizer must not keep the handle alive

        def after_step(*_: object) -> None:
            if (comparison := known()) is not None:
                comparison._read_weights()

        # Any: torch types the result as a function of named arguments
        hook: Any = torch.compiler.disable(after_step)
        every = [one for outer in optimizers for one in with_inner(outer)]
        telling = [each for each in every if "_optimizer_step_post_hooks" in vars(each)]
        for each in telling:
            each.register_step_post_hook(hook)
        return bool(telling)

    def _read_weights(self) -> None:
        """Read the weights if the next step compares them; for the first time after the first step."""
        due = self._step <= 0 or (self._step + 1) % self._every == 0
        if due and self._read is None and self._weights is not None and self._applies():
            self._read = weight_lines(self._weights())


class OptimizerSettings:
    """The settings of the optimizers' parameter groups, the names of their parameters, and which of these are frozen.

    A setting is an argument of the optimizer's class. Anything else in a group is state, such as a number of steps or an adapted rate.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> None:
        self._names, kinds = names, [type(innermost(each)) for each in optimizers]
        self._optimizers = list(zip(optimizers, [each.__name__ for each in kinds], map(_options, kinds), strict=True))
        # Lines and digest, made again only after a change.
        self._value_lines = lru_cache(maxsize=1)(self._made_value_lines)
        self._member_lines = lru_cache(maxsize=1)(self._made_member_lines)

    def read(self) -> tuple[int, list[str]]:
        """Read the present settings; return their digest, and the settings line by line."""
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
        """Write a line per parameter, sorted, so that a parameter has the same place on all ranks."""
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
    """Write a line with the digest of each tensor, which depends on every element and its place. A host sync."""
    named = dict(weights)
    digests = kernels.digests([each.detach() for each in named.values()]).tolist()
    return [
        f"weights {name!r} with digest {one & (1 << 64) - 1:016x}" for name, one in zip(named, digests, strict=True)
    ]


@cache
def _options(kind: type) -> tuple[str, ...]:
    """List the common settings, and the arguments of an optimizer's class and of its base classes."""
    made = [each for each in kind.__mro__ if "__init__" in vars(each)]
    arguments = {name for each in made for name in inspect.signature(each.__init__).parameters}
    return tuple(sorted(_COMMON | arguments - {"params"}))


def _plain(value: object) -> object:
    """Bring a number, a text or a tuple of them into one form; "" for anything else."""
    if isinstance(value, Tensor):
        return _plain(value.item()) if value.numel() == 1 else ""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    return value if isinstance(value, (bool, str)) or value is None else ""
