"""What lets a training loop stay as it is: the copy of the model that is trained, its gradients, and the weights it shows.

The loop calls the model, the backward pass and `optimizer.step()`. The gradients that it sees have the norm of the mean one. In front of
the optimizer's own step, those of all ranks become one step of the weights; then the optimizer finds no gradient. A forward pass without
gradients, and `model.state_dict()`, have the common weights, which are the same on all ranks, and not a rank's own.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.exchanges.weights import Weights
from sparsync.runtime.backward_passes import BackwardPasses
from sparsync.runtime.findings import (
    check_model,
    is_fsdp2,
    not_floating,
    reducing_wrappers,
    warn_or_raise,
)
from sparsync.runtime.parameter_names import named_parameters, plain_name, trained


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

    def gradients(self) -> Iterator[Tensor | None]:
        """Return what this rank holds of the gradients."""
        return (each.grad for each in self.owned.values())

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Return what this rank holds of the parameters that are not trained, with their names."""
        owned = {id(each) for each in self.owned.values()}
        found = [(name, each.detach()) for name, each in named_parameters(self.module) if id(each) not in owned]
        return [(name, getattr(each, "to_local", lambda whole=each: whole)()) for name, each in found]

    def frozen_and_copies(self) -> list[tuple[str, Tensor]]:
        """Return what `frozen` does, and the buffers that copy trained parameters, such as their average, with their names.

        These have the shape of a trained parameter, and a name that ends in that one's: "target.weight" or "ema_weight" beside
        "encoder.weight". Others, such as BatchNorm's running means, follow from a rank's own data and may differ.
        """

        def copies_one(name: str, buffer: Tensor) -> bool:
            own_data = name.rpartition(".")[2].startswith("running_")
            return not own_data and any(name.endswith(own) and buffer.shape == shape for own, shape in shapes)

        shapes = {(name.rpartition(".")[2], each.shape) for name, each in self.owned.items()}
        buffers = ((plain_name(name), each) for name, each in self.module.named_buffers() if each.is_floating_point())
        copies = [(name, each) for name, each in buffers if copies_one(name, each)]
        return [*self.frozen(), *copies]

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
        owner, owned = weakref.ref(by), self.owned.items()
        hooks = [each.register_hook(partial(_divided, owner, name)) for name, each in owned]
        hooks += [each.register_post_accumulate_grad_hook(partial(_accumulated, owner)) for _, each in owned]
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
        self.passes = BackwardPasses(replica.gradients)
        self._bodies = replica.bodies
        self._undo = replica.divide_gradients(self)

    def divided(self, names: Iterable[str], gradient: Tensor) -> Tensor:
        """Return the gradient of the parameters of these names divided."""
        self.passes.begins(gradient)
        if self.factor == 1:
            return gradient
        self._divided.update(names)
        return gradient / self.factor

    def accumulated(self) -> None:
        """Note that there are gradients that a loop may throw away. In evaluation mode, as in an attack, it skips no step by that."""
        if all(each.training for each in self._bodies):
            self.passes.came()

    def undone(self, name: str) -> float:
        """Return what the gradient of a parameter is to be multiplied by to be this rank's own."""
        return self.factor if name in self._divided else 1.0

    def next_step(self, factor: float) -> None:
        """Divide by `factor` from here on."""
        self.passes.stepped()
        self.factor = factor
        self._divided.clear()

    def release(self) -> None:
        """Leave gradients as they come from here on."""
        self.next_step(1.0)
        for undo in self._undo:
            undo()


