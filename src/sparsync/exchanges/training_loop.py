"""What lets a training loop stay as it is: the copy of the model that is trained, its gradients, its optimizer, and the weights it shows.

The loop calls the model, the backward pass and `optimizer.step()`. The gradients that it sees have the norm of the mean one. In front of
the optimizer's own step, those of all ranks become one step of the weights; then the optimizer finds no gradient. A forward pass that does
not train, and `model.state_dict()`, have the common weights, which are the same on all ranks, and not a rank's own.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparsync.exchanges.rules import optimizers_of
from sparsync.exchanges.weights import Weights
from sparsync.runtime.findings import (
    Finding,
    check_model,
    is_fsdp2,
    not_floating,
    reducing_wrappers,
    warn_of,
    warn_or_raise,
)
from sparsync.runtime.parameter_names import plain_name, trained

# Torch's name: a scaler then calls `step` also where it found NaN or Inf.
SUPPORTS_SCALING = "_step_supports_amp_scaling"

Owner = TypeVar("Owner")
Hidden = list[tuple[nn.Parameter, Tensor]]
Arguments = tuple[
    tuple[Any, ...], dict[str, Any]
]  # Any: as torch's hooks have those of `optimizer.step`, itself the first


class Replica:
    """One copy of a model, of which this rank holds all.

    `called` are the modules that a training loop may call besides `module`: what was made of it, such as a compiled one.
    """

    axis = ""  # of FSDP2, over which copies exchange
    part = ""  # the name of what this rank holds; "" is all of the model

    def __init__(self, module: nn.Module, called: Sequence[nn.Module] = ()) -> None:
        self.module = module
        self.bodies = [module, *([module.get_submodule("_orig_mod")] if hasattr(module, "_orig_mod") else [])]
        self.called = distinct([*called, *self.bodies])
        # What the optimizer has, and what this rank holds of it, by name.
        self.owned = trained_parameters(module)
        self.trained: Mapping[str, nn.Parameter] = self.owned

    def held(self) -> list[Tensor]:
        """Return what this rank holds of all parameters, and the buffers."""
        return [*self.module.parameters(), *self.module.buffers()]

    def take_gradients(self) -> None:
        """Have `trained` show the gradients of `owned`, and what of it is frozen."""
        return

    def agreed(self, finite: bool) -> bool:
        """Return whether `finite` holds for all that a copy consists of."""
        return finite

    def whole(self, name: str, flat: Tensor) -> Tensor:
        """Return values of what this rank holds of a parameter, flat, as `state_dict` of the module has the parameter."""
        return flat.view(self.trained[name].shape)

    def written(self) -> None:
        """Note that weights were written, of which the module may have older copies."""
        return

    def divide_gradients(self, by: "GradientDivisor") -> list[Callable[[], None]]:
        """Have gradients divided as the backward pass makes them; return what undoes that."""
        hooks = [each.register_hook(partial(_divided, weakref.ref(by), name)) for name, each in self.owned.items()]
        return [each.remove for each in hooks]


def distinct(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules, each once."""
    return list({id(each): each for each in modules}.values())


class GradientDivisor:
    """Divides each gradient by `factor` as the backward pass makes it, until `release`.

    A rank's own gradient is longer than the mean one. Divided by how much, it has the mean one's norm, and clipping at a norm or logging
    it means what it did. Gradients of several backward passes add up, because `factor` changes between two steps only. A gradient that the
    loop itself puts on a parameter is not divided.
    """

    def __init__(self, replica: Replica) -> None:
        self.factor = 1.0
        self._divided: set[str] = set()  # parameters with a gradient that was divided since the last step
        self._undo = replica.divide_gradients(self)

    def divided(self, names: Iterable[str], gradient: Tensor) -> Tensor:
        """Return the gradient of the parameters of these names divided."""
        if self.factor == 1:
            return gradient
        self._divided.update(names)
        return gradient / self.factor

    def undone(self, name: str) -> float:
        """Return what the gradient of a parameter is to be multiplied by to be this rank's own."""
        return self.factor if name in self._divided else 1.0

    def next_step(self, factor: float) -> None:
        """Divide by `factor` from here on."""
        self.factor = factor
        self._divided.clear()

    def release(self) -> None:
        """Leave gradients as they come from here on."""
        self.next_step(1.0)
        for undo in self._undo:
            undo()


