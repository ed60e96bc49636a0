"""What lets a training loop stay as it is: the copy of the model that is trained, and its gradients.

The loop calls the model, the backward pass and `optimizer.step()`. The gradients that it sees have the norm of the mean one. In front of
the optimizer's own step, those of all ranks become one step of the weights; then the optimizer finds no gradient.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor, nn

from sparsync.runtime.findings import (
    check_model,
    is_fsdp2,
    not_floating,
    reducing_wrappers,
    warn_or_raise,
)
from sparsync.runtime.parameters import named_parameters, trained
from sparsync.runtime.rescaling import BackwardPasses


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
