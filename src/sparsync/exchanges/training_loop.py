"""Hooks into an unchanged training loop: the trained copy of the model, its gradients, and `optimizer.step()`.

The loop calls the model, the backward pass and `optimizer.step()`. It sees gradients with the norm of the mean gradient. Before the
optimizer steps, the gradients of all ranks become one step of the weights; the optimizer itself then has no gradient to apply.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsync.exchanges.rules import optimizers_of
from sparsync.runtime.findings import check_model, is_fsdp2, not_floating, reducing_wrappers, warn_or_raise
from sparsync.runtime.parameters import named_parameters, trained
from sparsync.runtime.rescaling import BackwardPasses

# Torch's name: a scaler then calls `step` even if it has found NaN or Inf.
_SUPPORTS_SCALING = "_step_supports_amp_scaling"

Hidden = list[tuple[nn.Parameter, Tensor]]
# Any: the arguments of `optimizer.step`, the optimizer first, as torch passes them to hooks.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Replica:
    """One copy of a model, held whole by this rank.

    `called`: modules made from `module`, such as a compiled one, that a training loop may call instead.
    """

    axis = ""  # the axis of FSDP2 over which copies exchange
    part = ""  # the name of this rank's part; "" is the whole model

    def __init__(self, module: nn.Module, called: Sequence[nn.Module] = ()) -> None:
        self.module = module
        self.bodies = [module, *([module.get_submodule("_orig_mod")] if hasattr(module, "_orig_mod") else [])]
        self.called = distinct([*called, *self.bodies])
        # By name: the optimizer's parameters, and this rank's part of them.
        self.owned = trained_parameters(module)
        self.trained: Mapping[str, nn.Parameter] = self.owned

    def held(self) -> list[Tensor]:
        """List this rank's part of all parameters, and the buffers."""
        return [*self.module.parameters(), *self.module.buffers()]

    def gradients(self) -> Iterator[Tensor | None]:
        """Give this rank's part of the gradients."""
        return (each.grad for each in self.owned.values())

    def frozen(self) -> list[tuple[str, Tensor]]:
        """List this rank's part of the parameters that are not trained, with their names."""
        owned = {id(each) for each in self.owned.values()}
        others = [(name, each.detach()) for name, each in named_parameters(self.module) if id(each) not in owned]
        return [(name, getattr(each, "to_local", lambda whole=each: whole)()) for name, each in others]

    def take_gradients(self) -> None:
        """Copy gradients and `requires_grad` from `owned` to `trained`."""
        return

    def agreed(self, finite: bool) -> bool:
        """Tell whether `finite` holds for all parts of a copy."""
        return finite

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """Bring flat values of this rank's part of a parameter into the form that the module's `state_dict` has."""
        return flat.view(self.trained[name].shape)

    def written(self) -> None:
        """Note that weights were written: the module's copies of them are out of date."""
        return

    def divide_gradients(self, by: "GradientDivisor") -> list[Callable[[], None]]:
        """Divide gradients as the backward pass makes them; return the functions that undo this."""
        owner, owned = weakref.ref(by), self.owned.items()
        hooks = [each.register_hook(partial(_divided, owner, name)) for name, each in owned]
        hooks += [each.register_post_accumulate_grad_hook(partial(_accumulated, owner)) for _, each in owned]
        return [each.remove for each in hooks]


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """List the modules without duplicates."""
    return list({id(each): each for each in modules}.values())


class GradientDivisor:
    """Divides each gradient by `factor` as the backward pass makes it, until `release`.

    A rank's gradient is longer than the mean gradient, by about `factor`. Divided, it has the norm of the mean gradient, so clipping at a
    norm and logging the norm keep their meaning. Gradients of several backward passes add up, because `factor` changes only between two
    steps. A gradient that the loop itself puts on a parameter is not divided.
    """

    def __init__(self, replica: Replica) -> None:
        self.factor = 1.0
        self._divided: set[str] = set()  # parameters with a gradient that was divided since the last step
        self.passes = BackwardPasses(replica.gradients)
        self._bodies = replica.bodies
        self._undo = replica.divide_gradients(self)

    def divided(self, names: Iterable[str], gradient: Tensor) -> Tensor:
        """Divide the gradient of the parameters of these names."""
        self.passes.begins(gradient)
        if self.factor == 1:
            return gradient
        self._divided.update(names)
        return gradient / self.factor

    def accumulated(self) -> None:
        """Note gradients that a loop may throw away to skip the step; not in evaluation mode, as in an adversarial attack."""
        if all(each.training for each in self._bodies):
            self.passes.came()

    def undone(self, name: str) -> float:
        """Return the factor that undoes the division of a parameter's gradient."""
        return self.factor if name in self._divided else 1.0

    def next_step(self, factor: float) -> None:
        """Divide by `factor` from here on."""
        self.passes.stepped()
        self.factor = factor
        self._divided.clear()

    def release(self) -> None:
        """Stop dividing gradients."""
        self.next_step(1.0)
        for undo in self._undo:
            undo()


