"""Which weights a model shows: a rank's own ones while it trains, the common ones wherever else it is used or saved.

Own weights differ from rank to rank. What is evaluated, or saved by way of `model.state_dict()`, is the same on all ranks.
"""

import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from sparsync.exchanges.replica import Replica
from sparsync.exchanges.weights import Weights
from sparsync.runtime.parameter_names import plain_name


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
        self._hooks = [
            *(
                each.register_forward_pre_hook(_BeforeForward(self), prepend=True)  # before FSDP2 gathers
                for each in replica.called
            ),
            replica.module.register_state_dict_post_hook(_AfterStateDict(self)),
        ]

    @property
    def common(self) -> bool:
        """Whether the common weights are in the model."""
        return self._own is not None

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

    def before_forward(self, module: nn.Module) -> None:
        """Show what a forward pass of `module` is to use; a copy of the model has weights that nothing is known of."""
        if any(module is each for each in self._replica.called):
            if self._asks() and self._weights.was_written():
                self._adopt()
            self.show(common=not (module.training and torch.is_grad_enabled()))

    def put_common(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:  # Any: as `state_dict` has it
        """Put the common weights into what `module.state_dict()` returned, in the types of the parameters."""
        if module is not self._replica.module or not self._asks():
            return
        self._adopt()
        names = {id(each): name for name, each in self._replica.owned.items()}
        common, values = dict(self._weights.common()), dict[int, Tensor]()
        for full_name, parameter in module.named_parameters(remove_duplicate=False):
            key = next((prefix + each for each in (full_name, plain_name(full_name)) if prefix + each in state), None)
            if (
                key is None or id(parameter) not in names or isinstance(state[key], nn.Parameter)
            ):  # as with keep_vars=True
                continue
            name = names[id(parameter)]
            if id(parameter) not in values:  # names that share a parameter share its value
                values[id(parameter)] = self._replica.whole(name, common[name].to(parameter.dtype, copy=True))
            state[key] = values[id(parameter)]

    def release(self) -> None:
        """Leave the common weights in the model, for good."""
        self.show(common=True)
        self._own = None
        for hook in self._hooks:
            hook.remove()


class _Hook:
    """Refers to its `shown` weakly. A copy, by `copy` or `pickle` of a model, does nothing."""

    def __init__(self, shown: ShownWeights | None = None) -> None:
        self._shown = (lambda: None) if shown is None else weakref.ref(shown)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class _BeforeForward(_Hook):
    def __call__(self, module: nn.Module, _: object) -> None:
        if (shown := self._shown()) is not None:
            shown.before_forward(module)


class _AfterStateDict(_Hook):
    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _: object
    ) -> None:  # Any: as `state_dict` has it
        if (shown := self._shown()) is not None:
            shown.put_common(module, state, prefix)