class ShownWeights:
    """Shows the `weights` of `replica`: own ones in a forward pass that trains, common ones in any other, and in `state_dict()`.

    A forward pass trains where gradients are recorded, also in evaluation mode: some loops train in it, for BatchNorm to stay as it is.
    `set_outside` has the names of weights that were set from outside, and `adopt` takes those for the common ones; weights that are set
    while the common ones are shown become both. `begins` is called before each pass that trains. While `asks` is False nothing changes.
    """

    def __init__(
        self,
        replica: Replica,
        weights: Weights,
        set_outside: Callable[[], Collection[str]],
        adopt: Callable[[], object],
        asks: Callable[[], bool],
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self._replica, self._weights = replica, weights
        self._set_outside, self._adopt, self._asks, self._begins = set_outside, adopt, asks, begins
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

    def without_own(self, names: Iterable[str]) -> list[str]:
        """Return the names without those of parameters that have the own weights again, which are put aside."""
        own = self._own
        return list(names) if own is None else [each for each in names if not self._weights.shows(each, own)]

    def _before_forward(self, module: nn.Module) -> None:
        """Show what a forward pass of `module` is to use; a copy of the model has weights that nothing is known of."""
        if not any(module is each for each in self._replica.called):
            return
        if _records():
            self._check_unwrapped()
            if self._asks() and self._weights.was_written():
                self._adopt()
            self.show(common=False)
            if self._asks():
                self._begins()
        # What the loop evaluates in the place of the weights, such as their average, it may put back to what was there.
        elif not self.common and self._asks() and not self._set_outside():
            self.show(common=True)

    def _after_forward(self, output: object) -> None:
        """Look at the beginning of the backward pass whether the own weights are in the model, if this pass has used them."""
        if _records() and not self.common and self._asks():
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
        as_set = self._set_outside()
        names = {id(each): name for name, each in self._replica.owned.items()}
        common, values = dict(self._weights.common()), dict[int, Tensor]()
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            key = next((prefix + each for each in (full_name, plain_name(full_name)) if prefix + each in state), None)
            # Those of keep_vars=True are the model's.
            if key is None or id(parameter) not in names or isinstance(state[key], nn.Parameter):
                continue
            name = names[id(parameter)]
            if name in as_set:
                continue
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


def _records() -> bool:
    """Return whether gradients are recorded now."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _leave_common(weights: Weights) -> None:
    """Leave the common weights in a model that nothing trains any more."""
    with torch.no_grad():
        for bucket in weights.buckets:
            bucket.write(bucket.common)


def _refuse_common(shown: "weakref.ref[ShownWeights]", _: Tensor) -> None:
    """Raise RuntimeError where a backward pass of own weights finds the common ones in the model."""
    if (found := shown()) is not None and found.common:
        raise RuntimeError(
            "between a forward pass that trains and its backward pass came another forward pass of the model, without gradients, such as "
            "that of a reference or a target, which uses the weights that all ranks have in common; make that one before, or after the "
            "backward pass; or attach with exchange=sparsync.Steps(keep=0.0), where each rank trains these weights"
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


class _Hook:
    """Refers to its `shown` weakly. A copy, by `copy` or `pickle` of a model, does nothing."""

    def __init__(self, shown: ShownWeights | None = None) -> None:
        self._shown: Callable[[], ShownWeights | None] = (lambda: None) if shown is None else weakref.ref(shown)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _BeforeForward(_Hook):
    def __call__(self, module: nn.Module, _: object) -> None:
        if (shown := self._shown()) is not None:
            shown.before_forward(module)


class _AfterForward(_Hook):
    def __call__(self, _: nn.Module, __: object, output: object) -> None:
        if (shown := self._shown()) is not None:
            shown.after_forward(output)


class _AfterStateDict(_Hook):
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:  # Any: as `state_dict` has it
        if (shown := self._shown()) is not None:
            shown.put_common(module, state, prefix)


def _divided(owner: "weakref.ref[GradientDivisor]", name: str, gradient: Tensor) -> Tensor | None:
    divisor = owner()
    return None if divisor is None else divisor.divided([name], gradient)


def _accumulated(owner: "weakref.ref[GradientDivisor]", _: Tensor) -> None:
    if (divisor := owner()) is not None:
        divisor.accumulated()


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
