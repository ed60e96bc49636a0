"""The step of an exchange in the place of the optimizers' own, as the loop calls it: with closures and loss scalers."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsync.exchanges.rules import optimizers_of
from sparsync.runtime.findings import Finding, warn_of

# Torch's name: a scaler then calls `step` also where it found NaN or Inf.
SUPPORTS_SCALING = "_step_supports_amp_scaling"


Hidden = list[tuple[nn.Parameter, Tensor]]


Arguments = tuple[
    tuple[Any, ...], dict[str, Any]
]  # Any: as torch's hooks have those of `optimizer.step`, itself the first


class TakenOptimizer:
    """Calls `take_step` in place of the `step` of these optimizers, until `release`: once for all, before the first of them steps.

    `take_step` returns whether all ranks skipped the step: a tensor, not zero if so, where only a device knows. `scaler` is the one that
    scales the loss, where there is one: it learns what other ranks found.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], take_step: Callable[[], bool | Tensor], scaler: GradScaler | None = None
    ) -> None:
        self._optimizers, self._take_step, self._scaler = optimizers, take_step, scaler
        self._called: set[int] = set()  # ids of the optimizers whose `step` was called since the last step was taken
        self._waiting: set[int] = set()  # ids of those that had gradients then, and have not stepped since
        self._late = self._told_of_waiting = False  # a gradient has come since that step
        self._emptied: list[
            tuple[list[nn.Parameter], list[nn.Parameter]]
        ] = []  # groups' lists, and what they hold otherwise
        # Any: torch types what it returns as a function of named arguments
        before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        self._hooks: list[Any] = []  # Any: torch's handles of hooks
        self._order: dict[int, tuple[Any, Any]] = {}  # ours before and after the step, by the id of the optimizer
        for each in optimizers:
            self._order[id(each)] = hooks = each.register_step_pre_hook(before), each.register_step_post_hook(after)
            self._hooks += hooks
            late = partial(_note_late, weakref.ref(self))
            trained = [x for x in _parameters(each) if x.requires_grad] if len(optimizers) > 1 else []
            self._hooks += [x.register_post_accumulate_grad_hook(late) for x in trained]
        self._scaled = Scaled(optimizers)
        self.never_scaled = self._scaled.release
        _look_at_steps()
        _TAKEN.add(self)

    def prepare(self, optimizer: Optimizer) -> None:
        """Have the hooks of a loop see what they see without us: gradients without the loss scale before, all parameters after the step."""
        if (hooks := self._order.get(id(optimizer))) is None:
            return
        self._refill()  # where the last step of an optimizer has raised
        # HACK: torch has no public function for this. Price: names that may change with torch; a test has hooks on both sides of ours.
        before: Any = optimizer._optimizer_step_pre_hooks  # Any: ordered dicts, which torch types as plain ones
        after: Any = optimizer._optimizer_step_post_hooks
        before.move_to_end(hooks[0].id)
        after.move_to_end(hooks[1].id, last=False)
        self._unscale(optimizer)

    def forget_step(self) -> None:
        """Forget a step that has failed, also that the scaler has unscaled its gradients."""
        self._called.clear()
        if self._scaler is not None:
            # HACK: torch has no public function for this. Price: a name that may change with torch; a test takes a step again.
            self._scaler._per_optimizer_states.clear()

    def has(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether one of these parameters belongs to the optimizers."""
        own = {id(each) for optimizer in self._optimizers for each in _parameters(optimizer)}
        return any(id(each) in own for each in parameters)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether this optimizer, or those inside it, were taken."""
        return all(any(each is own for own in self._optimizers) for each in optimizers_of(optimizer))

    def release(self) -> None:
        """Let the optimizers take their own steps from here on."""
        _TAKEN.discard(self)
        self._refill()
        for hook in self._hooks:
            hook.remove()
        self._scaled.release()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:  # Any: see Arguments
        args, kwargs = _with_closure_called(args, kwargs)
        if not self._called or id(optimizer) in self._called:
            if self._called:
                self._warn_of_waiting(optimizer)
            self._called.clear()
            self._late = False
            self._waiting = {
                id(each) for each in self._optimizers if any(x.grad is not None for x in _parameters(each))
            }
            skipped = self._take_step()
            if skipped is not False and self._scaler is not None and self._scaler.is_enabled():
                self._tell_scaler(self._scaler, optimizer, skipped)
        elif self._late and id(optimizer) in self._waiting:
            raise RuntimeError(
                f"a backward pass came before the step of {self._named(optimizer)} and after that of another one, which has taken the step "
                "of all parameters: step all optimizers after the backward passes of a step, one after the other; or attach each part of "
                "the model with its own optimizer"
            )
        self._called.add(id(optimizer))
        self._waiting.discard(id(optimizer))
        if len(self._called) == len(self._optimizers):
            self._called.clear()
        # Not the gradients alone: some optimizers make zeros of those that are missing, and decay the weights once more.
        self._emptied = [(group["params"], list(group["params"])) for group in optimizer.param_groups]
        for listed, _ in self._emptied:
            listed.clear()
        return args, kwargs

    def note_late(self) -> None:
        """Note that a gradient comes, which the step that was taken for all does not have."""
        self._late = bool(self._called)

    def _warn_of_waiting(self, optimizer: Optimizer) -> None:
        """Warn, once, where a loop steps one optimizer more often than another one."""
        waiting = [self._named(each) for each in self._optimizers if id(each) in self._waiting]
        if not waiting or self._told_of_waiting:
            return
        self._told_of_waiting = True
        warn_of(
            Finding(
                f"{self._named(optimizer)} steps again before {' and '.join(waiting)} has, and each step moves the parameters of all",
                "step all optimizers, one after the other; or attach each part of the model with its own optimizer",
            )
        )

    def _named(self, optimizer: Optimizer) -> str:
        place = next(place for place, each in enumerate(self._optimizers, 1) if each is optimizer)
        return f"optimizer {place} of {len(self._optimizers)} ({type(optimizer).__name__})"

    def _after(self, *_: object) -> None:
        self._refill()

    def _refill(self) -> None:
        for listed, parameters in self._emptied:
            listed[:] = parameters
        self._emptied = []

    def _unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale, where a scaler leaves that to the optimizer."""
        if not hasattr(optimizer, "found_inf"):
            return
        if self._scaler is None:
            raise RuntimeError(
                "a GradScaler calls this optimizer, and each rank's has found its own NaN and Inf; pass it, so that they agree: "
                "sparsync.attach(..., scaler=scaler)"
            )
        unscale_(optimizer)

    def _tell_scaler(self, scaler: GradScaler, optimizer: Optimizer, skipped: bool | Tensor) -> None:
        """Have the scaler lower its scale on all ranks, also where this rank's gradient was finite."""
        # HACK: torch has no public function for this. Price: a name that may change with torch; tests call it with NaN on one rank.
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.copy_(torch.maximum(found, torch.as_tensor(skipped).to(found).view(found.shape)))


class Scaled:
    """Has a loss scaler call the `step` of `optimizers` also where it found NaN or Inf on this rank, until `release`."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._before = [(each, vars(each).get(SUPPORTS_SCALING)) for each in optimizers]
        for each, _ in self._before:
            setattr(each, SUPPORTS_SCALING, True)

    def release(self) -> None:
        """Leave the optimizers as they were: trainers do not clip gradients of one that divides them by the scale itself."""
        for each, was in self._before:
            vars(each).pop(SUPPORTS_SCALING, None)
            if was is not None:
                setattr(each, SUPPORTS_SCALING, was)
        self._before = []


_TAKEN: weakref.WeakSet[TakenOptimizer] = weakref.WeakSet()


@cache
def _look_at_steps() -> None:
    """Look at the steps of all optimizers from here on: once, for torch iterates over its hooks while a handle may be collected."""
    look: Any = torch.compiler.disable(_before_all_hooks)  # Any: as in TakenOptimizer
    register_optimizer_step_pre_hook(look)


def _before_all_hooks(optimizer: Optimizer, *_: object) -> None:
    _refuse_another(optimizer)
    for each in list(_TAKEN):
        each.prepare(optimizer)


def _refuse_another(optimizer: Optimizer) -> None:
    """Raise RuntimeError where an optimizer steps parameters for which another one was taken: ranks would part."""
    others = [each for each in _TAKEN if not each.is_of(optimizer)]
    stepped = [each for each in _parameters(optimizer) if each.grad is not None]
    if any(each.has(stepped) for each in others):
        raise RuntimeError(
            f"another {type(optimizer).__name__} steps a model whose optimizer was passed to sparsync.attach, and nothing would exchange "
            "that; call detach() on the handle, and attach with this optimizer"
        )


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"])


def hide_gradients(optimizer: Optimizer) -> Hidden:
    """Take the gradients of an optimizer's parameters away, so that its step moves none of them; return what `put_back` takes."""
    hidden = [(each, each.grad) for each in _parameters(optimizer) if each.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    return hidden


def put_back(hidden: Hidden) -> None:
    """Give parameters their gradients again."""
    for parameter, gradient in hidden:
        parameter.grad = gradient


def unscale_(optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale that a scaler has left with the optimizer, if any."""
    if (scale := getattr(optimizer, "grad_scale", None)) is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(scale.double().reciprocal().to(parameter.grad))


def _with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:  # Any: see Arguments
    """Call the closure among the arguments of `step`, which makes the gradients, and put one that returns its loss in its place."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def never_scaled(given: Iterable[Optimizer]) -> bool:
    """Return whether a trainer's wrapper of an optimizer tells that no loss scaler calls it: Fabric's, whose precision has none."""
    strategies = [strategy for each in given if (strategy := getattr(each, "_strategy", None)) is not None]
    return any(getattr(getattr(each, "precision", None), "scaler", None) is None for each in strategies)


def closure_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:  # Any: see Arguments; the loss
    """Return the closure among the arguments of `step`, which makes the gradients, if there is one."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> Arguments:  # Any: as in `closure_of`
    """Return the arguments of `step` with another closure."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _note_late(taken: "weakref.ref[TakenOptimizer]", _: Tensor) -> None:
    if (found := taken()) is not None:
        found.note_late()