class TakenOptimizer:
    """Calls `take_step` in place of the `step` of these optimizers, until `release`: once for all, before the first of them steps.

    `take_step` returns whether all ranks skipped the step. `scaler` is the one that scales the loss, where there is one: it learns what
    other ranks found.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], take_step: Callable[[], bool], scaler: GradScaler | None = None
    ) -> None:
        self._optimizers, self._take_step, self._scaler = optimizers, take_step, scaler
        self._called: set[int] = set()  # ids of the optimizers whose `step` was called since the last step was taken
        self._waiting: set[int] = set()  # ids of those that had gradients then, and have not stepped since
        self._late = self._told_of_waiting = False  # a gradient has come since that step
        self._emptied: list[
            tuple[list[nn.Parameter], list[nn.Parameter]]
        ] = []  # groups' lists, and what they hold otherwise
        self._told_of_moments = any(any(each.state.values()) for each in optimizers)  # by `attach`
        # Any: torch types what it returns as a function of named arguments
        before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        self._hooks: list[Any] = []  # Any: torch's handles of hooks
        self._handle_loaded = False  # since the last step
        self._without_moments = ""  # the kind of an optimizer whose loaded state has none
        for each in optimizers:
            self._note_loaded(each)  # before `attach`
            self._hooks += [each.register_step_pre_hook(before), each.register_step_post_hook(after)]
            self._hooks.append(each.register_load_state_dict_post_hook(self._note_loaded))
            # Where there is no state at all, torch.distributed.checkpoint takes a step to make one. It also tells `_note_loaded` of a
            # state that was saved here: that of an optimizer outside of a handle has no entry of a parameter before its first step.
            for parameter in _parameters(each):
                each.state.setdefault(parameter, {})
                if len(optimizers) > 1 and parameter.requires_grad:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(_NoteLate(self)))
        self._scaled = Scaled(optimizers)
        self.never_scaled = self._scaled.release
        _refuse_others()
        _TAKEN.add(self)

    def forget_moments(self) -> None:
        """Have the optimizers begin with new moments when they take their own steps again."""
        for each in self._optimizers:
            each.state.clear()

    def note_handle_loaded(self) -> None:
        """Note that a state of the handle was loaded, which has the moments."""
        self._handle_loaded, self._without_moments = True, ""

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
        for each in self._optimizers:
            for parameter in [parameter for parameter, state in each.state.items() if not state]:
                del each.state[parameter]
        for hook in self._hooks:
            hook.remove()
        self._scaled.release()

    def _before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Arguments:  # Any: see Arguments
        self._refill()  # where the last step of an optimizer has raised
        args, kwargs = _with_closure_called(args, kwargs)
        self._warn_of_moments(optimizer)
        if not self._called or id(optimizer) in self._called:
            if self._called:
                self._warn_of_waiting(optimizer)
            self._called.clear()
            self._late = False
            self._waiting = {
                id(each) for each in self._optimizers if any(x.grad is not None for x in _parameters(each))
            }
            self._unscale(optimizer)
            skipped = self._take_step()
            if skipped and self._scaler is not None and self._scaler.is_enabled():
                self._tell_scaler(self._scaler, optimizer)
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

    def _note_loaded(self, optimizer: Optimizer) -> None:
        if optimizer.state and not any(optimizer.state.values()) and not self._handle_loaded:
            self._without_moments = type(optimizer).__name__

    def _warn_of_moments(self, optimizer: Optimizer) -> None:
        if kind := self._without_moments:
            warn_of(
                Finding(
                    f"this {kind} has the state of a training whose steps were exchanged, and its moments are in that of the handle",
                    "load the handle's state too, by sparsync.checkpoint.load or handle.load_state_dict",
                )
            )
        self._handle_loaded, self._without_moments = False, ""
        if not self._told_of_moments and any(optimizer.state.values()):
            self._told_of_moments = True
            kind = type(optimizer).__name__
            warn_of(
                Finding(
                    f"this {kind} has moments, as from a checkpoint that was loaded, and exchanged steps do not use them",
                    "load a checkpoint of the handle, which has their moments",
                )
            )

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

    def _tell_scaler(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Have the scaler lower its scale on all ranks, also where this rank's gradient was finite."""
        # HACK: torch has no public function for this. Price: a name that may change with torch; tests call it with NaN on one rank.
        for found in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(1.0)


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