def _divided(owner: "weakref.ref[GradientDivisor]", name: str, gradient: Tensor) -> Tensor | None:
    divisor = owner()
    return None if divisor is None else divisor.divided([name], gradient)


def _accumulated(owner: "weakref.ref[GradientDivisor]", _: Tensor) -> None:
    if (divisor := owner()) is not None:
        divisor.accumulated()


class TakenOptimizer:
    """Calls `take_step` before these optimizers step, and hides the gradients from them so that they move nothing, until `release`.

    With several optimizers, the first to step takes the step of all. `take_step` returns whether all ranks skipped the step, as a tensor,
    not zero if so, if only a device knows. `scaler` scales the loss, if given: it learns of NaN and Inf on other ranks.
    Step hooks of the loop see all parameters and their gradients. One exception: a pre-step hook registered after this object sees none in
    its first step. Another optimizer that steps one of these parameters raises.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], take_step: Callable[[], bool | Tensor], scaler: GradScaler | None = None
    ) -> None:
        self._optimizers, self._take_step, self._scaler = optimizers, take_step, scaler
        self._called: set[int] = set()  # ids of the optimizers that have stepped since the last step was taken
        self._taken = list[tuple[Tensor, int]]()  # gradients and their versions, until all optimizers have stepped
        self._hidden: Hidden = []
        self._ours: dict[int, tuple[Any, Any]] = {}  # Any: torch's handles of hooks, before and after the step
        # Any: torch types the result as a function of named arguments
        before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        for each in optimizers:
            self._ours[id(each)] = ours = each.register_step_pre_hook(before), each.register_step_post_hook(after)
            # HACK: torch has no public function for this. Price: the name may change with torch; a test has hooks on both sides of ours.
            hooks: Any = each._optimizer_step_post_hooks  # Any: an ordered dict, which torch types as a plain one
            hooks.move_to_end(ours[1].id, last=False)
        self._scaling = step_whatever_is_found(optimizers if scaler is not None else ())
        self._caller: str | None = None
        _look_at_steps()
        _TAKEN.add(self)

    def forget_step(self) -> None:
        """Forget a failed step, so that the scaler unscales the gradients of the next one."""
        self._called.clear()
        if self._scaler is not None:
            # HACK: torch has no public function for this. Price: the name may change with torch; a test takes a step again.
            self._scaler._per_optimizer_states.clear()

    def release(self) -> None:
        """Let the optimizers step by themselves from here on."""
        _TAKEN.discard(self)
        for pair in self._ours.values():
            for hook in pair:
                hook.remove()
        self._scaling()

    def check_caller(self, caller: str) -> None:
        """Raise RuntimeError if the loop has stepped in another way before: it would take two steps with the same gradients."""
        if self._caller not in (None, caller):
            raise RuntimeError(
                f"this loop has called {self._caller} before, and {caller} would take a second step with the same gradients; call only one "
                "of them"
            )
        self._caller = caller

    def refuse(self, optimizer: Optimizer) -> None:
        """Raise RuntimeError if another optimizer steps a parameter of these: weights would differ between ranks."""
        if id(optimizer) in self._ours or all(id(each) in self._ours for each in optimizers_of(optimizer)):
            return
        stepped = {id(each) for one in self._optimizers for each in _parameters(one)}
        if any(each.grad is not None and id(each) in stepped for each in _parameters(optimizer)):
            raise RuntimeError(
                f"another {type(optimizer).__name__} steps a model whose optimizer was passed to sparsync.attach, and nothing would "
                "exchange that; call detach() on the handle, and attach with this optimizer"
            )

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        args, kwargs = _with_closure_called(args, kwargs)
        if not self._called or id(optimizer) in self._called:
            self._called.clear()
            self.check_caller("optimizer.step()")
            self._unscale(optimizer)
            skipped = self._take_step()
            self._taken = [found for each in self._optimizers for found in _gradients(each)]
            if skipped is not False and self._scaler is not None and self._scaler.is_enabled():
                self._tell_scaler(self._scaler, optimizer, skipped)
        elif not all(any(one is each and t == then for each, then in self._taken) for one, t in _gradients(optimizer)):
            raise RuntimeError(
                f"the gradients of this {type(optimizer).__name__} have changed since another optimizer has taken the step of all "
                "parameters: step all optimizers after the backward passes and the clipping of a step, one after the other; or attach "
                "every part of the model separately, with its optimizer"
            )
        self._called.add(id(optimizer))
        if len(self._called) == len(self._optimizers):
            self._called.clear()
            self._taken.clear()
        self._hidden = hide_gradients(optimizer)
        return args, kwargs

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        put_back(self._hidden)
        self._hidden = []
        # Hooks registered after ours see the gradients from the next step on. HACK: as above.
        hooks: Any = optimizer._optimizer_step_pre_hooks
        hooks.move_to_end(self._ours[id(optimizer)][0].id)

    def _unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the loss scale if the scaler leaves that to the optimizer."""
        if not hasattr(optimizer, "found_inf"):
            return
        if self._scaler is None:
            raise RuntimeError(
                "a GradScaler calls this optimizer, and looks for NaN and Inf on its rank only; pass it, so that all ranks agree: "
                "sparsync.attach(..., scaler=scaler)"
            )
        unscale_(optimizer)

    def _tell_scaler(self, scaler: GradScaler, optimizer: Optimizer, skipped: bool | Tensor) -> None:
        """Make the scaler lower its scale on all ranks, even if this rank's gradient was finite."""
        # HACK: torch has no public function for this. Price: the name may change with torch; tests call it with NaN on one rank.
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            flag.copy_(torch.maximum(flag, torch.as_tensor(skipped).to(flag).view(flag.shape)))


