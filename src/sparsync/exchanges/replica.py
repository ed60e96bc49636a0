"""A model as step methods train it: what this rank holds of a copy of it, a whole module here, shards of one under FSDP2."""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsync.runtime.findings import is_fsdp2
from sparsync.runtime.parameter_names import trained


class Replica:
    """One copy of a model, of which this rank holds all.

    `called` are the modules that a training loop calls: `module`, or what was made of it, such as a compiled one. Without, it is `module`.
    """

    axis = ""  # of FSDP2, over which copies exchange
    part = ""  # the name of what this rank holds; "" is all of the model

    def __init__(self, module: nn.Module, called: Sequence[nn.Module] = ()) -> None:
        self.module, self.called = module, called or [module]
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


def _divided(owner: "weakref.ref[GradientDivisor]", name: str, gradient: Tensor) -> Tensor | None:
    divisor = owner()
    return None if divisor is None else divisor.divided([name], gradient)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name.

    Raises TypeError for a model that is wrapped or sharded, ValueError for one without any.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    wrappers = (DistributedDataParallel, *([fsdp.FullyShardedDataParallel] if fsdp is not None else []))
    for module in model.modules():
        if isinstance(module, wrappers) or is_fsdp2(module):
            raise TypeError(
                f"this model is wrapped by {type(module).__name__}, which reduces gradients at every step; local steps need the whole "
                "model on each rank: pass the bare module"
            )
    found = dict(trained(model))
    if not found:
        raise ValueError("the model has no parameter with requires_grad=True; there is nothing to exchange")
    for name, each in found.items():
        if not each.is_floating_point():
            raise TypeError(f"{name} is {each.dtype}; local steps exchange floating parameters, freeze it")
        if hasattr(each, "to_local"):
            raise TypeError(f"{name} is a DTensor; local steps need the whole model on each rank")
    return found