class ShownWeights:
    """Shows the `weights` of `replica`: own ones in a forward pass that trains, common ones in any other, and in `state_dict()`.

    A forward pass trains where the module is in training mode and gradients are enabled. `adopt` takes weights that were set from outside;
    weights that are set while the common ones are shown become both. While `asks` is False nothing changes.
    """

    def __init__(
        self, replica: Replica, weights: Weights, adopt: Callable[[], object], asks: Callable[[], bool]
    ) -> None:
        self._replica, self._weights = replica, weights
        self._adopt, self._asks = adopt, asks
        self._own: list[Tensor] | None = None  # put aside while the common ones are in the model
        # Any: torch has not typed what it returns
        self.before_forward: Any = torch.compiler.disable(self._before_forward)
        self.after_forward: Any = torch.compiler.disable(self._after_forward)
        self._hooks = [
            *(
                each.register_forward_pre_hook(_BeforeForward(self), prepend=True)  # before FSDP2 gathers
                for each in replica.called
            ),
            *(each.register_forward_hook(_AfterForward(self)) for each in replica.bodies),
            *(each.register_state_dict_post_hook(_AfterStateDict(self)) for each in replica.bodies),
        ]
        self._left = weakref.finalize(self, _leave_common, weights)  # where the handle is dropped, and not closed
        self._left.atexit = False

    @property
    def common(self) -> bool:
        """Whether the common weights are in the model."""
        return self._own is not None

    @torch.inference_mode(False)
    @torch.no_grad()
    def show(self, common: bool) -> None:
        """Have the common weights in the model, or the own ones."""
        if common == self.common or not self._asks():
            return
        self._adopt()
        buckets = self._weights.buckets
        if common:
            self._own = [each.own() for each in buckets]
        own, self._own = self._own or [], self._own if common else None
        for bucket, weights in zip(buckets, own, strict=True):
            bucket.write(bucket.common if common else weights)
        self._replica.written()
        self._weights.note_written()

    def take(self, names: Collection[str]) -> None:
        """Take what is in the model of these parameters, which were set from outside, for the own weights that are put aside."""
        if self._own is not None:
            for bucket, own in zip(self._weights.buckets, self._own, strict=True):
                bucket.copy_own_(own, names)

    def _before_forward(self, module: nn.Module) -> None:
        """Show what a forward pass of `module` is to use; a copy of the model has weights that nothing is known of."""
        if any(module is each for each in self._replica.called):
            trains = module.training and torch.is_grad_enabled()
            if trains:
                self._check_unwrapped()
            if self._asks() and self._weights.was_written():
                self._adopt()
            self.show(common=not trains)

    def _after_forward(self, module: nn.Module, output: object) -> None:
        """Look at the beginning of the backward pass whether the own weights are in the model, if this pass has used them."""
        if module.training and torch.is_grad_enabled() and not self.common and self._asks():
            for each in _tensors(output):
                if each.grad_fn is not None:
                    each.register_hook(partial(_refuse_common, weakref.ref(self)))

    def _check_unwrapped(self) -> None:
        """Raise RuntimeError where DDP reduces the gradients of a model that was attached without it."""
        # HACK: torch has no public function for this. Price: a name that may change with torch; a test wraps an attached model.
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or any(wrapper is each for each in self._replica.called):
            return
        ignored = wrapper.parameters_to_ignore
        reduced = {
            id(each) for name, each in wrapper.module.named_parameters() if each.requires_grad and name not in ignored
        }
        if any(id(each) in reduced for each in self._replica.owned.values()):
            raise RuntimeError(
                "DistributedDataParallel wraps a model that was attached without it, and reduces all gradients whole besides; call "
                "detach() on the handle, and attach the wrapped model: sparsync.attach(DistributedDataParallel(model), ...)"
            )

    def put_common(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:  # Any: as `state_dict` has it
        """Put the common weights into what `module.state_dict()` returned, in the types of the parameters."""
        if not any(module is each for each in self._replica.bodies) or not self._asks():
            return
        self._adopt()
        names = {id(each): name for name, each in self._replica.owned.items()}
        common, values = dict(self._weights.common()), dict[int, Tensor]()
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            key = next((prefix + each for each in (full_name, plain_name(full_name)) if prefix + each in state), None)
            # Those of keep_vars=True are the model's.
            if key is None or id(parameter) not in names or isinstance(state[key], nn.Parameter):
                continue
            name = names[id(parameter)]
            if id(parameter) not in values:  # names that share a parameter share its value
                values[id(parameter)] = self._replica.whole(name, common[name].to(parameter.dtype, copy=True))
            state[key] = values[id(parameter)]

    def release(self) -> None:
        """Leave the common weights in the model, for good."""
        self.show(common=True)
        self._own = None
        self._left.detach()
        for hook in self._hooks:
            hook.remove()


def _leave_common(weights: Weights) -> None:
    """Leave the common weights in a model that nothing trains any more."""
    with torch.no_grad():
        for bucket in weights.buckets:
            bucket.write(bucket.common)


def _refuse_common(shown: "weakref.ref[ShownWeights]", _: Tensor) -> None:
    """Raise RuntimeError where a backward pass of own weights finds the common ones in the model."""
    if (found := shown()) is not None and found.common:
        raise RuntimeError(
            "between a forward pass that trains and its backward pass came another forward pass of the model, in evaluation mode or "
            "without gradients, which uses other weights; make that one before, or after the backward pass"
        )


def _tensors(output: object) -> Iterator[Tensor]:
    """Find the tensors in what a module returns, also in mappings, sequences and dataclasses."""
    if isinstance(output, Tensor):
        yield output
        return
    held = output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else ()
    if is_dataclass(output) and not held:
        held = vars(output).values()
    for each in held:
        yield from _tensors(each)


class _Hook(Generic[Owner]):
    """Refers to its owner weakly. A copy, by `copy` or `pickle` of a model, does nothing."""

    def __init__(self, owner: Owner | None = None) -> None:
        self._owner: Callable[[], Owner | None] = (lambda: None) if owner is None else weakref.ref(owner)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _NoteLate(_Hook[TakenOptimizer]):
    def __call__(self, _: Tensor) -> None:
        if (taken := self._owner()) is not None:
            taken.note_late()


class _BeforeForward(_Hook[ShownWeights]):
    def __call__(self, module: nn.Module, _: object) -> None:
        if (shown := self._owner()) is not None:
            shown.before_forward(module)


class _AfterForward(_Hook[ShownWeights]):
    def __call__(self, module: nn.Module, _: object, output: object) -> None:
        if (shown := self._owner()) is not None:
            shown.after_forward(module, output)


class _AfterStateDict(_Hook[ShownWeights]):
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:  # Any: as `state_dict` has it
        if (shown := self._owner()) is not None:
            shown.put_common(module, state, prefix)


_TAKEN: weakref.WeakSet[TakenOptimizer] = weakref.WeakSet()


@cache
def _refuse_others() -> None:
    """Look at the steps of all optimizers from here on: once, for torch iterates over its hooks while a handle may be collected."""
    register_optimizer_step_pre_hook(_refuse_another)


def _refuse_another(optimizer: Optimizer, *_: object) -> None:
    """Raise RuntimeError where an optimizer steps parameters for which another one was taken: ranks would part."""
    others = [each for each in _TAKEN if not each.is_of(optimizer)]
    stepped = [each for each in _parameters(optimizer) if each.grad is not None]
    if any(each.has(stepped) for each in others):
        raise RuntimeError(
            f"another {type(optimizer).__name__} steps a model whose optimizer was passed to sparsync.attach, and nothing would exchange "
            "that; call detach() on the handle, and attach with this optimizer"
        )


def _divided(owner: "weakref.ref[GradientDivisor]", name: str, gradient: Tensor) -> Tensor | None:
    divisor = owner()
    return None if divisor is None else divisor.divided([name], gradient)


def _parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"])


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name.

    Raises TypeError for a model that is wrapped or sharded, ValueError for one without any.
    """
    check_bare(model)
    found = dict(trained(model))
    if not found:
        raise ValueError("the model has no parameter with requires_grad=True; there is nothing to exchange")
    warn_or_raise(not_floating(found.items()))
    for name, each in found.items():
        if hasattr(each, "to_local"):
            raise TypeError(f"{name} is a DTensor; steps and weight changes need the whole model on each rank")
    return found


def check_bare(model: nn.Module) -> None:
    """Raise TypeError for a model that is wrapped or sharded, in parts or whole, and for what is none."""
    check_model(model)
    for module in model.modules():
        if isinstance(module, reducing_wrappers()) or is_fsdp2(module):
            raise TypeError(
                f"this model is wrapped by {type(module).__name__}, which reduces gradients at every step, and here each rank needs the "
                "whole model as it is: pass the bare module"
            )


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