_TAKEN: weakref.WeakSet[TakenOptimizer] = weakref.WeakSet()


@cache
def _look_at_steps() -> None:
    """Watch the steps of all optimizers, once per process: torch iterates over its hooks while a handle may be collected."""
    look: Any = torch.compiler.disable(_refuse_another)  # Any: as in TakenOptimizer
    register_optimizer_step_pre_hook(look)


def _refuse_another(optimizer: Optimizer, *_: object) -> None:
    for each in list(_TAKEN):
        each.refuse(optimizer)


def step_whatever_is_found(optimizers: Iterable[Optimizer]) -> Callable[[], None]:
    """Make a loss scaler call `step` of these optimizers even if it has found NaN or Inf on this rank; return the undo function."""
    marked = [each for each in optimizers if not supports_scaling(each)]
    for each in marked:
        setattr(each, _SUPPORTS_SCALING, True)

    def undo() -> None:
        for each in marked:
            vars(each).pop(_SUPPORTS_SCALING, None)

    return undo


def supports_scaling(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer divides its gradients by the loss scale in its step."""
    return getattr(optimizer, _SUPPORTS_SCALING, False)


def hide_gradients(optimizer: Optimizer) -> Hidden:
    """Remove the gradients of an optimizer's parameters, so that its step moves nothing; return the argument of `put_back`."""
    hidden = [(each, each.grad) for each in _parameters(optimizer) if each.grad is not None]
    for parameter, _ in hidden:
        parameter.grad = None
    return hidden


def put_back(hidden: Hidden) -> None:
    """Give parameters their gradients again."""
    for parameter, gradient in hidden:
        parameter.grad = gradient


def unscale_(optimizer: Optimizer) -> None:
    """Divide the gradients by the loss scale that a scaler has set on the optimizer, if any."""
    if (scale := getattr(optimizer, "grad_scale", None)) is None:
        return
    for parameter in _parameters(optimizer):
        if parameter.grad is not None:
            parameter.grad.mul_(scale.double().reciprocal().to(parameter.grad))


def closure_of(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:  # Any: see Arguments; the loss
    """Find the closure among the arguments of `step`: it makes the gradients. None if there is none."""
    return args[1] if len(args) > 1 else kwargs.get("closure")


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]
) -> Arguments:  # Any: as in `closure_of`
    """Replace the closure among the arguments of `step`."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure}


def _with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:  # Any: see Arguments
    """Call the closure among the arguments of `step`, and replace it by one that returns its loss."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return with_closure(args, kwargs, lambda: loss)


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _gradients(optimizer: Optimizer) -> list[tuple[Tensor, int]]:
    """List the gradients with their versions, which count changes."""
    return [(each.grad, each.grad._version) for each in _parameters(optimizer) if each.grad is not None]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find the trained parameters, by name.

    Raises TypeError for a wrapped or sharded model, and ValueError for one without trained parameters.
    """
    check_bare(model)
    parameters = dict(trained(model))
    if not parameters:
        raise ValueError("the model has no parameter with requires_grad=True; there is nothing to exchange")
    warn_or_raise(not_floating(parameters.items()))
    for name, each in parameters.items():
        if hasattr(each, "to_local"):
            raise TypeError(f"{name} is a DTensor; steps and weight changes need the whole model on each rank")
    return parameters


def check_bare(model: nn.Module) -> None:
    """Raise TypeError for a model that is wrapped or sharded, in parts or whole, and for anything but a model."""
    check_model(model)
    for module in model.modules():
        if isinstance(module, reducing_wrappers()) or is_fsdp2(module):
            raise TypeError(
                f"this model is wrapped by {type(module).__name__}, which reduces gradients at every step, and here every rank needs the "
                "whole model unwrapped: pass the bare module"
            )
